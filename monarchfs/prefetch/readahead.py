"""How far ahead of a reader its file is fetched. Pure; in chunks."""

from __future__ import annotations

RECORD_CHUNKS = 8
"""Who read this much in sequence reads on."""


class Readahead:
    """A window that grows with what was read in sequence, and closes when a read is elsewhere. It
    opens when more was read than in the sequences before: readers of records at random want no
    more than one each.

    Constant: ``most``, the largest window. Changing: the window, where the sequence began and where
    the last read ended, how long those before were (the last ones count most), and up to where was
    fetched ahead.
    """

    __slots__ = ("_before", "_began", "_end", "_fetched", "_window", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._began = self._end = self._before = 0
        self._window = 0
        self._fetched = 0

    @property
    def trigger(self) -> int | None:
        """Reads that end before this chunk do not change what is fetched; None: none does, unless
        it asks for what is missing."""
        return self._fetched - self._window // 2 if self._window else None

    @property
    def open(self) -> bool:
        """Whether so much was read in sequence that the rest will be, too."""
        return self._window == self.most

    def advance(self, first: int, last: int) -> int:
        """A read of chunks [first, last): up to which chunk to fetch now (``last``: no further).

        The kernel may ask for a sequential reader's pages a little out of order, and for parts of
        a chunk: a read counts as sequential if it touches the chunk where the last one ended, or
        is inside the window.
        """
        if not first <= self._end <= last and not self._end <= first <= self._fetched:
            self._window = 0
            self._fetched = 0
            before = max(self._end - self._began, self._before - self._before // 4)
            self._before = min(before, RECORD_CHUNKS)
            self._began = first
        elif last > self._end and last - self._began > self._before:
            self._window = min(last - self._began, self.most)
        self._end = max(last, self._end) if self._window else last
        # In portions of half a window, not a chunk with every read.
        if self._window and self._end + self._window // 2 >= self._fetched:
            self._fetched = self._end + self._window
            return self._fetched
        return last
