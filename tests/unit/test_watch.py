"""``status``: rates from reports, words for people, the screen at any width, a terminal left as it
was; and any command whose output cannot be written."""

import copy
import fcntl
import io
import json
import os
import re
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

from monarchfs.cli.output import format_share
from monarchfs.cli.status import makes_sense, report_lines
from monarchfs.cli.watch import History, MountsView, draw, number
from monarchfs.system.sizes import format_bytes, format_seconds
from tests.support import mounting, surroundings
from tests.support.fake_daemon import changed, healthy
from tests.support.mounting import wait_for
from tests.support.processes import parent_of
from tests.support.timing import Stopwatch
from tests.support.trees import write_files

REPORT = changed(healthy(), prefetch={"queued": 40, "active": 10, "left_bytes": 5 << 20})


def later(seconds: float, **sections: Any) -> dict[str, Any]:
    """REPORT some seconds on; what is given for a section is added to its numbers, or replaces a
    plain value."""
    report = copy.deepcopy(REPORT)
    report["uptime_seconds"] += seconds
    for name, values in sections.items():
        if isinstance(values, dict):
            for key, value in values.items():
                is_count = isinstance(value, int) and not isinstance(value, bool)
                report[name][key] = report[name][key] + value if is_count else value
        else:
            report[name] = values
    return report


def history_of(*reports: tuple[float, dict[str, Any]]) -> History:
    history = History()
    for at, report in reports:
        history.add(at, report)
    return history


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"served": {"local_opens": -10}, "worker": {"pid": 1}}, id="another worker"),
        pytest.param({"source_io": {"operations": -1}}, id="the same number, counts go back"),
        pytest.param({"uptime_seconds": 1.0}, id="the same number, begun later"),
    ],
)
def test_another_worker_counts_anew(sections: dict[str, Any]) -> None:
    history, fresh = history_of((0.0, REPORT)), later(1, **sections)
    assert history.add(1.0, fresh).rates is None
    after = copy.deepcopy(fresh)
    after["served"]["local_opens"] += 5
    after["uptime_seconds"] += 1
    view = history.add(2.0, after)
    assert view.rates is not None
    assert view.rates.share("opens") == 1.0


@pytest.mark.parametrize(
    ("prefetch", "read_bytes", "seconds"),
    [
        pytest.param({"completed": 20, "failed": 4, "refused": 1}, 0, 20, id="by files that wait"),
        pytest.param({"queued": -40}, 10 << 20, 5, id="by bytes when none waits"),
        pytest.param({"queued": -40, "active": -10}, 0, None, id="nothing waits"),
        pytest.param({"scanning": True, "completed": 5}, 0, None, id="a scan finds more"),
        pytest.param({}, 0, None, id="nothing moves"),
    ],
)
def test_time_left(prefetch: dict[str, Any], read_bytes: int, seconds: float | None) -> None:
    begun = {key: value for key, value in prefetch.items() if key in ("queued", "active")}
    now = later(10, prefetch=prefetch, source_io={"read_bytes": read_bytes})
    left = history_of((0.0, later(0, prefetch=begun))).add(10.0, now).left_seconds
    assert left is None if seconds is None else left == pytest.approx(seconds)


@pytest.mark.parametrize("report", [{}, {"files": {}, "served": {}, "tiers": [{}], "worker": {}}])
def test_a_report_may_lack_anything(report: dict[str, Any]) -> None:
    history = history_of((0.0, report))
    Console(file=io.StringIO(), width=80).print(draw(history.add(1.0, report)))
    assert list(MountsView(list).lines(history.add(2.0, report)))
    assert "\n".join(report_lines(report)).startswith("? on ?\n")
    assert number(report, "served", "local_opens") == 0
    assert makes_sense(report), "another version leaves things out only"
    assert makes_sense({"state": "starting", "age_seconds": None})


def test_a_report_of_nonsense() -> None:
    for said in (
        *('"tiers": 5', '"files": null', '"served": 5', '"worker": []', '"peers": [5]'),
        '"worker": {"last_death": {"unix_seconds": "x"}}',
        *('"tiers": [{"used_bytes": null}]', '"x": [1e999]', f'"files": {{"a": {10**400}}}'),
    ):
        assert not makes_sense(json.loads(f"{{{said}}}")), said


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        *((format_seconds(0.0012), "1.2 ms"), (format_seconds(1.5), "1.5 s")),
        *((format_seconds(60), "1 min"), (format_seconds(65), "1 min 5 s")),
        *((format_seconds(3661), "1 h 1 min"), (format_seconds(90000), "1 d 1 h")),
        *((format_bytes(1023), "1023 bytes"), (format_bytes(1024), "1.0K")),
        *((format_bytes(3 << 39), "1.5T"), (format_share(0, 0), "-"), (format_share(0, 5), "0%")),
        (format_share(10**6 - 1, 10**6), "99.9%"),  # not all
    ],
)
def test_words(shown: str, text: str) -> None:
    assert shown == text


