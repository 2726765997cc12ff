"""What the cache needs of the threads of the C part, which open and read files without Python.

The cache says which files they may read, and asks them before it removes one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from monarchfs.core.nonresident import NonresidentReads
from monarchfs.types import Node, Replica


class Readers(Protocol):
    """The threads of a process. No method has a checkpoint. The only wait is for closing local
    files."""

    @property
    def nonresident(self) -> NonresidentReads: ...

    def stored(self, replicas: Sequence[tuple[Node, Replica]]) -> None:
        """The index has this complete replica of each node: a new one, or one at another place."""

    def invalidate(self, ino: int, /) -> None:
        """Its replica must not be read any more, even by readers that have it open."""

    def try_remove(self, ino: int, /) -> bool:
        """``invalidate``, unless the file is open or being read: then False."""

    def reading(self, ino: int, /) -> bool:
        """Whether a thread still reads a replica that was invalidated, or replaced by ``stored``:
        its bytes must stay. Once this is False it stays so."""

    def expire(self, ino: int) -> None:
        """The source has another version: open handles keep this one, and no open gets it."""

    def use(self, ino: int, /) -> None:
        """Count a use of it by Python, which ends with ``unuse``."""

    def unuse(self, ino: int, /) -> None: ...

    def used(self, ino: int, /) -> bool:
        """Whether the kernel has it open, as far as it says so, or Python uses it."""

    def open_inodes(self) -> Collection[int]:
        """What the kernel has open, as far as it says so."""

    def seen(self, ino: int, /) -> bool:
        """Whether they have opened or read its replica."""

    def serve(self, tier_id: int, dir_fd: int | None) -> None:
        """They may read the files in this directory of the tier, which stays the caller's; with
        None, no files of the tier."""

    def catch_up(self) -> None:
        """Report to ``Cache.accessed`` what they opened since the last call."""

    def exclude(self, ino: int, *, excluded: bool) -> bool:
        """Python begins to read the file from the source, or ends: meanwhile no thread begins to.
        True if a thread is reading the whole file, or has, and Python will soon hear of it."""
