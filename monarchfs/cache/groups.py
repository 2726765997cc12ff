"""Small files whose replicas come to be together.

For each of them ``Filling`` would send a thread on an errand and commit two transactions, which
takes longer than to write some kilobytes. Here that is done once for all. The order is the same:
room, the journal, the files under their final names, the commit that makes them resident.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import ExitStack

from monarchfs.cache.filling import Filling, replica_of
from monarchfs.cache.replicas import Reservation
from monarchfs.placement.events import Place
from monarchfs.types import IndexWriteError, Node, Replica, ReplicaState

Written = tuple[int, int] | OSError
"""Allocated bytes and checksum."""


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

    async def write_each(self, files: Sequence[tuple[Reservation, bytes]]) -> list[bool | OSError]:
        """``write_all`` of each: what that would have returned, or raised. Raises nothing."""
        with ExitStack() as stack:
            stack.enter_context(self._unwritten(sum(len(data) for _, data in files)))
            results: list[bool | OSError] = []
            for reservation, _ in files:
                stack.enter_context(reservation.using())
                try:
                    await reservation.room()
                    results.append(True)
                except OSError as exc:
                    results.append(exc)
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
                    allocated, checksum = outcome
                    stored[n] = (
                        reservation,
                        replica_of(
                            reservation, ReplicaState.RESIDENT, allocated, checksum=checksum
                        ),
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


def _write_each(files: Sequence[tuple[Reservation, bytes]]) -> list[Written]:
    """``Reservation.write_whole`` of each, for a thread."""
    results: list[Written] = []
    for reservation, data in files:
        try:
            results.append(reservation.write_whole(data))
        except OSError as exc:
            results.append(exc.with_traceback(None))
    return results
