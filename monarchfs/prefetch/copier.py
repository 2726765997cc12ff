"""Copies files into the tiers: which next, how many at once, in what portions.

There are ``copy_workers`` slots for background fetches. A fetch that hangs in the source lends its
slot, so that one storage target that does not answer does not stop the rest. Readers never wait for
a slot: what they need is fetched at once, on the source's demand lane.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.reasons import Cause
from monarchfs.metrics import Metrics
from monarchfs.metrics.counts import NS
from monarchfs.prefetch.fetch import CHUNK_BYTES, HEADER_FILE_BYTES, WHOLE_BYTES, Fetch, State
from monarchfs.prefetch.fill import Fill
from monarchfs.prefetch.fills import Fills
from monarchfs.prefetch.governor import BesideReaders, Governor, RateLimiter, TargetLimit
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.queue import Batch, Priority
from monarchfs.prefetch.small_files import SmallFiles
from monarchfs.prefetch.spans import Nodes
from monarchfs.source.source import Source
from monarchfs.system.low_priority import at_normal_priority
from monarchfs.types import Lane, Node

MOST_TOGETHER = 128
"""The most small files that are copied together."""

MIN_UNIT_BYTES = 2 * CHUNK_BYTES
MAX_UNIT_BYTES = 8 << 20
SHORT_SECONDS, LONG_SECONDS = 0.015, 0.060
"""A background fetch should take about this long: a reader may have to wait for one."""

DEFER_SECONDS, LOCAL_DEFER_SECONDS = 0.005, 0.02
"""While readers wait for the source, the fetches of files that nobody has open are put off by
this much. A local disk (the second) serves only few at once, and more would delay readers. Behind
a network it matters how much is under way, and with `auto` readers soon want these files."""

YIELD_SECONDS = 1.0
"""For so long after a reader waited for the source, copies of large files give way to readers
(``BesideReaders``), but for files that are read in sequence or in large pieces."""

BRIEF_SECONDS = 0.002, 0.004
"""What the shortest fetch then takes, about as long as a reader's own. The rest takes as long;
after a larger fetch, longer by as many times."""

JUDGED_READS = 32
JUDGED_SECONDS = 0.05
"""So many reads of readers, in so much time, are judged together."""

YOUNG_SECONDS = 1.1
"""After this long, a file that had just been changed is looked at again."""

BEING_READ_SECONDS = 0.5
"""And one that was being read, for a reader or into the window."""

MOST_BEGUN = 64
"""The most large files that are copied at once: some may have to wait for other nodes."""

SPREAD_OVER = 16
"""Among this many files, the copier chooses by the storage targets that hold them."""

STUCK_SECONDS = 1.0
MAX_LENT = 64
"""A fetch that takes longer lends its slot, as many of them as that at most."""

Work = Callable[[], Awaitable[None]]


class AdaptiveSize:
    """How much is asked for at once, so that it takes about so long. Changing: ``value``."""

    def __init__(self, value: int, least: int, most: int, short: float, long: float) -> None:
        """What takes less than ``short`` seconds is too little, more than ``long`` too much."""
        self.value = value
        self._least = least
        self._most = most
        self._short = short
        self._long = long

    def record_latency(self, seconds: float) -> None:
        """So long, just now."""
        if seconds < self._short:
            self.value = min(2 * self.value, self._most)
        elif seconds > self._long:
            self.value = max(self.value // 2, self._least)


@dataclass(eq=False, slots=True)
class CopySlot:
    """A background fetch under way. ``limit``: where it counts, if nobody waits for it. ``yields``:
    it is one of those that give way to readers."""

    started: float
    limit: TargetLimit | None
    yields: bool = False
    lent: bool = False

    def release(self, now: float) -> None:
        """Another fetch may begin in its place."""
        if self.limit is not None:
            self.limit.ended(now, now - self.started)
            self.limit = None


class Copier:
    """Runs on the event loop.

    Constant: its parts: ``jobs``, what is to be done; ``files``, those that are open or being
    copied; ``small``, who reads small files as a whole (None: they are read as all others).
    Changing: ``unit_bytes``, how much of a large file is fetched at once; ``together``, how many
    small ones are copied at once; the slots that are taken, and how many of them are lent;
    ``_targets``, the fetches of each storage target; ``beside_readers``, until when large files
    give way, until when they rest, and what readers had read, and when, as that was judged last.
    """

    def __init__(
        self,
        jobs: CopyJobs,
        source: Source,
        cache: Cache,
        metrics: Metrics,
        nursery: trio.Nursery,
        nodes: Nodes | None = None,
        *,
        workers: int,
        rate: int,
        floor: float,
        trusts_times: bool,
        count: Callable[[], None] = lambda: None,
    ) -> None:
        """``workers`` fetches at once. Of files that nobody has open: ``rate`` bytes a second at
        most (0: any); while the source is slow, ``floor`` (0 to 1) of the workers are left at
        least. ``nodes`` share large files. ``trusts_times``: the source does not change while it
        is mounted. ``count`` brings the counters of ``source`` up to date."""
        self.jobs = jobs
        self.files = Fills(jobs, source, cache, metrics, nursery, nodes, trusts_times=trusts_times)
        self.small: SmallFiles | None = None
        self.unit_bytes = AdaptiveSize(
            1 << 20, MIN_UNIT_BYTES, MAX_UNIT_BYTES, LONG_SECONDS / 2, LONG_SECONDS
        )
        self._brief_bytes = AdaptiveSize(
            MIN_UNIT_BYTES, MIN_UNIT_BYTES, MAX_UNIT_BYTES, *BRIEF_SECONDS
        )
        self.together = AdaptiveSize(1, 1, MOST_TOGETHER, SHORT_SECONDS, LONG_SECONDS)
        self.governor = Governor(workers, floor)
        self.beside_readers = BesideReaders(2 * workers)
        self._rate_limiter = RateLimiter(rate)
        self._trusts_times = trusts_times
        self._source = source
        self._defer_seconds = LOCAL_DEFER_SECONDS if source.on_local_disk else DEFER_SECONDS
        self._cache = cache
        self._nursery = nursery
        self._targets: Counter[int | None] = Counter()
        self._workers = workers
        self._slots: set[CopySlot] = set()
        self._lent = 0
        self._count = count
        self._judged = (-math.inf, 0, 0)
        self._yields_until = self._rests_until = -math.inf

    def bind(self, small: SmallFiles) -> None:
        """``small`` reads small files from now on. It needs ``jobs`` and ``files`` to be made."""
        self.small = small

    async def run(self) -> None:
        """Copy for ever."""
        self._nursery.start_soon(self._lend_slots)
        self._nursery.start_soon(self.files.checkpoints)
        while True:
            # Memory must not fill up with what a slow tier cannot take.
            while len(self._slots) - self._lent >= self._workers or self._cache.writer.backlogged:
                await self.jobs.wakes.park()
            # Sleep before claiming anything: a reader must not wait for work that is put off.
            if self._source.demand_waiting and not any(
                fill.copy.handles for fill in self.jobs.background
            ):
                await trio.sleep(self._defer_seconds)
            now = trio.current_time()
            self._watch_readers(now)
            wait = self._rate_limiter.wait(now)
            if not self._begin_next(now, paced=wait == 0):
                rest = self._rests_until - now
                pauses = (wait or math.inf, self.governor.rest(now), rest if rest > 0 else math.inf)
                with trio.move_on_after(min(pauses)):
                    await self.jobs.wakes.park()

    def _watch_readers(self, now: float) -> None:
        """See what readers have to wait for. Looked at now and then: that costs some 20 us."""
        if self._source.demand_waiting:
            self._yields_until = now + YIELD_SECONDS
        began, reads, took_ns = self._judged
        if now < began + JUDGED_SECONDS:
            return
        self._count()
        durations = self._source.counters.of(Lane.DEMAND, "read").durations
        count = sum(durations.counts)
        if count > reads:
            self._yields_until = now + YIELD_SECONDS
        if count - reads >= JUDGED_READS:
            mean_ns = (durations.total_ns - took_ns) / (count - reads)
            self.beside_readers.record(now, mean_ns / NS)
        if count - reads >= JUDGED_READS or now >= began + YIELD_SECONDS:
            self._judged = now, count, durations.total_ns

    async def suspend(self) -> None:
        """Record what is partly copied, before the end. Nothing may be reading any more."""
        if self.small is not None:
            self.small.suspend()
        await self.files.suspend()

    # -- slots

    def _start(
        self,
        now: float,
        work: Work,
        paced_bytes: int,
        target: int | None = None,
        *,
        yields: bool = False,
    ) -> None:
        """Do it in a slot. ``paced_bytes``: roughly how much the source must give for files that
        nobody has open; ``target``: which of its storage targets must."""
        limit = None
        if paced_bytes:
            self._rate_limiter.began(now, paced_bytes)
            limit = self.governor.limit(target)
            limit.began()
        slot = CopySlot(now, limit, yields)
        self._slots.add(slot)
        self._nursery.start_soon(self._in_slot, slot, work)

    async def _in_slot(self, slot: CopySlot, work: Work) -> None:
        try:
            await work()
        finally:
            self._slots.discard(slot)
            self._lent -= slot.lent
            slot.release(trio.current_time())
            self.jobs.wakes.unpark_all()

    async def _lend_slots(self) -> None:
        while True:
            await trio.sleep(STUCK_SECONDS / 2)
            for fill in self.jobs.files.values():
                fill.copy.threads.hide_source()
            now, lent = trio.current_time(), self._lent
            for slot in self._slots:
                if slot.started < now - STUCK_SECONDS and not slot.lent and self._lent < MAX_LENT:
                    slot.lent = True
                    self._lent += 1
                    slot.release(now)
            if self._lent > lent:
                self.jobs.wakes.unpark_all()

    # -- what comes next

    def _begin_next(self, now: float, *, paced: bool) -> bool:
        """Begin what comes next; False if there is nothing. Something for files that nobody has
        open comes only if ``paced``, and as the governor allows."""
        new = paced and self.governor.wait(now, None) == 0
        for fill in self._in_turn():
            if self._begin_file(now, self._goes_before(fill), paced=new):
                return True
            allowed = paced and self.governor.wait(now, fill.next_target) == 0
            if not (allowed or fill.copy.handles):
                continue
            yields = now < self._yields_until and not fill.wanted_soon
            if yields and not self._may_yield(now):
                continue
            brief = yields and not self.beside_readers.free
            fetch = self._claim(fill, self._brief_bytes if brief else self.unit_bytes)
            if fetch is not None:
                size = 0 if fill.copy.handles else fetch.end - fetch.start
                work = partial(self._fetch_briefly if brief else self._fetch, fill, fetch)
                self._start(now, work, size, fetch.target, yields=yields)
                return True
            if self._is_over(fill):
                self.jobs.forget_failures(fill.copy.node.ino)
                self.jobs.end_copy(fill)
        if len(self.jobs.background) >= MOST_BEGUN:
            return False  # they wait for other nodes' copies
        return self._begin_file(now, Priority.NOBODY, paced=new)

    def _may_yield(self, now: float) -> bool:
        """Whether another fetch may begin that gives way to readers."""
        under_way = sum(slot.yields and not slot.lent for slot in self._slots)
        at_once = self.beside_readers.at_once
        return under_way < at_once or (under_way == at_once == 0 and now >= self._rests_until)

    def _claim(self, fill: Fill, size: AdaptiveSize) -> Fetch | None:
        """Claim the part of a file that is to be copied next."""
        supplied = self.jobs.get(fill.copy.node.ino).supplied
        fetch = fill.claim_next(size.value, owned_only=supplied)
        if fetch is not None:
            self._targets[fetch.target] += 1
        return fetch

    def _is_over(self, fill: Fill) -> bool:
        """Whether there is nothing left to copy of it."""
        if fill.copy.state is not State.FILLING or fill.copy.full or fill.copy.chunks.complete:
            return True
        own_alone = fill.own_alone or self.jobs.get(fill.copy.node.ino).supplied
        spans = fill.copy.remote.spans if own_alone else None
        return spans is not None and not spans.owned_missing(fill.copy.chunks)

    def _in_turn(self) -> list[Fill]:
        """The files of the background list in turn: by priority, and within one by how few of our
        reads their next storage target is serving."""
        if not self._source.has_layouts:
            return list(self.jobs.background)
        first, rest = self.jobs.background[:SPREAD_OVER], self.jobs.background[SPREAD_OVER:]
        load = self._targets
        return sorted(first, key=lambda fill: (fill.copy.priority, load[fill.next_target])) + rest

    def _goes_before(self, fill: Fill) -> int:
        """Queued files with a priority number below this are begun before ``fill`` goes on. Its own
        priority is among them if its storage target is already busy."""
        busy = fill.next_target is not None and self._targets[fill.next_target] > 0
        return fill.copy.priority + (busy and len(self.jobs.background) < SPREAD_OVER)

    def _begin_file(self, now: float, before: int, *, paced: bool) -> bool:
        """Begin the next queued file, if its priority number is below ``before``."""
        if self._cache.reconciling:
            return False  # there may be more room in a moment
        if not paced:
            before = min(before, Priority.HINTED)
        while self.jobs.queue.first < before and (job := self.jobs.take_next()) is not None:
            ino, priority = job
            if (node := self._copyable(ino, self._cache.index.nodes.node(ino))) is not None:
                is_paced = priority is not Priority.OPENED
                if self._is_small(node) and not self._gives_way(node, now):
                    batch = self._begin_small(self._with_others(node, priority), priority)
                    if batch is None:
                        self._start(now, trio.lowlevel.checkpoint, 0)
                    else:
                        size = sum(place.size for place in batch.places.values())
                        self._start(now, partial(self._copy_small, batch), is_paced * size)
                    return True
                if not self._cache.resident(node):
                    work, size = self._begin_large(node, priority)
                    self._start(now, work, is_paced * size)
                    return True
            self.jobs.on_step([ino])
        return False

    def _copyable(self, ino: int, node: Node | None) -> Node | None:
        """The node, as the index has it, if it may be copied. A resident one passes, but finds no
        room."""
        fill = self.files.get(ino)
        if fill is not None and (fill.copy.in_background or fill.copy.state is State.RESIDENT):
            return None
        if self.jobs.get(ino).arriving:
            return None
        if node is None or node.outdated or not node.stat.is_regular:
            return None
        return node

    def _begin_large(self, node: Node, priority: Priority) -> tuple[Work, int]:
        """Ask for room; the returned work fetches the first portion, of about so many bytes (0:
        there is nothing to fetch). The slot's task must not ask: tasks that start together run in
        any order, and room is given in the queue's order."""
        fill = self.files.to_copy(node)
        if fill is None:  # what is read for a reader is stored, what is read into the window is not
            self.jobs.retry(node.ino, priority, BEING_READ_SECONDS)
            return trio.lowlevel.checkpoint, 0
        fetch = None
        past_racy_window = fill.copy.past_racy_window
        evicts = priority <= Priority.HINTED
        if not fill.copy.in_background and fill.copy.start_filling(evicts=evicts):
            self.jobs.begin_copy(fill, priority)
            if trio.current_time() >= self._yields_until:
                fetch = self._claim(fill, self.unit_bytes)
        elif not past_racy_window:
            self._cache.reasons.put(
                node.ino, Cause.YOUNG, "it was changed a moment ago, and may be changed again"
            )
            self.jobs.retry(node.ino, priority, YOUNG_SECONDS)
        fill.copy.settle()
        self.jobs.on_step([node.ino])
        if fetch is None:
            return trio.lowlevel.checkpoint, 0
        return partial(self._fetch, fill, fetch), min(node.stat.size, self.unit_bytes.value)

    def _is_small(self, node: Node) -> bool:
        """Whether it is copied as a whole: nobody has it open, and it is not too young for that."""
        if self.small is None or self.files.get(node.ino) is not None:
            return False
        if not 0 < node.stat.size <= WHOLE_BYTES:
            return False
        return self._trusts_times or node.stat.version.past_racy_window(time.time_ns())

    def _gives_way(self, node: Node, now: float) -> bool:
        """Whether a small file's copy gives way to readers: they want headers of such files."""
        if node.stat.size < HEADER_FILE_BYTES or now >= self._yields_until:
            return False
        small = self.small
        return small is not None and small.misses.reads_headers and not self.beside_readers.free

    def _with_others(self, node: Node, priority: Priority) -> list[Node]:
        """The node, and the next small files of the queue that are to be copied with it."""
        nodes, size = [node], node.stat.size
        uncopied: list[int] = []
        paced = (
            math.inf
            if priority is Priority.OPENED
            else self._rate_limiter.room(trio.current_time())
        )
        now = trio.current_time()
        # There is no checkpoint between these looks and the end of the batch.
        next_ones = self.jobs.queue.next(priority, max(0, self.together.value - 1))
        known = self._cache.index.nodes.nodes_of([job.ino for job in next_ones])
        taken = 0
        for job in next_ones:
            if size > paced:
                break
            other = self._copyable(job.ino, known.get(job.ino))
            if other is None:
                uncopied.append(job.ino)
            else:
                size += other.stat.size
                together = self._is_small(other) and not self._gives_way(other, now)
                if size > MAX_UNIT_BYTES or not together:
                    break
                nodes.append(other)
            taken += 1
        self.jobs.take_each(next_ones[:taken])
        self.jobs.on_step(uncopied)
        return nodes

    def _begin_small(self, nodes: list[Node], priority: Priority) -> Batch | None:
        """Ask for room for each, and make a batch of those that have some; None: none has."""
        assert self.small is not None
        begun = []
        for place, node in zip(
            self._cache.reservations.reserve_each(nodes, evicts=priority <= Priority.HINTED),
            nodes,
            strict=True,
        ):
            if place is None:
                self.jobs.on_step([node.ino])
            elif place.resumed is not None:
                self.files.copy_alone(place, priority)
            else:
                self.jobs.begin_arrival(node.ino)
                begun.append(place)
        return self.small.want(begun, priority) if begun else None

    async def _copy_small(self, batch: Batch) -> None:
        assert self.small is not None
        seconds, sizes = await self.small.copy(batch)
        if sizes:
            self._record(None, seconds, sum(sizes), len(sizes))
            # For a single file, what two would have taken.
            self.together.record_latency(seconds if len(sizes) > 1 else 2 * seconds)

    def _record(self, target: int | None, seconds: float, size: int, count: int) -> None:
        """So many reads of the source took so long together."""
        now, readers = trio.current_time(), self._source.reads_for_readers
        self.governor.record(now, target, seconds / count, size // count, count, readers)

    def hurry(self, inos: Sequence[int]) -> None:
        """Copy at once files that somebody waits for: beside the copies under way, and even while
        readers wait for the source. No checkpoint."""
        small = self.small
        if small is None or not self.jobs.keeps or self._cache.reconciling:
            return
        small.take_events()
        for fill in filter(None, map(self.files.get, inos)):
            if fill.copy.filling and fill.copy.size <= WHOLE_BYTES:
                fill.fetch_now(0, fill.copy.chunks.count)  # its copy may be giving way
        known = self._cache.index.nodes.nodes_of(inos)
        nodes = [node for ino in inos if (node := self._copyable(ino, known.get(ino))) is not None]
        others = [node for node in nodes if not self._is_small(node)]
        for node in others:
            self.jobs.want_opened(node.ino)
        begun = [node for node in nodes if node not in others]
        if begun and (batch := self._begin_small(begun, Priority.OPENED)) is not None:
            self._nursery.start_soon(self._copy_small, batch)
        small.hurry(inos)

    async def _fetch_briefly(self, fill: Fill, fetch: Fetch) -> None:
        """And have a rest, as copies do that give way."""
        try:
            await self._fetch(fill, fetch)
        finally:
            times = max(1.0, (fetch.end - fetch.start) / self._brief_bytes.value)
            self._rests_until = trio.current_time() + times * (fetch.seconds or 0.0)
        if fetch.seconds is not None and fetch.end - fetch.start >= self._brief_bytes.value:
            self._brief_bytes.record_latency(fetch.seconds)

    async def _fetch(self, fill: Fill, fetch: Fetch) -> None:
        paced = not fill.copy.handles
        # Somebody who has it open may read at any moment what is fetched here.
        at_normal_priority.set(not paced)
        await fill.fetch(fetch, Lane.BACKGROUND)
        self._targets[fetch.target] -= 1
        if paced and fetch.seconds:
            self._record(fetch.target, fetch.seconds, fetch.end - fetch.start, 1)
        if fetch.error is not None and fill.copy.in_background:
            # The first failed fetch is reported for all fetches of the file that are under way.
            self.jobs.failed(fill.copy.node.ino, fill.copy.priority, fetch.error)
            self.jobs.end_copy(fill)
        elif fetch.seconds is not None and fetch.end - fetch.start >= self.unit_bytes.value:
            self.unit_bytes.record_latency(fetch.seconds)
