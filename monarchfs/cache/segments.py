"""Small replicas, which share files: where they are put, and how their bytes are freed.

Only the worker that made a segment writes to it. In this order, a crash is harmless at every point:

1. the index enters the segment;
2. the store makes its file, and appends replicas to it;
3. the index commits their records: they are resident. What has no record is a gap;
4. a record goes: the commit marks its segment as one that may have gaps;
5. the gap is punched. If the record was durable, the index is synced before: a power cut must not
   bring back the record of punched bytes.

The next worker writes to none of them. It syncs the index, and punches the gaps of those marked.
"""

from __future__ import annotations

import errno
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import trio

from monarchfs.cache.index.index import Index
from monarchfs.cache.placement.placement import Placement
from monarchfs.cache.readers import Readers
from monarchfs.cache.store.allocator import SEGMENT_BYTES, SMALL_BYTES, Allocator, allocated
from monarchfs.cache.store.tier import Tier
from monarchfs.cache.tier_threads import TierThreads
from monarchfs.cache.tiers import Tiers
from monarchfs.types import Data, IndexWriteError, Replica

log = logging.getLogger(__name__)

SEGMENTS_OF_A_TIER = 16
"""At least this many: a smaller tier has smaller segments."""

LEAST_SEGMENT_BYTES = 4 << 20

