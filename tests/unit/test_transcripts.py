"""Command lines and what they print: each file of tests/golden/commands is a transcript.

    $ monarchfs pin /mnt/photos a
    < pin {"ok": true, "result": {"files": 1, "bytes": 1536}}
    asked: {"command": "pin", "paths": ["a"]}
    pinned 1 file, 1.5K

A block is a command line (or its words, as JSON, in which ``x*5000`` stands for so many letters),
what the daemon of a mount on /mnt/photos replies to its commands, and what follows from that. A
reply ``@healthy`` is the report of a mount in that state (`fake_daemon.states`). Lines of standard
error and an exit code that is not 0 are marked. Commands run in this process, in a directory
``<dir>`` with files of every kind; they leave it as it was. ``pytest --update-golden`` writes what
follows anew: review the difference."""

import io
import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from monarchfs.cli import cache as cache_module
from monarchfs.cli import doctor as doctor_module
from monarchfs.cli.main import main
from monarchfs.cli.plan import combine, lines, shared
from monarchfs.cli.top import TopView, Usage
from monarchfs.cli.watch import History, MountsView, MountView, draw, draw_list
from monarchfs.config import User
from monarchfs.config.model import ShareMode
from monarchfs.control.messages import encode_result
from monarchfs.doctor.checks import ok, problem, warning
from monarchfs.insight.estimates import SourceRates, TierRates
from monarchfs.insight.fitting import PlannedTier
from monarchfs.insight.live import LiveRates
from monarchfs.insight.recording import AnsweredBy
from monarchfs.slurm.inventory import OTHER_TIER, UNCLAIMED, LocalCache, TierDirectory
from monarchfs.slurm.leftovers import Leftover
from monarchfs.supervisor.directories import Size
from monarchfs.types import Space
from tests.support.fake_daemon import Daemon, Start, changed, healthy, only_these, states
from tests.support.golden import DIRECTORY, Golden, unfolded

