"""Copies files into the tiers: which next, how many at once, in what portions.

There are ``copy_workers`` slots for background fetches (``CopySlots``). Readers never wait for one:
what they need is fetched at once, on the source's demand lane.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from functools import partial

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import Reservation
from monarchfs.metrics import Metrics
from monarchfs.prefetch.copy import Copy
from monarchfs.prefetch.copy_slots import STUCK_SECONDS, CopySlot, CopySlots
from monarchfs.prefetch.fetch import CHUNK_BYTES, WHOLE_BYTES, Fetch, State
from monarchfs.prefetch.fill import Fill
from monarchfs.prefetch.queue import CopyQueue, Priority
from monarchfs.prefetch.rate_limiter import RateLimiter
from monarchfs.prefetch.remote import RemoteFile
from monarchfs.prefetch.retries import Retries
from monarchfs.prefetch.small import Batch, SmallFiles
from monarchfs.source.source import Source
from monarchfs.system.low_priority import at_normal_priority
from monarchfs.types import Archived, DirRef, Lane, Node

log = logging.getLogger(__name__)

MOST_TOGETHER = 128
"""So many small files are copied together at most."""

MIN_UNIT_BYTES = 2 * CHUNK_BYTES
MAX_UNIT_BYTES = 8 << 20
SHORT_SECONDS, LONG_SECONDS = 0.015, 0.060
"""A background fetch should take about this long: a reader may have to wait for one."""

DEFER_SECONDS = 0.02
"""While readers wait for the source, the fetches of files that nobody has open are put off by
this much."""

YOUNG_SECONDS = 1.1
"""When a file that was changed just before is looked at again."""

CHECKPOINT_SECONDS = 30.0
CHECKPOINT_MIN_BYTES = 64 << 20
"""A crash costs a smaller file's copy all it had; of a larger one, what the last half minute
brought."""

SPREAD_OVER = 16
"""Among so many files it is chosen by where the source has them."""

Work = Callable[[], Awaitable[None]]


class Copier:
    """All files that are read from the source or copied. Runs on the event loop.

    Constant: its parts, ``keeps`` (whether anything is copied at all), ``small`` (None: small files
    are copied as all others). Changing: ``files``, by
    inode number, which are open or being copied; ``queue``; ``background``, the files whose chunks
    the slots take, in order.
    """

    def __init__(
        self,
        source: Source,
        cache: Cache,
        metrics: Metrics,
        nursery: trio.Nursery,
        *,
        copy_workers: int,
        keeps: bool,
        trusts_times: bool = True,
        rate: int = 0,
    ) -> None:
        """``trusts_times``: the source does not change while it is mounted. ``rate``: bytes a
        second that are copied of files which nobody has open, 0 for any."""
        self.files: dict[int, Fill] = {}
        self.queue = CopyQueue()
        self.background: list[Fill] = []
        self.keeps = keeps
        self.unit_bytes = 1 << 20
        self._trusts_times = trusts_times
        self._source = source
        self._cache = cache
        self._metrics = metrics
        self._nursery = nursery
        self.rate_limiter = RateLimiter(rate, copy_workers)
        self._targets: Counter[int | None] = Counter()
        self.small: SmallFiles | None = None
        self.together = 1
        self._slots = CopySlots(copy_workers, self.rate_limiter)
        self._wake = trio.Event()
        self._shrunk = trio.Event()
        self._retries = Retries(nursery, self._again)
        self._arriving: set[int] = set()
        self.observers: list[Callable[[Sequence[int]], None]] = []
        """Each is called with inode numbers whenever something of their copying has ended: not
        necessarily all of it, see ``pending``. No checkpoint."""
        cache.room_appeared = self._wake_copier

    # -- for readers

    async def open(self, node: Node) -> Fill:
        """The file behind a node that is not resident; its ``handles`` go up by one.

        Asks the source for a descriptor, and so for permission, unless that was done already.
        Raises the source's OSError, or SourceChanged where it holds another version now.
        """
        fill = self._file(node)
        fill.handles += 1
        try:
            await fill.remote.open(Lane.DEMAND)
        except BaseException:
            fill.release()
            raise
        return fill

    async def open_as_is(self, node: Node) -> Fill:
        """The same for an outdated node: what is read is what the source has now at its place, or
        what those read who have it open already; nothing of it is kept. Raises as ``open``,
        SourceChanged where the directory lies elsewhere."""
        fill = self._file(node)
        fill.handles += 1
        try:
            await fill.open_as_is()
        except BaseException:
            fill.release()
            raise
        fill.outdated()
        return fill

    def _file(self, node: Node) -> Fill:
        fill = self.files.get(node.ino)
        if fill is None:
            fill = self.files[node.ino] = self._new_fill(node)
            if not self._cache.readers.hold(node.ino, held=True) and self.small is not None:
                self.small.leave(node.ino)
        return fill

    def _file_to_copy(self, node: Node) -> Fill | None:
        """The same; None where somebody else has begun to read all of it for a reader."""
        fill = self.files.get(node.ino)
        if fill is None:
            fill = self.files[node.ino] = self._new_fill(node)
            if self._cache.readers.hold(node.ino, held=True):
                fill.settle()
                return None
        return fill

    def _new_fill(self, node: Node) -> Fill:
        remote = RemoteFile(node.stat.version, lambda: self._where(node), self._source)
        return Fill(
            node,
            remote,
            self._cache,
            self._metrics,
            self._nursery,
            self._forget,
            self._stepped,
            trusts_times=self._trusts_times,
        )

    def _where(self, node: Node) -> tuple[DirRef, bytes]:
        current = self._cache.index.node(node.ino) or node
        directory = self._cache.index.dirref(current.parent)
        if directory is None:
            raise OSError(errno.ESTALE, "its directory is not known any more")
        return directory, current.name

    def _forget(self, fill: Copy) -> None:
        if self.files.get(fill.node.ino) is fill:
            del self.files[fill.node.ino]
            self._cache.readers.hold(fill.node.ino, held=False)
            self._tell(fill.node.ino)

    def opened(self, ino: int) -> None:
        """A file was opened: it is wanted before anything that was only scanned."""
        self.want(ino, Priority.OPENED)

    def nonresident(self, ino: int) -> Fill | None:
        return self.files.get(ino)

    async def suspend_all(self) -> None:
        """Record what is partly copied, before the end. Nothing may be reading any more."""
        if self.small is not None:
            self.small.suspend()
        for fill in list(self.files.values()):
            await fill.suspend()

    # -- for those who want files copied

    def want(self, ino: int, priority: Priority) -> None:
        """Copy the file some time, unless nothing is to be copied or it is there already.

        What is hinted or listed somebody named: that counts also where opened files are not copied
        (``keeps``)."""
        if not self.keeps and priority not in (Priority.HINTED, Priority.LISTED):
            return
        fill = self.files.get(ino)
        if fill is not None and fill.in_background:
            if priority < fill.priority:
                self.background.remove(fill)
                self._insert(fill, priority)
        elif self.queue.push(ino, priority):
            self._wake.set()

    def _insert(self, fill: Fill, priority: Priority) -> None:
        fill.priority = priority
        insort(self.background, fill, key=lambda fill: fill.priority)

    async def queue_below(self, count: int) -> None:
        """Wait until fewer than ``count`` files wait to be copied. A checkpoint in any case."""
        await trio.lowlevel.checkpoint()
        while len(self.queue) >= count:
            self._shrunk = trio.Event()
            await self._shrunk.wait()

    def pending(self, ino: int) -> bool:
        """Whether the copier still has something to do for the file: it is queued, being copied, or
        to be tried again."""
        fill = self.files.get(ino)
        under_way = fill is not None and (fill.in_background or fill.fetching or fill.ending)
        return under_way or ino in self.queue or ino in self._retries or ino in self._arriving

    def queued(self, ino: int) -> bool:
        return ino in self.queue

    def queue_position(self, ino: int) -> int | None:
        return self.queue.position(ino)

    def again_in(self, ino: int) -> float | None:
        """Seconds until a file that failed or was too young is tried again; None: it is not."""
        return self._retries.due_in(ino)

    def local_bytes(self, ino: int) -> int:
        """How much of a copy that is under way is local; 0 where there is none."""
        fill = self.files.get(ino)
        return 0 if fill is None else fill.local_bytes

    def copied_bytes(self, inos: Container[int]) -> int:
        """How much of these files is local, of those that are being copied now."""
        return sum(fill.local_bytes for fill in self.background if fill.node.ino in inos)

    def copying(self, ino: int) -> bool:
        """Whether it is being copied."""
        fill = self.files.get(ino)
        return ino in self._arriving or (fill is not None and fill.filling)

    def arriving(self, ino: int) -> bool:
        """All of the file is read by others, or was, and is stored then; False where it is being
        copied already. No checkpoint."""
        if ino in self.files or ino in self._arriving:
            return False
        self._arriving.add(ino)
        return True

    def arrived(self, inos: Sequence[int]) -> None:
        """That is over, whatever came of it."""
        self._arriving.difference_update(inos)
        self._tell(*inos)

    def _tell(self, *inos: int) -> None:
        for observer in self.observers:
            observer(inos)

    def _stepped(self, fill: Copy) -> None:
        self._wake.set()
        self._tell(fill.node.ino)

    def _wake_copier(self) -> None:
        self._wake.set()

    @property
    def active(self) -> int:
        return len(self.background) + len(self._arriving)

    @property
    def filling(self) -> int:
        """How many files ``copying`` is true of."""
        return len(self._arriving) + sum(fill.filling for fill in self.files.values())

    async def run(self) -> None:
        """Copy for ever."""
        self._nursery.start_soon(self._lend_slots)
        self._nursery.start_soon(self._checkpoints)
        while True:
            # A slow tier must not collect what it cannot take in memory.
            while not self._slots.free or self._cache.backlogged:
                await self._sleep()
            # Before anything is claimed: a reader must not wait for what is put off.
            if self._source.demand_waiting and not any(fill.handles for fill in self.background):
                await trio.sleep(DEFER_SECONDS)
            now = trio.current_time()
            wait = self.rate_limiter.wait(now)
            work, paced_bytes = self._next_work(paced=wait == 0)
            if work is None:
                with trio.move_on_after(wait or math.inf):
                    await self._sleep()
                continue
            self._nursery.start_soon(self._in_slot, self._slots.take(now, paced_bytes), work)

    async def _sleep(self) -> None:
        self._wake = trio.Event()
        await self._wake.wait()

    def _next_work(self, *, paced: bool) -> tuple[Work | None, int]:
        """What to do next, and how much it asks of the source, roughly, if nobody has the file
        open. Such work only if ``paced``."""
        for fill in self._in_turn():
            work, size = self._next_file(self._goes_before(fill), paced=paced)
            if work is not None:
                return work, size
            if not (paced or fill.handles):
                continue
            fetch = fill.claim_next(self.unit_bytes)
            if fetch is not None:
                self._targets[fetch.target] += 1
                size = 0 if fill.handles else fetch.end - fetch.start
                return partial(self._fetch, fill, fetch), size
            if fill.state is not State.FILLING or fill.full or fill.chunks.complete:
                self.fetched(fill.node.ino)
                self._leave_background(fill)
        return self._next_file(Priority.NOBODY, paced=paced)

    def _in_turn(self) -> list[Fill]:
        """The files of the background list as their turns are: by priority, and within one first
        those for which a storage target is asked that serves few of our reads."""
        if not self._source.has_layouts:
            return list(self.background)
        first, rest = self.background[:SPREAD_OVER], self.background[SPREAD_OVER:]
        load = self._targets
        return sorted(first, key=lambda fill: (fill.priority, load[fill.next_target])) + rest

    def _goes_before(self, fill: Fill) -> int:
        """Files of the queue with a lower priority than this are begun before ``fill`` goes on:
        also some of its own, where its storage target is being asked already."""
        busy = fill.next_target is not None and self._targets[fill.next_target] > 0
        return fill.priority + (busy and len(self.background) < SPREAD_OVER)

    def _next_file(self, before: int, *, paced: bool) -> tuple[Work | None, int]:
        """Begin with a file that goes before those of a priority."""
        if self._cache.taking_stock:
            return None, 0  # they would find no room where there may be some in a moment
        if not paced:
            before = min(before, Priority.HINTED)
        while self.queue.first < before and (job := self.queue.pop()) is not None:
            self._shrunk.set()
            if (node := self._copyable(job[0])) is not None:
                if self._is_small(node):
                    return self._begin_small(self._with_others(node, job[1]), job[1])
                if not self._cache.resident(node):
                    size = 0 if job[1] is Priority.OPENED else min(node.stat.size, self.unit_bytes)
                    return self._begin(node, job[1]), size
            self._tell(job[0])
        return None, 0

    def _copyable(self, ino: int) -> Node | None:
        """One that is resident finds that there is no room for another replica."""
        fill = self.files.get(ino)
        if fill is not None and (fill.in_background or fill.state is State.RESIDENT):
            return None
        if ino in self._arriving:
            return None
        node = self._cache.index.node(ino)
        if node is None or node.outdated or node.stat is None or not node.stat.is_regular:
            return None
        return node

    async def _in_slot(self, slot: CopySlot, work: Work) -> None:
        try:
            with self._slots.taken(slot):
                await work()
        finally:
            self._wake.set()

    def _begin(self, node: Node, priority: Priority) -> Work:
        """Ask for room; what is left to do is to fetch the first portion. Not by the slot: tasks
        that start together run in any order, and room is given in the order of the queue."""
        fill = self._file_to_copy(node)
        if fill is None:
            return trio.lowlevel.checkpoint
        fetch = None
        past_racy_window = fill.past_racy_window
        evicts = priority <= Priority.HINTED
        if not fill.in_background and fill.start_filling(evicts=evicts):
            fill.in_background = True
            self._insert(fill, priority)
            self._wake.set()
            fetch = fill.claim_next(self.unit_bytes)
            if fetch is not None:
                self._targets[fetch.target] += 1
        elif not past_racy_window:
            self._cache.reasons.put(
                node.ino, Cause.YOUNG, "it was changed a moment ago, and may be changed again"
            )
            self._retries.later(node.ino, priority, YOUNG_SECONDS)
        fill.settle()
        self._tell(node.ino)
        return trio.lowlevel.checkpoint if fetch is None else partial(self._fetch, fill, fetch)

    def _is_small(self, node: Node) -> bool:
        """Whether it is copied as a whole: nobody has it open, and it is not too young for that."""
        if self.small is None or not 0 < node.stat.size <= WHOLE_BYTES or node.ino in self.files:
            return False
        return self._trusts_times or node.stat.version.past_racy_window(time.time_ns())

    def _with_others(self, node: Node, priority: Priority) -> list[Node]:
        """The node, and the next small files of the queue that are to be copied with it."""
        nodes, size = [node], node.stat.size
        paced = (
            math.inf if priority is Priority.OPENED else self.rate_limiter.room(trio.current_time())
        )
        while len(nodes) < self.together and size <= paced:
            job = self.queue.peek()
            if job is None or job[1] is not priority:
                break
            other = self._copyable(job[0])
            if other is not None:
                size += other.stat.size
                if size > MAX_UNIT_BYTES or not self._is_small(other):
                    break
            self.queue.pop()
            self._shrunk.set()
            if other is None:
                self._tell(job[0])
            else:
                nodes.append(other)
        return nodes

    def _begin_small(self, nodes: list[Node], priority: Priority) -> tuple[Work, int]:
        """``_begin`` of each."""
        begun = []
        for place, node in zip(
            self._cache.reserve_each(nodes, evicts=priority <= Priority.HINTED), nodes, strict=True
        ):
            if place is None:
                self._tell(node.ino)
            elif place.resumed is not None:
                self.copy_alone(place, priority)
            else:
                self._arriving.add(node.ino)
                begun.append(place)
        if not begun:
            return trio.lowlevel.checkpoint, 0
        size = 0 if priority is Priority.OPENED else sum(place.size for place in begun)
        assert self.small is not None
        return partial(self._copy_small, self.small, self.small.want(begun, priority)), size

    async def _copy_small(self, small: SmallFiles, batch: Batch) -> None:
        seconds, sizes = await small.copy(batch)
        if sizes:
            now = trio.current_time()
            self.rate_limiter.took(now, seconds / len(sizes), sum(sizes) // len(sizes))
            # What two would have taken, where it was one.
            self._adapt_together(seconds if len(sizes) > 1 else 2 * seconds)

    def copy_alone(self, place: Reservation, priority: Priority) -> None:
        """A file that finds no others to be copied with, and for which there is room. No
        checkpoint."""
        node = place.node
        self._arriving.discard(node.ino)
        fill = self._file_to_copy(node)
        if fill is None:
            self._cache.cancel(place)
        elif fill.begin_filling(place):
            fill.in_background = True
            self._insert(fill, priority)
            self._wake.set()
        self._tell(node.ino)

    def _adapt_together(self, seconds: float) -> None:
        if seconds < SHORT_SECONDS:
            self.together = min(self.together * 2, MOST_TOGETHER)
        elif seconds > LONG_SECONDS:
            self.together = max(self.together // 2, 1)

    async def _fetch(self, fill: Fill, fetch: Fetch) -> None:
        paced = not fill.handles
        # Who has opened it may read any moment what is being fetched here.
        at_normal_priority.set(not paced)
        await fill.fetch(fetch, Lane.BACKGROUND)
        self._targets[fetch.target] -= 1
        if paced and fetch.seconds:
            self.rate_limiter.took(trio.current_time(), fetch.seconds, fetch.end - fetch.start)
        if fetch.error is not None and fill.in_background:
            # The first of its fetches to fail speaks for those that are under way beside it.
            self.failed(fill.node.ino, fill.priority, fetch.error)
            self._leave_background(fill)
        elif fetch.seconds is not None and fetch.end - fetch.start >= self.unit_bytes:
            self._adapt(fetch.seconds)

    def _adapt(self, seconds: float) -> None:
        if seconds < LONG_SECONDS / 2:
            self.unit_bytes = min(self.unit_bytes * 2, MAX_UNIT_BYTES)
        elif seconds > LONG_SECONDS:
            self.unit_bytes = max(self.unit_bytes // 2, MIN_UNIT_BYTES)

    def _leave_background(self, fill: Fill) -> None:
        if fill.in_background:
            fill.in_background = False
            self.background.remove(fill)
            fill.settle()
            self._tell(fill.node.ino)

    def failed(self, ino: int, priority: Priority, exc: OSError) -> None:
        """The source said this when the file was to be copied. No checkpoint."""
        if isinstance(exc, Archived):
            reason = f"{exc.strerror}: it is copied when it has been read"
            self._cache.reasons.put(ino, Cause.ARCHIVED, reason)
            return
        self._cache.reasons.put(ino, Cause.FAILED, f"copying failed: {exc.strerror}")
        if not self._retries.after_failure(ino, priority, exc.errno):
            self._metrics.copy_failed(exc.errno)
            log.warning("inode %d is not copied: %s", ino, exc)

    def fetched(self, ino: int) -> None:
        """The source gave all of it."""
        self._retries.forget_failures(ino)

    def _again(self, ino: int, priority: Priority) -> None:
        self.want(ino, priority)
        self._tell(ino)

    async def _checkpoints(self) -> None:
        while True:
            await trio.sleep(CHECKPOINT_SECONDS)
            for fill in list(self.files.values()):
                if fill.size >= CHECKPOINT_MIN_BYTES:
                    try:
                        fill.checkpoint()
                    except OSError as exc:
                        log.warning(
                            "inode %d: its progress is not recorded: %s", fill.node.ino, exc
                        )

    async def _lend_slots(self) -> None:
        while True:
            await trio.sleep(STUCK_SECONDS / 2)
            for fill in self.files.values():
                fill.try_again()
            before = trio.current_time() - STUCK_SECONDS
            if self._slots.lend(before):
                self._wake.set()
