"""Reads past the page cache (O_DIRECT) of what is kept: which files are read that way.

Pages of the source are of no use to us: the bytes go into a tier, and the mount has pages of its
own. On a local file system they cost most of the processor time that a cold read takes. But what a
direct read costs differs from one file system to the next, so both ways are measured in turn, and
the slower one is left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections import deque
from statistics import median

from monarchfs.engine.units import Unit

LEAST_BYTES = 1 << 20
"""Opening the file once more would cost too much for less."""

TRIALS = 8
"""So many units are read in turn this way and that, at first and then again after ``PERIOD``."""
PERIOD = 256

SLOWER = 1.25
"""A direct read may take so many times longer: it leaves the processor and the memory to others."""

_FUSE_MAGIC = 0x65735546

_libc = ctypes.CDLL(None, use_errno=True)


class DirectReads:
    """Of one source. Changing, by any thread and each in one step: how many units were read; how
    long the last ones took, in seconds a byte; ``_possible``, None until the first one is read."""

    def __init__(self) -> None:
        self._count = 0
        self._took: dict[bool, deque[float]] = {way: deque(maxlen=TRIALS) for way in (False, True)}
        self._possible: bool | None = None

    def read(self, unit: Unit, fd: int) -> bool:
        """``unit.read``; blocks in the source."""
        size = unit.end - unit.start
        began = time.monotonic()
        direct = self._open(fd) if size >= LEAST_BYTES and self._turn(fd) else -1
        try:
            complete = unit.read(fd, direct)
        finally:
            if direct >= 0:
                os.close(direct)
        if complete and size >= LEAST_BYTES:
            self._took[unit.direct].append((time.monotonic() - began) / size)
        if direct >= 0 and not unit.direct:
            self._possible = False
        return complete

    def _turn(self, fd: int) -> bool:
        if self._possible is None:
            # The file system's own server would be told, and might read past its memory, too.
            self._possible = not _is_fuse(fd)
        if not self._possible:
            return False
        self._count += 1
        if self._count % PERIOD < TRIALS:
            return self._count % 2 == 0
        direct, cached = self._took[True], self._took[False]
        return not direct or not cached or median(direct) <= SLOWER * median(cached)

    def _open(self, fd: int) -> int:
        """Another descriptor of the same file; -1: it is read as ever."""
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._possible = False
            return -1


def _is_fuse(fd: int) -> bool:
    """By f_type, the first word of struct statfs (which is 120 bytes on 64-bit machines)."""
    buffer = ctypes.create_string_buffer(256)
    known = _libc.fstatfs(fd, buffer) == 0
    return not known or ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF == _FUSE_MAGIC
