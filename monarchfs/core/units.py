"""Reads of large files in the source on behalf of their copies (_unit.c): the bytes do not come to
Python.

Two threads work on a unit at once. One calls ``read``, and whoever waits for a block of it is
answered there; the other one calls ``write``, which takes what has arrived. Readers never wait for
the second.
"""

from __future__ import annotations

from monarchfs.core import _units
from monarchfs.core._units import memory_bytes
from monarchfs.types import SourceVersion

__all__ = ["Unit", "memory_bytes"]


class Unit(_units.Unit):
    """The bytes [start, end) of a version of a file. All methods (see _units.c) may be called from
    any thread, ``read`` and ``write`` from one at a time."""

    __slots__ = ()

    def __new__(
        cls,
        ino: int,
        start: int,
        end: int,
        *,
        chunk_bytes: int,
        version: SourceVersion,
        device: int,
        readers: object = None,
        most_bytes: int = 0,
        in_requests: bool = True,
        sparse: bool = False,
    ) -> Unit:
        """``device`` is that of the source's root; ``readers`` as of ``NonresidentReads``. What
        arrives while all units have more than ``most_bytes`` in memory is dropped; 0: nothing is.
        ``in_requests``: what a request to a server brings is read at once, where ``read`` is told
        how much that is; else a block, more only if that is slow. ``sparse``: ``read`` asks where
        the source has holes (lseek(2), SEEK_DATA), and does not read them.
        """
        st_dev, st_ino, size, mtime_ns, ctime_ns = version
        numbers = st_dev or device, st_ino, size, *_timespec(mtime_ns), *_timespec(ctime_ns)
        return super().__new__(
            cls,
            ino,
            start,
            end - start,
            chunk_bytes,
            numbers,
            readers,
            most_bytes,
            in_requests,
            sparse,
        )


def _timespec(time_ns: int) -> tuple[int, int]:
    return divmod(time_ns, 1_000_000_000)
