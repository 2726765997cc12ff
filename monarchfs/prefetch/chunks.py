"""Which chunks of a file are local, and which somebody is fetching. Pure."""

from __future__ import annotations

from collections.abc import Iterator

MISSING, CLAIMED, PRESENT = b"\0", b"\1", b"\2"


class ChunkMap:
    """One byte a chunk, so that runs are found by the C library: 5 MB for a 600 GB file.

    Constant: ``size``, ``chunk_bytes``, ``count``. A chunk is claimed by at most one fetcher and
    goes missing -> claimed -> present, or back to missing when the fetch failed; therefore no byte
    is asked from the source twice.
    """

    __slots__ = ("_state", "chunk_bytes", "count", "present_count", "size")

    def __init__(self, size: int, chunk_bytes: int, present: bytes = b"") -> None:
        """``present``: one byte a chunk, 1 where it is there, as ``saved`` gives it; empty: none.

        Raises ValueError where ``present`` is not of this file.
        """
        self.size = size
        self.chunk_bytes = chunk_bytes
        self.count = -(-size // chunk_bytes)
        if present and len(present) != self.count:
            raise ValueError(f"{len(present)} chunks recorded, the file has {self.count}")
        self._state = bytearray(present.replace(b"\1", PRESENT) if present else self.count)
        self.present_count = self._state.count(PRESENT)

    @property
    def complete(self) -> bool:
        return self.present_count == self.count

    def saved(self) -> bytes:
        """One byte a chunk: 1 where it is present. What is claimed only does not count."""
        return self.saved_range(0, self.count)

    def saved_range(self, first: int, last: int) -> bytes:
        """``saved`` of [first, last)."""
        return bytes(self._state[first:last]).replace(CLAIMED, MISSING).replace(PRESENT, CLAIMED)

    def states(self) -> bytes:
        """All of them."""
        return bytes(self._state)

    def state(self, chunk: int) -> bytes:
        return bytes(self._state[chunk : chunk + 1])

    def chunk_of(self, offset: int) -> int:
        return offset // self.chunk_bytes

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The bytes [start, end) of the chunks [first, last)."""
        return first * self.chunk_bytes, min(last * self.chunk_bytes, self.size)

    def run_end(self, chunk: int, last: int) -> int:
        """The end of the run of chunks in the state that ``chunk`` is in, at most ``last``."""
        state = self._state[chunk]
        end = chunk + 1
        while end < last and self._state[end] == state:
            end += 1
        return end

    def missing_runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The runs of missing chunks in [first, last). The map may be changed in between."""
        start = first
        while (start := self._state.find(MISSING, start, last)) >= 0:
            end = self.run_end(start, last)
            yield start, end
            start = end

    def first_missing(self, cursor: int) -> int | None:
        """The first missing chunk at or after ``cursor``, else from the start."""
        start = self._state.find(MISSING, cursor)
        if start < 0:
            start = self._state.find(MISSING)
        return None if start < 0 else start

    def missing_in(self, first: int, last: int, max_chunks: int) -> tuple[int, int] | None:
        """The first run of missing chunks in [first, last), at most ``max_chunks`` long and ending
        at a multiple of ``max_chunks``, so that what is read of the source is aligned. None where
        nothing is missing."""
        start = self._state.find(MISSING, first, last)
        if start < 0:
            return None
        boundary = (start // max_chunks + 1) * max_chunks
        return start, self.run_end(start, min(boundary, last))

    def next_missing(self, cursor: int, max_chunks: int) -> tuple[int, int] | None:
        """``missing_in`` all of it: at or after ``cursor``, else from the start."""
        return self.missing_in(cursor, self.count, max_chunks) or self.missing_in(
            0, self.count, max_chunks
        )

    def is_present(self, first: int, last: int) -> bool:
        """Whether all of [first, last) are."""
        return self._state.count(PRESENT, first, last) == last - first

    def claim(self, first: int, last: int) -> None:
        assert self._state.count(MISSING, first, last) == last - first, "claimed twice"
        self._state[first:last] = CLAIMED * (last - first)

    def release(self, first: int, last: int) -> None:
        assert self._state.count(CLAIMED, first, last) == last - first, "released unclaimed"
        self._state[first:last] = MISSING * (last - first)

    def arrive(self, first: int, last: int) -> None:
        assert self._state.count(CLAIMED, first, last) == last - first, "arrived unclaimed"
        self._state[first:last] = PRESENT * (last - first)
        self.present_count += last - first
