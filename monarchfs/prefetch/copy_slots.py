"""How many background fetches are under way.

A fetch that hangs in the source lends its slot, so that one storage target that does not answer
does not stop the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from monarchfs.prefetch.governor import TargetWindow

STUCK_SECONDS = 1.0
MAX_LENT = 64


@dataclass(eq=False, slots=True)
class CopySlot:
    """``window``: where it counts, if its copy is one that nobody waits for."""

    started: float
    window: TargetWindow | None
    lent: bool = False


class CopySlots:
    """Constant: ``count``. Changing: those that are taken, how many of them are lent."""

    def __init__(self, count: int) -> None:
        self.lent = 0
        self._count = count
        self._taken: set[CopySlot] = set()

    def __len__(self) -> int:
        """How many are taken."""
        return len(self._taken)

    @property
    def free(self) -> bool:
        return len(self._taken) - self.lent < self._count

    def take(self, now: float, window: TargetWindow | None) -> CopySlot:
        """``window``: nobody waits for it."""
        slot = CopySlot(now, window)
        if window is not None:
            window.began()
        self._taken.add(slot)
        return slot

    def release(self, now: float, slot: CopySlot) -> None:
        """It is free again."""
        self._taken.discard(slot)
        self.lent -= slot.lent
        if slot.window is not None:
            slot.window.ended(now, now - slot.started)

    def lend(self, now: float) -> bool:
        """Lend those that were taken STUCK_SECONDS ago; whether there are any more."""
        lent = self.lent
        for slot in self._taken:
            stuck = slot.started < now - STUCK_SECONDS
            if stuck and not slot.lent and self.lent < MAX_LENT:
                slot.lent = True
                self.lent += 1
                if slot.window is not None:
                    slot.window.ended(now, now - slot.started)
                    slot.window = None
        return self.lent > lent
