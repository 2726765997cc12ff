"""How many background fetches are under way.

A fetch that hangs in the source lends its slot, so that one storage target that does not answer
does not stop the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from monarchfs.prefetch.rate_limiter import RateLimiter

STUCK_SECONDS = 1.0
MAX_LENT = 64


@dataclass(eq=False, slots=True)
class CopySlot:
    """``paced``: its copy is one that nobody waits for, and counts for the pace."""

    started: float
    paced: bool
    lent: bool = False


class CopySlots:
    """Constant: ``count``. Changing: those that are taken, how many of them are lent."""

    def __init__(self, count: int, rate_limiter: RateLimiter) -> None:
        self.lent = 0
        self._count = count
        self._pace = rate_limiter
        self._taken: set[CopySlot] = set()

    def __len__(self) -> int:
        """How many are taken."""
        return len(self._taken)

    @property
    def free(self) -> bool:
        return len(self._taken) - self.lent < self._count

    def take(self, now: float, paced_bytes: int) -> CopySlot:
        """For about so many bytes that nobody waits for; 0: somebody may."""
        slot = CopySlot(now, paced_bytes > 0)
        if slot.paced:
            self._pace.began(now, paced_bytes)
        self._taken.add(slot)
        return slot

    @contextmanager
    def taken(self, slot: CopySlot) -> Iterator[None]:
        """It is free again at the end."""
        try:
            yield
        finally:
            self._taken.discard(slot)
            self.lent -= slot.lent
            if slot.paced:
                self._pace.ended()

    def lend(self, before: float) -> bool:
        """Lend those that were taken before then; whether there are any more."""
        lent = self.lent
        for slot in self._taken:
            if not slot.lent and slot.started < before and self.lent < MAX_LENT:
                slot.lent = True
                self.lent += 1
                if slot.paced:
                    slot.paced = False
                    self._pace.ended()
        return self.lent > lent
