"""Commands that take paths (``refresh``, ``pin``, ``warm``, ``why``, ...): what is asked, and what
answers become, of a daemon that says what the test wants and on real mounts.

What they print is in tests/golden/commands, what the daemon does in tests/layers/test_warm.py and
tests/layers/test_reasons.py.
"""

import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cli import ask as ask_module
from monarchfs.cli.ask import ask_command, below, warm_command
from monarchfs.cli.fsck import bar
from monarchfs.cli.parser import build_parser
from monarchfs.control import client, messages
from monarchfs.fuse.mountinfo import split_below
from monarchfs.types import UsageError
from tests.support import surroundings, trees
from tests.support.fake_daemon import Start, only_these
from tests.support.mounting import (
    MONARCHFS,
    Bench,
    asked,
    assert_refused,
    kill_each,
    needs_mounts,
    run,
    wait_for,
)
from tests.support.processes import parent_of
from tests.support.programs import Running


def test_paths_are_relative_to_the_mount() -> None:
    for path, expected in (
        ("./a//b/", "a/b"),
        (".", ""),
        ("a/../b", "b"),
        ("..a", "..a"),
        ("/mnt/data/", ""),
        ("//mnt/data/x y", "x y"),
        ("/link/a", "a"),
        ("/mnt/other/../data/a", "a"),
    ):
        assert below(path, ("/link", "/mnt/data")) == expected
    for outside in ("..", "a/../..", "/mnt", "/mnt/database"):
        with pytest.raises(UsageError):
            below(outside, ("/link", "/mnt/data"))


def test_where_a_path_is_split(tmp_path: Path) -> None:
    mounts = ["/mnt/data", "/mnt/data/inner", str(tmp_path / "here"), f"{tmp_path}/hung/m"]
    (tmp_path / "link").symlink_to("here/d")
    (tmp_path / "hung").symlink_to("link")  # what leads to a mount point is not asked
    (tmp_path / "way").symlink_to("hung/m/d")
    (tmp_path / "loop").symlink_to("loop")
    for path, expected in (
        ("/mnt/data", ("/mnt/data", "")),
        ("/mnt/data/a/b", ("/mnt/data", "a/b")),
        ("/mnt/data/inner/x", ("/mnt/data/inner", "x")),
        ("/mnt/database", None),
        ("/", None),
        (f"{tmp_path}/link/x", (f"{tmp_path}/here", "d/x")),
        (f"{tmp_path}/loop/x", None),
        (f"{tmp_path}/hung/m", (f"{tmp_path}/hung/m", "")),
        (f"{tmp_path}/way//./x", (f"{tmp_path}/hung/m", "d/x")),
    ):
        assert split_below(path, mounts) == expected


def test_the_bar_of_fsck() -> None:
    assert bar(5, 10, 4) == "[##--]  50%"
    assert bar(30, 10, 4) == bar(0, 0, 4) == "[####] 100%"


def test_lines_to_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    so_far = {"files": 2000, "bytes": 4 << 20, "resident": 1000, "resident_bytes": 1 << 20}
    ask_module._lines()(so_far)
    assert capsys.readouterr().err == "", "not that often"
    monkeypatch.setattr(ask_module, "_LINE_SECONDS", 0.0)
    show = ask_module._lines()
    show(so_far)
    show({**so_far, "walked": True, "failed": 2, "refused": 3})
    show({**so_far, "what": "metadata"})
    assert capsys.readouterr().err.splitlines() == [
        "warm: 1,000 of 2,000 files, 1.0M of 4.0M found so far",
        "warm: 1,000 of 2,000 files, 1.0M of 4.0M, no room 3, failed 2",
        "warm: 2,000 files found so far",
    ]


