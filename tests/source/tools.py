"""What the tests of the source share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import trio
import trio.testing

from monarchfs.source import PosixSource, SourceEntry
from monarchfs.types import DirRef, SourceStat, SourceVersion


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def soon(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - another thread's doing has no trio.Event
            await trio.sleep(0.002)


def ref(root: Path, path: bytes = b"") -> DirRef:
    st, own = os.lstat(os.path.join(os.fsencode(root), path)), os.lstat(root).st_dev
    return DirRef(path, st.st_ino, 0 if st.st_dev == own else st.st_dev)


def everything(posix: PosixSource, directory: DirRef, batch: int = 1000) -> list[SourceEntry]:
    return [entry for entries in posix.list(directory, batch) for entry in entries]


class HangingPosix(PosixSource):
    """A source whose calls for names with "hang" in them wait until they are released."""

    def __init__(self, root_fd: int) -> None:
        super().__init__(root_fd)
        self.release = threading.Event()
        self.inside = 0
        self._lock = threading.Lock()

    def hang(self) -> None:
        with self._lock:
            self.inside += 1
        assert self.release.wait(30)
        with self._lock:
            self.inside -= 1

    def stat(self, directory: DirRef, name: bytes) -> SourceStat:
        if b"hang" in name:
            self.hang()
        return super().stat(directory, name)

    def open(self, directory: DirRef, name: bytes) -> tuple[int, SourceStat]:
        opened = super().open(directory, name)
        if b"hang" in name:
            self.hang()
        return opened

    def read(self, fd: int, offset: int, size: int) -> tuple[bytes, SourceVersion]:
        if offset == 1:
            self.hang()
        return super().read(fd, offset, size)
