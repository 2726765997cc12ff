"""A process that opens and reads files as it is told: a test itself must not hang in a mount."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.mounting import as_user

_PROGRAM = """
import json, mmap, os, sys
def drop(fd):
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
def read(fd, offset, size):
    drop(fd)  # so that the kernel asks
    return os.pread(fd, size, offset).hex()
def mapped(fd, offset, size):
    drop(fd)
    with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        return memory[offset : offset + size].hex()
CALLS = {
    "open": lambda path: os.open(path, os.O_RDONLY),
    "close": os.close,
    "read": read,
    "mapped": mapped,
    "again": lambda fd, offset, size: os.pread(fd, size, offset).hex(),
    "size": lambda fd: os.fstat(fd).st_size,
    "access": lambda path: os.access(path, os.R_OK),
}
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        answer = {"result": CALLS[name](*arguments)}
    except OSError as error:
        answer = {"errno": error.errno}
    print(json.dumps(answer), flush=True)
"""


class Reader:
    """Its methods raise the OSError that the process had."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _ask(self, *call: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "errno" in answer:
            raise OSError(answer["errno"], "in the reader")
        return answer["result"]

    def open(self, path: Path) -> int:
        fd: int = self._ask("open", str(path))
        return fd

    def close(self, fd: int) -> None:
        self._ask("close", fd)

    def read(self, fd: int, offset: int = 0, size: int = 1 << 22) -> bytes:
        """Not from the kernel's page cache."""
        return bytes.fromhex(self._ask("read", fd, offset, size))

    def again(self, fd: int, offset: int = 0, size: int = 1 << 22) -> bytes:
        """From there, if it can be."""
        return bytes.fromhex(self._ask("again", fd, offset, size))

    def mapped(self, fd: int, offset: int, size: int) -> bytes:
        return bytes.fromhex(self._ask("mapped", fd, offset, size))

    def size(self, fd: int) -> int:
        size: int = self._ask("size", fd)
        return size

    def access(self, path: Path) -> bool:
        allowed: bool = self._ask("access", str(path))
        return allowed


@contextmanager
def reader(user: str | None = None) -> Iterator[Reader]:
    process = subprocess.Popen(
        as_user(user, [sys.executable, "-c", _PROGRAM]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        yield Reader(process)
    finally:
        process.kill()
        process.communicate()
