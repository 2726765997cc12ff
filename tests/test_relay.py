"""The threads of the C part, with a socket in the place of the kernel."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from monarchfs.fuse.session import hooks

pytestmark = pytest.mark.skipif(hooks is None, reason="the C part was not built")

BOUNDS = (10**9, 2 * 10**9)
IN = struct.Struct("=IIQQIIIHH")
READ = struct.Struct("=QQIIQII")
OUT = struct.Struct("=IiQ")
FUSE_LOOKUP, FUSE_READ = 1, 15


class Threads:
    """Of one process, which can start them once only: hence ``main``."""

    def __init__(self) -> None:
        # Not by start_relay: that needs a session of libfuse.
        assert hooks is not None
        self.kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.kernel.settimeout(10)
        for end in (self.kernel, device):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        library = ctypes.CDLL(hooks.__file__, use_errno=True)
        bounds = (ctypes.c_uint64 * len(BOUNDS))(*BOUNDS)
        self.news = library.relay_start(device.detach(), 4, bounds, len(BOUNDS))
        assert self.news >= 0

    def ask(self, unique: int, fh: int, offset: int, size: int) -> None:
        body = READ.pack(fh, offset, size, 0, 0, 0, 0)
        header = IN.pack(IN.size + len(body), FUSE_READ, unique, 7, 0, 0, 1, 0, 0)
        self.kernel.send(header + body)

    def answer(self) -> tuple[int, bytes]:
        """unique and data."""
        message = self.kernel.recv(2 << 20)
        length, error, unique = OUT.unpack_from(message)
        assert (length, error) == (len(message), 0)
        return unique, message[OUT.size :]

    def queued(self) -> int:
        assert hooks is not None
        queued: int = hooks.relay_counts()[2]
        return queued

    def left_to_python(self, fh: int, offset: int = 0, size: int = 10) -> None:
        before = self.queued()
        self.ask(99, fh, offset, size)
        end = time.monotonic() + 10
        while self.queued() == before:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert self.queued() == before + 1


def main(directory: Path) -> None:
    assert hooks is not None
    data = random.Random(1).randbytes(3_000_000)
    path = directory / "replica"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    threads = Threads()
    assert hooks.relay(5, fd, len(data))
    assert hooks.relay(6, fd, len(data))
    assert not hooks.relay(6, fd, len(data)), "a handle twice"

    # All of what is asked for, but at the end of the file.
    for offset, size in ((0, 1), (1, 4096), (131071, 1 << 20), (len(data) - 10, 100), (1 << 40, 9)):
        threads.ask(2, 5, offset, size)
        assert threads.answer() == (2, data[offset : offset + size])

    # Many at once, in whatever order they come back.
    relayed_bytes = 1 + 4096 + (1 << 20) + 10
    asked = {2 * n: (n * 7919 % len(data), 1 + n * 977 % 200_000) for n in range(1, 200)}
    waiting = 0
    for unique, (offset, size) in [*asked.items(), *[(0, (0, 0))] * 4]:
        if unique:
            threads.ask(unique, 5 + unique // 2 % 2, offset, size)
            waiting += 1
        if waiting == 5 or not unique:
            back, got = threads.answer()
            waiting -= 1
            offset, size = asked.pop(back)
            relayed_bytes += len(got)
            assert got == data[offset : offset + size]
    assert not asked

    reads, relayed, _queued, total_ns, took = hooks.relay_counts()
    assert reads == 5 + 199
    assert relayed == relayed_bytes
    assert total_ns > 0
    assert sum(took) == reads
    assert len(took) > len(BOUNDS)

    # Anything else is Python's.
    threads.left_to_python(7)
    hooks.end_relay(6)
    hooks.end_relay(6)
    threads.left_to_python(6)
    header = IN.pack(IN.size + 2, FUSE_LOOKUP, 4, 1, 0, 0, 1, 0, 0)
    before = threads.queued()
    threads.kernel.send(header + b"a\0")
    while threads.queued() == before:
        time.sleep(0.001)

    # The descriptor is the caller's to close; the number may come again for another file.
    os.close(fd)
    threads.ask(8, 5, 10, 10)
    assert threads.answer() == (8, data[10:20])
    hooks.end_relay(5)
    other = directory / "other"
    other.write_bytes(b"another file")
    again = os.open(other, os.O_RDONLY)
    assert again == fd
    assert hooks.relay(8, again, 12)
    threads.ask(10, 8, 0, 100)
    assert threads.answer() == (10, b"another file")

    # A replica that is shorter than it was, and one that is not to be read any more.
    os.truncate(other, 5)
    threads.left_to_python(8)
    os.truncate(other, 12)
    hooks.forget_relayed(again)
    threads.left_to_python(8)
    assert hooks.relay(9, again, 12), "the same number, of a file that is good"
    threads.ask(12, 9, 11, 100)
    assert threads.answer() == (12, b"\0")

    # Thousands of handles.
    for fh in range(100, 5100):
        assert hooks.relay(fh, again, 12)
    threads.ask(14, 3777, 0, 5)
    assert threads.answer() == (14, b"anoth")
    for fh in range(100, 5100):
        hooks.end_relay(fh)
    hooks.end_relay(8)
    hooks.end_relay(9)
    os.close(again)
    assert psutil.Process().open_files() == []
    print("done")


def test_reads_are_answered_and_all_else_is_left_to_python(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, tests.test_relay as t; from pathlib import Path;"
         " t.main(Path(sys.argv[1]))", str(tmp_path)],
        cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_a_session_that_was_not_begun_has_no_threads() -> None:
    assert hooks is not None
    assert not hooks.start_relay(0, 0, 1, BOUNDS)
    with pytest.raises(TypeError):
        hooks.end_relay("handle")
    with pytest.raises(OverflowError):
        hooks.end_relay(-1)
