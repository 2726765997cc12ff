"""What is fetched of a file that is being copied: claimed, read from the source, written.

A chunk is claimed by one fetch at a time, so a byte is asked from the source once, however many
readers want it. Large files are fetched in units (``core.units``), small ones as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import trio

from monarchfs.cache import writer
from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import Reservation
from monarchfs.core.units import Unit
from monarchfs.prefetch.chunks import CLAIMED, MISSING, PRESENT, ChunkMap
from monarchfs.prefetch.copy import Copy
from monarchfs.prefetch.fetch import CHUNK_BYTES, WHOLE_BYTES, Fetch, State
from monarchfs.types import Lane, SourceChanged

MOST_SKIPPED_BYTES = 64 << 30
"""Of a hole, at once: the digests of so much take a few milliseconds."""


class Fetching(Copy):
    """A copy: what is fetched of it. Changing: ``_data``, a range of the source without holes;
    ``_at_random``, whether nothing was local before what was missed last."""

    _data = (0, 0)
    _at_random = False

    @property
    def fetching(self) -> bool:
        """Whether reads of the source are under way for it; after each, ``wake_copier``."""
        return bool(self._fetches)

    # -- what is to be fetched

    def _claim(self, first: int, last: int, lane: Lane) -> Fetch | None:
        """Take a run of missing chunks; None where there is no room for it."""
        assert self.reservation is not None
        start, end = self.chunks.span(first, last)
        if not self._cache.reservations.grow(self.reservation, end - start):
            self.full = True
            return None
        self.chunks.claim(first, last)
        self._tell(first, last, CLAIMED)
        layout = self.remote.layout
        target = None if layout is None else layout.target(start)
        whole = self.size <= WHOLE_BYTES and end - start == self.size and self.reservation.whole
        unit = None if whole else self._unit(start, end, lane)
        fetch = Fetch(self.chunks, first, last, start, end, trio.Event(), target, unit)
        self._fetches.append(fetch)
        self.busy += 1
        return fetch

    def _unit(self, start: int, end: int, lane: Lane) -> Unit:
        # A slow tier must not slow the readers: what they wait for is fetched again some time.
        most = writer.MOST_UNWRITTEN_BYTES if lane is Lane.DEMAND else 0
        return Unit(
            self.node.ino,
            start,
            end,
            chunk_bytes=self.chunks.chunk_bytes,
            version=self.remote.version,
            device=self.remote.device,
            readers=self._cache.readers.nonresident.units,
            most_bytes=most,
            # Whoever reads at random may want any block of it next.
            in_requests=not (self.handles and self._at_random),
            sparse=lane is Lane.BACKGROUND
            and self.node.stat.occupied_bytes < self.size
            and not (self._data[0] <= start and end <= self._data[1]),
        )

    @property
    def arriving(self) -> bool:
        """Whether all of it was fetched, and is local or on its way into the tier."""
        missing = self.state is State.FILLING and self.chunks.first_missing(0) is not None
        return not missing and self.state is not State.DIRECT

    @property
    def own_alone(self) -> bool:
        """Whether only the spans that this node owns are kept."""
        return self.remote.spans is not None and not self._cache.reservations.keeps_foreign

    def claim_next(self, unit_bytes: int, *, owned_only: bool = False) -> Fetch | None:
        """The next run to be copied in the background, or None where there is none to claim.
        ``owned_only``: it is copied for other nodes."""
        if self.state is not State.FILLING or self.full or self._finishing:
            return None
        if (layout := self.remote.layout) is not None:
            unit_bytes = layout.span(self._next_offset, unit_bytes)
        unit = max(1, unit_bytes // self.chunks.chunk_bytes)
        if self.size <= WHOLE_BYTES:
            unit = self.chunks.count
        if self.remote.spans is None:
            run = self.chunks.next_missing(self.cursor, unit)
        else:
            owned_only = owned_only or self.own_alone
            run = self.remote.spans.next_run(self.chunks, unit, owned_only=owned_only)
        return None if run is None else self._claim(*run, Lane.BACKGROUND)

    @property
    def next_target(self) -> int | None:
        """The storage target of the source that ``claim_next`` comes to; None if not known."""
        layout = self.remote.layout
        return None if layout is None else layout.target(self._next_offset)

    @property
    def _next_offset(self) -> int:
        return (self.chunks.first_missing(self.cursor) or 0) * self.chunks.chunk_bytes

    # -- to fetch it

    async def fetch(self, fetch: Fetch, lane: Lane) -> None:
        """Carry out a claimed fetch: source, then readers, then tier. Raises nothing."""
        try:
            if fetch.unit is not None:
                await self._fetch_unit(fetch, fetch.unit, lane)
            else:
                data = await self._fetch_source(fetch, lane)
                if data is not None and self._fills(fetch):
                    await self._keep_whole(fetch, data, lane)
        finally:
            self.end(fetch)

    def end(self, fetch: Fetch) -> None:
        """A claimed fetch is over, whatever came of it. No checkpoint."""
        self._fetches.remove(fetch)
        if fetch.unit is not None:
            self._settle_unit(fetch, fetch.unit)
        elif fetch.chunks.state(fetch.first) == CLAIMED:
            fetch.chunks.release(fetch.first, fetch.last)
        fetch.is_over()
        self._leave()
        self._wake_copier(self)

    async def _fetch_unit(self, fetch: Fetch, unit: Unit, lane: Lane) -> None:
        """Source and tier at the same time, once there is a part file: if the source does not let
        us read it, there is to be none."""
        reservation = self.reservation
        if reservation is None or not self._fills(fetch):
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

    def _fills(self, fetch: Fetch) -> bool:
        return self.state is State.FILLING and fetch.chunks is self.chunks

    async def _read_unit(self, fetch: Fetch, unit: Unit, lane: Lane) -> None:
        started = trio.current_time()
        try:
            from_source = await self.remote.read_unit(unit, lane, ahead=fetch.ahead)
        except OSError as exc:
            fetch.error = exc.with_traceback(None)
        except SourceChanged:
            self._changed()
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
        if not self._fills(fetch):
            return
        try:
            if not await self._cache.writer.write(reservation, unit, fetch.done):
                self.full = True
        except OSError as exc:
            self._tier_failed(reservation, exc, "copying failed")

    def _settle_unit(self, fetch: Fetch, unit: Unit) -> None:
        """What was written is present, the rest is missing again."""
        unit.stop()
        chunks, at, fills = fetch.chunks, fetch.first, self._fills(fetch)
        for start, end in unit.stored():
            first, last = chunks.chunk_of(start), chunks.chunk_of(end - 1) + 1
            self._miss(fetch, at, first)
            chunks.arrive(first, last)
            if fills and self.reservation is not None:
                self.reservation.put_digests(start, unit.digests(start, end))
                self._tell(first, last, PRESENT)
            at = last
        self._miss(fetch, at, fetch.last)
        if unit.data_end:
            self._data = unit.start, unit.data_end
        if fills and self.reservation is not None and at == fetch.last and not self.own_alone:
            for first, last in _skip_hole(unit, chunks, self.reservation):
                self._tell(first, last, PRESENT)
        if fills and chunks.complete:
            self._begin_finish()

    def _miss(self, fetch: Fetch, first: int, last: int) -> None:
        if first < last:
            fetch.chunks.release(first, last)
            if fetch.chunks is self.chunks:
                self._tell(first, last, MISSING)

    def give_up(self, cause: Cause, reason: str) -> None:
        super().give_up(cause, reason)
        for fetch in self._fetches:
            if fetch.unit is not None:
                fetch.unit.stop()

    async def _fetch_source(self, fetch: Fetch, lane: Lane) -> bytes | None:
        started = trio.current_time()
        try:
            fetch.data = await self.remote.fetch_whole(lane)
        except OSError as exc:
            fetch.error = exc
        except SourceChanged:
            self._changed()
        else:
            fetch.seconds = trio.current_time() - started
            fetch.done.set()
        return fetch.data

    def _tell(self, first: int, last: int, state: bytes) -> None:
        if self._shown:
            self._cache.readers.nonresident.chunks(self.node.ino, first, last, state)

    async def _keep_whole(self, fetch: Fetch, data: bytes, lane: Lane) -> None:
        if lane is Lane.DEMAND and self._cache.writer.backlogged:
            # A slow tier must not slow the readers: these bytes are fetched again some time.
            self._metrics.chunks_dropped += fetch.last - fetch.first
            return
        reservation = self.reservation
        assert reservation is not None
        try:
            stored = await self._cache.writer.write_all(reservation, data)
        except OSError as exc:
            self._tier_failed(reservation, exc, "copying failed")
            return
        fetch.chunks.arrive(fetch.first, fetch.last)
        if stored:
            self._become_resident()


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
