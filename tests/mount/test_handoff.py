"""Requests that are answered while the event loop's thread waits: correct, by any number of
processes at once, and no other task of the worker starves."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.mounting import Bench, requires_mounts

pytestmark = [
    *requires_mounts,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of statx"),
]

FILES, PROCESSES, TURNS = 50, 4, 30

ASK = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(256)
os.chdir(sys.argv[1])
for turn in range({TURNS}):
    names = os.listdir()
    assert len(names) == {FILES}, len(names)
    for name in names:
        # AT_STATX_FORCE_SYNC: also what the kernel knows is asked for.
        assert libc.syscall(332, -100, name.encode(), 0x2000, 0x7FF, buffer) == 0
        assert int.from_bytes(buffer[40:48], "little") == int(name[1:]), name
        with open(name, "rb") as file:
            assert len(file.read()) == int(name[1:])
    assert not os.path.exists(f"none{{turn}}.{{os.getpid()}}")
"""


@pytest.mark.parametrize("freshness", ["immutable", "ttl=1"])
def test_many_ask_at_once(work: Bench, tmp_path: Path, freshness: str) -> None:
    for number in range(FILES):
        (tmp_path / f"f{number}").write_bytes(b"x" * number)
    mount = work.mount(tmp_path, "--freshness", freshness)
    worker, command = mount.worker_pid(), [sys.executable, "-c", ASK, str(mount.path)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
            for _ in range(PROCESSES)
        ]
        for process in processes:
            stack.callback(process.kill)
        for _ in range(3):
            assert mount.worker_pid() == worker
        for process in processes:
            _, error = process.communicate(timeout=80)
            assert (process.returncode, error) == (0, "")
    assert mount.worker_pid() == worker
    assert "Traceback" not in work.log()
