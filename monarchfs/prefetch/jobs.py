"""What is to be copied, what of it is under way, and who is told of its end."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Container, Sequence
from typing import Protocol

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.reasons import Cause
from monarchfs.metrics import Metrics
from monarchfs.prefetch.copy import Copy
from monarchfs.prefetch.fetch import WHOLE_BYTES
from monarchfs.prefetch.fill import Fill
from monarchfs.prefetch.open_first import OpenFirst
from monarchfs.prefetch.queue import Batch, CopyJob, CopyQueue, Priority
from monarchfs.source.source import TRANSIENT
from monarchfs.system.listeners import Listeners
from monarchfs.types import Archived, Node

log = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 5.0, 25.0)
"""When a copy that failed in the source is tried again."""

_NOTHING = CopyJob(0)
"""Of files of which nothing is to be known. Never changed."""


class FileOwners(Protocol):
    """The nodes that share small files."""

    def elsewhere(self, node: Node) -> bool:
        """Whether another one owns the file."""
        ...

    async def ask(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Wait until their owners have copied these, and return what they still copy."""
        ...


class CopyJobs:
    """Constant: ``keeps``, whether anything is copied at all; ``owners``, if nodes share. Changing:
    ``files``, by inode number, which are open or being copied; ``_jobs``, what there is to do for
    each file, of which ``queue`` has those that wait; how many files others read as a whole
    (``arriving``), and for how many of these somebody waits (``hurried``); ``background``, the
    files whose chunks the copier takes, in order; ``wakes``, where the copier waits.
    """

    def __init__(
        self,
        cache: Cache,
        metrics: Metrics,
        nursery: trio.Nursery,
        owners: FileOwners | None = None,
        *,
        keeps: bool,
        opens_first: bool = False,
    ) -> None:
        """``opens_first``: small files that are open already are read through their descriptors
        (``OpenFirst``)."""
        self.files: dict[int, Fill] = {}
        self.keeps = keeps
        self.owners = owners
        self.queue = CopyQueue()
        self.open_first = OpenFirst(cache, possible=opens_first and owners is None)
        self.background: list[Fill] = []
        self.wakes = trio.lowlevel.ParkingLot()
        self.arriving = self.hurried = 0
        self.on_step: Listeners[[Sequence[int]]] = Listeners()
        """Called with inode numbers whenever something of their copying has ended: not necessarily
        all of it, see ``pending``."""
        self._cache = cache
        self._metrics = metrics
        self._nursery = nursery
        self._jobs: dict[int, CopyJob] = {}
        # `retry_in` is also asked on threads of the data path, where trio has no time.
        self._clock = trio.lowlevel.current_clock()
        self._shrunk = trio.lowlevel.ParkingLot()
        cache.accounts.on_room.add(self.wakes.unpark_all)

    def get(self, ino: int) -> CopyJob:
        """What there is to do for the file: perhaps nothing."""
        return self._jobs.get(ino, _NOTHING)

    def _job(self, ino: int) -> CopyJob:
        return self._jobs.get(ino) or self._jobs.setdefault(ino, CopyJob(ino))

    def _forget_if_over(self, job: CopyJob) -> None:
        if job.over and self._jobs.get(job.ino) is job:
            del self._jobs[job.ino]

    def resident(self, nodes: Sequence[Node]) -> set[int]:
        """The numbers of those of which there is nothing to copy. About 5 us each. None while the
        tiers are compared with the index: what it has may be gone."""
        return set() if self._cache.reconciling else self._cache.resident_each(nodes)

    def want(self, ino: int, priority: Priority) -> None:
        """Copy the file some time, unless nothing is to be copied or it is there already.

        What is hinted or listed somebody named: that counts also where opened files are not copied
        (``keeps``)."""
        if not self.keeps and priority not in (Priority.HINTED, Priority.LISTED):
            return
        self._supply_no_more(ino)
        if priority is Priority.SCANNED and self.owners is not None:
            node = self._cache.index.nodes.node(ino)
            if node and node.stat.size <= WHOLE_BYTES and self.owners.elsewhere(node):
                priority = Priority.ELSEWHERE
        fill = self.files.get(ino)
        if fill is not None and fill.copy.in_background:
            if priority < fill.copy.priority:
                self.background.remove(fill)
                self.begin_copy(fill, priority)
        elif self.queue.push(self._job(ino), priority) and self.wakes:
            self.wakes.unpark_all()

    def want_opened(self, ino: int) -> None:
        """A file was opened: it is wanted before anything that was only scanned."""
        self.want(ino, Priority.OPENED)

    def supply(self, ino: int, priority: Priority) -> None:
        """Copy what this node owns of a large file, as other nodes want that; all of it where it
        is wanted here, too."""
        wanted_here = self.pending(ino) and not self.get(ino).supplied
        self.want(ino, priority)
        if not wanted_here and self.pending(ino):
            self._job(ino).supplied = True

    def _supply_no_more(self, ino: int) -> None:
        if (job := self.get(ino)).supplied:
            job.supplied = False
            self._forget_if_over(job)

    def take_next(self) -> tuple[int, Priority] | None:
        """The next one of the queue."""
        first = self.queue.first
        jobs = self.queue.next(first, 1)
        self.take_each(jobs)
        return (jobs[0].ino, first) if jobs else None

    def take_each(self, jobs: Sequence[CopyJob]) -> None:
        """Take these out of the queue."""
        self._shrunk.unpark_all()
        self.queue.take(jobs)
        for job in jobs:
            self._forget_if_over(job)

    async def queue_below(self, count: int) -> None:
        """Wait until fewer than ``count`` files wait to be copied. A checkpoint in any case."""
        await trio.lowlevel.checkpoint()
        while len(self.queue) >= count:
            await self._shrunk.park()

    # -- the background list

    def begin_copy(self, fill: Fill, priority: Priority) -> None:
        """It is copied from now on."""
        fill.copy.in_background, fill.copy.priority = True, priority
        insort(self.background, fill, key=lambda fill: fill.copy.priority)
        self.wakes.unpark_all()

    def end_copy(self, fill: Fill) -> None:
        """Nothing more is to be fetched of it."""
        if fill.copy.in_background:
            fill.copy.in_background = False
            self.background.remove(fill)
            self._supply_no_more(fill.copy.node.ino)
            fill.copy.settle()
            self.on_step([fill.copy.node.ino])

    # -- what is under way

    def pending(self, ino: int) -> bool:
        """Whether there is still something to do for the file: it is queued, being copied, or to be
        tried again."""
        fill = self.files.get(ino)
        under_way = fill is not None and (
            fill.copy.in_background or fill.fetching or fill.copy.ending
        )
        job = self.get(ino)
        return under_way or job.queued or job.arriving or job.retry_at is not None

    def copying(self, ino: int) -> bool:
        """Whether it is being copied."""
        fill = self.files.get(ino)
        return self.get(ino).arriving or (fill is not None and fill.copy.filling)

    @property
    def filling(self) -> int:
        """How many files ``copying`` is true of."""
        return self.arriving + sum(fill.copy.filling for fill in self.files.values())

    @property
    def active(self) -> int:
        return len(self.background) + self.arriving

    def copied_bytes(self, inos: Container[int]) -> int:
        """How much of these files is local, of those that are being copied now."""
        return sum(fill.copy.local_bytes for fill in self.background if fill.copy.node.ino in inos)

    # -- files that arrive as a whole

    def take_batches(self) -> list[tuple[int, Batch]]:
        """The mount ends: the files whose bytes a batch waits for, which it does no more."""
        found = [(ino, job.batch) for ino, job in self._jobs.items() if job.batch is not None]
        for ino, _batch in found:
            self._jobs[ino].batch = None
        return found

    def begin_arrival(self, ino: int) -> bool:
        """All of the file is read by others, or was, and is stored then; False where it is being
        copied already. No checkpoint."""
        if ino in self.files or self.get(ino).arriving:
            return False
        self._job(ino).arriving = True
        self.arriving += 1
        return True

    def hurry(self, inos: Sequence[int]) -> list[CopyJob]:
        """Somebody waits until these are stored. Those of them that arrive."""
        found = [job for job in map(self.get, inos) if job.arriving]
        for job in found:
            self.hurried += not job.hurried
            job.hurried = True
        return found

    def end_arrivals(self, inos: Sequence[int]) -> None:
        """That is over, whatever came of it."""
        for job in map(self.get, inos):
            if job.arriving:
                self.arriving -= 1
                self.hurried -= job.hurried
                job.arriving = job.hurried = job.asked = False
                job.batch = None
                self._forget_if_over(job)
        self.on_step(inos)

    def stepped(self, copy: Copy) -> None:
        """A fetch or a copy has ended: it may be another file's turn."""
        self.wakes.unpark_all()
        self.on_step([copy.node.ino])

    # -- what is tried again

    def failed(self, ino: int, priority: Priority, exc: OSError) -> None:
        """The source said this when the file was to be copied. No checkpoint."""
        if isinstance(exc, Archived):
            reason = f"{exc.strerror}: it is copied when it has been read"
            self._cache.reasons.put(ino, Cause.ARCHIVED, reason)
            return
        self._cache.reasons.put(ino, Cause.FAILED, f"copying failed: {exc.strerror}")
        job = self._job(ino)
        if exc.errno in TRANSIENT and job.failures < len(RETRY_SECONDS):
            job.failures += 1
            self.retry(ino, priority, RETRY_SECONDS[job.failures - 1])
        else:
            job.failures = 0
            self._forget_if_over(job)
            self._metrics.copy_failed(exc.errno)
            log.warning("inode %d is not copied: %s", ino, exc)

    def forget_failures(self, ino: int) -> None:
        """All of it was fetched."""
        if (job := self.get(ino)).failures:
            job.failures = 0
            self._forget_if_over(job)

    def retry(self, ino: int, priority: Priority, seconds: float) -> None:
        """Want it again after a while."""
        self._job(ino).retry_at = self._clock.current_time() + seconds
        self._nursery.start_soon(self._retry, ino, priority, seconds)

    async def _retry(self, ino: int, priority: Priority, seconds: float) -> None:
        await trio.sleep(seconds)
        job = self._job(ino)
        job.retry_at = None
        self.want(ino, priority)
        self._forget_if_over(job)
        self.on_step([ino])

    def retry_in(self, ino: int) -> float | None:
        """Seconds until it is tried again; None: it is not."""
        at = self.get(ino).retry_at
        return None if at is None else max(0.0, at - self._clock.current_time())
