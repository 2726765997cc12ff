"""A file that is read from the source, and on its way into a tier if there is room for it.

The way of a read: chunks that are local come from the part file; chunks that somebody fetches are
waited for; the rest is claimed and fetched, and answered from the fetched bytes before they are
written (large files: ``core.units``). So a byte is asked from the source once, however many
readers want it. Where there is no room for a chunk, exactly the bytes that were asked for are read.
"""

from __future__ import annotations

from collections.abc import Iterator

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.replicas import OpenReplica, Reservation
from monarchfs.core.units import Unit
from monarchfs.metrics import Metrics
from monarchfs.prefetch.chunks import CLAIMED, MISSING, PRESENT, ChunkMap
from monarchfs.prefetch.copy import Copy
from monarchfs.prefetch.fetch import (
    CHUNK_BYTES,
    HEADER_FILE_BYTES,
    MOST_AHEAD_BYTES,
    WHOLE_BYTES,
    Fetch,
    State,
)
from monarchfs.prefetch.passing import PassingReads
from monarchfs.prefetch.readahead import Readahead
from monarchfs.types import Data, Lane, SourceChanged, SourceStat

MOST_SKIPPED_BYTES = 64 << 30
"""Of a hole, at once: the digests of so much take a few milliseconds."""

SMALL_SHARE = 4
"""A read of less than a chunk by this is small: at random, it brings just its bytes."""

MOST_TOUCHED = 1 << 14
"""Chunks that are told from each other of those that were read in part: 2 GiB of a file."""

MEAN_READS, LARGE_CHUNKS = 8, 2
"""Over how many reads the mean goes. A file is read in large pieces if that has so many chunks."""


