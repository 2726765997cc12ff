"""``monarchfs refresh``, ``pin``, ``unpin``, ``evict``: the question, and what answers become."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cli.ask import add, ask_command, batches, below
from monarchfs.cli.parser import build_parser
from monarchfs.cli.progress import bar
from monarchfs.control import client, messages
from monarchfs.control import client as control_client
from monarchfs.types import OperationError, UsageError
from tests.support.fake_daemon import Start, only_these
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


def test_a_bar() -> None:
    assert bar(0, 10, 4) == "[----]   0%"
    assert bar(5, 10, 4) == "[##--]  50%"
    assert bar(30, 10, 4) == "[####] 100%"
    assert bar(0, 0, 4) == "[####] 100%"


# Against a daemon that says what the test wants.


@pytest.fixture
def daemon(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    with only_these(place, monkeypatch) as start:
        yield start


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(arguments)


def test_progress_comes_before_the_result(
    daemon: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(connection: socket.socket) -> None:
        result = {"checked": 3, "changed": 0, "appeared": 0, "gone": 0}
        # Two lines at once, and one in pieces.
        connection.sendall(messages.encode_progress({"checked": 1}) * 2)
        last = messages.encode_progress({"checked": 2}) + messages.encode_result(result)
        connection.sendall(last[:20])
        connection.sendall(last[20:])

    one = daemon(serve)
    assert ask_command(parse("refresh", "/mnt/photos", "/mnt/photos/a", "b"), {}) == 0
    assert one.requests == [{"command": "refresh", "paths": ["a", "b"]}]
    captured = capsys.readouterr()
    assert captured.out == "checked 3, changed 0, appeared 0, gone 0\n"
    assert captured.err == "", "no terminal, no progress"


def test_progress_is_passed_on(daemon: Start) -> None:
    def serve(connection: socket.socket) -> None:
        for count in range(3):
            connection.sendall(messages.encode_progress({"checked": count}))
        connection.sendall(messages.encode_result({"checked": 3}))

    seen: list[dict[str, Any]] = []
    with control_client.Connection(daemon(serve).path, 5) as connection:
        assert connection.long_request({"command": "refresh"}, seen.append) == {"checked": 3}
    assert seen == [{"checked": count} for count in range(3)]


def test_requests_of_many_paths_are_added_up(
    daemon: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    one = daemon({"pin": messages.encode_result({"files": 4, "bytes": 9})})
    paths = [f"{n}/" * 200 for n in range(300)]
    assert ask_command(parse("pin", "/mnt/photos", *paths, "--json"), {}) == 0
    assert len(one.requests) > 1
    assert json.loads(capsys.readouterr().out)["files"] == 4 * len(one.requests)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (messages.encode_progress({"checked": 1}), "the connection was closed"),
        (b"", "the connection was closed"),
        (b"junk\n", "gave no answer"),
        (messages.encode_message({"progress": 5}), "without a reason"),
    ],
)
def test_other_ends(daemon: Start, reply: bytes, words: str) -> None:
    daemon(lambda connection: connection.sendall(reply))
    with pytest.raises(OperationError, match=words):
        ask_command(parse("refresh", "/mnt/photos"), {})


def test_silence_ends_it(daemon: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENCE_SECONDS", 0.2)

    def serve(connection: socket.socket) -> None:
        connection.sendall(messages.encode_progress({"checked": 1}))
        connection.recv(1)  # until the client gives up

    daemon(serve)
    with pytest.raises(OperationError, match=r"within 0\.2 s"):
        ask_command(parse("refresh", "/mnt/photos"), {})


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
    # A name of the mount by way of others is one, too.
    for command, mount in (("unpin", "mnt/."), ("pin", f"{work.path}//mnt")):
        done = work.run(command, mount)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "which PATH" in done.stderr
    assert work.run("umount", "mnt").returncode == 0
