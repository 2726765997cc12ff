"""One read of the source on behalf of a file, and the sizes in which that is done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import trio

from monarchfs.core.units import Unit
from monarchfs.prefetch.chunks import ChunkMap
from monarchfs.types import Data

WHOLE_BYTES = 1 << 20
"""Files up to this size are fetched in one read and written in one go."""

HEADER_FILE_BYTES = 256 << 10
"""As in _misses.c. A reader of a little of such a file does not wait for all of it."""

MOST_AHEAD_BYTES = 4 << 20
"""A sequential reader's data are fetched so far ahead of it: one read of the source per megabyte
or so, however small the kernel's own readahead is."""

CHUNK_BYTES = 128 << 10


def chunk_bytes_for(size: int) -> int:
    """128 KiB, the kernel's usual readahead; 256 KiB where the map would be large otherwise."""
    return CHUNK_BYTES if size < 64 << 30 else 2 * CHUNK_BYTES


class State(Enum):
    FILLING = auto()
    """There is a reservation: what is fetched is kept."""
    DIRECT = auto()
    """Nothing is kept: each read goes to the source as it is."""
    RESIDENT = auto()
    """The replica is complete."""


@dataclass(eq=False, slots=True)
class Fetch:
    """One read of the source under way: by a ``unit``, or for ``data``. That or ``error``, and the
    ``seconds`` that the source took, are set before ``done``. ``target`` is the source's storage
    target, if that is known; ``ahead``: a reader is expected to come to it."""

    chunks: ChunkMap
    first: int
    last: int
    start: int
    end: int
    done: trio.Event
    target: int | None = None
    unit: Unit | None = None
    data: bytes | None = None
    error: OSError | None = None
    seconds: float | None = None
    ahead: bool = False
    ended: bool = False
    waiting: int = 0

    def finish(self) -> None:
        """It is over, whatever came of it."""
        self.done.set()
        self.ended = True
        self._let_go()

    async def piece(self, offset: int, end: int) -> Data | None:
        """What it brought of [offset, end), which begins in it; None where that is not in memory
        any more, where the source has another version, and where it failed: who waits then asks
        for itself, as a reader."""
        self.waiting += 1
        try:
            await self.done.wait()
            if self.unit is not None and (piece := self.unit.peek(offset, end)):
                return piece
            if self.data is None:
                return None
            stop = min(end, self.end) - self.start
            if offset == self.start and stop == len(self.data):
                return self.data
            return memoryview(self.data)[offset - self.start : stop]
        finally:
            self.waiting -= 1
            self._let_go()

    def _let_go(self) -> None:
        if self.unit is not None and self.ended and not self.waiting:
            self.unit.empty()