class Fill:
    """A file behind all handles of its inode, and what is fetched of it: claimed, read from the
    source, written. A chunk is claimed by one fetch at a time. Small files are fetched as a whole.

    Constant: ``copy``. Changing: ``cursor``, where the copier goes on; ``_data``, a range of the
    source without holes; ``_at_random``, whether nothing was local before what was missed last;
    ``_read_to``, where the last read ended; ``_mean_read``, the size of the last reads;
    ``_touched``, the chunks of which a little was read at random, a bit each; ``_failed``, the
    spans that the source did not give when they were fetched; ``_passing``, what was read of it
    from other nodes and is not kept."""

    def __init__(self, copy: Copy, cache: Cache, metrics: Metrics, nursery: trio.Nursery) -> None:
        self.copy = copy
        self.cursor = 0
        self._cache = cache
        self._metrics = metrics
        self._nursery = nursery
        self._fetches: list[Fetch] = []
        self._failed: set[tuple[int, int]] = set()
        self._ahead = Readahead(MOST_AHEAD_BYTES // copy.chunks.chunk_bytes)
        self._data = (0, 0)
        self._at_random = False
        self._read_to = 0
        self._mean_read = 0.0
        self._touched = 0
        self._passing: PassingReads | None = None

    # -- reading

    async def read(self, offset: int, size: int) -> Data:
        """The bytes at ``offset``, fewer only at the end of the file.

        Raises OSError with the source's errno; trouble with the tier is routed around.
        """
        if self.copy.changes and self.copy.state is not State.RESIDENT:
            self.copy.busy += 1
            try:
                return await self._read_source(offset, offset + size)  # it may have grown
            finally:
                self.copy.leave()
        end = min(offset + size, self.copy.size)
        if offset >= end:
            return b""
        self.copy.busy += 1
        try:
            changes = self.copy.changes
            if self.copy.state is State.FILLING:
                self._demand(offset, end)
            piece = await self._piece(offset, end)
            if offset + len(piece) == end:
                return piece
            out = bytearray(piece)
            while piece and offset + len(out) < end:
                piece = await self._piece(offset + len(out), end)
                out += piece
            if self.copy.changes != changes:
                # Some of it was of one version and some of another.
                return await self._read_source(offset, end)
            return bytes(out)
        finally:
            self.copy.leave()

    def _demand(self, offset: int, end: int) -> None:
        """Claim what is missing of [offset, end) and fetch it now. No checkpoint."""
        chunks = self.copy.chunks
        first, last = chunks.chunk_of(offset), chunks.chunk_of(end - 1) + 1
        if self.copy.size <= WHOLE_BYTES:
            first, last = 0, chunks.count
        self._at_random = first > 0 and chunks.state(first - 1) == MISSING
        small = (end - offset) * SMALL_SHARE < chunks.chunk_bytes
        follows = offset == self._read_to
        self._read_to = end
        self._mean_read += (end - offset - self._mean_read) / MEAN_READS
        if self.copy.size > WHOLE_BYTES:
            at_random = self._at_random and not follows
        else:
            at_random = self.copy.size >= HEADER_FILE_BYTES
        if small and at_random and self._touch(first, last):
            return  # a chunk, or all of it, would cost many times what is asked for
        self.fetch_now(first, last)
        if small and offset == 0:
            return  # perhaps a header, of which no more is read
        self._go_ahead(first, last)

    def _touch(self, first: int, last: int) -> bool:
        """Whether nothing of the chunks [first, last) was read before: who reads the same part of a
        file again gets it from the tier."""
        bits = 1 << first % MOST_TOUCHED | 1 << (last - 1) % MOST_TOUCHED
        if self._touched & bits:
            return False
        forgets = self._touched.bit_count() > MOST_TOUCHED // 2
        self._touched = bits if forgets else self._touched | bits
        return True

    def _go_ahead(self, first: int, last: int) -> None:
        """Fetch what comes after the chunks [first, last), if they are read in sequence. Apart from
        them, which are then answered as soon as they are there."""
        chunks = self.copy.chunks
        stop = self._ahead.advance(first, last)
        self.cursor = last
        self.fetch_now(last, min(stop, chunks.count), ahead=True)
        copy = self.copy
        if copy.state is State.FILLING and copy.threads.show(chunks, copy.reservation):
            for fetch in self._fetches:
                if fetch.unit is not None:  # some of it may be on its way into a tier that is slow
                    fetch.unit.show()
        copy.threads.ahead(self._ahead.trigger if stop < chunks.count else None)

    def on_readahead(self, first: int, last: int) -> None:
        """A read that went past Python is of the chunks [first, last). No checkpoint."""
        if self.copy.threads.shown and first < last <= self.copy.chunks.count:
            self._go_ahead(first, last)

    def fetch_now(self, first: int, last: int, *, ahead: bool = False) -> None:
        """Fetch what is missing of [first, last); ``ahead``: nobody waits for it yet."""
        for run in list(self._to_keep(first, last)):
            if fetch := self._claim(*run, Lane.DEMAND):
                fetch.ahead = ahead
                self._nursery.start_soon(self.fetch, fetch, Lane.DEMAND)

    def _to_keep(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The runs that are missing of [first, last), and to be kept."""
        spans = self.copy.remote.spans if self.own_alone else None
        for run in self.copy.chunks.missing_runs(first, last):
            if spans is None:
                yield run
            else:
                yield from spans.owned_runs(self.copy.chunks, *run)

    async def _piece(self, offset: int, end: int) -> Data:
        """At least one byte of [offset, end), from its start; none where the source has no more."""
        if self.copy.replica is not None:
            return await self._read_replica(self.copy.replica, offset, end)
        if self.copy.state is State.FILLING:
            chunk, last = self.copy.chunks.chunk_of(offset), self.copy.chunks.chunk_of(end - 1) + 1
            state = self.copy.chunks.state(chunk)
            stop = min(end, self.copy.chunks.span(chunk, self.copy.chunks.run_end(chunk, last))[1])
            if state == PRESENT:
                if (piece := await self._read_part(offset, stop)) is not None:
                    return piece
            elif state == CLAIMED:
                fetch = next(f for f in self._fetches if f.start <= offset < f.end)
                return await self._fetched(fetch, offset, end)
            end = stop
        if (passed := await self._from_owner(offset, end)) is not None:
            return passed
        return await self._read_source(offset, end)

    async def _from_owner(self, offset: int, end: int) -> Data | None:
        """At least one byte of [offset, end) of a file that other nodes share; None: read it from
        the source."""
        spans = self.copy.remote.spans
        if spans is None or not spans.shared:
            return None
        if self._passing is None:
            self._passing = PassingReads(self.copy, spans, self._nursery)
        return await self._passing.read(offset, end)

    async def _fetched(self, fetch: Fetch, offset: int, end: int) -> Data:
        if (piece := await fetch.piece(offset, end)) is not None:
            return piece
        if self.copy.state is not State.FILLING or fetch.chunks is not self.copy.chunks:
            return await self._piece(offset, end)  # as the source is now
        if fetch.unit is not None and fetch.unit.is_stored(offset):
            chunk = self.copy.chunks.chunk_of(offset)
            stop = min(end, self.copy.chunks.span(chunk, chunk + 1)[1])
            if (piece := await self._read_part(offset, stop)) is not None:
                return piece
        return await self._read_source(offset, min(end, fetch.end))

    async def _read_part(self, offset: int, end: int) -> Data | None:
        reservation = self.copy.reservation
        assert reservation is not None
        try:
            data = self._cache.writer.read_part_nowait(reservation, offset, end - offset)
            if data is None:
                data = await self._cache.writer.read_part(reservation, offset, end - offset)
        except OSError as exc:
            self.copy.tier_failed(reservation, exc, "its copy could not be read")
            return None
        return data

    async def _read_replica(self, replica: OpenReplica, offset: int, end: int) -> Data:
        try:
            data = replica.read_nowait(offset, end - offset)
            if data is None:
                data = await self._cache.read(replica, offset, end - offset)
        except OSError as exc:
            self._cache.failed_read(replica, exc)
            if self.copy.replica is replica:
                self.copy.replica, self.copy.state = None, State.DIRECT
            return await self._read_source(offset, end)
        return data

    async def _read_source(self, offset: int, end: int) -> Data:
        """Exactly these bytes, from the source as it is. Raises its OSError, SourceChanged."""
        try:
            data, version = await self.copy.remote.read(offset, end, Lane.DEMAND)
        except SourceChanged:
            self._cache.accounts.on_outdated(self.copy.node.ino)
            raise
        self.copy.see_version(version)
        self.copy.allow_direct_reads()
        for span in [one for one in self._failed if one[0] < end and offset < one[1]]:
            self._failed.remove(span)  # the source gives it again, from the archive, say
            if self.copy.state is State.FILLING:
                chunks = self.copy.chunks
                self.fetch_now(chunks.chunk_of(span[0]), chunks.chunk_of(span[1] - 1) + 1)
        return data

    async def current(self) -> SourceStat:
        """What the source has now under the descriptor that is read. Raises as ``read``."""
        self.copy.busy += 1
        try:
            stat = await self.copy.remote.current(Lane.DEMAND)
            self.copy.see_version(stat.version)
            return stat
        finally:
            self.copy.leave()

    async def open_as_is(self) -> None:
        """Read what the source has now, whatever version that is, unless all of this one is local.
        Raises the source's OSError, SourceChanged where the directory lies elsewhere."""
        if self.copy.replica is None:
            version = await self.copy.remote.open_as_is(Lane.DEMAND)
            if version != self.copy.node.stat.version:
                self.copy.see_version(version)

    def close(self) -> None:
        """Nobody has it open, and nothing of it is under way."""
        if self._passing is not None:
            self._passing.close()

    @property
    def wanted_soon(self) -> bool:
        """Whether those who read it want much of it: they read it in sequence or large pieces."""
        large = self._mean_read >= LARGE_CHUNKS * self.copy.chunks.chunk_bytes
        return self.copy.handles > 0 and (large or self._ahead.open)

    @property
    def fetching(self) -> bool:
        """Whether reads of the source are under way for it; after each, ``wake_copier``."""
        return bool(self._fetches)

    # -- what is to be fetched

    def _claim(self, first: int, last: int, lane: Lane) -> Fetch | None:
        """Take a run of missing chunks; None where there is no room for it."""
        assert self.copy.reservation is not None
        start, end = self.copy.chunks.span(first, last)
        if not self._cache.reservations.grow(self.copy.reservation, end - start):
            self.copy.full = True
            return None
        self.copy.chunks.claim(first, last)
        self.copy.threads.tell(first, last, CLAIMED)
        layout = self.copy.remote.layout
        target = None if layout is None else layout.target(start)
        whole = (
            self.copy.size <= WHOLE_BYTES
            and end - start == self.copy.size
            and self.copy.reservation.whole
        )
        unit = None if whole else self._unit(start, end, lane)
        fetch = Fetch(self.copy.chunks, first, last, start, end, trio.Event(), target, unit)
        self._fetches.append(fetch)
        if unit is not None:
            self.copy.units.append(unit)
        self.copy.busy += 1
        return fetch

    def _unit(self, start: int, end: int, lane: Lane) -> Unit:
        return self.copy.make_unit(
            start,
            end,
            lane,
            # Whoever reads at random may want any block of it next.
            in_requests=not (self.copy.handles and self._at_random),
            sparse=lane is Lane.BACKGROUND
            and self.copy.node.stat.occupied_bytes < self.copy.size
            and not (self._data[0] <= start and end <= self._data[1]),
        )

    @property
    def arriving(self) -> bool:
        """Whether all of it was fetched, and is local or on its way into the tier."""
        missing = self.copy.state is State.FILLING and self.copy.chunks.first_missing(0) is not None
        return not missing and self.copy.state is not State.DIRECT

    @property
    def own_alone(self) -> bool:
        """Whether only the spans that this node owns are kept."""
        return self.copy.remote.spans is not None and not self._cache.reservations.keeps_foreign

    def claim_next(self, unit_bytes: int, *, owned_only: bool = False) -> Fetch | None:
        """The next run to be copied in the background, or None where there is none to claim.
        ``owned_only``: it is copied for other nodes."""
        if self.copy.state is not State.FILLING or self.copy.full or self.copy.finishing:
            return None
        if (layout := self.copy.remote.layout) is not None:
            unit_bytes = layout.span(self._next_offset, unit_bytes)
        unit = max(1, unit_bytes // self.copy.chunks.chunk_bytes)
        if self.copy.size <= WHOLE_BYTES:
            unit = self.copy.chunks.count
        if self.copy.remote.spans is None:
            run = self.copy.chunks.next_missing(self.cursor, unit)
        else:
            owned_only = owned_only or self.own_alone
            run = self.copy.remote.spans.next_run(self.copy.chunks, unit, owned_only=owned_only)
        return None if run is None else self._claim(*run, Lane.BACKGROUND)

    @property
    def next_target(self) -> int | None:
        """The storage target of the source that ``claim_next`` comes to; None if not known."""
        layout = self.copy.remote.layout
        return None if layout is None else layout.target(self._next_offset)

    @property
    def _next_offset(self) -> int:
        return (self.copy.chunks.first_missing(self.cursor) or 0) * self.copy.chunks.chunk_bytes

    # -- to fetch it

    async def fetch(self, fetch: Fetch, lane: Lane) -> None:
        """Carry out a claimed fetch: source, then readers, then tier. Raises nothing."""
        try:
            if fetch.unit is not None:
                await self._fetch_unit(fetch, fetch.unit, lane)
            else:
                data = await self._fetch_source(fetch, lane)
                if data is not None and self._is_current(fetch):
                    await self._keep_whole(fetch, data, lane)
        finally:
            self.end_fetch(fetch)

    def end_fetch(self, fetch: Fetch) -> None:
        """A claimed fetch is over, whatever came of it. No checkpoint."""
        self._fetches.remove(fetch)
        if fetch.unit is not None:
            self.copy.units.remove(fetch.unit)
            self._settle_unit(fetch, fetch.unit)
        elif fetch.chunks.state(fetch.first) == CLAIMED:
            fetch.chunks.release(fetch.first, fetch.last)
        fetch.finish()
        if fetch.error is not None:
            self._failed.add((fetch.start, fetch.end))
        self.copy.leave()
        self.copy.wake_copier(self.copy)

    async def _fetch_unit(self, fetch: Fetch, unit: Unit, lane: Lane) -> None:
        """Source and tier at the same time, once there is a part file: if the source does not let
        us read it, there is to be none."""
        reservation = self.copy.reservation
        if reservation is None or not self._is_current(fetch):
            unit.stop()
            await self._read_unit(fetch, unit, lane)
        elif reservation.fd < 0:
            await self._read_unit(fetch, unit, lane)
            if unit.read_bytes or unit.elsewhere_bytes or unit.hole_bytes:
                await self._keep_unit(reservation, fetch, unit)
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_unit, reservation, fetch, unit)
                await self._read_unit(fetch, unit, lane)

    def _is_current(self, fetch: Fetch) -> bool:
        return self.copy.state is State.FILLING and fetch.chunks is self.copy.chunks

    async def _read_unit(self, fetch: Fetch, unit: Unit, lane: Lane) -> None:
        started = trio.current_time()
        waited = lane is Lane.DEMAND or self.copy.handles > 0
        try:
            from_source = await self.copy.remote.read_unit(
                unit, lane, ahead=fetch.ahead, waited=waited
            )
        except OSError as exc:
            fetch.error = exc.with_traceback(None)
        except SourceChanged:
            self.copy.source_changed()
        except BaseException:
            unit.stop()  # its thread goes on
            raise
        else:
            fetch.seconds = trio.current_time() - started if from_source else None
        unit.finish()
        for start, end in unit.dropped():
            self._metrics.chunks_dropped += -(-(end - start) // fetch.chunks.chunk_bytes)
        fetch.done.set()

    async def _keep_unit(self, reservation: Reservation, fetch: Fetch, unit: Unit) -> None:
        if not self._is_current(fetch):
            return
        try:
            if not await self._cache.writer.write(reservation, unit, fetch.done):
                self.copy.full = True
        except OSError as exc:
            self.copy.tier_failed(reservation, exc, "copying failed")

    def _settle_unit(self, fetch: Fetch, unit: Unit) -> None:
        """What was written is present, the rest is missing again."""
        unit.stop()
        chunks, at, fills = fetch.chunks, fetch.first, self._is_current(fetch)
        for start, end in unit.stored():
            first, last = chunks.chunk_of(start), chunks.chunk_of(end - 1) + 1
            self._miss(fetch, at, first)
            chunks.arrive(first, last)
            if fills and self.copy.reservation is not None:
                self.copy.reservation.put_digests(start, unit.digests(start, end))
                self.copy.threads.tell(first, last, PRESENT)
            at = last
        self._miss(fetch, at, fetch.last)
        if unit.data_end:
            self._data = unit.start, unit.data_end
        if fills and self.copy.reservation is not None and at == fetch.last and not self.own_alone:
            for first, last in _skip_hole(unit, chunks, self.copy.reservation):
                self.copy.threads.tell(first, last, PRESENT)
        if fills and chunks.complete:
            self.copy.begin_finish()

    def _miss(self, fetch: Fetch, first: int, last: int) -> None:
        if first < last:
            fetch.chunks.release(first, last)
            if fetch.chunks is self.copy.chunks:
                self.copy.threads.tell(first, last, MISSING)

    async def _fetch_source(self, fetch: Fetch, lane: Lane) -> bytes | None:
        started = trio.current_time()
        try:
            fetch.data = await self.copy.remote.fetch_whole(lane)
        except OSError as exc:
            fetch.error = exc
        except SourceChanged:
            self.copy.source_changed()
        else:
            fetch.seconds = trio.current_time() - started
            fetch.done.set()
        return fetch.data

    async def _keep_whole(self, fetch: Fetch, data: bytes, lane: Lane) -> None:
        if lane is Lane.DEMAND and self._cache.writer.backlogged:
            # A slow tier must not slow the readers: these bytes are fetched again some time.
            self._metrics.chunks_dropped += fetch.last - fetch.first
            return
        reservation = self.copy.reservation
        assert reservation is not None
        try:
            stored = await self._cache.writer.write_all(reservation, data)
        except OSError as exc:
            self.copy.tier_failed(reservation, exc, "copying failed")
            return
        fetch.chunks.arrive(fetch.first, fetch.last)
        if stored:
            self.copy.become_resident()


def _skip_hole(unit: Unit, chunks: ChunkMap, reservation: Reservation) -> Iterator[tuple[int, int]]:
    """A unit was written: the rest of the hole of the source in which it ends, if it does, is one
    in the part file, too. The runs of chunks that are present now."""
    if unit.hole_end <= unit.end:
        return
    zeros = unit.digests(unit.end - CHUNK_BYTES, unit.end)
    # The last chunk, which may be a short one, is left for a unit.
    stop = chunks.chunk_of(min(unit.hole_end, unit.end + MOST_SKIPPED_BYTES) - 1)
    for first, last in chunks.missing_runs(chunks.chunk_of(unit.end), stop):
        start, end = chunks.span(first, last)
        chunks.claim(first, last)
        chunks.arrive(first, last)
        reservation.put_digests(start, zeros * ((end - start) // CHUNK_BYTES))
        yield first, last
