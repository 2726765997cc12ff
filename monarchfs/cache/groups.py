"""Small files whose replicas are stored as a group.

For each of them ``Filling`` would call a thread and commit two transactions, which
takes longer than to write some kilobytes. Here that is done once for all. The order is the same:
room, what the journal has to know, the bytes, the commit that makes them resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from monarchfs.cache.filling import Filling
from monarchfs.cache.replicas import Reservation
from monarchfs.placement.events import Place, WantedEach
from monarchfs.types import Data, Node


class Groups(Filling):
    """The part of the cache that copies of several small files use."""

    def reserve_each(self, nodes: Sequence[Node], *, evicts: bool) -> list[Reservation | None]:
        """``reserve`` of each, in their order."""
        self._tiers.look()
        self.readers.catch_up()
        reservations: list[Reservation | None] = [None] * len(nodes)
        new: list[tuple[int, Node]] = []
        known = self.index.replicas_of([node.ino for node in nodes])
        for n, node in enumerate(nodes):
            if node.ino in self._busy or node.ino in known or self._adopt(node) is not None:
                reservations[n] = self.reserve(node, evicts=evicts)
            else:
                new.append((n, node))
        wanted = [(node.ino, node.stat.occupied_bytes) for _, node in new]
        answers = self._handle(WantedEach(wanted, evicts))
        places: list[tuple[int, Node, Place]] = []
        for (n, node), answer in zip_longest(new, answers):
            place = answer if isinstance(answer, Place) else self._room(node, evicts)
            if place is not None:
                places.append((n, node, place))
        placed = self._place([(node, place) for _, node, place in places])
        for (n, _, _), reservation in zip(places, placed, strict=True):
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
