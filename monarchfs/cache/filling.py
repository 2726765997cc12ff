"""How a replica comes to be, in the order that makes a crash harmless at every point:

1. ``reserve``: placement sets room aside, and the index journals that a file may come to lie there.
2. The copier writes a part file (``store``), chunk by chunk, or a small file in one go.
3. The part is renamed to its final name.
4. The index commit makes it resident and ends the journal's entry. A crash before this leaves a
   file that the journal names: the next mount removes it.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence

import trio

from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import Reservation
from monarchfs.cache.rooms import Rooms
from monarchfs.cache.segments import unrecorded
from monarchfs.engine.units import Unit
from monarchfs.placement.events import (
    Abandoned,
    Dropped,
    PlacementEvent,
    Stored,
    Suspended,
)
from monarchfs.store.checksum import combine
from monarchfs.store.read import read_full, read_nowait
from monarchfs.types import Data, IndexWriteError, Replica, ReplicaState


class Filling(Rooms):
    """The part of the cache that copies use, chunk by chunk."""

    # -- bytes

    async def write(self, reservation: Reservation, unit: Unit, read: trio.Event) -> bool:
        """Put the bytes of the source that arrive with a unit into the part file, until ``read``
        says that they all have; False, and nothing is written, where a file with holes needs more
        room than there is. Raises OSError of the tier."""
        tier = reservation.tier
        with reservation.using():
            if reservation.sparse:
                await read.wait()
                if not self._take(reservation, await self._in_thread(unit.needed)):
                    return False
            if reservation.after:
                await reservation.room()
            await self._make_part(reservation)
            while not await self._write_in_thread(tier.files.write_unit, reservation.fd, unit):
                await read.wait()
            allocated = tier.files.allocated(reservation.fd)
        before = 0 if reservation.resumed is None else reservation.resumed.allocated_bytes
        # Of two writes that end together the later one may come first.
        more = max(0, allocated - before - reservation.written)
        reservation.written += more
        self._tiers.written[tier.id] += more
        return True

    async def _make_part(self, reservation: Reservation) -> None:
        if reservation.fd >= 0:
            return
        async with reservation.lock:
            if reservation.fd < 0:
                self._begin_part(reservation)
                reservation.fd = await self._in_thread(reservation.new_part)
                self.readers.nonresident.part(reservation.node.ino, reservation.fd)

    async def read_part(self, reservation: Reservation, offset: int, size: int) -> bytes:
        """Bytes that were written already. Raises OSError of the tier."""
        with reservation.using():
            return await self._in_thread_now(read_full, reservation.fd, offset, size)

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
        checksum = combine(reservation.digests)
        with reservation.using():
            allocated = await self._in_thread(
                reservation.tier.files.finish_part, reservation.fd, reservation.name, checksum
            )
            return await self._commit(reservation, allocated, checksum)

    def _begin_part(self, reservation: Reservation) -> None:
        """What was to share a file gets one of its own. Raises OSError."""
        if reservation.shares:
            ino, name = reservation.node.ino, reservation.name
            try:
                self.index.replicas.begin_copy(ino, reservation.tier.id, name)
            except IndexWriteError as exc:
                raise unrecorded(exc) from exc
            reservation.shares = False

    async def _commit(self, reservation: Reservation, allocated: int, checksum: int) -> bool:
        replica = replica_of(reservation, ReplicaState.RESIDENT, allocated, checksum=checksum)
        try:
            if not reservation.given_up:
                # No checkpoint between the index commit and the accounts.
                self._put(reservation.node.ino, replica)
                now = self.index.tree.node(reservation.node.ino)
                outdated = {reservation.node.ino} if now is None or now.outdated else set()
                self._stored([(reservation, replica)], outdated)
                self._holder.stored(reservation.node.ino)
                return True
        except OSError:
            await self._in_thread(reservation.tier.files.discard, reservation.name)
            raise
        await self._in_thread(reservation.tier.files.discard, reservation.name)
        return False

    def _stored(
        self, stored: Sequence[tuple[Reservation, Replica]], outdated: Container[int]
    ) -> None:
        """The index says that they are resident: so do the accounts."""
        for reservation, replica in stored:
            self._no_more_writes(reservation)
            self.reasons.forget(reservation.node)
            self._durability.stored(reservation.node.ino, replica)
        self._handle(
            Stored([(place.node.ino, replica.allocated_bytes) for place, replica in stored])
        )
        self._metrics.copies_completed += len(stored)
        self.readers.stored(
            [
                (node._replace(outdated=True) if node.ino in outdated else node, replica)
                for node, replica in ((place.node, replica) for place, replica in stored)
            ]
        )

    def suspend(self, reservation: Reservation, chunk_bytes: int, present: bytes) -> None:
        """Put an unfinished copy aside: what is there is recorded, for this mount and later ones.

        ``present`` has one byte a chunk, 1 where the chunk was written. Nobody may be using the
        part. Raises OSError where this cannot be done: then the copy is still to be abandoned.
        """
        allocated = self._record_part(reservation, chunk_bytes, present, in_flight=False)
        self._end(reservation, Suspended(reservation.node.ino, allocated))
        reservation.close_now()

    def checkpoint(self, reservation: Reservation, chunk_bytes: int, present: bytes) -> None:
        """Record what is there of a copy that goes on, so that a crash does not cost it."""
        self._record_part(reservation, chunk_bytes, present, in_flight=True)

    def _record_part(
        self, reservation: Reservation, chunk_bytes: int, present: bytes, *, in_flight: bool
    ) -> int:
        # Without a thread, so that whoever opens the file next finds it at rest: fstat(2) of an
        # open file of a local file system asks no disk.
        allocated = reservation.tier.files.allocated(reservation.fd)
        replica = replica_of(reservation, ReplicaState.PARTIAL, allocated)._replace(
            chunk_bytes=chunk_bytes, present=present, digests=bytes(reservation.digests)
        )
        self._put(reservation.node.ino, replica, in_flight=in_flight)
        return allocated

    def cancel(self, reservation: Reservation) -> None:
        """Give back the room of a copy that has no part file yet."""
        assert reservation.fd < 0
        if not reservation.shares:
            self._removals.gone(reservation.tier.id, reservation.name)
        self._end(reservation, Abandoned(reservation.node.ino))

    async def abandon(self, reservation: Reservation, cause: Cause, reason: str) -> None:
        """Give a copy up: its part goes, its room is free again once it is gone."""
        ino = reservation.node.ino
        if cause is Cause.CHANGED:
            self.reasons.put_changed(reservation.node, reason)
        else:
            self.reasons.put(ino, cause, reason)
        reservation.given_up = True
        allocated = self._allocated(reservation)
        await reservation.close()
        record = self.index.replicas.replica(ino)
        if record is not None and not self._forget([(ino, record.tier)]):
            self._end(reservation, Suspended(ino, record.allocated_bytes))
            return
        part = replica_of(reservation, ReplicaState.PARTIAL, allocated)
        self._end(reservation, Suspended(ino, allocated))
        self._handle(Dropped(ino, part.tier, allocated))
        await self._removals.finish(ino, part)

    def _allocated(self, reservation: Reservation) -> int:
        if reservation.fd < 0:
            return 0
        try:
            return reservation.tier.files.allocated(reservation.fd)
        except OSError:  # this is the end of a copy whose tier failed, which was said
            return reservation.written

    def tier_failed(self, reservation: Reservation, exc: OSError) -> None:
        """Count and log what a copier ran into."""
        self._tiers.failed(reservation.tier, "copying", exc)

    def _put(self, ino: int, replica: Replica, *, in_flight: bool = False) -> None:
        try:
            self.index.replicas.put_replica(ino, replica, in_flight=in_flight)
        except IndexWriteError as exc:
            raise unrecorded(exc) from exc

    def _end(self, reservation: Reservation, event: PlacementEvent) -> None:
        self._no_more_writes(reservation)
        self._handle(event)

    def _no_more_writes(self, reservation: Reservation) -> None:
        """Nothing is written to it any more: an event says what became of it."""
        self._tiers.written[reservation.tier.id] -= reservation.written
        reservation.written = 0
        self._busy.pop(reservation.node.ino, None)


def replica_of(
    reservation: Reservation,
    state: ReplicaState,
    allocated: int,
    *,
    checksum: int = 0,
    place: tuple[int, int] = (0, 0),
) -> Replica:
    """What is to be recorded, with its place in a segment; nothing of it is durable yet."""
    segment, offset = place
    return Replica(
        reservation.tier.id,
        state,
        reservation.name,
        reservation.size,
        allocated,
        durable=False,
        created_ns=time.time_ns(),
        checksum=checksum,
        segment=segment,
        offset=offset,
    )
