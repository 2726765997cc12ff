"""The order in which files are copied. Pure."""

from __future__ import annotations

import heapq
from enum import IntEnum


class Priority(IntEnum):
    """Who wants a file copied; smaller goes first."""

    OPENED = 0
    HINTED = 1
    LISTED = 2
    SCANNED = 3
    ELSEWHERE = 4
    """As SCANNED, and another node owns it: by then it may have copied it."""
    NOBODY = 5
    """After all the others; never in a queue."""


class CopyQueue:
    """Inode numbers by priority, first come first served within one; each is in it once.

    A file that is wanted again at a higher priority moves up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Priority, int, int]] = []
        self._best: dict[int, Priority] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._best)

    def __contains__(self, ino: int) -> bool:
        return ino in self._best

    def position(self, ino: int) -> int | None:
        """How many go before it; None where it is not in the queue. Looks at all of them: 50,000
        take about 10 ms."""
        best = self._best.get(ino)
        if best is None:
            return None
        # One that moved up and down again may be in the heap twice, with different orders.
        turns: dict[int, tuple[Priority, int]] = {}
        for priority, order, other in self._heap:
            if self._best.get(other) == priority:
                turns[other] = min(turns.get(other, (priority, order)), (priority, order))
        return sum(turn < turns[ino] for turn in turns.values())

    def push(self, ino: int, priority: Priority) -> bool:
        """True if this changed anything."""
        known = self._best.get(ino)
        if known is not None and known <= priority:
            return False
        self._best[ino] = priority
        self._count += 1
        heapq.heappush(self._heap, (priority, self._count, ino))
        return True

    @property
    def first(self) -> Priority:
        """The priority of the file whose turn it is, NOBODY if there is none."""
        heap = self._heap
        while heap and self._best.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else Priority.NOBODY

    def pop(self) -> tuple[int, Priority] | None:
        while self._heap:
            priority, _order, ino = heapq.heappop(self._heap)
            if self._best.get(ino) == priority:
                del self._best[ino]
                return ino, priority
        return None

    def peek(self) -> tuple[int, Priority] | None:
        """What ``pop`` would give."""
        return None if self.first is Priority.NOBODY else (self._heap[0][2], self._heap[0][0])