REPEATED = re.compile(r"^(.*?)(.)\*(\d{3,})$", re.DOTALL)
LONGEST = 3000
ALSO_REQUIRED = "required: MOUNTPOINT, PATH"
"""Python 3.13 names only the first."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    for name in ("COLUMNS", "NO_COLOR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    (tmp_path / "run").mkdir()
    with only_these(tmp_path / "run", monkeypatch) as start:
        yield start
        monkeypatch.undo()
        time.tzset()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "place"
    for name in ("dir", "src", "mnt", "index_is_a_file"):
        (made / name).mkdir(parents=True)
    (made / "file").write_bytes(b"nothing")
    (made / "loop").symlink_to("loop")
    (made / "dangling").symlink_to("nosuch")
    os.mkfifo(made / "fifo")
    (made / "index_is_a_file/index").touch()
    (made / "list").write_text("a\n/mnt/photos/b\n")
    (made / "weights").write_text("1.5\ta\n2\t/mnt/photos/b\n")
    for name, text in (("bare", "1"), ("letters", "x\ta"), ("nan", "nan\ta")):
        (made / name).write_text(text)
    monkeypatch.chdir(made)
    return made


def words_of(line: str) -> list[str]:
    if not line.startswith("["):
        return shlex.split(line)[1:]
    words: list[str] = json.loads(line)
    return [REPEATED.sub(lambda m: m[1] + m[2] * int(m[3]), word) for word in words]


def reply_of(text: str) -> bytes:
    return encode_result(states()[text[1:]]) if text.startswith("@") else text.encode() + b"\n"


def shortened(line: str) -> str:
    return line if len(line) < LONGEST else f"{line[:80]}... ({len(line)} letters)"


@pytest.mark.parametrize("name", sorted(path.name for path in (DIRECTORY / "commands").iterdir()))
def test_commands(
    name: str, start: Start, place: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    daemon: Daemon | None = None
    before = sorted(place.rglob("*"))
    parts = []
    for block in (DIRECTORY / "commands" / name).read_text().split("\n\n"):
        lines = block.splitlines()
        given = [line for line in lines if line.startswith(("# ", "$ ", "< "))]
        replies: dict[str, bytes] = {}
        for line in given:
            if line.startswith("< "):
                _, command, reply = line.split(" ", 2)
                replies[command] = replies.get(command, b"") + reply_of(reply)
        if replies and daemon is None:  # not before: its thread is none of commands that fork
            daemon = start(replies)
        if daemon is not None:
            daemon.answer, daemon.requests = replies, []
        (line,) = [line for line in given if line.startswith("$ ")]
        code = main(words_of(line[2:]))
        out, errors = capsys.readouterr()
        assert (out + errors).replace("\n", "").isprintable()
        if name.startswith("wrong-"):
            assert (len(errors.splitlines()), out) == (1, "") if code else not errors
        shown = [
            *(f"asked: {json.dumps(request)}" for request in (daemon.requests if daemon else ())),
            *unfolded(out),
            *(f"stderr: {line}" for line in errors.splitlines()),
            *([f"exit code {code}"] if code else []),
        ]
        text = "\n".join(shown).replace(str(place), "<dir>").replace(str(place.parent), "<above>")
        text = text.replace(ALSO_REQUIRED, ALSO_REQUIRED.removesuffix(", PATH"))
        parts.append("\n".join([*given, *map(shortened, text.splitlines())]))
    assert sorted(place.rglob("*")) == before
    golden(f"commands/{name}", "\n\n".join(parts) + "\n")


# What commands print otherwise, a file of tests/golden for each. Times that pass are masked.


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

CLOCK = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


class Shown:
    """What commands print, one after the other."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.parts: list[str] = []

    def run(self, line: str) -> None:
        """A command line in this process."""
        code = main(shlex.split(line))
        captured = self._capsys.readouterr()
        self.put(
            f"$ monarchfs {line}",
            *unfolded(captured.out),
            *(f"stderr: {line}" for line in captured.err.splitlines()),
            *([f"exit code {code}"] if code else []),
        )

    def put(self, *lines: str) -> None:
        """One block of text. The time is told in other words."""
        self.parts.append(CLOCK.sub("<now>", "\n".join(lines)) + "\n")

    def __str__(self) -> str:
        return "\n".join(self.parts)


@pytest.fixture
def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Shown]:
    with only_these(tmp_path, monkeypatch):
        yield Shown(capsys)


def busy() -> MountView:
    """The last of five looks, a second apart, at a mount that copies."""
    history, well = History(), states()["full"]
    for second in range(5):
        report = changed(
            well,
            served={"local_opens": 10 + 9 * second, "source_opens": 10 + second},
            source_io={
                **{"prefetch_read_bytes": second << 20, "read_bytes": second << 20},
                **{"demand_read_bytes": 70 * second, "operations": 2 * second},
                "operation_seconds": 0.1 * second,
            },
            evictions={"policy": 2 + second},
            prefetch={"queued": 40, "active": 10, "left_bytes": 5 << 20, "completed": 5 * second},
            requests={"waiting": 3},
            uptime_seconds=100.0 + second,
        )
        view = history.add(second, report)
    return view


def on_screen(drawn: Any, width: int, encoding: str = "utf-8") -> str:
    binary = io.BytesIO()
    file = io.TextIOWrapper(binary, encoding=encoding)
    Console(file=file, width=width, no_color=True, force_terminal=False).print(drawn)
    file.flush()
    text = binary.getvalue().decode(encoding)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_the_screen(shown: Shown, golden: Golden) -> None:
    every = states()
    for width in (40, 60, 80, 120):
        shown.put(f"# {width} columns", on_screen(draw(busy(), footer="q quits"), width))
    shown.put("# ASCII", on_screen(draw(busy()), 80, "ascii"))
    for state in ("healthy", "worker not answering", "safe mode", "odd names", "nothing is said"):
        shown.put(f"# {state}", on_screen(draw(History().add(0.0, every[state])), 80))
    gone = {"source": "/s", "mountpoint": "/mnt/gone", "state": "dead"}
    for width in (60, 120):
        shown.put(f"# the list, {width}", on_screen(draw_list([every["odd names"], gone]), width))
    shown.put("# no mounts", on_screen(draw_list([]), 80))
    golden("status-screen.txt", str(shown))


