"""Small files whose replicas come to be together.

For each of them ``Filling`` would send a thread on an errand and commit two transactions, which
takes longer than to write some kilobytes. Here that is done once for all. The order is the same:
room, the journal, the files under their final names, the commit that makes them resident.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from monarchfs.cache.filling import Filling, replica_of
from monarchfs.cache.replicas import Reservation
from monarchfs.placement.events import Place
from monarchfs.store.tier import Written
from monarchfs.types import Data, IndexWriteError, Node, Replica, ReplicaState


class Groups(Filling):
    """The part of the cache that copies of several small files use."""

    def reserve_each(self, nodes: Sequence[Node], *, evicts: bool) -> list[Reservation | None]:
        """``reserve`` of each, in their order."""
        self._tiers.look()
        self.readers.catch_up()
        reservations: list[Reservation | None] = [None] * len(nodes)
        places: dict[int, tuple[Node, Place]] = {}
        for n, node in enumerate(nodes):
            if node.ino in self._busy or self.index.replica(node.ino) is not None:
                reservations[n] = self.reserve(node, evicts=evicts)
            elif (place := self._room(node, evicts)) is not None:
                places[n] = node, place
        for n, reservation in zip(places, self._place(list(places.values())), strict=True):
            reservations[n] = reservation
        return reservations

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
        written = await self._in_thread(_write_each, [files[n] for n in wanted])
        stored: dict[int, tuple[Reservation, Replica]] = {}
        for n, outcome in zip(wanted, written, strict=True):
            reservation = files[n][0]
            if isinstance(outcome, OSError):
                results[n] = outcome
            elif reservation.given_up:
                results[n] = False
            else:
                allocated, total = outcome
                stored[n] = (
                    reservation,
                    replica_of(reservation, ReplicaState.RESIDENT, allocated, checksum=total),
                )
        unwanted = [n for n, result in enumerate(results) if result is False]
        try:
            # No checkpoint between the look at what was given up, the commit and the books.
            self._store(list(stored.values()))
        except OSError as exc:
            unwanted += stored
            results = [exc if n in stored else result for n, result in enumerate(results)]
        for n in unwanted:
            reservation = files[n][0]
            try:
                await self._in_thread(reservation.tier.discard, reservation.name)
            except OSError as exc:
                results[n] = exc
        return results

    def _store(self, stored: Sequence[tuple[Reservation, Replica]]) -> None:
        """Record replicas that lie in their tiers: all of them, or none and OSError."""
        replicas = [(reservation.node.ino, replica) for reservation, replica in stored]
        try:
            if replicas:
                self.index.put_replicas(replicas)
        except IndexWriteError as exc:
            # An error of the index says nothing of the tier.
            raise OSError(errno.EBUSY, str(exc)) from exc
        for reservation, replica in stored:
            self._stored(reservation, replica)


def _write_each(files: Sequence[tuple[Reservation, Data]]) -> list[Written]:
    """``Reservation.write_whole`` of each, for a thread."""
    results: list[Written] = [(0, 0)] * len(files)
    for tier in {reservation.tier for reservation, _ in files}:
        places = [n for n, (reservation, _) in enumerate(files) if reservation.tier is tier]
        written = tier.write_each([(files[n][0].name, files[n][1]) for n in places])
        for n, result in zip(places, written, strict=True):
            results[n] = result
            if isinstance(result, FileExistsError):
                try:
                    results[n] = files[n][0].write_whole(files[n][1])
                except OSError as exc:
                    results[n] = exc.with_traceback(None)
    return results
