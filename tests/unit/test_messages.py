"""What a worker's words become: one of a few types, whatever they are; and that logs stay short."""

import errno
import json
import logging
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarchfs.cli import job
from monarchfs.config import User
from monarchfs.supervisor.logs import log_file_handler
from monarchfs.supervisor.messages import (
    MOST_OFFERED,
    MOST_WORDS,
    Back,
    Failed,
    MalformedMessage,
    Message,
    Offer,
    Ready,
    StatusReport,
    Unback,
    WorkerLoaded,
    parse,
)
from monarchfs.system import logs
from monarchfs.system.logs import INTERVAL_SECONDS, MOST_LINES, FewOfEach
from tests.support.fake_mounts import is_plain

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)
KEYS = st.sampled_from(["event", "number", "files", "ids", "error", "status"])
EVENTS = st.sampled_from(["failed", "back", "unback", "status", "loaded", "ready"])
MESSAGES = st.builds(
    lambda fields, event: json.dumps({**fields, "event": event}).encode(),
    st.dictionaries(KEYS | st.text(max_size=3), VALUES, max_size=5),
    EVENTS | VALUES,
)


@given(MESSAGES | st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"event":"status","number":1,"status":{"files":' + b"[" * 980 + b"]" * 980 + b"}}")
@example(b'{"event":"status","number":1,"status":' + b'{"a":' * 990 + b"1" + b"}" * 990 + b"}")
@example(b"1" * 5000)
@example("{}".encode("utf-16"))
@example(json.dumps({"event": "failed", "error": "a\nb\r\x1b[2J\u202e\u2028\udcff"}).encode())
def test_whatever_comes_is_one_of_a_few(content: bytes) -> None:
    message = understood(content)
    match message:
        case str(why):
            assert why.isprintable()
            assert len(why) < 300
        case StatusReport(number, status, dropped):
            assert 0 <= number < 1 << 64
            assert dropped >= 0
            assert is_plain(status)
            # Whoever asks gets it, with a little around it.
            assert json.loads(json.dumps({"result": status}, allow_nan=False))
        case Failed(error):
            assert error.isprintable()
            assert len(error) < 12 * MOST_WORDS
        case Back(number, offers):
            assert 0 <= number < 1 << 64
            assert len(offers) <= MOST_OFFERED
        case Unback(number, ids):
            assert 0 <= number < 1 << 64
            assert all(type(one) is int for one in ids)
        case _:
            assert isinstance(message, (WorkerLoaded, Ready))


def understood(content: bytes) -> Message | str:
    try:
        return parse(content)
    except MalformedMessage as malformed:
        return str(malformed)


def say(**message: object) -> bytes:
    return json.dumps(message).encode()


def test_what_makes_sense_comes_through() -> None:
    status = {
        "state": "serving",
        "tiers": [{"path": "/tier\n\udcff", "used_bytes": 7}],
        "worker": {"pid": 1, "error": None},
        "served": {"seconds": 0.5, "more": {"of": ["the", "same"]}},
    }
    assert parse(say(event="status", number=3, status=status)) == StatusReport(3, status, 0)
    assert parse(say(event="loaded")) == WorkerLoaded()
    assert parse(say(event="ready")) == Ready()
    assert parse(say(event="failed", error="the index is öld")) == Failed("the index is öld")
    files = [[1, "ab/abc.0123", 5]]
    assert parse(say(event="back", number=1, files=files)) == Back(1, (Offer(1, "ab/abc.0123", 5),))
    assert parse(say(event="unback", number=1, ids=[2, -1, "3", True])) == Unback(1, (2,))
    said = b"""{"event": "status", "number": 3, "status": {"state": 1, "worker": [1], "tiers": [2],
        "passthrough": null, "files": {"known": NaN, "resident": 1e999, "partial": 4},
        "new": [1, -Infinity, 18446744073709551616]}}"""
    assert parse(said) == StatusReport(3, {"files": {"partial": 4}, "new": [1]}, 8)
    assert parse(say(event="status", number=3, status=[])) == StatusReport(3, {}, 1)


ME = User("me", os.geteuid(), os.getegid(), tuple(os.getgroups()))
log = logging.getLogger("monarchfs.of_this_test")


def many(count: int) -> None:
    for number in range(count):
        log.warning("replica %d is gone", number)


def test_what_is_told_of_each_file_is_told_of_a_few(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    said = FewOfEach(lambda: now)
    with caplog.filtering(said):
        many(10_000)
        log.warning("something else")
        first = [f"replica {n} is gone" for n in range(MOST_LINES)] + ["something else"]
        said.report()
        assert caplog.messages == first
        now += INTERVAL_SECONDS
        said.report()
        rest = (
            f"and {10_000 - MOST_LINES} more like this in 60 s, the last one: replica 9999 is gone"
        )
        assert caplog.messages[MOST_LINES + 1 :] == [rest]
        # A new interval: told again.
        many(1)
        assert caplog.messages[-1] == "replica 0 is gone"
        # Nothing is left untold at the end.
        many(MOST_LINES + 1)
        said.report(all_of_them=True)
        assert caplog.messages[-1].startswith("and 2 more like this in 0 s")


WRITES = """
import logging, os, sys
from monarchfs.system import logs
directory = os.open(sys.argv[1], os.O_RDONLY)
logs.MOST_BYTES = 10_000
logging.basicConfig(handlers=[logs.BoundedLog(directory, "worker.log")])
for number in range(1000):
    logging.warning("line %d of what a worker says", number)
os.write(2, b"the last words\\n")
"""


@pytest.mark.parametrize("beside", ["nothing", "link"])
def test_a_workers_log_is_bounded(tmp_path: Path, beside: str) -> None:
    path, other = tmp_path / "worker.log", tmp_path / "other"
    other.write_text("keep me")
    if beside == "link":
        (tmp_path / "worker.log.1").symlink_to(other)
    with open(path, "a") as stderr:
        subprocess.run(
            [sys.executable, "-c", WRITES, str(tmp_path)], stderr=stderr, check=True, timeout=30
        )
    before = (tmp_path / "worker.log.1").read_text()
    assert path.read_text().endswith("the last words\n")
    assert max(len(before), path.stat().st_size) < 10_200
    assert before.splitlines()[-1].startswith("WARNING:root:line ")
    assert other.read_text() == "keep me"
    assert sorted(os.listdir(tmp_path)) == ["other", "worker.log", "worker.log.1"]


def test_what_a_log_cannot_take_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full, its file server gone, or closing says so; and others rotate the file."""
    path, handler = tmp_path / "log", log_file_handler(f"{tmp_path}/log", ME)
    assert isinstance(handler, logging.StreamHandler)
    bounded = logs.BoundedLog(-1, "log", handler.stream)
    record = log.makeRecord("x", logging.INFO, "f", 1, "a line", (), None)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), handler.stream.fileno())
    handler.handle(record)
    path.rename(tmp_path / "log.1")
    handler.handle(record)
    assert path.read_text() == "a line\n"
    with monkeypatch.context() as broken:
        for name in ("stat", "fstat"):
            broken.setattr(os, name, Mock(side_effect=PermissionError(errno.EACCES, "no")))
        handler.handle(record)
        bounded.handle(record)
    os.close(handler.stream.fileno())
    path.rename(tmp_path / "log.1")
    for _ in range(2):  # the first one finds out
        handler.handle(record)
    assert path.read_text() == "a line\n"
    handler.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["syslog", "stderr"])
def test_nobody_waits_for_a_log(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog,
        open(reading, "rb", buffering=0) as pipe,
        open(writing, "w") as stderr,
    ):
        syslog.bind(f"{tmp_path}/log")
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(job, "_SYSLOG", f"{tmp_path}/{'log' if kind == 'syslog' else 'none'}")
        reads: Any = syslog.makefile("rb", buffering=0) if kind == "syslog" else pipe
        handler = job.first_that_works(None)
        record = log.makeRecord("x", logging.INFO, "f", 1, "a line" + "x" * 1000, (), None)
        for _ in range(1000):
            handler.handle(record)
        got = 0
        while select.select([reads], [], [], 0)[0]:
            got += reads.read(1 << 20).count(b"a line")
        handler.handle(record)
        assert f"({1000 - got} lines before this one were lost)" in reads.read(1 << 20).decode()
        handler.close()


def test_a_supervisors_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_BYTES", 10_000)
    path = tmp_path / "log"
    (tmp_path / "log.1").write_text("of long ago")
    # Two mounts may share a file.
    handlers = [log_file_handler(str(path), ME) for _ in range(2)]
    for number in range(1000):
        record = log.makeRecord("x", logging.INFO, "f", 1, f"line {number} of a mount", (), None)
        handlers[number % 2].handle(record)
    for handler in handlers:
        handler.close()
    text = (tmp_path / "log.1").read_text() + path.read_text()
    assert text.endswith("line 999 of a mount\n")
    numbers = [int(line.split()[1]) for line in text.splitlines()]
    assert numbers == list(range(numbers[0], 1000))
    assert max(path.stat().st_size, (tmp_path / "log.1").stat().st_size) < 10_200
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1"]