def test_the_lines_of_status_watch(shown: Shown, golden: Golden) -> None:
    well, history = healthy(), History()
    later = changed(well, uptime_seconds=3702.0, served={"local_opens": 13, "source_opens": 11})
    gone = {"mountpoint": "/mnt/photos", "state": "silent", "error": "no\nanswer"}
    looks: list[Any] = [well, later, gone, [well, gone], []]
    for at, seen in enumerate(looks):
        view = seen if isinstance(seen, list) else history.add(2.0 * at, seen)
        shown.put(*MountsView(list).lines(view))
    golden("status-watch.txt", str(shown))


def test_top(shown: Shown, golden: Golden) -> None:
    read = LiveRates(
        1234.5, 12.0, 0.4, 5e8, 0.62, 0.62, {AnsweredBy.TIER: 0.75, AnsweredBy.PEER: 0.25}
    )
    idle = LiveRates(0.0, 0.0, 0.0, 0.0, 0.04, 0.04, {AnsweredBy.WAITED: 1.0})
    feeds = {
        "both hidden": SimpleNamespace(connection=1, hidden=["reads", "opens"]),
        "no worker": SimpleNamespace(connection=None, hidden=["reads"]),
    }
    processes = [(71, "python\x1b[2J", read), (0, "(kernel)", idle)]
    several = Usage(0.0, 2.0, 8, 3, [*processes, *((100 + n, "cat", idle) for n in range(25))])
    nothing = Usage(0.0, 2.0, 1, 0, [])
    directories = Usage(0.0, 2.0, 1, 0, [("train/a\nb", "", read), (".", "", idle)])
    for name, feed in feeds.items():
        by_process, by_directory = (
            TopView("/mnt/photos", feed, who)  # type: ignore[arg-type]
            for who in ("process", "directory")
        )
        shown.put(f"# {name}", *by_process.lines(nothing))
        if feed.connection:
            shown.put("# processes", *by_process.lines(several))
            shown.put("# directories", *by_directory.lines(directories))
            drawn = by_process.draw(several, 10, "q quits")
            shown.put("# a screen of 10 lines", on_screen(drawn, 100))
            told = json.dumps(by_directory.to_json(directories))
            shown.put("# as an object", *unfolded(told + "\n"))
    golden("top.txt", str(shown))


