"""Requests that are answered while the event loop's thread waits: correct, by any number of
processes at once, and no other task of the worker starves."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.support.mounting import Bench, Mount, requires_mounts

pytestmark = [
    *requires_mounts,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of statx"),
]

FILES, PROCESSES = 50, 4

ASK = """
import ctypes, os, sys
root, turns, files = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(256)
done = 0
for turn in range(turns):
    names = os.listdir(root + "/d")
    assert len(names) == files, len(names)
    for name in names:
        path = os.fsencode(f"{root}/d/{name}")
        # AT_STATX_FORCE_SYNC: also what the kernel knows is asked for.
        assert libc.syscall(332, -100, path, 0x2000, 0x7FF, buffer) == 0
        assert int.from_bytes(buffer[40:48], "little") == int(name[1:]), name
        with open(path, "rb") as file:
            assert len(file.read()) == int(name[1:])
        done += 1
    try:
        os.stat(f"{root}/d/none{turn}.{os.getpid()}")
        assert False
    except FileNotFoundError:
        pass
print(done)
"""


def asking(mount: Mount, turns: int) -> list[str]:
    return [sys.executable, "-c", ASK, str(mount.path), str(turns), str(FILES)]


@pytest.mark.parametrize("freshness", ["immutable", "ttl=1"])
def test_many_ask_at_once(work: Bench, freshness: str) -> None:
    source = work.path / "source"
    (source / "d").mkdir(parents=True)
    for number in range(FILES):
        (source / "d" / f"f{number}").write_bytes(b"x" * number)
    mount = work.mount(source, "--freshness", freshness)
    pid = mount.worker_pid()
    turns = 60
    processes = [
        subprocess.Popen(
            asking(mount, turns), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(PROCESSES)
    ]
    try:
        slowest = 0.0
        for _ in range(3):
            started = time.monotonic()
            assert mount.worker_pid() == pid
            slowest = max(slowest, time.monotonic() - started)
        for process in processes:
            out, error = process.communicate(timeout=80)
            assert (process.returncode, error) == (0, "")
            assert int(out) == turns * FILES
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    # Starting the command takes most of it.
    assert slowest < 20
    assert mount.worker_pid() == pid
    assert "Traceback" not in work.log()


def test_a_request_that_has_to_wait_leaves_the_others_alone(work: Bench) -> None:
    backing = work.path / "backing"
    (backing / "d").mkdir(parents=True)
    for number in range(FILES):
        (backing / "d" / f"f{number}").write_bytes(b"x" * number)
    (backing / "slow").write_bytes(b"slow")
    source = work.faulty_source(backing)
    mount = work.mount(source.path, "--freshness", "immutable")
    ask = asking(mount, 3)
    subprocess.run(ask, check=True, capture_output=True, timeout=60)
    source.faults(hang=["lookup slow", "getattr slow"])
    waiting = subprocess.Popen(["stat", str(mount.path / "slow")], stdout=subprocess.DEVNULL)
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert waiting.poll() is None
        source.faults()
        assert waiting.wait(30) == 0
    finally:
        waiting.kill()
        waiting.wait()
