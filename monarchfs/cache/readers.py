"""What the cache needs of the threads of the C part, which open and read files without Python.

The cache says which files they may read, and asks them before it removes one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from monarchfs.types import Node, Replica, SourceVersion


class Readers(Protocol):
    """The threads of a process. No method has a checkpoint. The only wait is for closing local
    files."""

    @property
    def nonresident(self) -> NonresidentReads: ...

    def stored(self, replicas: Sequence[tuple[Node, Replica]]) -> None:
        """The index has this complete replica of each node: a new one, or one at another place."""

    def invalidate(self, ino: int) -> None:
        """Its replica must not be read any more, even by readers that have it open."""

    def try_remove(self, ino: int) -> bool:
        """``invalidate``, unless the file is open or being read: then False."""

    def reading(self, ino: int) -> bool:
        """Whether a thread still reads a replica that was invalidated, or replaced by ``stored``:
        its bytes must stay. Once this is False it stays so."""

    def expire(self, ino: int) -> None:
        """The source has another version: open handles keep this one, and no open gets it."""

    def used(self, ino: int) -> bool:
        """Whether they have a handle for it."""

    def open_inodes(self) -> Collection[int]:
        """What they have handles for."""

    def seen(self, ino: int) -> bool:
        """Whether they have opened or read its replica."""

    def serve(self, tier_id: int, dir_fd: int | None) -> None:
        """They may read the files in this directory of the tier, which stays the caller's; with
        None, no files of the tier."""

    def catch_up(self) -> None:
        """Report to ``Cache.accessed`` what they opened since the last call."""

    def exclude(self, ino: int, *, excluded: bool) -> bool:
        """Python begins to read the file from the source, or ends: meanwhile no thread begins to.
        True if a thread is reading the whole file, or has, and Python will soon hear of it."""


class NonresidentReads:
    """The threads' reads of files that are not resident (yet). An inode number is one version of
    one file. Descriptors stay the caller's. No method has a checkpoint, or waits.

    In this class the methods do nothing: all of those reads come to Python."""

    units: object = None
    """How a ``Unit`` answers readers that wait for its bytes."""

    def source(self, ino: int, fd: int, version: SourceVersion) -> bool:
        """Threads may read from the source what is not kept of the file, as long as the source has
        this version. Whether they will. The source is not asked now."""
        return False

    def no_source(self, ino: int) -> None:
        """Ends ``source``. Reads under way are still answered."""

    def fill(self, ino: int, size: int, chunk_bytes: int, states: bytes) -> bool:
        """The file is being copied, and somebody reads it; ``states`` as of ``ChunkMap``."""
        return False

    def part(self, ino: int, fd: int) -> None:
        """The part file; called before the first chunk is present."""

    def chunks(self, ino: int, first: int, last: int, state: bytes) -> None:
        """The chunks [first, last) are in that state now."""

    def ahead(self, ino: int, chunk: int | None) -> None:
        """Report the next read that reaches this chunk; None: report none."""

    def stop(self, ino: int) -> None:
        """The file must not be read any more. Reads under way are still answered."""

    def used(self, ino: int) -> bool:
        """Whether the file was read since the last call."""
        return False