def test_doctor(shown: Shown, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = ok("kernel", "6.18", "", release="6.18")
    slow = warning("tier", "/scratch\n: 40 MB/s", "name another disk", path="/scratch")
    bad = problem("mount", "/dev/fuse is missing", "modprobe fuse")
    advice = ok("memory", "enough", "more would not hurt")
    monkeypatch.setattr(doctor_module, "configuration", lambda *_: ok("configuration", "defaults"))
    for checks in ([fine, advice], [fine, slow, slow], [slow, bad]):
        monkeypatch.setattr(doctor_module, "examine", lambda *_, checks=checks: iter(checks))
        shown.run("doctor /lustre/photos --quick")
        shown.run("doctor /lustre/photos --quick --json")
    golden("doctor.txt", str(shown))


def test_cache_and_gc(shown: Shown, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    now, me = time.time(), User("root", 0, 0)

    def directory(name: str, size: Size, **more: Any) -> TierDirectory:
        return TierDirectory("/scratch", f"/scratch/{name}", size, False, now, **more)

    used = directory("a", Size(5 << 30, 1200))
    caches = [
        LocalCache("/lustre/a", me, "/state/a", (used,), True, now - 90_000, "/mnt/a"),
        LocalCache(
            *("/lustre/b\x1b", User("ann", 1000, 1000), "/state/b"),
            (
                directory("b", Size(9000, 1, whole=False)),
                directory("c", Size(100, 2), stranded=OTHER_TIER),
            ),
            *(False, now - 500_000),
        ),
        LocalCache(
            *("/lustre/d", me, "/state/d", (directory("d", Size(), stranded=UNCLAIMED),)),
            *(False, now - 500_000),
            claimed=False,
        ),
    ]
    inventory = SimpleNamespace(caches=lambda: caches, notes=["the home of bob hangs"])
    monkeypatch.setattr(cache_module, "take_inventory", lambda *_, **__: inventory)
    monkeypatch.setattr(cache_module, "read_site", lambda _: None)
    shown.run("cache list")
    shown.run("cache show /lustre/a /scratch/c")
    shown.run("cache show /nowhere")
    shown.run("cache remove /lustre/a --yes")
    shown.run("cache remove /state/b --dry-run")
    shown.run("cache prune --dry-run")
    shown.run("cache prune --dry-run --older-than 2d")
    shown.run("cache prune --dry-run --older-than 2d --json")
    caches.clear()
    for line in ("list", "list x", "show", "remove", "prune --dry-run", "list --older-than 1d"):
        shown.run(f"cache {line}")

    sweeper = SimpleNamespace(
        remove=False,
        found=[],
        notes=[],
        **dict.fromkeys(("registrations", "sockets", "mounts"), id),
    )
    monkeypatch.setattr(cache_module, "Sweeper", lambda **_: sweeper)
    shown.run("gc --dry-run")
    sweeper.found = [
        Leftover("socket", "/run/a\n", "nobody listens"),
        Leftover("mount", "/mnt/a", "its daemon is dead", removed=True),
        Leftover("cache", "/c", "its user is gone", error="Permission denied"),
    ]
    sweeper.notes = ["jobs were not looked at: no squeue"]
    shown.run("gc")
    shown.run("gc --json")
    golden("cache-gc.txt", re.sub(r'("last_used_unix_seconds": )[0-9.]+', r"\1<then>", str(shown)))


def test_plan(shown: Shown, golden: Golden) -> None:
    def amount(files: int, size: int) -> dict[str, int]:
        return {"files": files, "bytes": size}

    space = Space(200 * GIB, 100 * GIB, 1000, 1000)
    fast = PlannedTier("/dev/shm", 2 * GIB, space, 2 * GIB, 2 * GIB, "")
    disk = PlannedTier("/t\x1b", 202 * GIB, space, 202 * GIB, 40 * GIB, "its file system")
    sizes = [{"up_to_bytes": KIB, "files": 5}, {"up_to_bytes": MIB, "files": 0}]
    sizes += [{"up_to_bytes": GIB, "files": 100_007}]
    whole = {
        **{"complete": True, **amount(100_012, 53 * GIB), "directories": 7, "others": 0},
        **{"unreadable": 0, "hard_links": 0, "sizes": sizes},
        "cached": [amount(0, 0), amount(1, 5 * GIB)],
        "placed": [amount(1000, 2 * GIB), amount(90_000, 38 * GIB)],
        "whole": amount(91_000, 39 * GIB),
        "partial": amount(1, GIB),
        "remote": amount(9010, 8 * GIB),
    }
    fits = {**whole, **amount(91_001, 45 * GIB), "whole": amount(91_000, 40 * GIB)}
    fits |= {"partial": amount(0, 0), "remote": amount(0, 0)}
    hurried = {**whole, "complete": False, "unreadable": 2}
    rates = SourceRates(100e6, 0.001, 4), [TierRates(5e9, 9e9), TierRates(1e9, 2e9)]
    quick = SourceRates(9e9, 0.00001, 4), rates[1]
    for name, report, measured in (
        ("too large", whole, rates),
        ("fits", fits, rates),
        ("a quick source", fits, quick),
        ("not all was seen", hurried, None),
    ):
        plan = combine("/lustre/p\n", report, [fast, disk], measured, 10)
        shown.put(f"# {name}", *lines(plan))
        for share in ShareMode if name == "too large" else ():
            plan["sharing"] = shared(plan, 2, share)
            shown.put(f"# {name}, of 2 nodes: {share.value}", *lines(plan))
    told = json.dumps(combine("/s", whole, [fast, disk], rates, 10))
    shown.put("# as an object", *unfolded(told + "\n"))
    golden("plan.txt", str(shown))
