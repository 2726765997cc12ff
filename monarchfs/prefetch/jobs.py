"""What is to be copied, what of it is under way, and who is told of its end."""

from __future__ import annotations

import errno
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
from monarchfs.prefetch.queue import CopyQueue, Priority
from monarchfs.system.listeners import Listeners
from monarchfs.types import Archived, Node

log = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 5.0, 25.0)
"""When a copy that failed in the source is tried again."""

TRANSIENT = {errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.EMFILE, errno.ENOTCONN}


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
    ``files``, by inode number, which are open or being copied; ``queue``; ``background``, the files
    whose chunks the copier takes, in order; ``supplied``, the files that only other nodes want; the
    files that others read as a whole (``arriving``); ``wakes``, where the copier waits. Of files
    whose copy failed, or that were too young: how often each failed in a row (``_failures``), and
    when it is tried again (``_retries``).
    """

    def __init__(
        self,
        cache: Cache,
        metrics: Metrics,
        nursery: trio.Nursery,
        owners: FileOwners | None = None,
        *,
        keeps: bool,
    ) -> None:
        self.files: dict[int, Fill] = {}
        self.keeps = keeps
        self.owners = owners
        self.queue = CopyQueue()
        self.background: list[Fill] = []
        self.wakes = trio.lowlevel.ParkingLot()
        self.arriving: set[int] = set()
        self.supplied: set[int] = set()
        self.on_step: Listeners[[Sequence[int]]] = Listeners()
        """Called with inode numbers whenever something of their copying has ended: not necessarily
        all of it, see ``pending``."""
        self._cache = cache
        self._metrics = metrics
        self._nursery = nursery
        self._failures: dict[int, int] = {}
        self._retries: dict[int, float] = {}
        # `retry_in` is also asked on threads of the data path, where trio has no time.
        self._clock = trio.lowlevel.current_clock()
        self._shrunk = trio.lowlevel.ParkingLot()
        cache.accounts.on_room.add(self.wakes.unpark_all)

    def want(self, ino: int, priority: Priority) -> None:
        """Copy the file some time, unless nothing is to be copied or it is there already.

        What is hinted or listed somebody named: that counts also where opened files are not copied
        (``keeps``)."""
        if not self.keeps and priority not in (Priority.HINTED, Priority.LISTED):
            return
        self.supplied.discard(ino)
        if priority is Priority.SCANNED and self.owners is not None:
            node = self._cache.index.nodes.node(ino)
            if node and node.stat.size <= WHOLE_BYTES and self.owners.elsewhere(node):
                priority = Priority.ELSEWHERE
        fill = self.files.get(ino)
        if fill is not None and fill.copy.in_background:
            if priority < fill.copy.priority:
                self.background.remove(fill)
                self.begin_copy(fill, priority)
        elif self.queue.push(ino, priority) and self.wakes:
            self.wakes.unpark_all()

    def want_opened(self, ino: int) -> None:
        """A file was opened: it is wanted before anything that was only scanned."""
        self.want(ino, Priority.OPENED)

    def supply(self, ino: int, priority: Priority) -> None:
        """Copy what this node owns of a large file, as other nodes want that; all of it where it
        is wanted here, too."""
        wanted_here = self.pending(ino) and ino not in self.supplied
        self.want(ino, priority)
        if not wanted_here and self.pending(ino):
            self.supplied.add(ino)

    def take_next(self) -> tuple[int, Priority] | None:
        """The next one of the queue."""
        self._shrunk.unpark_all()
        return self.queue.pop()

    def take_each(self, inos: Sequence[int]) -> None:
        """Take these out of the queue."""
        self._shrunk.unpark_all()
        self.queue.drop(inos)

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
            self.supplied.discard(fill.copy.node.ino)
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
        return under_way or ino in self.queue or ino in self._retries or ino in self.arriving

    def copying(self, ino: int) -> bool:
        """Whether it is being copied."""
        fill = self.files.get(ino)
        return ino in self.arriving or (fill is not None and fill.copy.filling)

    @property
    def filling(self) -> int:
        """How many files ``copying`` is true of."""
        return len(self.arriving) + sum(fill.copy.filling for fill in self.files.values())

    @property
    def active(self) -> int:
        return len(self.background) + len(self.arriving)

    def copied_bytes(self, inos: Container[int]) -> int:
        """How much of these files is local, of those that are being copied now."""
        return sum(fill.copy.local_bytes for fill in self.background if fill.copy.node.ino in inos)

    def begin_arrival(self, ino: int) -> bool:
        """All of the file is read by others, or was, and is stored then; False where it is being
        copied already. No checkpoint."""
        if ino in self.files or ino in self.arriving:
            return False
        self.arriving.add(ino)
        return True

    def end_arrivals(self, inos: Sequence[int]) -> None:
        """That is over, whatever came of it."""
        self.arriving.difference_update(inos)
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
        failures = self._failures.pop(ino, 0)
        if exc.errno in TRANSIENT and failures < len(RETRY_SECONDS):
            self._failures[ino] = failures + 1
            self.retry(ino, priority, RETRY_SECONDS[failures])
        else:
            self._metrics.copy_failed(exc.errno)
            log.warning("inode %d is not copied: %s", ino, exc)

    def forget_failures(self, ino: int) -> None:
        """All of it was fetched."""
        self._failures.pop(ino, None)

    def retry(self, ino: int, priority: Priority, seconds: float) -> None:
        """Want it again after a while."""
        self._retries[ino] = self._clock.current_time() + seconds
        self._nursery.start_soon(self._retry, ino, priority, seconds)

    async def _retry(self, ino: int, priority: Priority, seconds: float) -> None:
        await trio.sleep(seconds)
        self._retries.pop(ino, None)
        self.want(ino, priority)
        self.on_step([ino])

    def retry_in(self, ino: int) -> float | None:
        """Seconds until it is tried again; None: it is not."""
        at = self._retries.get(ino)
        return None if at is None else max(0.0, at - self._clock.current_time())
