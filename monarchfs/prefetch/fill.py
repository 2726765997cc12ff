"""A file that is read from the source, and on its way into a tier if there is room for it.

The way of a read: chunks that are local come from the part file; chunks that somebody fetches are
waited for; the rest is claimed and fetched, and answered from the fetched bytes before they are
written. So a byte is asked from the source once, however many readers want it. Where there is no
room for a chunk, exactly the bytes that were asked for are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.replicas import OpenReplica, Reservation
from monarchfs.metrics import Metrics
from monarchfs.prefetch.chunks import CLAIMED, PRESENT, ChunkMap
from monarchfs.prefetch.fetch import MOST_AHEAD_BYTES, WHOLE_BYTES, Fetch, State, chunk_bytes_for
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.readahead import Readahead
from monarchfs.prefetch.remote import RemoteFile
from monarchfs.types import Data, Lane, Node, SourceChanged

log = logging.getLogger(__name__)


class Fill:
    """Constant: ``node``, ``remote``, ``size``. Changing: the rest, on the event loop only.

    It lives while it has handles, fetches under way (``busy``), or a place in the copier's
    background list; then ``settle`` puts it to rest and calls ``forget``.
    """

    def __init__(
        self,
        node: Node,
        remote: RemoteFile,
        cache: Cache,
        metrics: Metrics,
        nursery: trio.Nursery,
        forget: Callable[[Fill], None],
        poke: Callable[[], None],
    ) -> None:
        """``forget`` is called once it is settled, and ``poke`` when a fetch or a copy has
        ended: it may be another file's turn in the background."""
        self.node = node
        self.remote = remote
        self.size = node.stat.size
        self.state = State.DIRECT
        self.handles = 0
        self.in_background = False
        self.priority = Priority.NOBODY
        self.full = False
        self.cursor = 0
        self.reservation: Reservation | None = None
        self.replica: OpenReplica | None = None
        self.busy = 0
        self._acquired: list[OpenReplica] = []
        self.chunks = ChunkMap(self.size, chunk_bytes_for(self.size))
        self._cache = cache
        self._metrics = metrics
        self._nursery = nursery
        self._forget = forget
        self._poke = poke
        self._fetches: list[Fetch] = []
        self._ahead = Readahead(MOST_AHEAD_BYTES // self.chunks.chunk_bytes)
        self._finishing = False

    @property
    def filling(self) -> bool:
        """Whether it is being copied, or is about to be: there is room for more of it."""
        return self.state is State.FILLING and not self.full

    @property
    def partial(self) -> bool:
        """Whether some of it is local."""
        return self.state is State.FILLING and self.chunks.present_count > 0

    def start_filling(self) -> bool:
        """Ask for room; False where there is none and reads stay direct. No checkpoint."""
        if self.state is not State.DIRECT:
            return True
        if self.reservation is not None:
            return False  # an earlier one is still being given back
        reservation = self._cache.reserve(self.node)
        if reservation is None:
            return False
        if (resumed := reservation.resumed) is not None:
            self.chunks = ChunkMap(self.size, resumed.chunk_bytes, resumed.present)
        self.reservation = reservation
        self.full = False
        self._finishing = False
        self.state = State.FILLING
        if self.chunks.complete:  # an empty file, or one whose last step was missing
            self._begin_finish()
        return True

    # -- reading

    async def read(self, offset: int, size: int) -> Data:
        """The bytes at ``offset``, fewer only at the end of the file.

        Raises OSError with the source's errno; trouble with the tier is routed around.
        """
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        self.busy += 1
        try:
            if self.state is State.FILLING:
                self._demand(offset, end)
            piece = await self._piece(offset, end)
            if offset + len(piece) == end:
                return piece
            out = bytearray(piece)
            while piece and offset + len(out) < end:
                piece = await self._piece(offset + len(out), end)
                out += piece
            return bytes(out)
        finally:
            self._leave()

    def _demand(self, offset: int, end: int) -> None:
        """Claim what is missing of [offset, end) and fetch it now. No checkpoint."""
        chunks = self.chunks
        first, last = chunks.chunk_of(offset), chunks.chunk_of(end - 1) + 1
        if self.size <= WHOLE_BYTES:
            first, last = 0, chunks.count
        self._fetch_now(first, last)
        stop = self._ahead.advance(first, last)
        self.cursor = last
        # Apart from what is asked for, which is then answered as soon as it is there.
        self._fetch_now(last, min(stop, chunks.count))

    def _fetch_now(self, first: int, last: int) -> None:
        for run in list(self.chunks.missing_runs(first, last)):
            if fetch := self._claim(*run):
                self._nursery.start_soon(self.fetch, fetch, Lane.DEMAND)

    def _claim(self, first: int, last: int) -> Fetch | None:
        """Take a run of missing chunks; None where there is no room for it."""
        assert self.reservation is not None
        start, end = self.chunks.span(first, last)
        if not self._cache.grow(self.reservation, end - start):
            self.full = True
            return None
        self.chunks.claim(first, last)
        fetch = Fetch(self.chunks, first, last, start, end, trio.Event())
        self._fetches.append(fetch)
        self.busy += 1
        return fetch

    def claim_next(self, unit_bytes: int) -> Fetch | None:
        """The next run to be copied in the background, or None where there is none to claim."""
        if self.state is not State.FILLING or self.full or self._finishing:
            return None
        unit = max(1, max(unit_bytes, min(self.size, WHOLE_BYTES)) // self.chunks.chunk_bytes)
        run = self.chunks.next_missing(self.cursor, unit)
        return None if run is None else self._claim(*run)

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
                if (piece := await fetch.piece(offset, end)) is not None:
                    return piece
                return await self._piece(offset, end)  # as the source is now
            else:
                return await self._read_source(offset, stop)
        return await self._read_source(offset, end)

    async def _read_part(self, offset: int, end: int) -> Data | None:
        reservation = self.reservation
        assert reservation is not None
        try:
            data = self._cache.read_part_nowait(reservation, offset, end - offset)
            if data is None:
                data = await self._cache.read_part(reservation, offset, end - offset)
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
            data, same = await self.remote.read(offset, end, Lane.DEMAND)
        except SourceChanged:
            self._cache.outdated(self.node)
            raise
        if not same:
            self._cache.outdated(self.node)
        return data

    # -- fetching

    async def fetch(self, fetch: Fetch, lane: Lane) -> None:
        """Carry out a claimed fetch: source, then readers, then tier. Raises nothing."""
        try:
            data = await self._fetch_source(fetch, lane)
            if data is not None and self._keeps(fetch, lane):
                await self._keep(fetch, data)
        finally:
            self._fetches.remove(fetch)
            if fetch.chunks.state(fetch.first) == CLAIMED:
                fetch.chunks.release(fetch.first, fetch.last)
            fetch.done.set()
            self._leave()
            self._poke()

    async def _fetch_source(self, fetch: Fetch, lane: Lane) -> bytes | None:
        try:
            fetch.data = await self.remote.fetch(fetch.start, fetch.end, lane)
        except OSError as exc:
            fetch.error = exc
        except SourceChanged:
            self._changed()
        else:
            fetch.done.set()
        return fetch.data

    def _keeps(self, fetch: Fetch, lane: Lane) -> bool:
        if self.state is not State.FILLING or fetch.chunks is not self.chunks:
            return False
        if lane is Lane.DEMAND and self._cache.backlogged:
            # A slow tier must not slow the readers: these bytes are fetched again some time.
            self._metrics.chunks_dropped += fetch.last - fetch.first
            return False
        return True

    async def _keep(self, fetch: Fetch, data: bytes) -> None:
        reservation = self.reservation
        assert reservation is not None
        whole = fetch.start == 0 and fetch.end == self.size and reservation.fd < 0
        try:
            if whole and reservation.whole:
                stored = await self._cache.write_all(reservation, data)
                fetch.chunks.arrive(fetch.first, fetch.last)
                if stored:
                    self._become_resident()
                return
            await self._cache.write(reservation, fetch.start, data)
        except OSError as exc:
            self._tier_failed(reservation, exc, "copying failed")
            return
        fetch.chunks.arrive(fetch.first, fetch.last)
        if self.state is State.FILLING and self.chunks.complete:
            self._begin_finish()

    def _changed(self) -> None:
        if self.state is State.FILLING:
            self._metrics.copies_outdated += 1
            self._cache.outdated(self.node)
            self.give_up("it changed in the source while it was copied")

    # -- the end of it

    def give_up(self, reason: str) -> None:
        """Keep nothing; open handles read the source directly from now on. No checkpoint."""
        if self.state is State.FILLING:
            self.state = State.DIRECT
            self._nursery.start_soon(self._abandon, reason)

    async def _abandon(self, reason: str) -> None:
        assert self.reservation is not None
        # Also when the mount ends: it waits for this tier's threads alone, as that would anyway.
        with trio.CancelScope(shield=True):
            await self._cache.abandon(self.reservation, reason)
        self._reset()
        self.settle()
        self._poke()

    def _reset(self) -> None:
        """There is no reservation any more, and no part file."""
        self.state = State.DIRECT
        self.reservation = None
        self.chunks = ChunkMap(self.size, chunk_bytes_for(self.size))

    def _tier_failed(self, reservation: Reservation, exc: OSError, what: str) -> None:
        self._cache.tier_failed(reservation, exc)
        if self.state is State.FILLING:
            self._metrics.copies_failed += 1
            self.give_up(f"{what}: {exc.strerror}")

    def _begin_finish(self) -> None:
        if not self._finishing:
            self._finishing = True
            self.busy += 1
            self._nursery.start_soon(self._finish)

    async def _finish(self) -> None:
        """Every chunk is in the part file: make it the replica."""
        reservation = self.reservation
        assert reservation is not None
        try:
            if self.size == 0:
                if not await self._may_read():
                    return
                stored = await self._cache.write_all(reservation, b"")
            else:
                stored = await self._cache.finish(reservation)
            if stored:
                self._become_resident()
                await reservation.close()
        except OSError as exc:
            self._tier_failed(reservation, exc, "copying failed")
        finally:
            self._leave()

    async def _may_read(self) -> bool:
        """Whether the source lets us open an empty file, for which no read asks."""
        try:
            await self.remote.open(Lane.BACKGROUND)
        except SourceChanged:
            self._changed()
        except OSError as exc:
            self._metrics.copies_failed += 1
            self.give_up(f"copying failed: {exc.strerror}")
        else:
            return True
        return False

    def _become_resident(self) -> None:
        """The index says so already. No checkpoint."""
        self._reset()
        if (replica := self._cache.acquire(self.node)) is not None:
            self.replica, self.state = replica, State.RESIDENT
            self._acquired.append(replica)

    def release(self) -> None:
        """A handle is closed."""
        self.handles -= 1
        self.settle()

    def _leave(self) -> None:
        self.busy -= 1
        self.settle()

    def settle(self) -> None:
        """Put everything down where nobody needs it any more. No checkpoint."""
        if self.handles or self.busy or self.in_background:
            return
        if self.state is State.FILLING and not self._rest():
            self.give_up("its copy could not be put aside")
        if self.state is State.DIRECT and self.reservation is not None:
            return  # its end is under way and comes back here
        self._forget(self)
        self.remote.close_soon()
        self.replica = None
        while self._acquired:
            # More than one where the tier failed a reader, who may still have been reading it.
            self._cache.release(self._acquired.pop())

    def _rest(self) -> bool:
        """Record what is local, and end the reservation; False where that fails. No checkpoint."""
        reservation = self.reservation
        assert reservation is not None
        if reservation.fd < 0:
            self._cache.cancel(reservation)
        else:
            try:
                chunks = self.chunks
                self._cache.rest(reservation, chunks.chunk_bytes, chunks.saved())
            except OSError as exc:
                self._cache.tier_failed(reservation, exc)
                return False
        self._reset()
        return True

    async def put_aside(self) -> None:
        """At the end of the mount, when no task of the copier runs any more."""
        if self.state is State.FILLING and not self._rest():
            assert self.reservation is not None
            await self._cache.abandon(self.reservation, "its copy could not be put aside")
            self._reset()
        self.remote.close_soon()
