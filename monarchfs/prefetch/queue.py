"""What there is to do for each file that is to be copied, and in which order. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice

import trio

from monarchfs.cache.replicas import Reservation


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


@dataclass(eq=False, slots=True)
class Batch:
    """Files that the copier wants together: by inode number, the room that there is for each.
    ``left``: how many are neither stored nor given up; ``unread``: of how many the C part has yet
    to report. ``took_ns``, ``sizes``: the time for all files that were read, and their sizes, but
    for those in memory and in the window."""

    places: dict[int, Reservation]
    priority: Priority
    left: int
    unread: int
    took_ns: int = 0
    sizes: list[int] = field(default_factory=list)
    done: trio.Event = field(default_factory=trio.Event)

    def end_one(self) -> None:
        """Another file was stored or given up."""
        self.left -= 1
        if not self.left:
            self.done.set()


@dataclass(eq=False, slots=True)
class CopyJob:
    """What there is to do for a file, until nothing is. Constant: ``ino``.

    ``priority``: where it is in the queue; NOBODY: nowhere. ``supplied``: only other nodes want it.
    ``failures``: how often its copy failed in a row; ``retry_at``: when it is tried again, on
    trio's clock.

    ``arriving``: all of it is read by others, or was, and is stored then. Of such a file:
    ``batch``, the copier's batch that waits for its bytes; ``asked``: its owner is asked to copy
    it first; ``hurried``: somebody waits until it is stored.
    """

    ino: int
    priority: Priority = Priority.NOBODY
    supplied: bool = False
    failures: int = 0
    retry_at: float | None = None
    arriving: bool = False
    batch: Batch | None = None
    asked: bool = False
    hurried: bool = False

    @property
    def queued(self) -> bool:
        return self.priority is not Priority.NOBODY

    @property
    def over(self) -> bool:
        """Whether nothing has to be known of it any more."""
        waits = self.queued or self.retry_at is not None
        return not (waits or self.arriving or self.supplied or self.failures)


class CopyQueue:
    """Files by priority, first come first served within one; each is in it once.

    A file that is wanted again at a higher priority moves up.
    """

    def __init__(self) -> None:
        # Not dict: where many were taken from its front, finding the first one takes long.
        self._lines: dict[Priority, OrderedDict[CopyJob, None]] = {
            priority: OrderedDict() for priority in Priority
        }

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def position(self, job: CopyJob) -> int:
        """How many go before it, which is in the queue."""
        before = sum(len(line) for of, line in self._lines.items() if of < job.priority)
        return before + list(self._lines[job.priority]).index(job)

    def push(self, job: CopyJob, priority: Priority) -> bool:
        """True if this changed anything."""
        if job.priority <= priority:
            return False
        if job.queued:
            del self._lines[job.priority][job]
        job.priority = priority
        self._lines[priority][job] = None
        return True

    @property
    def first(self) -> Priority:
        """The priority of the file whose turn it is, NOBODY if there is none."""
        for priority, line in self._lines.items():
            if line:
                return priority
        return Priority.NOBODY

    def next(self, priority: Priority, count: int) -> list[CopyJob]:
        """The next ones, up to so many, if they have this priority."""
        return list(islice(self._lines[priority], count)) if self.first is priority else []

    def take(self, jobs: Iterable[CopyJob]) -> None:
        """Take these, which are in the queue."""
        for job in jobs:
            del self._lines[job.priority][job]
            job.priority = Priority.NOBODY