@pytest.fixture
def daemon(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    with only_these(place, monkeypatch) as start:
        yield start


def test_progress_comes_before_the_result(daemon: Start) -> None:
    result = {"checked": 3, "changed": 0, "appeared": 0, "gone": 0}

    def serve(connection: socket.socket) -> None:
        # Two lines at once, and one in pieces.
        connection.sendall(messages.encode_progress({"checked": 1}) * 2)
        last = messages.encode_progress({"checked": 2}) + messages.encode_result(result)
        connection.sendall(last[:20])
        connection.sendall(last[20:])

    seen: list[dict[str, Any]] = []
    with client.Connection(daemon(serve).path, 5) as connection:
        assert connection.request({"command": "refresh"}, progress=seen.append) == result
    assert seen == [{"checked": count} for count in (1, 1, 2)]


def test_many_paths_are_several_requests(daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts are added up, and of errors the first is told."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(messages.encode_result({"files": 4, "error": f"{len(one.requests)}th"}))

    one = daemon(serve)
    paths = [f"\udcff{number}" * 40 for number in range(1000)]
    words = build_parser().parse_args(["pin", "/mnt/photos", *paths, "--json"])
    assert ask_command(words, {}) == 0
    assert [path for request in one.requests for path in request["paths"]] == paths
    for request in one.requests:
        assert len(messages.encode_message(request)) <= messages.MOST_REQUEST_BYTES
    assert json.loads(capsys.readouterr().out) == {"files": 4 * len(one.requests), "error": "1th"}


def test_warm_asks_the_next_worker(daemon: Start, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [b"", messages.encode_error(messages.NO_WORKER), messages.encode_result({"files": 4})]
    daemon(lambda connection: connection.sendall(answers.pop(0)))
    assert warm_command(build_parser().parse_args(["warm", "/mnt/photos", "--wait"]), {}) == 0
    assert capsys.readouterr().out.endswith("of 4 files, 0 bytes\n")


KIB = 1024
COMMANDS = ("warm", "evict", "pin", "unpin", "refresh")


@needs_mounts
def test_on_a_terminal_there_is_a_bar_and_an_interrupt_ends_the_waiting_only(work: Bench) -> None:
    files = {f"d{n % 4}/file {n}": trees.random_bytes(30_000, 1) for n in range(40)}
    source = work.faulty_source(trees.write_files(work.path / "src", files))
    mount = work.mount(source.path)
    source.faults(delay=0.02)
    ours, theirs = surroundings.open_terminal()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    command = [*MONARCHFS, "warm", str(mount.path), "--wait"]
    process = Running(command, stderr=theirs, cwd="/", env=environment)
    os.close(theirs)
    seen, interrupted = b"", False
    while select.select([ours], [], [], 30)[0]:
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:  # EIO: the other end is closed
            break
        shows = b"\x1b[" in seen and b"files" in seen
        if shows and not interrupted and mount.status()["files"]["resident"]:
            process.send_signal(signal.SIGINT)
            interrupted = True
    out, _ = process.communicate(timeout=20)
    os.close(ours)
    assert (process.returncode, out) == (-signal.SIGINT, "")
    assert b"monarchfs: interrupted the waiting; the mount goes on with it" in seen
    source.faults()
    wait_for(lambda: run("warm", str(mount.path), "--check").returncode == 0, "copying to end")


def why(*paths: str | Path) -> list[dict[str, Any]]:
    done = run("why", *map(str, paths), "--json")
    assert done.stderr == ""
    reports: list[dict[str, Any]] = json.loads(done.stdout)["paths"]
    assert done.returncode == any("error" in report for report in reports)
    return reports


def attribute(path: Path, name: str) -> str:
    return os.getxattr(path, f"user.monarchfs.{name}").decode()


def files_to_explain(work: Bench) -> Path:
    source = work.path / "src"
    trees.write_files(source, {name: os.urandom(60 * KIB) for name in ("a", "d/b", "d/c")})
    (source / "link").symlink_to("d/b")
    (source / "away").symlink_to("/etc")
    (source / "loop").symlink_to("loop")
    os.mkfifo(source / "fifo")
    return source


@needs_mounts
def test_attributes_say_what_the_command_says(work: Bench) -> None:
    """The sentences are held by tests/layers/test_reasons.py."""
    mount = work.mount(files_to_explain(work), tier="100K")
    a, b = mount.path / "a", mount.path / "d" / "b"
    assert why(a)[0]["reason"] == "not opened yet"
    for name in ("a", "d/b"):
        assert run("warm", str(mount.path), name, "--wait").returncode == 0
    assert run("why", str(a)).stdout.startswith(f"{a}: resident in {work.path}/tier\n  copied: ")
    (report,) = why(b)
    assert (report["cause"], report["reason"]) == ("no room", attribute(b, "reason"))
    assert (attribute(a, "state"), attribute(a, "tier")) == ("resident", f"{work.path}/tier")
    assert os.listxattr(a) == []
    with pytest.raises(OSError, match="No data available"):
        attribute(a, "reason")
    assert asked("evict", str(mount.path), "a")["files"] == 1
    assert run("pin", str(mount.path), "link").returncode == 0
    evicted, waiting = why(a, mount.path / "link")
    assert evicted["reason"].startswith("evicted by hand")
    assert (evicted["pinned"], waiting["pinned"]) == (False, True)


@needs_mounts
def test_what_a_daemon_says_of_bad_paths(work: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line; and all is found before anything is done."""
    mount = work.mount(files_to_explain(work), "--freshness", "immutable")
    for words, refusal in (
        ("why {mnt}/nope {mnt}/neither", "(and 1 more)"),
        ("why {mnt}/a/x", "a is not a directory"),
        ("why {mnt}/away/passwd", "leads out of the mount"),
        ("why {mnt}/loop", "too many symbolic links"),
        ("why {mnt}/" + "x" * 300, "File name too long"),
        ("why {mnt}/\udcff", "\\udcff: no such file"),
        ("warm {mnt} fifo", "fifo is no file or directory"),
        *((f"{command} {{mnt}} d nope/deeper", "o such file or directory") for command in COMMANDS),
        *((f"{command} {{mnt}} {'x' * 300}", "ile name too long") for command in COMMANDS),
        *((f"{command} {{mnt}} -- -x", "o such file or directory") for command in COMMANDS),
        ("pin {mnt} d/c nope", "no such file"),
    ):
        assert_refused(mount, capsys, words.split(), 1, refusal)
    assert why(mount.path / "d" / "c")[0]["pinned"] is False
    # By way of links.
    link = work.path / "elsewhere"
    link.symlink_to(mount.path)
    file, odd, linked = why(link / "a", mount.path / "fifo", mount.path / "link")
    assert (file["path"], file["type"]) == (str(mount.path / "a"), "file")
    assert (odd["type"], linked["size_bytes"]) == ("other", 60 * KIB)
    # Without a daemon.
    worker = mount.worker_pid()
    kill_each((parent_of(worker), worker))
    wait_for(lambda: run("status", str(mount.path)).returncode, "the daemon to be gone")
    for words in ("why {mnt}/a", *(f"{command} {{mnt}} a" for command in COMMANDS)):
        assert_refused(mount, capsys, words.split(), 1, "monarchfs umount")