READING_SECONDS = 0.002
"""Between two checks whether a thread still reads a record that is to be punched."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

Range = tuple[int, int]
"""Offset and length in bytes."""


class Written(NamedTuple):
    """Where a replica was put."""

    segment: int
    offset: int
    allocated_bytes: int
    checksum: int


class SegmentRecords:
    """The segments of all tiers. Runs on the event loop.

    Constant: its parts. Changing: by tier, ``_allocators``: where the next replica goes, None if a
    tier takes none; ``_own``, the segments that this worker made; ``_leaving``, the ranges of each
    segment that have no record and are not punched yet; ``_waiting``, the replicas to punch.
    """

    def __init__(
        self,
        index: Index,
        tiers: Tiers,
        readers: Readers,
        threads: TierThreads,
        placement: Placement,
        most_bytes: int,
    ) -> None:
        """Replicas larger than ``most_bytes`` have files of their own."""
        self._most_bytes = most_bytes
        self._index = index
        self._tiers = tiers
        self._readers = readers
        self._threads = threads
        self._placement = placement
        self._allocators: dict[int, Allocator | None] = {}
        self._own: dict[int, set[int]] = defaultdict(set)
        self._leaving: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        self._waiting: list[tuple[Replica, trio.Event]] = []
        self._failed: dict[trio.Event, OSError] = {}
        self._punching = False

    # -- replicas that come

    def begin_tier(self, tier: Tier) -> None:
        """Find out whether a tier can free a part of a file. From then on it takes small replicas,
        in files of their own if it cannot. Blocks for as long as the disk takes for 64 KiB. Raises
        nothing."""
        try:
            frees_punched = tier.segments.frees_punched()
            tier.segments.lists.count()
            tier.segments.trees.count()
        except OSError as exc:
            frees_punched = exc.errno in _FULL  # no trial on a full disk, but most can
            if not frees_punched:
                self._tiers.failed(tier, "trying to give back a part of a file", exc)
        self._allocators[tier.id] = None
        if not frees_punched:
            log.info("tier %s: its small copies lie in files of their own", tier.path)
        else:
            capacity = self._placement.ledger(tier.id).usage[1]
            size = min(SEGMENT_BYTES, capacity // SEGMENTS_OF_A_TIER)
            self._allocators[tier.id] = Allocator(
                max(LEAST_SEGMENT_BYTES, size), tier.segments.align
            )

    def replaced(self, tier: Tier) -> None:
        """It has another directory, without the segments that were written to."""
        self._own.pop(tier.id, None)
        self.begin_tier(tier)

    def takes(self, tier_id: int, size: int) -> bool:
        """Whether a replica of ``size`` bytes that is written whole shares a file with others."""
        return 0 < size <= self._most_bytes and self._allocators.get(tier_id) is not None

    async def write_each(self, tier: Tier, replicas: Sequence[Data]) -> list[Written | OSError]:
        """Put replicas into segments. They count once they are recorded. Give those that are not
        recorded to ``discard``."""
        allocator = self._allocators[tier.id]
        if allocator is None:  # the directory changed since they got their room
            return [OSError(errno.EBUSY, "the tier takes no shared files now") for _ in replicas]
        sizes = [memoryview(data).nbytes for data in replicas]
        taken = [allocated(size, tier.segments.align) for size in sizes]
        places, begun = allocator.place(sizes)
        try:
            if begun:
                self._index.segments.begin_segments(tier.id, begun)
        except IndexWriteError as exc:
            allocator.seal()
            return [unrecorded(exc) for _ in places]
        self._own[tier.id].update(begun)
        # Until they are recorded, or punched.
        for (segment, offset), length in zip(places, taken, strict=True):
            self._leaving[tier.id, segment][offset] = length
        records = [(*place, data) for place, data in zip(places, replicas, strict=True)]
        outcomes = await self._threads.run(tier.segments.write_each, records)
        results: list[Written | OSError] = []
        for (segment, offset), length, outcome in zip(places, taken, outcomes, strict=True):
            if isinstance(outcome, OSError):
                allocator.seal()
                self._left(tier.id, segment, offset)  # the store has punched it
                results.append(outcome)
            else:
                results.append(Written(segment, offset, length, outcome))
        return results

    def recorded(self, replica: Replica) -> None:
        """The index has committed it."""
        self._left(replica.tier, replica.segment, replica.offset)

    async def discard(self, tier: Tier, places: Iterable[Written]) -> None:
        """Give back the room of replicas that were not recorded. Raises OSError."""
        by_segment: dict[int, list[Range]] = defaultdict(list)
        for place in places:
            by_segment[place.segment].append((place.offset, place.allocated_bytes))
        for segment, ranges in by_segment.items():
            await self._threads.run(tier.segments.punch, segment, ranges)
            for offset, _length in ranges:
                self._left(tier.id, segment, offset)

    # -- replicas that go

    def leaves(self, replica: Replica) -> None:
        """Its record is gone; ``remove`` follows. No checkpoint."""
        place = self._leaving[replica.tier, replica.segment]
        place[replica.offset] = replica.allocated_bytes

    async def remove(self, replicas: Sequence[tuple[int, Replica]]) -> None:
        """Give back the room of replicas after ``leaves``, together with others that are removed
        meanwhile. Raises OSError if that failed for one of them."""
        for ino, _ in replicas:
            # Threads of the C part tell nobody when they are done.
            while self._readers.reading(ino):  # noqa: ASYNC110
                await trio.sleep(READING_SECONDS)
        done = trio.Event()
        self._waiting += [(replica, done) for _, replica in replicas]
        if self._punching:
            await done.wait()
        while not done.is_set():
            self._punching = True
            try:
                await self._punch_waiting()
            finally:
                self._punching = False
        if (error := self._failed.pop(done, None)) is not None:
            raise error

    async def _punch_waiting(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            by_tier: dict[int, list[tuple[Replica, trio.Event]]] = defaultdict(list)
            for replica, done in waiting:
                by_tier[replica.tier].append((replica, done))
            try:
                if any(replica.durable for replica, _ in waiting):
                    await self._threads.run(self._index.environment.sync)
                for tier_id, going in by_tier.items():
                    await self._punch(self._tiers.by_id[tier_id], going)
            except IndexWriteError as exc:
                self._failed |= {done: unrecorded(exc) for _, done in waiting}
            finally:
                for _, done in waiting:
                    done.set()

    async def _punch(self, tier: Tier, going: Sequence[tuple[Replica, trio.Event]]) -> None:
        by_segment: dict[int, list[tuple[Replica, trio.Event]]] = defaultdict(list)
        for replica, done in going:
            by_segment[replica.segment].append((replica, done))
        work: list[tuple[int, list[Range] | None]] = []
        for segment, items in by_segment.items():
            gaps = [(replica.offset, replica.allocated_bytes) for replica, _ in items]
            empty = self._is_empty(tier.id, segment, {offset for offset, _ in gaps})
            work.append((segment, None if empty else gaps))
        errors = await self._threads.run(_punch_each, tier, work)
        for (segment, ranges), error in zip(work, errors, strict=True):
            if error is not None:
                self._failed |= {done: error for _, done in by_segment[segment]}
                continue
            if ranges is None:
                self._gone(tier.id, segment)
            for replica, _ in by_segment[segment]:
                self._left(tier.id, segment, replica.offset)

    def _is_empty(self, tier_id: int, segment: int, going: Iterable[int]) -> bool:
        """Whether the segment has, and will get, nothing but what is at the offsets ``going``."""
        allocator = self._allocators.get(tier_id)
        if allocator is not None and allocator.current == segment:
            return False
        others = self._leaving[tier_id, segment].keys() - set(going)
        return not others and self._index.segments.segment_empty(tier_id, segment)

    def _left(self, tier_id: int, segment: int, offset: int) -> None:
        leaving = self._leaving.get((tier_id, segment))
        if leaving is not None:
            leaving.pop(offset, None)
            if not leaving:
                del self._leaving[tier_id, segment]

    def _gone(self, tier_id: int, segment: int) -> None:
        self._own[tier_id].discard(segment)
        try:
            self._index.segments.segment_gone(tier_id, segment)
        except IndexWriteError as exc:
            # The next mount looks for it once more.
            log.warning("the index keeps a segment that is gone: %s", exc)

    # -- what others left

    async def settle(self, tier: Tier) -> None:
        """Give back what an earlier worker left in segments without a record. Raises OSError,
        IndexWriteError."""
        segments = self._index.segments.segments(tier.id).items()
        left = [n for n, marked in segments if marked and n not in self._own[tier.id]]
        if left:
            # That worker may have dropped records that are durable on the disk.
            await self._threads.run(self._index.environment.sync)
        for segment in left:
            # There is no checkpoint between reading the records and computing the gaps.
            gaps = self._gaps(tier.id, segment)
            if gaps is None:
                await self._threads.run(tier.segments.remove, segment)
                self._gone(tier.id, segment)
            else:
                await self._threads.run(partial(_punch_gaps, tier, segment, gaps))
                if (tier.id, segment) not in self._leaving:
                    self._index.segments.segment_clean(tier.id, segment)

    def _gaps(self, tier_id: int, segment: int) -> list[Range] | None:
        """The ranges of a segment that have no record and no reader. The last one has no end
        (length 0). None if that is the whole segment."""
        taken = dict(self._leaving.get((tier_id, segment), {}))
        for offset, ino in self._index.segments.segment_records(tier_id, segment):
            record = self._index.replicas.replica(ino)
            # A record without a replica was lost in a reboot: such are dropped one by one.
            taken[offset] = SMALL_BYTES if record is None else record.allocated_bytes
        if not taken:
            return None
        gaps, end = [], 0
        for offset, length in sorted(taken.items()):
            if offset > end:
                gaps.append((end, offset - end))
            end = max(end, offset + length)
        return [*gaps, (end, 0)]


def unrecorded(exc: IndexWriteError) -> OSError:
    """An error of the index says nothing about the tier."""
    return OSError(errno.EBUSY, str(exc))


def _punch_each(tier: Tier, work: Iterable[tuple[int, list[Range] | None]]) -> list[OSError | None]:
    """Punch the ranges of each segment; remove it if there are none. For a thread."""
    errors: list[OSError | None] = []
    for segment, ranges in work:
        try:
            if ranges is None:
                tier.segments.remove(segment)
            else:
                tier.segments.punch(segment, ranges)
        except OSError as exc:
            errors.append(exc)
        else:
            errors.append(None)
    return errors


def _punch_gaps(tier: Tier, segment: int, gaps: Sequence[Range]) -> None:
    """Punch only what has data: most of a gap was punched before. For a thread."""
    ranges: list[Range] = []
    align = tier.segments.align
    data = [(start, allocated(stop, align)) for start, stop in tier.segments.data_ranges(segment)]
    at = 0  # both rise
    for offset, length in gaps:
        end = offset + length if length or not data else data[-1][1]
        while at < len(data) and data[at][0] < end:
            start, stop = data[at]
            if stop > offset:
                ranges.append((max(offset, start), min(end, stop) - max(offset, start)))
            if stop > end:
                break
            at += 1
    if ranges:
        tier.segments.punch(segment, ranges)
