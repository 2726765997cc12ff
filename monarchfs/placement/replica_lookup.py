"""What placement looks up instead of remembering it: the replicas at rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class ReplicaLookup(Protocol):
    """Answers from memory, or a memory map: every method is called on the event loop, up to 1,000
    times for one event.

    The books may still show what placement has just decided to evict: it remembers that itself.
    """

    def allocated_bytes(self, ino: int, tier: int) -> int | None:
        """Of the replica of ``ino`` at rest in ``tier``; None if there is none, also where one is
        being filled there, or lies in another tier."""

    def evictable(self, ino: int) -> bool:
        """Whether the replica may go now: at rest, not open and not pinned."""

    def outdated(self, tier: int) -> Iterable[int]:
        """The replicas of the tier that nobody will open again: of versions that the source does
        not have any more, and found ones. Must be cheap where there are none: asked for each file
        that does not fit."""

    def any(self, tier: int) -> Iterable[int]:
        """The replicas of the tier, in no particular order, consumed lazily. Had better start
        elsewhere each time: the same 1,000 that may not go would hide all others."""
