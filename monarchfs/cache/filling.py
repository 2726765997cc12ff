"""How a replica comes to be, in the order that makes a crash harmless at every point:

1. ``reserve``: placement sets room aside (memory only).
2. The copier writes a part file (``store``), chunk by chunk, or a small file in one go.
3. The part is renamed to its final name.
4. The index commit makes it resident. A crash before this leaves a file that no record knows:
   a part is removed by the next mount, a renamed one is replaced by the next copy.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import trio

from monarchfs.cache.records import Records
from monarchfs.cache.replicas import Reservation
from monarchfs.index.index import Index
from monarchfs.metrics import Metrics
from monarchfs.placement.events import (
    Abandoned,
    Event,
    Grant,
    Kept,
    Place,
    Refuse,
    Resumed,
    RoomWanted,
    Stored,
    Wanted,
)
from monarchfs.placement.placement import Placement
from monarchfs.store.read import read_full, read_nowait
from monarchfs.store.tier import Tier
from monarchfs.types import Data, IndexWriteError, Node, Replica, ReplicaState, TierSize

MOST_UNWRITTEN_BYTES = 256 << 20
"""So much of the source may wait in memory for a slow tier; more is not kept."""

OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
"""What open(2) says of this process or this node, not of the file."""

T = TypeVar("T")


class Filling(Records):
    """The part of the cache that copies use. Changing: how much waits for the tiers."""

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Tier],
        sizes: Sequence[TierSize],
        placement: Placement,
        metrics: Metrics,
        local: trio.CapacityLimiter,
    ) -> None:
        super().__init__(index, tiers, sizes, placement, metrics, local)
        self._unwritten_bytes = 0

    # -- room

    def reserve(self, node: Node) -> Reservation | None:
        """Room for a replica of ``node``; None (and a reason) where there is none. A partial
        replica is taken up again."""
        self._tiers.look()
        record = self.index.replica(node.ino)
        if record is not None and record.tier in self.tiers:
            if record.state is ReplicaState.RESIDENT:
                return None  # out of reach for the moment; a second one would be counted twice
            try:
                return self._resume(node, record)
            except OSError as exc:
                self._tiers.trouble(self.tiers[record.tier], "opening a part", exc)
                if exc.errno not in OUT_OF_DESCRIPTORS:
                    self.drop(node.ino, "its part was lost")
            if self.index.replica(node.ino) is not None:
                return None
        (action,) = self._handle(Wanted(node.ino, node.stat.size))
        if isinstance(action, Place):
            tier = self.tiers[action.tier]
            return Reservation(node, node.stat.version, tier, whole=action.whole)
        assert isinstance(action, Refuse)
        self._metrics.copies_refused += 1
        self.explain(node.ino, f"{action.reason.value}: {action.missing_bytes} bytes short")
        return None

    def _resume(self, node: Node, record: Replica) -> Reservation:
        """Raises OSError of the tier, ReplicaLost among them."""
        tier = self.tiers[record.tier]
        reservation = Reservation(node, record.version, tier, whole=False, resumed=record)
        reservation.fd = tier.open_part(record.version)
        self._handle(Resumed(node.ino, record.tier, record.allocated_bytes))
        return reservation

    def grow(self, reservation: Reservation, size: int) -> bool:
        """``size`` bytes more for a partial replica; False where there is no room."""
        if reservation.whole:
            return True
        self._tiers.look()
        (action,) = self._handle(RoomWanted(reservation.node.ino, size))
        return isinstance(action, Grant)

    @property
    def backlogged(self) -> bool:
        """Whether the tiers are so far behind that bytes must not wait for them any more."""
        return self._unwritten_bytes > MOST_UNWRITTEN_BYTES

    @contextmanager
    def _unwritten(self, size: int) -> Iterator[None]:
        self._unwritten_bytes += size
        try:
            yield
        finally:
            self._unwritten_bytes -= size

    # -- bytes

    async def write(self, reservation: Reservation, offset: int, data: bytes) -> None:
        """Put bytes of the source into the part file. Raises OSError of the tier."""
        with reservation.using(), self._unwritten(len(data)):
            if reservation.fd < 0:
                async with reservation.lock:
                    if reservation.fd < 0:
                        reservation.fd = await self._in_thread(reservation.new_part)
            await self._in_thread(reservation.tier.write, reservation.fd, offset, data)
        reservation.written += len(data)
        self._tiers.written[reservation.tier.id] += len(data)

    async def read_part(self, reservation: Reservation, offset: int, size: int) -> bytes:
        """Bytes that were written already. Raises OSError of the tier."""
        with reservation.using():
            return await self._in_thread(read_full, reservation.fd, offset, size)

    def read_part_nowait(self, reservation: Reservation, offset: int, size: int) -> Data | None:
        """The same, or None where the disk would have to be waited for."""
        return read_nowait(
            reservation.fd, offset, size, memory_backed=reservation.tier.memory_backed
        )

    # -- the end of a reservation

    async def finish(self, reservation: Reservation) -> bool:
        """All bytes are there: make the part a resident replica. Raises OSError of the tier; False
        where the copy was given up meanwhile.

        The part's descriptor stays open for those who still read it: ``Reservation.close``.
        """
        with reservation.using():
            allocated = await self._in_thread(
                reservation.tier.finish_part, reservation.fd, reservation.version
            )
            return self._commit(reservation, allocated)

    async def write_all(self, reservation: Reservation, data: bytes) -> bool:
        """``write`` and ``finish`` of a whole file in one step."""
        with reservation.using(), self._unwritten(len(data)):
            allocated = await self._in_thread(reservation.write_whole, data)
            return self._commit(reservation, allocated)

    def _commit(self, reservation: Reservation, allocated: int) -> bool:
        # No checkpoint between the index commit and the books.
        ino = reservation.node.ino
        replica = _replica(reservation, ReplicaState.RESIDENT, allocated)
        if reservation.given_up:
            self._tiers.unlink(replica)
            return False
        try:
            self._put(ino, replica)
        except OSError:
            self._tiers.unlink(replica)
            raise
        self._end(reservation, Stored(ino, allocated))
        self._metrics.copies_completed += 1
        self.reasons.pop(ino, None)
        self._durability.stored(ino, reservation.tier.id)
        return True

    def rest(self, reservation: Reservation, chunk_bytes: int, present: bytes) -> None:
        """Put an unfinished copy aside: what is there is recorded, for this mount and later ones.

        ``present`` has one byte a chunk, 1 where the chunk was written. Nobody may be using the
        part. Raises OSError where this cannot be done: then the copy is still to be abandoned.
        """
        # Without a thread, so that whoever opens the file next finds it at rest: fstat(2) of an
        # open file of a local file system asks no disk.
        allocated = reservation.tier.allocated(reservation.fd)
        ino = reservation.node.ino
        replica = _replica(reservation, ReplicaState.PARTIAL, allocated)
        self._put(ino, replica._replace(chunk_bytes=chunk_bytes, present=present))
        self._end(reservation, Kept(ino, allocated))
        reservation.close_now()

    def cancel(self, reservation: Reservation) -> None:
        """Give back the room of a copy that has no part file yet."""
        assert reservation.fd < 0
        self._end(reservation, Abandoned(reservation.node.ino))

    async def abandon(self, reservation: Reservation, reason: str) -> None:
        """Give a copy up: its part goes, its room is free again."""
        ino = reservation.node.ino
        self.explain(ino, reason)
        reservation.given_up = True
        await reservation.close()
        record = self.index.replica(ino)
        if record is not None and not self._forget(ino, record):
            self._end(reservation, Kept(ino, record.allocated_bytes))
            return
        try:
            await self._in_thread(reservation.tier.remove_part, reservation.version)
        except OSError as exc:
            self._tiers.trouble(reservation.tier, "removing a part", exc)
        finally:
            self._end(reservation, Abandoned(ino))

    def tier_failed(self, reservation: Reservation, exc: OSError) -> None:
        """Count and log what a copier ran into."""
        self._tiers.trouble(reservation.tier, "copying", exc)

    def _put(self, ino: int, replica: Replica) -> None:
        try:
            self.index.put_replica(ino, replica)
        except IndexWriteError as exc:
            raise OSError(errno.EIO, str(exc)) from exc

    def _end(self, reservation: Reservation, event: Event) -> None:
        self._tiers.written[reservation.tier.id] -= reservation.written
        reservation.written = 0
        self._handle(event)

    async def _in_thread(self, fn: Callable[..., T], *args: object) -> T:
        return await trio.to_thread.run_sync(fn, *args, limiter=self.local)


def _replica(reservation: Reservation, state: ReplicaState, allocated: int) -> Replica:
    return Replica(
        reservation.tier.id,
        state,
        reservation.version,
        allocated,
        durable=False,
        created_ns=time.time_ns(),
    )
