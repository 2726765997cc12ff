"""Reads of large files in the source on behalf of their copies (_unit.c): the bytes do not come to
Python.

Two threads work on a unit at once. One calls ``read``, and whoever waits for a block of it is
answered there; the other one calls ``write``, which takes what has arrived. Readers never wait for
the second.
"""

from __future__ import annotations

from monarchfs.engine import _units
from monarchfs.types import SourceVersion


class Unit:
    """The bytes [start, end) of a version of a file. All methods may be called from any thread,
    ``read`` and ``write`` from one at a time."""

    __slots__ = ("_c", "end", "start")

    def __init__(
        self,
        ino: int,
        start: int,
        end: int,
        *,
        chunk_bytes: int,
        version: SourceVersion,
        device: int,
        readers: object = None,
        most_bytes: int = 0,
    ) -> None:
        """``device`` is that of the source's root; ``readers`` as of ``NonresidentReads``. What
        arrives while all units have more than ``most_bytes`` in memory is dropped; 0: nothing is.
        """
        self.start = start
        self.end = end
        st_dev, st_ino, size, mtime_ns, ctime_ns = version
        numbers = st_dev or device, st_ino, size, *_timespec(mtime_ns), *_timespec(ctime_ns)
        self._c = _units.Unit(ino, start, end - start, chunk_bytes, numbers, readers, most_bytes)

    @property
    def read_bytes(self) -> int:
        """How much the source gave."""
        return self._c.read_bytes

    @property
    def direct(self) -> bool:
        """Whether it was read past the source's page cache."""
        return self._c.direct

    def read(self, fd: int, direct: int = -1) -> bool:
        """Read it from the source; False where that has another version, or not all of these bytes:
        what came before is good all the same. ``direct`` is a descriptor with O_DIRECT that is to
        be read instead, where that can be done. Raises the source's OSError."""
        return self._c.read(fd, direct)

    @property
    def elsewhere_bytes(self) -> int:
        """How much other nodes gave."""
        return self._c.elsewhere_bytes

    def read_elsewhere(self, read: object, peer: int, path: str, digests: bytes) -> int:
        """Read it from another node, before ``read``, which reads the rest; all blocks are compared
        with ``digests``. ``read`` is a capsule. ``_units.READ``, or why not all came: GONE
        (the file is not there, or ends early), WRONG, FAILED."""
        return self._c.read_elsewhere(read, peer, path, digests)

    def write(self, fd: int, seconds: float) -> bool:
        """Write what arrives to a part file; False where nothing did for so long, and there is more
        to come. Raises OSError of the tier."""
        return self._c.write(fd, seconds)

    def show(self) -> None:
        """Those who read the file without Python have just been told of it: of this, too."""
        self._c.show()

    def finish(self) -> None:
        """Nothing more arrives, as at the end of ``read``."""
        self._c.finish()

    def stop(self) -> None:
        """Nothing more of it is written, or shown to anybody."""
        self._c.stop()

    def empty(self) -> None:
        """Nobody needs its bytes any more, and nobody writes them."""
        self._c.empty()

    def peek(self, offset: int, end: int) -> bytes:
        """The bytes from ``offset`` on, as far as they are in memory: perhaps none."""
        return self._c.peek(offset, end)

    def needed(self) -> int:
        """How many bytes of blocks it takes to write what is in memory."""
        return self._c.needed()

    def stored(self) -> list[tuple[int, int]]:
        """The ranges that were written, as (start, end)."""
        return self._c.stored()

    def dropped(self) -> list[tuple[int, int]]:
        """The ranges for which there was no memory."""
        return self._c.dropped()

    def is_stored(self, offset: int) -> bool:
        """Whether this byte was written."""
        return self._c.is_stored(offset)

    def digests(self, start: int, end: int) -> bytes:
        """The digests of the blocks of ``store.checksum`` in a range that was written."""
        return self._c.digests(start, end)


def memory_bytes() -> int:
    """What all units have in memory: most of it waits for a tier."""
    return _units.memory_bytes()


def _timespec(time_ns: int) -> tuple[int, int]:
    return divmod(time_ns, 1_000_000_000)
