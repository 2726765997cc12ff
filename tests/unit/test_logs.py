"""Logs stay short: few lines of a kind, and files of a bounded size."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from monarchfs.config import User
from monarchfs.supervisor.logs import log_file_handler
from monarchfs.system import logs
from monarchfs.system.logs import INTERVAL_SECONDS, MOST_LINES, FewOfEach

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


@pytest.mark.parametrize("beside", ["nothing", "link", "fifo"])
def test_a_workers_log_is_bounded(tmp_path: Path, beside: str) -> None:
    path, other = tmp_path / "worker.log", tmp_path / "other"
    other.write_text("keep me")
    match beside:
        case "link":
            (tmp_path / "worker.log.1").symlink_to(other)
        case "fifo":
            os.mkfifo(tmp_path / "worker.log.1")
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
