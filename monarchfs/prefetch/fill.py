"""A file that is read from the source, and on its way into a tier if there is room for it.

The way of a read: chunks that are local come from the part file; chunks that somebody fetches are
waited for; the rest is claimed and fetched, and answered from the fetched bytes before they are
written (large files: ``core.units``). So a byte is asked from the source once, however many
readers want it. Where there is no room for a chunk, exactly the bytes that were asked for are read.
"""

from __future__ import annotations

from collections.abc import Iterator

from monarchfs.cache.replicas import OpenReplica
from monarchfs.prefetch.chunks import CLAIMED, MISSING, PRESENT
from monarchfs.prefetch.fetch import WHOLE_BYTES, Fetch, State
from monarchfs.prefetch.fetching import Fetching
from monarchfs.prefetch.passing import PassingReads
from monarchfs.types import Data, Lane, SourceChanged, SourceStat


class Fill(Fetching):
    """A file behind all handles of its inode. Changing: ``_passing``, what was read of it from
    other nodes and is not kept."""

    _passing: PassingReads | None = None

    # -- reading

    async def read(self, offset: int, size: int) -> Data:
        """The bytes at ``offset``, fewer only at the end of the file.

        Raises OSError with the source's errno; trouble with the tier is routed around.
        """
        if self._changes and self.state is not State.RESIDENT:
            self.busy += 1
            try:
                return await self._read_source(offset, offset + size)  # it may have grown
            finally:
                self._leave()
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        self.busy += 1
        try:
            changes = self._changes
            if self.state is State.FILLING:
                self._demand(offset, end)
            piece = await self._piece(offset, end)
            if offset + len(piece) == end:
                return piece
            out = bytearray(piece)
            while piece and offset + len(out) < end:
                piece = await self._piece(offset + len(out), end)
                out += piece
            if self._changes != changes:
                # Some of it was of one version and some of another.
                return await self._read_source(offset, end)
            return bytes(out)
        finally:
            self._leave()

    def _demand(self, offset: int, end: int) -> None:
        """Claim what is missing of [offset, end) and fetch it now. No checkpoint."""
        chunks = self.chunks
        first, last = chunks.chunk_of(offset), chunks.chunk_of(end - 1) + 1
        if self.size <= WHOLE_BYTES:
            first, last = 0, chunks.count
        self._at_random = first > 0 and chunks.state(first - 1) == MISSING
        self.fetch_now(first, last)
        self._go_ahead(first, last)

    def _go_ahead(self, first: int, last: int) -> None:
        """Fetch what comes after the chunks [first, last), if they are read in sequence. Apart from
        them, which are then answered as soon as they are there."""
        chunks = self.chunks
        stop = self._ahead.advance(first, last)
        self.cursor = last
        self.fetch_now(last, min(stop, chunks.count), ahead=True)
        if self._show():
            for fetch in self._fetches:
                if fetch.unit is not None:  # some of it may be on its way into a tier that is slow
                    fetch.unit.show()
        if self._shown:
            trigger = self._ahead.trigger if stop < chunks.count else None
            self._cache.readers.nonresident.ahead(self.node.ino, trigger)

    def on_readahead(self, first: int, last: int) -> None:
        """A read that went past Python is of the chunks [first, last). No checkpoint."""
        if self._shown and first < last <= self.chunks.count:
            self._go_ahead(first, last)

    def fetch_now(self, first: int, last: int, *, ahead: bool = False) -> None:
        """Fetch what is missing of [first, last); ``ahead``: nobody waits for it yet."""
        for run in list(self._to_keep(first, last)):
            if fetch := self._claim(*run, Lane.DEMAND):
                fetch.ahead = ahead
                self._nursery.start_soon(self.fetch, fetch, Lane.DEMAND)

    def _to_keep(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The runs that are missing of [first, last), and to be kept."""
        spans = self.remote.spans if self.own_alone else None
        for run in self.chunks.missing_runs(first, last):
            if spans is None:
                yield run
            else:
                yield from spans.owned_runs(self.chunks, *run)

    async def _piece(self, offset: int, end: int) -> Data:
        """At least one byte of [offset, end), from its start; none where the source has no more."""
        if self.replica is not None:
            return await self._read_replica(self.replica, offset, end)
        if self.state is State.FILLING:
            chunk, last = self.chunks.chunk_of(offset), self.chunks.chunk_of(end - 1) + 1
            state = self.chunks.state(chunk)
            stop = min(end, self.chunks.span(chunk, self.chunks.run_end(chunk, last))[1])
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
        spans = self.remote.spans
        if spans is None or not spans.shared:
            return None
        if self._passing is None:
            self._passing = PassingReads(
                spans,
                self.size,
                lambda start, end: self._unit(start, end, Lane.DEMAND),
                self._nursery,
            )
        return await self._passing.read(offset, end)

    async def _fetched(self, fetch: Fetch, offset: int, end: int) -> Data:
        if (piece := await fetch.piece(offset, end)) is not None:
            return piece
        if self.state is not State.FILLING or fetch.chunks is not self.chunks:
            return await self._piece(offset, end)  # as the source is now
        if fetch.unit is not None and fetch.unit.is_stored(offset):
            chunk = self.chunks.chunk_of(offset)
            stop = min(end, self.chunks.span(chunk, chunk + 1)[1])
            if (piece := await self._read_part(offset, stop)) is not None:
                return piece
        return await self._read_source(offset, min(end, fetch.end))

    async def _read_part(self, offset: int, end: int) -> Data | None:
        reservation = self.reservation
        assert reservation is not None
        try:
            data = self._cache.writer.read_part_nowait(reservation, offset, end - offset)
            if data is None:
                data = await self._cache.writer.read_part(reservation, offset, end - offset)
        except OSError as exc:
            self._tier_failed(reservation, exc, "its copy could not be read")
            return None
        return data

    async def _read_replica(self, replica: OpenReplica, offset: int, end: int) -> Data:
        try:
            data = replica.read_nowait(offset, end - offset)
            if data is None:
                data = await self._cache.read(replica, offset, end - offset)
        except OSError as exc:
            self._cache.failed_read(replica, exc)
            if self.replica is replica:
                self.replica, self.state = None, State.DIRECT
            return await self._read_source(offset, end)
        return data

    async def _read_source(self, offset: int, end: int) -> Data:
        """Exactly these bytes, from the source as it is. Raises its OSError, SourceChanged."""
        try:
            data, version = await self.remote.read(offset, end, Lane.DEMAND)
        except SourceChanged:
            self._cache.accounts.outdated(self.node)
            raise
        self._saw(version)
        self.allow_direct_reads()
        return data

    async def current(self) -> SourceStat:
        """What the source has now under the descriptor that is read. Raises as ``read``."""
        self.busy += 1
        try:
            stat = await self.remote.current(Lane.DEMAND)
            self._saw(stat.version)
            return stat
        finally:
            self._leave()

    async def open_as_is(self) -> None:
        """Read what the source has now, whatever version that is, unless all of this one is local.
        Raises the source's OSError, SourceChanged where the directory lies elsewhere."""
        if self.replica is None:
            version = await self.remote.open_as_is(Lane.DEMAND)
            if version != self.node.stat.version:
                self._saw(version)
