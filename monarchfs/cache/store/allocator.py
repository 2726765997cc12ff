"""Places of replicas in segments. Pure: no input or output."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

SEGMENT_BYTES = 64 << 20
SMALL_BYTES = 1 << 20
"""The largest replica that goes into a segment."""
ALIGN_BYTES = 4096


def allocated(size: int, align: int = ALIGN_BYTES) -> int:
    """The bytes that a record of ``size`` takes."""
    return -(-size // align) * align


def new_segment() -> int:
    """A number that no other segment has: random, of 64 bits, never 0."""
    return secrets.randbelow(2**64 - 1) + 1


class Allocator:
    """Gives records consecutive places; does no input or output.

    Changing: ``current`` and where it ends so far. Not thread-safe.
    """

    def __init__(
        self,
        segment_bytes: int,
        align: int = ALIGN_BYTES,
        new: Callable[[], int] = new_segment,
    ) -> None:
        self._segment_bytes = segment_bytes
        self._align = align
        self._new = new
        self._current = 0
        self._end = 0

    @property
    def current(self) -> int:
        """The segment that the next record goes to if it fits; 0: none."""
        return self._current

    def seal(self) -> None:
        """Place nothing more into the current segment."""
        self._current = self._end = 0

    def place(self, sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Segment and offset for each size, in order; and the segments that begin with this call,
        to be entered in the index before anything is written.

        A record that is larger than a segment gets a segment of its own. An empty record takes a
        block, so that no two have the same place.
        """
        places: list[tuple[int, int]] = []
        begun: list[int] = []
        for size in sizes:
            needed = max(allocated(size, self._align), self._align)
            if needed > self._segment_bytes:
                begun.append(self._new())
                places.append((begun[-1], 0))
                continue
            if not self._current or self._end + needed > self._segment_bytes:
                self._current, self._end = self._new(), 0
                begun.append(self._current)
            places.append((self._current, self._end))
            self._end += needed
        return places, begun