class Terminal:
    """A monarchfs command on a terminal of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.output, self.seen = bytearray(), 0
        self.master, self.slave = surroundings.open_terminal()
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *mounting.MONARCHFS, *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd="/",
            env={**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8", **environment},
        )

    def read(self) -> None:
        while select.select([self.master], [], [], 0)[0]:
            self.output += os.read(self.master, 1 << 16)

    def text(self) -> str:
        self.read()
        new = self.output[self.seen :].decode(errors="replace")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", new)

    def wait_for(self, words: str) -> None:
        wait_for(lambda: words in self.text(), f"{words!r} on the screen", 20)

    def forget(self) -> None:
        """What is shown by now is not looked at again."""
        self.read()
        self.seen = len(self.output)

    def is_still(self) -> bool:
        """Nothing has been drawn for longer than the interval that the tests name."""
        self.read()
        return not select.select([self.master], [], [], 0.5)[0]

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.kill(self.process.pid, signal.SIGWINCH)

    def assert_left_alone(self) -> None:
        """The terminal is as it was."""

        def ended() -> bool:
            self.read()  # a terminal that nobody reads holds up who writes to it
            return self.process.poll() is not None

        wait_for(ended, "the program to end")
        self.read()
        assert self.output.count(b"\x1b[?1049h") == self.output.count(b"\x1b[?1049l") == 1
        assert self.output.rindex(b"\x1b[?25h") > self.output.rindex(b"\x1b[?25l")
        assert termios.tcgetattr(self.slave) == self.before
        assert b"Traceback" not in self.output


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments, **environment)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.master)
        os.close(opened.slave)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[mounting.Bench, mounting.Mount]]:
    with mounting.bench() as work:
        source = write_files(work.path / "source", {f"file{n}": bytes(100_000) for n in range(5)})
        mount = work.mount(source)
        subprocess.run(f"cat {mount.path}/* >/dev/null", shell=True, check=True)
        mount.wait_idle()
        yield work, mount


@pytest.fixture
def mounted(served: tuple[mounting.Bench, mounting.Mount]) -> mounting.Mount:
    return served[1]


@mounting.needs_mounts
def test_the_terminal_is_left_as_it_was(mounted: mounting.Mount) -> None:
    for end in ("ctrl-c", "SIGTERM"):
        with terminal("status", str(mounted.path), "--watch", "0.2") as screen:
            screen.wait_for("5 resident")
            screen.wait_for("0 bytes/s prefetched")
            assert termios.tcgetattr(screen.slave) != screen.before
            if end == "SIGTERM":
                screen.process.terminate()
            else:
                screen.type(b"\x03")
            screen.assert_left_alone()
            expected = -signal.SIGTERM if end == "SIGTERM" else 0
            assert screen.process.returncode == expected


@mounting.needs_mounts
def test_another_size_of_the_terminal_and_no_colours(mounted: mounting.Mount) -> None:
    with terminal("status", "--watch", "60", str(mounted.path), NO_COLOR="1") as screen:
        screen.wait_for("5 resident")
        screen.forget()
        screen.resize(30, 60)
        screen.wait_for("5 resident")  # long before the next look
        screen.wait_for("╭" + "─ " + str(mounted.path)[:20])
        frames = screen.text().split("╭")
        assert all(len(line.rstrip("\r")) <= 61 for line in frames[-1].splitlines())
        screen.type(b"q")
        screen.assert_left_alone()
        assert screen.process.returncode == 0
        assert not re.search(rb"\x1b\[[0-9;]*3[1-7]m", screen.output)
    with terminal("status", str(mounted.path), NO_COLOR="1") as screen:
        screen.process.wait(20)
        assert "  files     known 6, resident 5" in screen.text()
        assert b"\x1b" not in screen.output


@mounting.needs_mounts
def test_keys_are_heard_while_nothing_answers(mounted: mounting.Mount) -> None:
    with terminal("status", str(mounted.path), "--watch", "0.2") as screen:
        screen.wait_for("5 resident")
        supervisor = parent_of(mounted.worker_pid())
        os.kill(supervisor, signal.SIGSTOP)
        try:
            wait_for(screen.is_still, "a question that is not answered")
            started = Stopwatch()
            screen.type(b"q")
            screen.assert_left_alone()
            started.check(3)
        finally:
            os.kill(supervisor, signal.SIGCONT)


@mounting.needs_mounts
def test_lines_where_there_is_no_terminal_and_objects_for_programs(mounted: mounting.Mount) -> None:
    command = [*mounting.MONARCHFS, "status", str(mounted.path), "--watch", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        texts = [process.stdout.readline().decode() for _ in range(3)]
        process.stdout.close()
        assert process.wait(60) == 0, "whoever reads may leave"
        assert process.stderr.read() == b""
    assert all(f"{mounted.path} serving: local" in text for text in texts)
    assert "files/s" in texts[2]
    command = [*mounting.MONARCHFS, "status", "--watch=0.1", "--json", str(mounted.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert json.loads(process.stdout.readline())["files"]["resident"] == 5
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@mounting.needs_mounts
def test_a_worker_that_hangs_and_a_mount_that_comes_back(
    served: tuple[mounting.Bench, mounting.Mount],
) -> None:
    work, mounted = served
    with terminal("status", str(mounted.path), "--watch", "0.2") as screen:
        screen.wait_for("5 resident")
        worker = mounted.worker_pid()
        os.kill(worker, signal.SIGSTOP)
        screen.wait_for("worker not answering")
        os.kill(worker, signal.SIGCONT)
        screen.forget()
        screen.wait_for("serving, ")
        assert mounted.umount().returncode == 0
        screen.wait_for("not mounted")
        screen.forget()
        work.mount(mounted.source, point=mounted.path)
        screen.wait_for("serving, ")
        screen.type(b"q")
        screen.assert_left_alone()
        assert screen.process.returncode == 0


# Where output cannot be written: what a command did decides its exit code, and one line tells.


ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    # It would have every letter written at once, and nothing left for the interpreter's end.
    if name != "PYTHONUNBUFFERED" and not name.startswith(("SUDO_", "XDG_", "SLURM_"))
}
NO_ROOM = "monarchfs: cannot write the output: No space left on device\n"
ENDS = {
    "full": 'exec "$@" 2>/dev/full',
    "closed": 'exec "$@" 2>&-',
    "all closed": 'exec "$@" <&- >&- 2>&-',
    "no reader": 'exec "$@"',
}


def ended(
    *arguments: str,
    shell: str = 'exec "$@"',
    stdout: Any = subprocess.PIPE,
    stderr: Any = subprocess.PIPE,
    **environment: str,
) -> tuple[int, str, str]:
    """A command: its exit code, what it printed and its standard error."""
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *mounting.MONARCHFS, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        cwd="/",
        env={**ENVIRONMENT, **environment},
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout or "", done.stderr or ""


def through(end: str, *arguments: str) -> tuple[int, str]:
    """A command whose standard error is as ``end`` says."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as broken:
        stderr = broken if end == "no reader" else subprocess.DEVNULL
        return ended(*arguments, shell=ENDS[end], stderr=stderr)[:2]


