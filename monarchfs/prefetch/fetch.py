"""One read of the source on behalf of a file, and the sizes in which that is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import trio

from monarchfs.prefetch.chunks import ChunkMap
from monarchfs.types import Data

WHOLE_BYTES = 1 << 20
"""Files up to this size are fetched in one read and written in one go."""

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
    """One read of the source under way. ``data`` or ``error``, and the ``seconds`` that the source
    took, are set before ``done``. ``target`` is the source's storage target, if that is known.
    ``pull`` is to be called by who waits for it, where it is fetched together with others."""

    chunks: ChunkMap
    first: int
    last: int
    start: int
    end: int
    done: trio.Event
    target: int | None = None
    data: bytes | None = None
    error: OSError | None = None
    seconds: float = 0.0
    pull: Callable[[], None] | None = None

    async def piece(self, offset: int, end: int) -> Data | None:
        """What it brings of [offset, end), which begins in it; None where the source has another
        version. Raises the source's OSError."""
        await self.done.wait()
        if self.error is not None:
            raise OSError(self.error.errno, self.error.strerror)
        if self.data is None:
            return None
        stop = min(end, self.end) - self.start
        if offset == self.start and stop == len(self.data):
            return self.data
        return memoryview(self.data)[offset - self.start : stop]
