"""Small files, whose replicas are stored as a whole, and several as a group.

For each of them ``Filling`` would call a thread and commit two transactions, which
takes longer than to write some kilobytes. Here that is done once for all. The order is the same:
room, what the journal has to know, the bytes, the commit that makes them resident.
"""

from __future__ import annotations

from collections.abc import Sequence

from monarchfs.cache.filling import Filling, replica_of
from monarchfs.cache.replicas import Reservation
from monarchfs.cache.segments import Written, unrecorded
from monarchfs.engine.units import memory_bytes
from monarchfs.types import Data, IndexWriteError, Replica, ReplicaState

MOST_UNWRITTEN_BYTES = 256 << 20
"""So much of the source may wait in memory for a slow tier; more is not kept."""


class Groups(Filling):
    """The part of the cache that copies of small files use. Changing: ``unwritten_bytes``, how much
    of them is in memory and waits for the tiers."""

    unwritten_bytes = 0

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
        allocated, checksum = await self._in_thread(reservation.write_whole, data)
        return await self._commit(reservation, allocated, checksum)

    async def _append_each(self, files: Sequence[tuple[Reservation, Data]]) -> list[bool | OSError]:
        """Put whole replicas of one tier into segments; of each whether it is resident now, or why
        not. Raises nothing."""
        tier = files[0][0].tier
        results: list[bool | OSError] = []
        stored: list[tuple[Reservation, Replica]] = []
        unwanted: list[Written] = []
        outcomes = await self._segments.write_each(tier, [data for _, data in files])
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
                await self._segments.discard(tier, unwanted)
        except OSError as exc:
            # The next worker looks at the segment.
            self._tiers.failed(tier, "giving back a part of a file", exc)
        return results

    def _store(self, stored: Sequence[tuple[Reservation, Replica]]) -> None:
        """Record replicas that lie in segments: all of them, or none and OSError."""
        replicas = [(reservation.node.ino, replica) for reservation, replica in stored]
        try:
            outdated = self.index.replicas.put_replicas(replicas) if replicas else set()
        except IndexWriteError as exc:
            raise unrecorded(exc) from exc
        for _, replica in stored:
            self._segments.recorded(replica)
        self._stored(stored, outdated)
