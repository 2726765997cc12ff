"""What the kernel has open: under each handle number, and, with free opens, by what it reads."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from monarchfs.fs.files import FileHandle, Files
from monarchfs.fuse.handle_table import HandleTable
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.insight.recording import AnsweredBy


def opened_by(handle: FileHandle, backing_id: int) -> AnsweredBy:
    """Who answered this open, for a recording."""
    if backing_id:
        return AnsweredBy.CHECKED_KERNEL if handle.checked else AnsweredBy.KERNEL
    if handle.local:
        return AnsweredBy.CHECKED if handle.checked else AnsweredBy.MEMORY
    return AnsweredBy.SOURCE


class Handles:
    """Numbers are never used twice: a request may be carried out twice (FUSE_NOTIFY_RESEND).

    Constant: the table that outlives this process. Changing: what its numbers stand for.
    """

    def __init__(self, table: HandleTable, passthrough: Passthrough) -> None:
        self.table = table
        self._passthrough = passthrough
        self._open: dict[int, FileHandle] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, handle: FileHandle, unique: int) -> tuple[int, int]:
        """The number and the backing id for the answer to the OPEN request ``unique``. Raises
        OSError ENFILE."""
        number, backing_id = self.table.add(handle.ino, unique)
        if (before := self._open.get(number)) is not None:
            before.release()  # of another answer to the same open
        self._open[number] = handle
        return number, backing_id

    def take_over(self, number: int, handle: FileHandle) -> None:
        """``number`` was given out by an earlier worker, or without Python. Raises OSError EBADF if
        it is not open."""
        if not self.table.own(number):
            handle.release()
            raise OSError(errno.EBADF, "unknown handle")
        self._open[number] = handle

    def get(self, number: int) -> FileHandle | None:
        """None for a number that this process' Python does not have: see ``table.ino``."""
        return self._open.get(number)

    def pop(self, number: int) -> FileHandle | None:
        """None for a number that is not open: a second RELEASE is not an error."""
        ino = self.table.end_handle(number)
        if ino is not None:
            self._passthrough.closed(ino)
        return self._open.pop(number, None)


MOST_KEPT = 1024
"""Files that are kept open although nobody is reading them."""

IDLE_SECONDS = 5.0
"""A file that was not read for this long is closed."""


@dataclass(eq=False, slots=True)
class _HeldHandle:
    handle: FileHandle
    readers: int = 0
    until: float = 0.0


class HandlelessReads:
    """Reads without an open: with free opens the kernel does not report what it opens.

    Only reads that the C part does not answer come here: of files that are not resident, or that it
    does not know yet. Such a file is kept open while it is being read, and for a while after.

    Changing: ``_held``, the open files by inode, the one that was read last at the end."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._held: OrderedDict[int, _HeldHandle] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def handle(self, ino: int) -> Iterator[FileHandle]:
        """For one read of ``ino``. Errors show in the read."""
        held = self._held.get(ino)
        if held is None:
            held = self._held[ino] = _HeldHandle(self._files.first_read(ino))
        held.readers += 1
        self._held.move_to_end(ino)
        try:
            yield held.handle
        finally:
            held.readers -= 1
            held.until = trio.current_time() + IDLE_SECONDS
            if held.handle.served:
                self._close(ino, held)  # the C part reads it from now on
            elif len(self._held) > MOST_KEPT:
                self._close_first()

    def _close(self, ino: int, held: _HeldHandle) -> None:
        if not held.readers:
            del self._held[ino]
            held.handle.release()

    def _close_first(self) -> None:
        for ino, held in self._held.items():
            if not held.readers:
                self._close(ino, held)
                return

    async def run(self) -> None:
        """Close what is not read any more, or what the C part reads, for ever."""
        used = self._files.cache.readers.nonresident.used  # by threads, since this was asked
        while True:
            await trio.sleep(1)
            now = trio.current_time()
            for ino, held in list(self._held.items()):
                if held.handle.served or (held.until < now and not used(ino)):
                    self._close(ino, held)
