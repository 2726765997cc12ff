"""How a replica comes to be, in the order that makes a crash harmless at every point:

1. ``reserve``: placement sets room aside, and the index journals that a file may come to lie there.
2. The copier writes a part file (``store``), chunk by chunk, or a small file in one go.
3. The part is renamed to its final name.
4. The index commit makes it resident and ends the journal's entry. A crash before this leaves a
   file that the journal names: the next mount removes it.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import trio

from monarchfs.cache.moves import Moves
from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import Reservation
from monarchfs.cache.segments import Written, unrecorded
from monarchfs.engine.units import Unit, memory_bytes
from monarchfs.placement.events import (
    Abandoned,
    Dropped,
    Event,
    Grant,
    Place,
    RefusalReason,
    Refuse,
    Resumed,
    RoomWanted,
    Stored,
    Suspended,
    Wanted,
)
from monarchfs.store.checksum import combine
from monarchfs.store.read import read_full, read_nowait
from monarchfs.types import Data, IndexWriteError, Node, Replica, ReplicaState

MOST_UNWRITTEN_BYTES = 256 << 20
"""So much of the source may wait in memory for a slow tier; more is not kept."""

OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
"""What open(2) says of this process or this node, not of the file."""


class Filling(Moves):
    """The part of the cache that copies use. Changing: ``unwritten_bytes``, how much of small files
    is in memory and waits for the tiers."""

    unwritten_bytes = 0

    # -- room

    def claim(self, node: Node) -> Replica | None:
        """The record of the node's replica; also one that an earlier index, or an earlier number
        of the same version, left in a tier."""
        return self.index.replica(node.ino) or self._adopt(node)

    def _adopt(self, node: Node) -> Replica | None:
        """The record that an earlier index, or an earlier number of the same version, left."""
        if not self.index.claimable or not node.stat.is_regular:
            return None
        try:
            record = self.index.claim(node.ino, node.stat.version.replica_name, node.stat.size)
        except IndexWriteError:
            return None
        if record is not None:
            self._metrics.replicas_adopted += 1
        return record

    def reserve(self, node: Node, *, evicts: bool = True) -> Reservation | None:
        """Room for a replica of ``node``; None (and a reason) where there is none. A partial
        replica is taken up again. ``evicts``: somebody reads it, so that others may have to go."""
        self._tiers.look()
        self.readers.catch_up()
        ino = node.ino
        if ino in self._busy:
            return None
        record = self.claim(node)
        if record is not None and record.tier in self.tiers:
            if record.state is not ReplicaState.PARTIAL:
                return None  # out of reach for the moment; a second one would be counted twice
            if (reason := self._tiers.out_of_service(record.tier)) is not None:
                path = self.tiers[record.tier].path
                self.reasons.put(ino, Cause.NO_TIER, f"its part lies in {path}: {reason}")
                return None
            try:
                return self._resume(node, record, evicts)
            except OSError as exc:
                self._tiers.failed(self.tiers[record.tier], "opening a part", exc, reading=True)
                if exc.errno in OUT_OF_DESCRIPTORS or not self.drop(ino, "its part was lost"):
                    return None
        place = self._room(node, evicts)
        return None if place is None else self._place([(node, place)])[0]

    def _room(self, node: Node, evicts: bool) -> Place | None:
        """Ask placement for room; None, and a reason, where it refuses."""
        (action,) = self._handle(Wanted(node.ino, node.stat.occupied_bytes, evicts))
        if isinstance(action, Place):
            return action
        assert isinstance(action, Refuse)
        self._metrics.copy_refused(action.reason.value)
        self._refused(action)
        return None

    def _place(self, places: Sequence[tuple[Node, Place]]) -> list[Reservation | None]:
        """Journal what is about to lie in the tiers. All are None where that fails."""
        copies = [(node.ino, place.tier, node.stat.version.replica_name) for node, place in places]
        shared = [
            place.whole
            and node.stat.occupied_bytes >= node.stat.size
            and self._segments.takes(place.tier, node.stat.size)
            for node, place in places
        ]
        try:
            if files := [copy for copy, shares in zip(copies, shared, strict=True) if not shares]:
                self.index.begin_copies(files)
        except IndexWriteError as exc:
            for ino, _tier, _name in copies:
                self._handle(Abandoned(ino))
                self.reasons.put(ino, Cause.UNRECORDED, str(exc))
            return [None] * len(copies)
        reservations: list[Reservation | None] = []
        # Files of one tier wait for its removals together.
        after = {tier_id: self._removals.pending(tier_id) for _, tier_id, _ in copies}
        for (node, place), (ino, tier_id, name), shares in zip(places, copies, shared, strict=True):
            self._busy[ino] = name
            reservations.append(
                Reservation(
                    *(node, name, self.tiers[tier_id]),
                    whole=place.whole,
                    shares=shares,
                    after=after[tier_id],
                    reserved_bytes=place.reserved_bytes,
                )
            )
        return reservations

    def _resume(self, node: Node, record: Replica, evicts: bool) -> Reservation | None:
        """None where it cannot be recorded. Raises OSError of the tier, ReplicaLost among them."""
        tier = self.tiers[record.tier]
        after = self._removals.pending(tier.id)
        reservation = Reservation(node, record.name, tier, whole=False, after=after, resumed=record)
        reservation.fd = tier.files.open_part(record.name, record.size)
        try:
            # It grows from now on: after a crash its blocks have to be counted anew.
            self.index.begin_copy(node.ino, tier.id, record.name)
        except IndexWriteError as exc:
            reservation.close_now()
            self.reasons.put(node.ino, Cause.UNRECORDED, str(exc))
            return None
        self._handle(Resumed(node.ino, record.tier, record.allocated_bytes, evicts))
        self._busy[node.ino] = record.name
        return reservation

    def grow(self, reservation: Reservation, size: int) -> bool:
        """``size`` bytes more for a partial replica; False where there is no room. How much of them
        a file with holes needs shows when they are written, and is asked for then."""
        if reservation.whole or (reservation.sparse and not reservation.tight):
            return True
        return self._grow(reservation, size)

    def _grow(self, reservation: Reservation, size: int) -> bool:
        self._tiers.look()
        (action,) = self._handle(RoomWanted(reservation.node.ino, size))
        if not isinstance(action, Grant):
            assert isinstance(action, Refuse)
            self._refused(action)
            return False
        reservation.after += self._removals.pending(reservation.tier.id)
        reservation.reserved_bytes += size
        return True

    def _take(self, reservation: Reservation, size: int) -> bool:
        """``size`` bytes of what is reserved for a file with holes, or more room; False where there
        is none. No checkpoint."""
        missing = max(reservation.needed, reservation.written) + size - reservation.reserved_bytes
        if missing > 0 and not self._grow(reservation, missing):
            reservation.tight = True
            return False
        reservation.needed += size
        return True

    def _refused(self, refusal: Refuse) -> None:
        """Remember that a file, or more of it, found no room."""
        match refusal.reason:
            case RefusalReason.NO_TIER:
                cause, text = Cause.NO_TIER, "no tier is in service"
            case RefusalReason.NO_INODES:
                cause, text = Cause.NO_ROOM, "no room: the tiers have no inodes to spare"
            case RefusalReason.NO_ROOM:
                cause, text = Cause.NO_ROOM, "no room"
        self.reasons.put(refusal.ino, cause, text, refusal.missing_bytes)

    @property
    def backlogged(self) -> bool:
        """Whether the tiers are so far behind that bytes must not wait for them any more."""
        return self.backlog_bytes > MOST_UNWRITTEN_BYTES

    @property
    def backlog_bytes(self) -> int:
        """How much of the source is in memory and waits for the tiers."""
        return self.unwritten_bytes + memory_bytes()

    @contextmanager
    def _unwritten(self, size: int) -> Iterator[None]:
        self.unwritten_bytes += size
        try:
            yield
        finally:
            self.unwritten_bytes -= size

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

    async def write_all(self, reservation: Reservation, data: bytes) -> bool:
        """``write`` and ``finish`` of a whole file in one step."""
        with reservation.using(), self._unwritten(len(data)):
            if reservation.after:
                await reservation.room()
            if reservation.shares:
                (result,) = await self._append_each([(reservation, data)])
                if isinstance(result, OSError):
                    raise result
                return result
            return await self._write_own(reservation, data)

    async def _write_own(self, reservation: Reservation, data: Data) -> bool:
        """As a file of its own."""
        allocated, checksum = await self._in_thread(reservation.write_whole, data)
        return await self._commit(reservation, allocated, checksum)

    def _begin_part(self, reservation: Reservation) -> None:
        """What was to share a file gets one of its own. Raises OSError."""
        if reservation.shares:
            ino, name = reservation.node.ino, reservation.name
            try:
                self.index.begin_copy(ino, reservation.tier.id, name)
            except IndexWriteError as exc:
                raise unrecorded(exc) from exc
            reservation.shares = False

    async def _append_each(self, files: Sequence[tuple[Reservation, Data]]) -> list[bool | OSError]:
        """Put whole replicas of one tier into segments; of each whether it is resident now, or why
        not. Raises nothing."""
        tier = files[0][0].tier
        results: list[bool | OSError] = []
        stored: list[tuple[Reservation, Replica]] = []
        unwanted: list[Written] = []
        outcomes = await self._segments.write_each(tier, [data for _, data in files])
        # No checkpoint between the look at what was given up, the commit and the books.
        for (reservation, _), outcome in zip(files, outcomes, strict=True):
            if isinstance(outcome, OSError):
                results.append(outcome)
            elif reservation.given_up:
                results.append(False)
                unwanted.append(outcome)
            else:
                results.append(True)
                replica = replica_of(
                    reservation,
                    ReplicaState.RESIDENT,
                    outcome.allocated_bytes,
                    checksum=outcome.checksum,
                    place=outcome[:2],
                )
                stored.append((reservation, replica))
        try:
            self._store(stored)
        except OSError as exc:
            results = [exc if result is True else result for result in results]
            unwanted = [outcome for outcome in outcomes if isinstance(outcome, Written)]
        try:
            if unwanted:
                await self._segments.discard(tier, unwanted)
        except OSError as exc:
            # The next worker looks at the segment.
            self._tiers.failed(tier, "giving back a part of a file", exc)
        return results

    def _store(self, stored: Sequence[tuple[Reservation, Replica]]) -> None:
        """Record replicas that lie in segments: all of them, or none and OSError."""
        replicas = [(reservation.node.ino, replica) for reservation, replica in stored]
        try:
            outdated = self.index.put_replicas(replicas) if replicas else set()
        except IndexWriteError as exc:
            raise unrecorded(exc) from exc
        for _, replica in stored:
            self._segments.recorded(replica)
        self._stored(stored, outdated)

    async def _commit(self, reservation: Reservation, allocated: int, checksum: int) -> bool:
        replica = replica_of(reservation, ReplicaState.RESIDENT, allocated, checksum=checksum)
        try:
            if not reservation.given_up:
                # No checkpoint between the index commit and the books.
                self._put(reservation.node.ino, replica)
                now = self.index.node(reservation.node.ino)
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
        """The index says that they are resident: so do the books."""
        for reservation, replica in stored:
            self._rests(reservation)
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

    def rest(self, reservation: Reservation, chunk_bytes: int, present: bytes) -> None:
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
        record = self.index.replica(ino)
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
            self.index.put_replica(ino, replica, in_flight=in_flight)
        except IndexWriteError as exc:
            raise unrecorded(exc) from exc

    def _end(self, reservation: Reservation, event: Event) -> None:
        self._rests(reservation)
        self._handle(event)

    def _rests(self, reservation: Reservation) -> None:
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
