"""What policies remember of inodes, in arrays: objects would take ten times the memory."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)

_PAGE_BITS = 6
_PAGE = 1 << _PAGE_BITS


class ByInode(Generic[Number]):
    """A number for each inode number, 0 if none was put. In pages of 64, because inode numbers are
    given out in sequence."""

    def __init__(self, zero: array[Number]) -> None:
        """``zero``: an array of one 0, of the type that the numbers have."""
        self._empty: array[Number] = zero * _PAGE
        self.pages: dict[int, array[Number]] = {}

    def get(self, ino: int) -> Number:
        page = self.pages.get(ino >> _PAGE_BITS)
        return self._empty[0] if page is None else page[ino & _PAGE - 1]

    def put(self, ino: int, number: Number) -> None:
        page = self.pages.get(ino >> _PAGE_BITS)
        if page is None:
            page = self.pages[ino >> _PAGE_BITS] = self._empty[:]
        page[ino & _PAGE - 1] = number


class InodeHeap:
    """Inode numbers with a key each, in a binary heap: the one with the smallest key is known, and
    a key is changed in logarithmic time. Place 0 is not used."""

    def __init__(self) -> None:
        self.inos = array("q", [0])
        self.keys = array("d", [0.0])
        self.places = ByInode(array("i", [0]))
        self._changes = 0

    def __len__(self) -> int:
        return len(self.inos) - 1

    def __contains__(self, ino: int) -> bool:
        return self.places.get(ino) > 0

    def put(self, ino: int, key: float) -> None:
        """Add it, or change its key."""
        place = self.places.get(ino)
        if not place:
            place = len(self.inos)
            self.inos.append(ino)
            self.keys.append(key)
        self._move(place, ino, key)

    def remove(self, ino: int) -> None:
        """It must be here."""
        place = self.places.get(ino)
        self.places.put(ino, 0)
        last, key = self.inos.pop(), self.keys.pop()
        if last == ino:
            self._changes += 1
        else:
            self._move(place, last, key)

    def divide(self, by: float) -> None:
        """Divide all keys, which keeps their order."""
        self.keys = array("d", [key / by for key in self.keys])

    def equalize(self) -> None:
        """All keys are 0."""
        self.keys = array("d", bytes(8 * len(self.keys)))

    def ascending(self) -> Iterator[int]:
        """Each number once, by key. The heap may change meanwhile."""
        given: set[int] = set()
        changes = -1
        while changes != self._changes:
            changes = self._changes
            # The children of the places that were passed are those that may be next.
            next_ones = [(self.keys[1], 1)] if len(self) else []
            while next_ones and changes == self._changes:
                _, place = heapq.heappop(next_ones)
                for child in range(2 * place, min(2 * place + 2, len(self.inos))):
                    heapq.heappush(next_ones, (self.keys[child], child))
                ino = self.inos[place]
                if ino not in given:
                    given.add(ino)
                    yield ino

    def _move(self, place: int, ino: int, key: float) -> None:
        """Find the place for a number whose own place is free."""
        inos, keys = self.inos, self.keys
        self._changes += 1
        while place > 1 and key < keys[above := place >> 1]:
            self._set(place, inos[above], keys[above])
            place = above
        while (below := 2 * place) < len(inos):
            if below + 1 < len(inos) and keys[below + 1] < keys[below]:
                below += 1
            if keys[below] >= key:
                break
            self._set(place, inos[below], keys[below])
            place = below
        self._set(place, ino, key)

    def _set(self, place: int, ino: int, key: float) -> None:
        self.inos[place] = ino
        self.keys[place] = key
        self.places.put(ino, place)
