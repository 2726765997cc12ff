"""A file's way into a tier: from the reservation to the complete replica, or to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import trio

from monarchfs.cache import writer
from monarchfs.cache.cache import Cache
from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import OpenReplica, Reservation
from monarchfs.core.nonresident import NonresidentReads
from monarchfs.core.units import Unit
from monarchfs.metrics import Metrics
from monarchfs.prefetch.chunks import ChunkMap
from monarchfs.prefetch.fetch import WHOLE_BYTES, State, chunk_bytes_for
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.remote import RemoteFile
from monarchfs.types import Lane, Node, SourceChanged, SourceVersion

log = logging.getLogger(__name__)


class Copy:
    """A file's place in a tier, if there is room for it. ``Fill`` fetches and reads it.

    Constant: ``node``, ``remote``, ``size``. Changing: the rest, on the event loop only. ``chunks``
    are those of a copy under way, else none; so many are ``_recorded``, -1 without a record;
    ``units`` are under way.

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
        forget: Callable[[Copy], None],
        wake_copier: Callable[[Copy], None],
    ) -> None:
        """``forget`` is called once it is settled, and ``wake_copier`` when a fetch or a copy has
        ended: it may be another file's turn in the background."""
        self.node = node
        self.remote = remote
        self.size = node.stat.size
        self.state = State.DIRECT
        self.handles = 0
        self.in_background = False
        self.priority = Priority.NOBODY
        self.full = False
        self.reservation: Reservation | None = None
        self.replica: OpenReplica | None = None
        self.busy = 0
        self._acquired: list[OpenReplica] = []
        self.chunks = ChunkMap(0, chunk_bytes_for(self.size))
        self._recorded = -1
        self._cache = cache
        self._metrics = metrics
        self._nursery = nursery
        self._forget = forget
        self.wake_copier = wake_copier
        self.changes = 0
        self._seen = node.stat.version
        self.units: list[Unit] = []
        self.finishing = False
        self.threads = ShownCopy(node, cache.readers.nonresident)

    @property
    def past_racy_window(self) -> bool:
        """Whether bytes that are read from now on can be told from those of a later version."""
        return self.remote.trusts_times or self.node.stat.version.past_racy_window(time.time_ns())

    @property
    def filling(self) -> bool:
        """Whether it is being copied, or is about to be: there is room for more of it."""
        return self.state is State.FILLING and not self.full

    @property
    def partial(self) -> bool:
        """Whether some of it is local."""
        return self.state is State.FILLING and self.chunks.present_count > 0

    @property
    def local_bytes(self) -> int:
        """How much of a copy under way is local."""
        if self.state is not State.FILLING:
            return 0
        return min(self.size, self.chunks.present_count * self.chunks.chunk_bytes)

    @property
    def ending(self) -> bool:
        """Whether the copy's last step is under way, to the replica or to nothing."""
        if self.state is State.FILLING:
            return self.finishing
        return self.state is State.DIRECT and self.reservation is not None

    def start_filling(self, *, evicts: bool = True) -> bool:
        """Ask for room; False where there is none and reads stay direct. No checkpoint.

        ``evicts``: somebody reads it, so that other files may have to go.
        """
        if self.state is not State.DIRECT:
            return True
        if self.reservation is not None or not self.past_racy_window:
            return False  # an earlier one is still being given back, or it is too young
        return self.begin_filling(self._cache.reservations.reserve(self.node, evicts=evicts))

    def begin_filling(self, reservation: Reservation | None) -> bool:
        """``start_filling`` where that is known to be possible and the cache was asked already."""
        if reservation is None:
            return False
        self.threads.hide()
        if (resumed := reservation.resumed) is not None:
            self.chunks = ChunkMap(self.size, resumed.chunk_bytes, resumed.present)
        else:
            self.chunks = ChunkMap(self.size, chunk_bytes_for(self.size))
        self._recorded = -1 if resumed is None else self.chunks.present_count
        self.reservation = reservation
        self.full = False
        self.finishing = False
        self.state = State.FILLING
        if self.chunks.complete:  # an empty file, or one whose last step was missing
            self.begin_finish()
        return True

    def checkpoint(self) -> None:
        """Record how far a large copy has come. No checkpoint of trio's. Raises OSError."""
        reservation = self.reservation
        if (
            self.state is State.FILLING
            and reservation is not None
            and reservation.fd >= 0
            and not self.finishing
            and not reservation.given_up
            and self.chunks.present_count != self._recorded
        ):
            chunks = self.chunks
            self._cache.writer.checkpoint(reservation, chunks.chunk_bytes, chunks.saved())
            self._recorded = chunks.present_count

    def make_unit(
        self,
        start: int,
        end: int,
        lane: Lane = Lane.DEMAND,
        *,
        in_requests: bool = True,
        sparse: bool = False,
    ) -> Unit:
        """The bytes [start, end), to be fetched. See ``Unit``."""
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
            in_requests=in_requests,
            sparse=sparse,
        )

    # -- the end of it

    def see_version(self, version: SourceVersion) -> None:
        """The source was read, and had this version then: once for each, what is known is wrong."""
        if version != self._seen:
            self._seen = version
            self.source_changed()

    def outdated(self) -> None:
        """The source holds another version: unless all of this one is local, nothing that is may
        be served any more, and reads show the source as it is. No checkpoint."""
        if self.state is not State.RESIDENT:
            self.source_changed()

    def source_changed(self) -> None:
        """The source has another version now: what was read of this one is not mixed with it."""
        self.changes += 1
        self.threads.hide()
        self._cache.accounts.on_outdated(self.node.ino)
        if self.state is State.FILLING:
            self._metrics.copies_outdated += 1
            self.give_up(Cause.CHANGED, "it changed in the source while it was copied")

    def give_up(self, cause: Cause, reason: str) -> None:
        """Keep nothing; open handles read the source directly from now on. No checkpoint."""
        if self.state is State.FILLING:
            assert self.reservation is not None
            self.reservation.given_up = True  # at once: its last step may be under way
            self.state = State.DIRECT
            self.threads.hide()
            self._nursery.start_soon(self._abandon, cause, reason)
        for unit in self.units:
            unit.stop()

    async def _abandon(self, cause: Cause, reason: str) -> None:
        assert self.reservation is not None
        # Also when the mount ends: it waits for this tier's threads alone, as that would anyway.
        with trio.CancelScope(shield=True):
            await self._cache.writer.abandon(self.reservation, cause, reason)
        self._reset()
        self.settle()
        self.wake_copier(self)

    def _reset(self) -> None:
        """There is no reservation any more, and no part file."""
        self.threads.hide()
        self.state = State.DIRECT
        self.reservation = None
        self.chunks = ChunkMap(0, chunk_bytes_for(self.size))

    def tier_failed(self, reservation: Reservation, exc: OSError, what: str) -> None:
        self._cache.writer.tier_failed(reservation, exc)
        if self.state is State.FILLING:
            self._metrics.copy_failed(exc.errno)
            self.give_up(Cause.FAILED, f"{what}: {exc.strerror}")

    def begin_finish(self) -> None:
        if not self.finishing:
            self.finishing = True
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
                stored = await self._cache.writer.write_all(reservation, b"")
            else:
                stored = await self._cache.writer.finish(reservation)
            if stored:
                if self.remote.spans is not None:
                    self.remote.spans.completed(reservation.digests)
                self.become_resident()
                await reservation.close()
        except OSError as exc:
            self.tier_failed(reservation, exc, "copying failed")
        finally:
            self.leave()

    async def _may_read(self) -> bool:
        """Whether the source lets us open an empty file, for which no read asks."""
        try:
            await self.remote.open(Lane.BACKGROUND)
        except SourceChanged:
            self.source_changed()
        except OSError as exc:
            self._metrics.copy_failed(exc.errno)
            self.give_up(Cause.FAILED, f"copying failed: {exc.strerror}")
        else:
            return True
        return False

    def become_resident(self) -> None:
        """The index says so already. No checkpoint."""
        self._reset()
        self.wake_copier(self)
        if not self.handles and self.busy <= 1:
            return  # nobody reads it: the file need not be opened
        if (replica := self._cache.acquire(self.node, accessed=False)) is not None:
            self.replica, self.state = replica, State.RESIDENT
            self._acquired.append(replica)

    def allow_direct_reads(self) -> None:
        """Missing chunks are not kept: the threads may read them from the source. No checkpoint."""
        if self.changes or not self.handles or self.remote.fd < 0:
            return
        if self.remote.spans is not None and self.remote.spans.shared:
            return  # other nodes may have them
        not_kept = self.state is State.DIRECT and self.reservation is None
        if not_kept or (self.threads.shown and self.full):
            self.threads.show_source(self.remote.fd)

    def release(self) -> None:
        """A handle is closed."""
        self.handles -= 1
        self.settle()

    def leave(self) -> None:
        self.busy -= 1
        self.settle()

    def settle(self) -> None:
        """Put everything down where nobody needs it any more. No checkpoint."""
        if self.handles or self.busy or self.in_background:
            return
        if self.state is State.FILLING and not self._keep_part():
            self.give_up(Cause.FAILED, "its copy could not be suspended")
        if self.state is State.DIRECT and self.reservation is not None:
            return  # its end is under way and comes back here
        self._forget(self)
        self.threads.hide()
        self.remote.close_soon()
        self.replica = None
        while self._acquired:
            # More than one where the tier failed a reader, who may still have been reading it.
            self._cache.release(self._acquired.pop())

    def _keep_part(self) -> bool:
        """Record what is local, and end the reservation; False where that fails. No checkpoint."""
        reservation = self.reservation
        assert reservation is not None
        if reservation.fd < 0:
            self._cache.writer.cancel(reservation)
        else:
            try:
                chunks, news = self.chunks, self.chunks.present_count != self._recorded
                saved = chunks.saved()
                self._cache.writer.suspend(reservation, chunks.chunk_bytes, saved, news=news)
            except OSError as exc:
                self._cache.writer.tier_failed(reservation, exc)
                return False
        self._reset()
        return True

    async def suspend(self) -> None:
        """At the end of the mount, when no task of the copier runs any more."""
        if self.state is State.FILLING and not self._keep_part():
            assert self.reservation is not None
            await self._cache.writer.abandon(
                self.reservation, Cause.FAILED, "its copy could not be suspended"
            )
            self._reset()
        self.remote.close_soon()


