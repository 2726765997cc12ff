"""The order in which files are copied. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import IntEnum
from itertools import islice


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
        # Not dict: where many were taken from its front, finding the first one takes long.
        self._lines: dict[Priority, OrderedDict[int, None]] = {
            priority: OrderedDict() for priority in Priority
        }
        self._priorities: dict[int, Priority] = {}

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, ino: int) -> bool:
        return ino in self._priorities

    def position(self, ino: int) -> int | None:
        """How many go before it; None where it is not in the queue."""
        own = self._priorities.get(ino)
        if own is None:
            return None
        before = sum(len(line) for priority, line in self._lines.items() if priority < own)
        return before + list(self._lines[own]).index(ino)

    def push(self, ino: int, priority: Priority) -> bool:
        """True if this changed anything."""
        known = self._priorities.get(ino)
        if known is not None and known <= priority:
            return False
        if known is not None:
            del self._lines[known][ino]
        self._priorities[ino] = priority
        self._lines[priority][ino] = None
        return True

    @property
    def first(self) -> Priority:
        """The priority of the file whose turn it is, NOBODY if there is none."""
        for priority, line in self._lines.items():
            if line:
                return priority
        return Priority.NOBODY

    def pop(self) -> tuple[int, Priority] | None:
        """Take the next one; None if there is none."""
        for line in self._lines.values():
            if line:
                ino, _ = line.popitem(last=False)
                return ino, self._priorities.pop(ino)
        return None

    def next(self, priority: Priority, count: int) -> list[int]:
        """What ``pop`` would give next, up to so many, if they have this priority."""
        return list(islice(self._lines[priority], count)) if self.first is priority else []

    def drop(self, inos: Iterable[int]) -> None:
        """Take these, which are in the queue."""
        for ino in inos:
            del self._lines[self._priorities.pop(ino)][ino]
