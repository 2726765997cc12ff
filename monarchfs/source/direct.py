"""How copies read the source: past its page cache (O_DIRECT), and how much at once.

Pages of the source are of no use: the bytes go into a tier, and the mount has pages of its own. On
a local file system they cost most of the processor time of a cold read. But the cost of direct
reads differs between file systems, so both ways are measured in turn, and the slower one is given
up."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from statistics import median

from monarchfs.core.units import Unit
from monarchfs.system.file_system_type import FUSE, file_system_type, is_network

LEAST_BYTES = 1 << 20
"""A smaller file is not opened a second time."""

TRIALS = 8
"""In each ``PERIOD`` of units, the first ones are read directly and normally in turn."""
PERIOD = 256

REQUEST_BYTES = 4 << 20
"""What a client of a network file system asks a server for at once, and gets at once: Lustre's
``max_pages_per_rpc``, and not less than others ask for."""

SLOWER = 1.25
"""A direct read may take this many times longer, as it leaves processor and memory to others."""


class DirectDescriptor:
    """A second descriptor of one open file, with O_DIRECT. Thread-safe; only ``get`` blocks.

    Changing, under the lock: the descriptor, -1 where there is none; whether it was closed; the
    number of opens that nobody has counted yet."""

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
            # ``close`` is called before the file is closed, after which ``fd`` may be another file.
            if not self._closed and self._fd < 0:
                self._fd, opened = opened, -1
            current = self._fd
        if opened >= 0:
            os.close(opened)
        return current

    def close(self) -> int:
        """No descriptor is opened from now on. Returns the one that the caller has to close, or
        -1."""
        with self._lock:
            self._closed = True
            fd, self._fd = self._fd, -1
        return fd

    def take_opens(self) -> int:
        with self._lock:
            opens, self._opens = self._opens, 0
        return opens


class DirectReads:
    """Those of one source. Changing, by any thread and each in one step: the number of units read;
    the durations of the last ones, in seconds a byte, by direct or not; ``_possible`` and
    ``_request_bytes``, None until the first one is read."""

    def __init__(self) -> None:
        self._count = 0
        self._durations: dict[bool, deque[float]] = {
            way: deque(maxlen=TRIALS) for way in (False, True)
        }
        self._possible: bool | None = None
        self._request_bytes: int | None = None

    def read(self, unit: Unit, fd: int, descriptor: DirectDescriptor) -> bool:
        """``unit.read``; blocks in the source."""
        size = unit.end - unit.start
        began = time.monotonic()
        direct = -1
        if size >= LEAST_BYTES and self._turn(fd):
            direct = self._get(fd, descriptor)
        if self._request_bytes is None:
            self._request_bytes = REQUEST_BYTES if _is_network(fd) else 0
        complete = unit.read(fd, direct, self._request_bytes)
        if complete and size >= LEAST_BYTES and not unit.hole_bytes:
            self._durations[unit.direct].append((time.monotonic() - began) / size)
        if direct >= 0 and not unit.direct:
            self._possible = False
        return complete

    def _turn(self, fd: int) -> bool:
        if self._possible is None:
            # A FUSE server is told of the flag, and might bypass its own cache, too.
            self._possible = not _is_fuse(fd)
        if not self._possible:
            return False
        self._count += 1
        if self._count % PERIOD < TRIALS:
            return self._count % 2 == 0
        direct, cached = self._durations[True], self._durations[False]
        return not direct or not cached or median(direct) <= SLOWER * median(cached)

    def _get(self, fd: int, descriptor: DirectDescriptor) -> int:
        try:
            return descriptor.get(fd)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._possible = False
            return -1


def _is_network(fd: int) -> bool:
    try:
        return is_network(fd)
    except OSError:
        return False  # the read will tell


def _is_fuse(fd: int) -> bool:
    """True also where that is not known."""
    try:
        return file_system_type(fd) == FUSE
    except OSError:
        return True