@pytest.fixture
def storage(work: mounting.Bench) -> list[str]:
    write_files(work.path / "source", {"file": b"content"})
    (work.path / "mnt").mkdir()
    return work.storage("10M")


@mounting.needs_mounts
@pytest.mark.parametrize("end", ENDS)
def test_run_ends_as_its_command_did(work: mounting.Bench, storage: list[str], end: str) -> None:
    options = [*storage, "--report", "--json", "/dev/full"]
    command = ["--", "sh", "-c", f"echo ran >>{work.path}/ran; exit 3"]
    assert through(end, "run", f"{work.path}/source", *options, *command) == (3, "")
    # And where a line says that nothing could be mounted.
    nowhere = ["--tier", f"{work.path}/no/such=10M", "--report"]
    assert through(end, "run", f"{work.path}/source", *nowhere, *command) == (3, "")
    assert (work.path / "ran").read_text() == "ran\n" * 2
    # An error that nobody can read is the same error.
    assert through(end, "umount") == (2, "")
    assert through(end, "status", "/nowhere") == (1, "")


@mounting.needs_mounts
@pytest.mark.parametrize("end", ["full", "all closed", "no reader"])
def test_a_mount_is_made_and_served_all_the_same(
    work: mounting.Bench, storage: list[str], end: str
) -> None:
    source, point = work.path / "source", work.path / "mnt"
    options = [*storage, "--log-level", "debug"]
    try:
        assert through(end, "mount", f"{source}", f"{point}", *options) == (0, "")
        assert (point / "file").read_text() == "content"
        assert through(end, "warm", f"{point}", "--wait")[0] == 0
    finally:
        assert mounting.run("umount", f"{point}").returncode == 0


@mounting.needs_mounts
def test_a_mount_in_the_foreground_logs_to_a_full_disk(
    work: mounting.Bench, storage: list[str]
) -> None:
    point = work.path / "mnt"
    command = [*mounting.MONARCHFS, "mount", f"{work.path}/source", f"{point}", *storage]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [*command, "--foreground", "--log-level", "debug"],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
            env=ENVIRONMENT,
        )
    try:
        wait_for(lambda: process.poll() is not None or os.path.ismount(point), "the mount")
        assert (point / "file").read_text() == "content"
        assert mounting.run("umount", f"{point}").returncode == 0
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "line",
    [
        *("--version", "gc --help", "completion bash", "status", "status --json"),
        pytest.param("exporter --once", marks=mounting.requires_root),
        # Where nothing can be mounted there is a problem to tell of, and that alone fails.
        pytest.param("doctor --json --quick", marks=mounting.requires_fuse),
    ],
)
def test_output_that_cannot_be_written_is_told_in_one_line(line: str) -> None:
    with open("/dev/full", "w") as full:
        assert ended(*line.split(), stdout=full) == (1, "", NO_ROOM)


def test_a_letter_that_cannot_be_shown_and_a_reader_who_leaves_early() -> None:
    shown = ended("doctor", "/ä", "--quick", PYTHONIOENCODING="ascii")[1]
    assert "source /\\xe4 does not exist" in shown
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as nobody:
        done = ended("doctor", "/nothing", "--quick", stdout=nobody)
    assert done == (128 + signal.SIGPIPE, "", "")
