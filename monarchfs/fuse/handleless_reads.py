"""Reads without an open: with free opens the kernel does not report what it opens.

Only reads that the C part does not answer come here: of files that are not resident, or that it
does not know yet. Such a file is kept open while it is being read, and for a while after.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from monarchfs.fs.files import FileHandle, Files

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
    """Changing: ``_held``, the open files by inode, the one that was read last at the end."""

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
        while True:
            await trio.sleep(1)
            now = trio.current_time()
            for ino, held in list(self._held.items()):
                used = (
                    self._files.cache.readers.nonresident.used
                )  # by threads, since this was asked
                if held.handle.served or (held.until < now and not used(ino)):
                    self._close(ino, held)
