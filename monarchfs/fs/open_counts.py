"""Which files are open."""

from __future__ import annotations

from collections.abc import Collection

from monarchfs.cache.readers import Readers


class OpenCounts:
    """Constant: ``readers``, which have handles, too; ``known`` is False where the kernel does not
    say what it opens. Changing: the number of handles by inode."""

    def __init__(self, readers: Readers, *, known: bool = True) -> None:
        self.known = known
        self._readers = readers
        self._handles: dict[int, int] = {}

    def add(self, ino: int) -> None:
        self._handles[ino] = self._handles.get(ino, 0) + 1

    def remove(self, ino: int) -> None:
        left = self._handles[ino] - 1
        if left:
            self._handles[ino] = left
        else:
            del self._handles[ino]

    def __contains__(self, ino: int) -> bool:
        """As far as that is ``known``."""
        return ino in self._handles or self._readers.used(ino)

    def inodes(self) -> Collection[int]:
        """All inodes that are open."""
        return {*self._handles, *self._readers.open_inodes()}
