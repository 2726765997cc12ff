"""The order in which files are copied. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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
        self._lines: dict[Priority, deque[int]] = {priority: deque() for priority in Priority}
        """Also with files that moved up, or have had their turn."""
        self._best: dict[int, Priority] = {}

    def __len__(self) -> int:
        return len(self._best)

    def __contains__(self, ino: int) -> bool:
        return ino in self._best

    def position(self, ino: int) -> int | None:
        """How many go before it; None where it is not in the queue. Looks at all of them: 50,000
        take about 10 ms."""
        if ino not in self._best:
            return None
        # One that was in the queue before may be in a line twice.
        turns = dict.fromkeys(
            other
            for priority, line in self._lines.items()
            for other in line
            if self._best.get(other) == priority
        )
        return list(turns).index(ino)

    def push(self, ino: int, priority: Priority) -> bool:
        """True if this changed anything."""
        known = self._best.get(ino)
        if known is not None and known <= priority:
            return False
        self._best[ino] = priority
        self._lines[priority].append(ino)
        return True

    @property
    def first(self) -> Priority:
        """The priority of the file whose turn it is, NOBODY if there is none."""
        job = self.peek()
        return Priority.NOBODY if job is None else job[1]

    def pop(self) -> tuple[int, Priority] | None:
        job = self.peek()
        if job is not None:
            ino, priority = job
            self._lines[priority].popleft()
            del self._best[ino]
        return job

    def peek(self) -> tuple[int, Priority] | None:
        """What ``pop`` would give."""
        for priority, line in self._lines.items():
            while line and self._best.get(line[0]) != priority:
                line.popleft()
            if line:
                return line[0], priority
        return None

    def next(self, priority: Priority, count: int) -> list[int]:
        """What ``pop`` would give next, up to so many, if they have this priority."""
        found: dict[int, None] = {}
        if self.first is priority:
            for ino in self._lines[priority]:
                if len(found) >= count:
                    break
                if self._best.get(ino) == priority:
                    found[ino] = None
        return list(found)

    def drop(self, inos: Iterable[int]) -> None:
        """Remove those that come ``next``, or the first of them."""
        for ino in inos:
            del self._best[ino]
        self.peek()