class ShownCopy:
    """What the threads of the C part may read of a file that is not resident, without Python.

    Changing: ``shown``, whether they know its chunks; ``from_source``, whether they read from the
    source what is missing."""

    def __init__(self, node: Node, reads: NonresidentReads) -> None:
        self.shown = False
        self.from_source = False
        self._node = node
        self._reads = reads

    def show(self, chunks: ChunkMap, reservation: Reservation | None) -> bool:
        """They may read what is there, and wait for what is being fetched. True if that is new. No
        checkpoint. (A small file's readers hurry what is fetched together with others.)"""
        size = self._node.stat.size
        if self.shown or size <= WHOLE_BYTES:
            return False
        self.shown = self._reads.fill(self._node.ino, size, chunks.chunk_bytes, chunks.states())
        if self.shown and reservation is not None and reservation.fd >= 0:
            self._reads.part(self._node.ino, reservation.fd)
        return self.shown

    def tell(self, first: int, last: int, state: bytes) -> None:
        """The chunks [first, last) are in this state now."""
        if self.shown:
            self._reads.chunks(self._node.ino, first, last, state)

    def ahead(self, chunk: int | None) -> None:
        """Hear of the next read that reaches this chunk; None: of none."""
        if self.shown:
            self._reads.ahead(self._node.ino, chunk)

    def show_source(self, fd: int) -> None:
        """They may read the missing chunks from the source, through this descriptor."""
        if not self.from_source:
            self.from_source = self._reads.source(self._node.ino, fd, self._node.stat.version)

    def hide_source(self) -> None:
        """The next read of a missing chunk has to ask."""
        if self.from_source and self.shown:
            self.from_source = False
            self._reads.no_source(self._node.ino)

    def hide(self) -> None:
        if self.shown or self.from_source:
            self.shown = self.from_source = False
            self._reads.stop(self._node.ino)
