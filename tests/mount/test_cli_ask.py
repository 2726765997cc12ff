"""Commands that take paths (``refresh``, ``pin``, ``warm``, ...): what is asked, and what answers
become."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cli import warm as warm_module
from monarchfs.cli.ask import add, ask_command, batches, below
from monarchfs.cli.parser import build_parser
from monarchfs.cli.progress import bar
from monarchfs.cli.warm import RateEstimate
from monarchfs.control import client, messages
from monarchfs.fuse.mountinfo import split_below
from monarchfs.types import OperationError, UsageError
from tests.support.fake_daemon import Start, only_these
from tests.support.fake_mounts import Area
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
    assert bar(5, 10, 4) == "[##--]  50%"
    assert bar(30, 10, 4) == bar(0, 0, 4) == "[####] 100%"


def test_where_a_path_is_split(tmp_path: Path) -> None:
    mounts = ["/mnt/data", "/mnt/data/inner", str(tmp_path / "here")]
    (tmp_path / "link").symlink_to("here/d")
    (tmp_path / "loop").symlink_to("loop")
    for path, expected in (
        ("/mnt/data", ("/mnt/data", "")),
        ("/mnt/data/a/b", ("/mnt/data", "a/b")),
        ("/mnt/data/inner/x", ("/mnt/data/inner", "x")),
        ("/mnt/database", None),
        ("/mnt", None),
        ("/", None),
        (f"{tmp_path}/link/x", (f"{tmp_path}/here", "d/x")),
        (f"{tmp_path}/loop/x", None),
    ):
        assert split_below(path, mounts) == expected


def test_the_pace() -> None:
    pace = RateEstimate()
    so_far = {"bytes": 400 << 20, "walked": True}
    assert pace.text({**so_far, "copied_bytes": 0}, 0.0) == ""
    half = {**so_far, "copied_bytes": 90 << 20, "resident_bytes": 90 << 20}
    assert pace.text({**half, "moving_bytes": 10 << 20}, 10.0) == "10M/s, 30 s left"
    assert pace.text({**half, "moving_bytes": 10 << 20, "walked": False}, 10.0) == "10M/s"
    for second in range(11, 40):
        text = pace.text({**half, "moving_bytes": 10 << 20}, float(second))
    assert text == "", "nothing moves"


def test_lines_for_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = warm_module._lines()
    so_far = {"files": 2000, "bytes": 4 << 20, "resident": 1000, "resident_bytes": 1 << 20}
    show(so_far)
    assert capsys.readouterr().err == "", "not that often"
    monkeypatch.setattr(warm_module, "_LINE_SECONDS", 0.0)
    show = warm_module._lines()
    show(so_far)
    show({**so_far, "walked": True, "failed": 2, "refused": 3})
    show({**so_far, "what": "metadata"})
    assert capsys.readouterr().err.splitlines() == [
        "warm: 1,000 of 2,000 files, 1.0M of 4.0M found so far",
        "warm: 1,000 of 2,000 files, 1.0M of 4.0M, no room 3, failed 2",
        "warm: 2,000 files found so far",
    ]


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
    result = {"checked": 3, "changed": 0, "appeared": 0, "gone": 0}

    def serve(connection: socket.socket) -> None:
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
    seen: list[dict[str, Any]] = []
    with client.Connection(one.path, 5) as connection:
        assert connection.long_request({"command": "refresh"}, seen.append) == result
    assert seen == [{"checked": count} for count in (1, 1, 2)]


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


@requires_root
@requires_fuse
def test_the_worker_is_asked(root_work: Area) -> None:
    """A path in the mount says which mount is meant; what follows is as the shell completes it."""
    root_work.mount()
    for command in ("refresh", "pin", "unpin", "evict", "warm"):
        for paths in (("mnt", "a", "c d", "mnt/b"), ("mnt/a/../a", "mnt/c d", "mnt/b")):
            absolute = f"{root_work.path}/{paths[-1]}"
            done = root_work.run(command, *paths[:-1], absolute, "--json")
            assert (done.returncode, done.stderr) == (0, "")
            if command != "warm":
                asked = json.loads(done.stdout)["request"]
                assert asked == {"command": command, "paths": ["a", "c d", "b"]}
    # A name of the mount by way of others is one, too.
    for command, mount in (("unpin", "mnt/."), ("pin", f"{root_work.path}//mnt")):
        done = root_work.run(command, mount)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "which PATH" in done.stderr
