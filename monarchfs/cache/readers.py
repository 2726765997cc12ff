"""Who reads replicas apart from this process' Python: the threads of the C part, if there are any.

They are told what they may read, and asked before it is taken away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from monarchfs.types import Node, Replica, SourceVersion


class Readers(Protocol):
    """No method has a checkpoint, or waits for anything but local files to be closed."""

    @property
    def nonresident(self) -> NonresidentReads: ...

    def stored(self, replicas: Sequence[tuple[Node, Replica]]) -> None:
        """The index has this complete replica of each node: a new one, or one at another place."""

    def stop(self, ino: int) -> None:
        """Its replica is not to be read any more, whoever has it open."""

    def retire(self, ino: int) -> bool:
        """The same, unless it is open or being read: then False."""

    def reading(self, ino: int) -> bool:
        """Whether a replica of it that was taken away, by ``stop`` or because another one was
        ``stored``, is still being read: its bytes are to stay. Once this is False it stays so."""

    def outdated(self, ino: int) -> None:
        """Its version is not the source's any more: who has it open keeps it, nobody opens it."""

    def used(self, ino: int) -> bool:
        """Whether they know of a handle for it."""

    def serve(self, tier_id: int, dir_fd: int | None) -> None:
        """What the tier holds in this directory may be read from now on; with None, nothing. The
        descriptor is the caller's."""

    def catch_up(self) -> None:
        """Say what was opened since the last time: ``Cache.accessed``."""

    def hold(self, ino: int, *, held: bool) -> bool:
        """This process' Python reads the file from the source, or not any more: meanwhile nobody
        else is to begin with that. Whether somebody else is reading the whole file from the source,
        or has, and it will be known here in a moment."""


class NonresidentReads:
    """The same for files that are not resident (yet). An inode number is one version of one file;
    descriptors are the caller's. No method has a checkpoint, or waits.

    Here they do nothing: all of those reads come to Python."""

    units: object = None
    """How a ``Unit`` answers those who wait for its bytes."""

    def source(self, ino: int, fd: int, version: SourceVersion) -> bool:
        """What is missing of it may be read from the source, where it is not kept; whether it will
        be. As long as the source has this version. The source is not asked now."""
        return False

    def no_source(self, ino: int) -> None:
        """That ends. What is being read is answered."""

    def fill(self, ino: int, size: int, chunk_bytes: int, states: bytes) -> bool:
        """It is being copied, and somebody reads it; ``states`` as of ``ChunkMap``."""
        return False

    def part(self, ino: int, fd: int) -> None:
        """The part file, before the first chunk is present."""

    def chunks(self, ino: int, first: int, last: int, state: bytes) -> None:
        """The chunks [first, last) are in that state now."""

    def ahead(self, ino: int, chunk: int | None) -> None:
        """The next read that goes as far as this chunk is to be told of. None: none is."""

    def stop(self, ino: int) -> None:
        """It is not to be read any more. What is being read is answered."""

    def used(self, ino: int) -> bool:
        """Whether it was read since this was asked the last time."""
        return False


class NoReaders:
    """Where all reads come to Python."""

    def __init__(self) -> None:
        self.nonresident = NonresidentReads()

    def stored(self, replicas: Sequence[tuple[Node, Replica]]) -> None:
        """As Readers."""

    def stop(self, ino: int) -> None:
        """As Readers."""

    def retire(self, ino: int) -> bool:
        return True

    def reading(self, ino: int) -> bool:
        return False

    def outdated(self, ino: int) -> None:
        """As Readers."""

    def used(self, ino: int) -> bool:
        return False

    def serve(self, tier_id: int, dir_fd: int | None) -> None:
        """As Readers."""

    def catch_up(self) -> None:
        """As Readers."""

    def hold(self, ino: int, *, held: bool) -> bool:
        return False
