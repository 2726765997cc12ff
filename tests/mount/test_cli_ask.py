"""``monarchfs refresh``, ``pin``, ``unpin``, ``evict``: the question, and what answers become."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cli import ask
from monarchfs.cli.ask import add, ask_command, batches, below, describe
from monarchfs.cli.parser import build_parser
from monarchfs.cli.progress import bar
from monarchfs.control import client, messages
from monarchfs.control import client as control_client
from monarchfs.control.registration import Registered, Registration
from monarchfs.supervisor.recover import FoundMount
from monarchfs.types import OperationError, UsageError
from tests.support.fake_daemon import Listener, Serve
from tests.support.fake_mounts import Area, area
from tests.support.mounting import requires_fuse, requires_root


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b", "a/b"),
        ("./a//b/", "a/b"),
        (".", ""),
        ("a/../b", "b"),
        ("..a", "..a"),
        ("/mnt/data", ""),
        ("/mnt/data/", ""),
        ("/mnt/data/x y", "x y"),
        ("//mnt/data/a", "a"),
        ("/link/a", "a"),
        ("/mnt/other/../data/a", "a"),
        ("\udcff", "\udcff"),
    ],
)
def test_paths_are_relative_to_the_mount(path: str, expected: str) -> None:
    assert below(path, ("/link", "/mnt/data")) == expected


@pytest.mark.parametrize("path", ["", "..", "../x", "a/../..", "/mnt", "/mnt/database", "/", "a\0"])
def test_paths_outside_are_refused(path: str) -> None:
    with pytest.raises(UsageError):
        below(path, ("/mnt/data",))


def test_many_paths_go_in_several_requests() -> None:
    paths = [f"\udcff{number}" * 100 for number in range(1000)]
    groups = list(batches(paths))
    assert [path for group in groups for path in group] == paths
    assert len(groups) > 1
    for group in groups:
        message = messages.encode_message({"command": "refresh", "paths": group})
        assert len(message) <= messages.MOST_REQUEST_BYTES
    assert list(batches([""])) == [[""]]


def test_results_add_up() -> None:
    total = add(add({}, {"files": 1, "bytes": 5, "error": ""}), {"files": 2, "error": "first"})
    assert add(total, {"error": "second"}) == {"files": 3, "bytes": 5, "error": "first"}


@pytest.mark.parametrize(
    ("command", "result", "line"),
    [
        (
            "refresh",
            {"checked": 9, "changed": 2, "appeared": 1, "gone": 0},
            "checked 9, changed 2, appeared 1, gone 0",
        ),
        ("pin", {"files": 1, "bytes": 1536}, "pinned 1 file, 1.5K"),
        (
            "pin",
            {"files": 0, "bytes": 0, "kept": 0, "not_listed": 2, "not_looked_at": 1},
            "pinned 0 files, 0 bytes so far, and what else lies there: 2 directories not listed"
            " yet, 1 name not looked at yet",
        ),
        ("unpin", {"files": 0, "bytes": 0, "not_listed": 1}, "unpinned 0 files, 0 bytes"),
        (
            "unpin",
            {"files": 0, "bytes": 0, "kept": 1},
            "unpinned 0 files, 0 bytes, kept 1 that are below another pinned directory",
        ),
        ("evict", {"files": 2, "bytes": 5 << 20}, "evicted 2 files, 5.0M"),
        (
            "evict",
            {"files": 2, "bytes": 0, "kept": 3},
            "evicted 2 files, 0 bytes, kept 3 that are open or pinned",
        ),
    ],
)
def test_for_people(command: str, result: dict[str, Any], line: str) -> None:
    assert describe(command, result) == line


def test_a_bar() -> None:
    assert bar(0, 10, 4) == "[----]   0%"
    assert bar(5, 10, 4) == "[##--]  50%"
    assert bar(30, 10, 4) == "[####] 100%"
    assert bar(0, 0, 4) == "[####] 100%"


# Against a daemon that says what the test wants.


class Daemon(Listener):
    """Every connection is handed to ``serve`` after its request was read."""

    def __init__(self, path: Path, serve: Serve) -> None:
        self.path = str(path / "daemon.sock")
        self.requests: list[dict[str, Any]] = []
        self._answer = serve
        super().__init__(self.path, self._read)

    def _read(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            line = lines.readline()
        if line:
            self.requests.append(messages.decode_message(line))
            self._answer(connection)


@pytest.fixture
def daemon(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Serve], Daemon]]:
    running: list[Daemon] = []

    def start(serve: Serve) -> Daemon:
        one = Daemon(place, serve)
        running.append(one)
        registration = Registration("/mnt", 0, "/src", 0, os.getpid(), 0, "/state", 0)
        registered = Registered(one.path.removesuffix(".sock"), os.geteuid(), registration)
        found = FoundMount("/mnt", "/src", None, registered)
        monkeypatch.setattr(ask, "find_all", lambda search: [found])
        monkeypatch.setattr(FoundMount, "supervisor_alive", True)
        return one

    yield start
    for one in running:
        one.close()


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(arguments)


def test_progress_comes_before_the_result(
    daemon: Callable[[Serve], Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(connection: socket.socket) -> None:
        result = {"checked": 3, "changed": 0, "appeared": 0, "gone": 0}
        # Two lines at once, and one in pieces.
        connection.sendall(messages.encode_progress({"checked": 1}) * 2)
        last = messages.encode_progress({"checked": 2}) + messages.encode_result(result)
        connection.sendall(last[:20])
        connection.sendall(last[20:])

    one = daemon(serve)
    assert ask_command(parse("refresh", "/mnt", "/mnt/a", "b"), {}) == 0
    assert one.requests == [{"command": "refresh", "paths": ["a", "b"]}]
    captured = capsys.readouterr()
    assert captured.out == "checked 3, changed 0, appeared 0, gone 0\n"
    assert captured.err == "", "no terminal, no progress"


def test_progress_is_passed_on(daemon: Callable[[Serve], Daemon]) -> None:
    def serve(connection: socket.socket) -> None:
        for count in range(3):
            connection.sendall(messages.encode_progress({"checked": count}))
        connection.sendall(messages.encode_result({"checked": 3}))

    seen: list[dict[str, Any]] = []
    with control_client.Connection(daemon(serve).path, 5) as connection:
        assert connection.long_request({"command": "refresh"}, seen.append) == {"checked": 3}
    assert seen == [{"checked": count} for count in range(3)]


def test_without_paths_it_is_all_of_the_mount(
    daemon: Callable[[Serve], Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    one = daemon(
        lambda connection: connection.sendall(messages.encode_result({"files": 4, "bytes": 9}))
    )
    assert ask_command(parse("evict", "/mnt", "--json"), {}) == 0
    assert one.requests == [{"command": "evict", "paths": [""]}]
    assert json.loads(capsys.readouterr().out) == {"files": 4, "bytes": 9}


def test_requests_of_many_paths_are_added_up(
    daemon: Callable[[Serve], Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    one = daemon(
        lambda connection: connection.sendall(messages.encode_result({"files": 4, "bytes": 9}))
    )
    assert (
        ask_command(parse("pin", "/mnt", *(f"{n}/" * 200 for n in range(300)), "--json"), {}) == 0
    )
    assert len(one.requests) > 1
    assert json.loads(capsys.readouterr().out)["files"] == 4 * len(one.requests)


def test_what_failed_is_an_error(
    daemon: Callable[[Serve], Daemon], capsys: pytest.CaptureFixture[str]
) -> None:
    daemon(
        lambda connection: connection.sendall(
            messages.encode_result({"checked": 4, "failed": 2, "error": "a: Input/output error"})
        )
    )
    with pytest.raises(OperationError, match="2 of them failed: a: Input/output error"):
        ask_command(parse("refresh", "/mnt"), {})
    assert ask_command(parse("refresh", "/mnt", "--json"), {}) == 1
    assert capsys.readouterr().out.count('"failed": 2') == 1


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (messages.encode_error("the source does not answer"), "the source does not answer"),
        (messages.encode_progress({"checked": 1}), "the connection was closed"),
        (b"", "the connection was closed"),
        (b"junk\n", "gave no answer"),
        (messages.encode_message({"progress": 5}), "without a reason"),
    ],
)
def test_other_ends(daemon: Callable[[Serve], Daemon], reply: bytes, words: str) -> None:
    daemon(lambda connection: connection.sendall(reply))
    with pytest.raises(OperationError, match=words):
        ask_command(parse("refresh", "/mnt"), {})


def test_silence_ends_it(
    daemon: Callable[[Serve], Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENCE_SECONDS", 0.2)

    def serve(connection: socket.socket) -> None:
        connection.sendall(messages.encode_progress({"checked": 1}))
        connection.recv(1)  # until the client gives up

    daemon(serve)
    with pytest.raises(OperationError, match=r"within 0\.2 s"):
        ask_command(parse("refresh", "/mnt"), {})


def test_not_a_mount(tmp_path: Path) -> None:
    for command in ("refresh", "evict"):
        with pytest.raises(OperationError, match="is not a monarchfs mount"):
            ask_command(parse(command, str(tmp_path)), {})


# Against a supervisor, with a worker that repeats what it is asked.


@pytest.fixture
def work(place: Path) -> Iterator[Area]:
    with area(place, None) as opened:
        yield opened


@requires_root
@requires_fuse
def test_the_worker_is_asked(work: Area) -> None:
    work.mount()
    for command in ("refresh", "pin", "unpin", "evict"):
        done = work.run(command, "mnt", "a", f"{work.path}/mnt/b", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        asked = json.loads(done.stdout)["request"]
        assert asked == {"command": command, "paths": ["a", "b"]}
    # A path in the mount says which mount is meant; what follows is as the shell completes it.
    for command in ("refresh", "pin", "unpin", "evict", "warm"):
        done = work.run(command, "mnt/a/../a", "mnt/c d", f"{work.path}/mnt/b", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        if command != "warm":
            asked = json.loads(done.stdout)["request"]
            assert asked == {"command": command, "paths": ["a", "c d", "b"]}
    for command, mount in (("pin", "mnt"), ("unpin", "mnt/."), ("pin", f"{work.path}//mnt")):
        done = work.run(command, mount)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "which PATH" in done.stderr
    for first, second in (("mnt/a", "src"), ("mnt/a", "a"), ("src/a", "mnt/a")):
        done = work.run("evict", first, second)
        assert (done.returncode in (1, 2), done.stderr.count("\n")) == (True, 1)
    done = work.run("pin", "mnt", "../x")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is not below" in done.stderr
    assert work.run("umount", "mnt").returncode == 0
    done = work.run("refresh", "mnt")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
