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
from typing import cast

import trio

from monarchfs.cache.accounts import Accounts
from monarchfs.cache.placement.events import Abandoned, Dropped, PlacementEvent, Stored
from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import Reservation
from monarchfs.cache.reservations import Reservations
from monarchfs.cache.segments import Written, unrecorded
from monarchfs.cache.store.checksum import combine
from monarchfs.cache.store.read import read_full, read_nowait
from monarchfs.core.units import Unit, memory_bytes
from monarchfs.types import Data, IndexWriteError, Replica, ReplicaState

MOST_UNWRITTEN_BYTES = 256 << 20
"""So much of the source may wait in memory for a slow tier; more is not kept."""


class CopyWriter:
    """Writes copies: large files chunk by chunk, small ones whole, and several as a group.

    For each small file ``write`` and ``finish`` would call a thread and commit two transactions,
    which takes longer than to write some kilobytes. ``write_each`` does that once for all, in the
    same order: room, what the journal has to know, the bytes, the commit that makes them resident.

    Changing: ``unwritten_bytes``, how much of small files is in memory and waits for the tiers.
    """

    def __init__(self, accounts: Accounts, reservations: Reservations) -> None:
        self._accounts = accounts
        self._reservations = reservations
        self.unwritten_bytes = 0

    # -- bytes

    async def write(self, reservation: Reservation, unit: Unit, read: trio.Event) -> bool:
        """Put the bytes of the source that arrive with a unit into the part file, until ``read``
        says that they all have; False, and nothing is written, where a file with holes needs more
        room than there is. Raises OSError of the tier."""
        tier = reservation.tier
        with reservation.using():
            if reservation.sparse:
                await read.wait()
                if not self._reservations.take_room(
                    reservation, await self._accounts.threads.run(unit.needed)
                ):
                    return False
            if reservation.after:
                await reservation.room()
            await self._make_part(reservation)
            while not await self._accounts.threads.write(
                tier.files.write_unit, reservation.fd, unit
            ):
                await read.wait()
            allocated = tier.files.allocated(reservation.fd)
        before = 0 if reservation.resumed is None else reservation.resumed.allocated_bytes
        # Of two writes that end together the later one may come first.
        more = max(0, allocated - before - reservation.written)
        reservation.written += more
        self._accounts.all_tiers.written[tier.id] += more
        return True

    async def _make_part(self, reservation: Reservation) -> None:
        if reservation.fd >= 0:
            return
        async with reservation.lock:
            if reservation.fd < 0:
                self._begin_part(reservation)
                reservation.fd = await self._accounts.threads.run(reservation.new_part)
                self._accounts.readers.nonresident.part(reservation.node.ino, reservation.fd)

    async def read_part(self, reservation: Reservation, offset: int, size: int) -> bytes:
        """Bytes that were written already. Raises OSError of the tier."""
        with reservation.using():
            return await self._accounts.threads.run_now(read_full, reservation.fd, offset, size)

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
            allocated = await self._accounts.threads.run(
                reservation.tier.files.finish_part, reservation.fd, reservation.name, checksum
            )
            return await self._commit(reservation, allocated, checksum)

    def _begin_part(self, reservation: Reservation) -> None:
        """What was to share a file gets one of its own. Raises OSError."""
        if reservation.shares:
            ino, name = reservation.node.ino, reservation.name
            try:
                self._accounts.index.replicas.begin_copies([(ino, reservation.tier.id, name)])
            except IndexWriteError as exc:
                raise unrecorded(exc) from exc
            reservation.shares = False

    async def _commit(self, reservation: Reservation, allocated: int, checksum: int) -> bool:
        replica = replica_of(reservation, ReplicaState.RESIDENT, allocated, checksum=checksum)
        try:
            if not reservation.given_up:
                # No checkpoint between the index commit and the accounts.
                self._put(reservation.node.ino, replica)
                now = self._accounts.index.nodes.node(reservation.node.ino)
                outdated = {reservation.node.ino} if now is None or now.outdated else set()
                self._stored([(reservation, replica)], outdated)
                self._accounts.holder.stored(reservation.node.ino)
                return True
        except OSError:
            await self._accounts.threads.run(reservation.tier.files.discard, reservation.name)
            raise
        await self._accounts.threads.run(reservation.tier.files.discard, reservation.name)
        return False

    def _stored(
        self, stored: Sequence[tuple[Reservation, Replica]], outdated: Container[int]
    ) -> None:
        """The index says that they are resident: so do the accounts."""
        for reservation, replica in stored:
            self._no_more_writes(reservation)
            self._accounts.reasons.forget(reservation.node)
            self._accounts.durability.stored(reservation.node.ino, replica)
        self._accounts.handle(
            Stored([(place.node.ino, replica.allocated_bytes) for place, replica in stored])
        )
        self._accounts.metrics.copies_completed += len(stored)
        self._accounts.readers.stored(
            [
                (node._replace(outdated=True) if node.ino in outdated else node, replica)
                for node, replica in ((place.node, replica) for place, replica in stored)
            ]
        )

    def suspend(
        self, reservation: Reservation, chunk_bytes: int, present: bytes, *, news: bool
    ) -> None:
        """Put an unfinished copy aside: what is there is recorded, for this mount and later ones.

        ``present`` has one byte a chunk, 1 where the chunk was written. Not ``news``: that was
        recorded. Nobody may be using the part. Raises OSError where this cannot be done: then the
        copy is still to be abandoned.
        """
        record = None if news else self._accounts.index.replicas.replica(reservation.node.ino)
        allocated = reservation.tier.files.allocated(reservation.fd)
        if record is None or record.allocated_bytes != allocated:
            allocated = self._record_part(reservation, chunk_bytes, present, in_flight=False)
        else:
            self._accounts.removals.gone(reservation.tier.id, reservation.name)
        self._end(reservation, Stored([(reservation.node.ino, allocated)]))
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
        # The digests may be many megabytes, which nobody changes before they are packed.
        replica = replica_of(reservation, ReplicaState.PARTIAL, allocated)._replace(
            chunk_bytes=chunk_bytes, present=present, digests=cast(bytes, reservation.digests)
        )
        self._put(reservation.node.ino, replica, in_flight=in_flight)
        return allocated

    def cancel(self, reservation: Reservation) -> None:
        """Give back the room of a copy that has no part file yet."""
        assert reservation.fd < 0
        if not reservation.shares:
            self._accounts.removals.gone(reservation.tier.id, reservation.name)
        self._end(reservation, Abandoned(reservation.node.ino))

    async def abandon(self, reservation: Reservation, cause: Cause, reason: str) -> None:
        """Give a copy up: its part goes, its room is free again once it is gone."""
        ino = reservation.node.ino
        if cause is Cause.CHANGED:
            self._accounts.reasons.put_changed(reservation.node, reason)
        else:
            self._accounts.reasons.put(ino, cause, reason)
        reservation.given_up = True
        allocated = self._allocated(reservation)
        await reservation.close()
        record = self._accounts.index.replicas.replica(ino)
        if record is not None and not self._accounts.forget([(ino, record.tier)]):
            self._end(reservation, Stored([(ino, record.allocated_bytes)]))
            return
        part = replica_of(reservation, ReplicaState.PARTIAL, allocated)
        self._end(reservation, Stored([(ino, allocated)]))
        self._accounts.handle(Dropped(ino, part.tier, allocated))
        await self._accounts.removals.finish(ino, part)

    def _allocated(self, reservation: Reservation) -> int:
        if reservation.fd < 0:
            return 0
        try:
            return reservation.tier.files.allocated(reservation.fd)
        except OSError:  # this is the end of a copy whose tier failed, which was said
            return reservation.written

    def tier_failed(self, reservation: Reservation, exc: OSError) -> None:
        """Count and log what a copier ran into."""
        self._accounts.all_tiers.failed(reservation.tier, "copying", exc)

    def _put(self, ino: int, replica: Replica, *, in_flight: bool = False) -> None:
        try:
            self._accounts.index.replicas.put_replica(ino, replica, in_flight=in_flight)
        except IndexWriteError as exc:
            raise unrecorded(exc) from exc

    def _end(self, reservation: Reservation, event: PlacementEvent) -> None:
        self._no_more_writes(reservation)
        self._accounts.handle(event)

    def _no_more_writes(self, reservation: Reservation) -> None:
        """Nothing is written to it any more: an event says what became of it."""
        self._accounts.all_tiers.written[reservation.tier.id] -= reservation.written
        reservation.written = 0
        self._accounts.busy.pop(reservation.node.ino, None)

    # -- small files: whole, and several at a time

    @property
    def backlogged(self) -> bool:
        """Whether the tiers are so far behind that bytes must not wait for them any more."""
        return self.backlog_bytes > MOST_UNWRITTEN_BYTES

    @property
    def backlog_bytes(self) -> int:
        """How much of the source is in memory and waits for the tiers."""
        return self.unwritten_bytes + memory_bytes()

    async def write_all(self, reservation: Reservation, data: Data) -> bool:
        """``write`` and ``finish`` of a whole file in one step."""
        (result,) = await self.write_each([(reservation, data)])
        if isinstance(result, OSError):
            raise result
        return result

    async def write_each(self, files: Sequence[tuple[Reservation, Data]]) -> list[bool | OSError]:
        """``write_all`` of each: what that would have returned, or raised. Raises nothing."""
        size = sum(len(data) for _, data in files)
        self.unwritten_bytes += size
        for reservation, _ in files:
            reservation.use()
        try:
            return await self._write_each(files)
        finally:
            for reservation, _ in files:
                reservation.unuse()
            self.unwritten_bytes -= size

    async def _write_each(self, files: Sequence[tuple[Reservation, Data]]) -> list[bool | OSError]:
        results: list[bool | OSError] = [True] * len(files)
        for n, (reservation, _) in enumerate(files):
            if reservation.after:
                try:
                    await reservation.room()
                except OSError as exc:
                    results[n] = exc
        wanted = [n for n, result in enumerate(results) if result is True]
        for tier in {files[n][0].tier for n in wanted if files[n][0].shares}:
            shared = [n for n in wanted if files[n][0].shares and files[n][0].tier is tier]
            appended = await self._append_each([files[n] for n in shared])
            for n, result in zip(shared, appended, strict=True):
                results[n] = result
        for n in wanted:
            if not files[n][0].shares:
                try:
                    results[n] = await self._write_own(*files[n])
                except OSError as exc:
                    results[n] = exc
        return results

    async def _write_own(self, reservation: Reservation, data: Data) -> bool:
        """As a file of its own."""
        allocated, checksum = await self._accounts.threads.run(reservation.write_whole, data)
        return await self._commit(reservation, allocated, checksum)

    async def _append_each(self, files: Sequence[tuple[Reservation, Data]]) -> list[bool | OSError]:
        """Put whole replicas of one tier into segments; of each whether it is resident now, or why
        not. Raises nothing."""
        tier = files[0][0].tier
        results: list[bool | OSError] = []
        stored: list[tuple[Reservation, Replica]] = []
        unwanted: list[Written] = []
        outcomes = await self._accounts.segments.write_each(tier, [data for _, data in files])
        # No checkpoint between the look at what was given up, the commit and the accounts.
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
                await self._accounts.segments.discard(tier, unwanted)
        except OSError as exc:
            # The next worker looks at the segment.
            self._accounts.all_tiers.failed(tier, "giving back a part of a file", exc)
        return results

    def _store(self, stored: Sequence[tuple[Reservation, Replica]]) -> None:
        """Record replicas that lie in segments: all of them, or none and OSError."""
        replicas = [(reservation.node.ino, replica) for reservation, replica in stored]
        try:
            outdated = self._accounts.index.replicas.put_replicas(replicas) if replicas else set()
        except IndexWriteError as exc:
            raise unrecorded(exc) from exc
        for _, replica in stored:
            self._accounts.segments.recorded(replica)
        self._stored(stored, outdated)


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
