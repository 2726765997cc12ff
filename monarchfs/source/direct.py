"""Reads past the page cache (O_DIRECT) of what is kept: which files are read that way.

Pages of the source are of no use to us: the bytes go into a tier, and the mount has pages of its
own. On a local file system they cost most of the processor time that a cold read takes. But what a
direct read costs differs from one file system to the next, so both ways are measured in turn, and
the slower one is left.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from statistics import median

from monarchfs.engine.units import Unit
from monarchfs.system.file_system_type import FUSE, file_system_type

LEAST_BYTES = 1 << 20
"""A file of less is not opened a second time."""

TRIALS = 8
"""So many units are read in turn this way and that, at first and then again after ``PERIOD``."""
PERIOD = 256

SLOWER = 1.25
"""A direct read may take so many times longer: it leaves the processor and the memory to others."""


class DirectDescriptor:
    """A second descriptor of one open file, with O_DIRECT. For any thread; only ``get`` blocks.

    Changing, under the lock: the descriptor, -1 where there is none; whether it was ``closed``;
    ``opens``, how often the file was opened for it and nobody has counted that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._closed = False
        self._opens = 0

    def get(self, fd: int) -> int:
        """The descriptor, opened by way of ``fd``; -1 where the file is closed by now. Raises the
        source's OSError."""
        if self._fd >= 0:
            return self._fd
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        with self._lock:
            self._opens += 1
            # Whoever closes the file says so here before: else ``fd`` may be another one's by now.
            if not self._closed and self._fd < 0:
                self._fd, opened = opened, -1
            current = self._fd
        if opened >= 0:
            os.close(opened)
        return current

    def close(self) -> int:
        """There is to be none any more; the descriptor that has to be closed, or -1."""
        with self._lock:
            self._closed = True
            fd, self._fd = self._fd, -1
        return fd

    def take_opens(self) -> int:
        with self._lock:
            opens, self._opens = self._opens, 0
        return opens


class DirectReads:
    """Of one source. Changing, by any thread and each in one step: how many units were read; how
    long the last ones took, in seconds a byte; ``_possible``, None until the first one is read."""

    def __init__(self) -> None:
        self._count = 0
        self._took: dict[bool, deque[float]] = {way: deque(maxlen=TRIALS) for way in (False, True)}
        self._possible: bool | None = None

    def read(self, unit: Unit, fd: int, descriptor: DirectDescriptor) -> bool:
        """``unit.read``; blocks in the source."""
        size = unit.end - unit.start
        began = time.monotonic()
        direct = -1
        if size >= LEAST_BYTES and self._turn(fd):
            direct = self._get(fd, descriptor)
        complete = unit.read(fd, direct)
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

    def _get(self, fd: int, descriptor: DirectDescriptor) -> int:
        try:
            return descriptor.get(fd)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._possible = False
            return -1


def _is_fuse(fd: int) -> bool:
    """Also where nobody can tell."""
    try:
        return file_system_type(fd) == FUSE
    except OSError:
        return True
