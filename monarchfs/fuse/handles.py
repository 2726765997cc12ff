"""Handle numbers: what the kernel has opened under each."""

from __future__ import annotations

import errno

from monarchfs.fs.files import FileHandle
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
