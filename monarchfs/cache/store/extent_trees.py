"""What the extents of segments take on the file system, beside the data.

ext4 keeps four extents of a file in its inode. If there are more, the file pays a block for every
340. Gaps in a segment make extents. Only data on the disk have extents, so a segment is measured
after a sync.
"""

from __future__ import annotations

import errno
import os
import threading

from monarchfs.cache.store import files as on_disk
from monarchfs.cache.store.allocator import allocated
from monarchfs.cache.store.directory import Directory
from monarchfs.cache.store.segment_lists import SEGMENT_NAME
from monarchfs.types import ReplicaLost


class ExtentTrees:
    """Constant: the segments' directory, their alignment in bytes. Changing, under the lock: the
    segments that were written to or punched since they were measured; ``_blocks``, the bytes that
    each one's extents take, and their sum ``bytes``, which anybody may read. Thread-safe."""

    def __init__(self, files: Directory, align: int) -> None:
        self._files = files
        self._align = align
        self._lock = threading.Lock()
        self._changed: set[str] = set()
        self._blocks: dict[str, int] = {}
        self.bytes = 0

    def count(self) -> None:
        """Note which segments there are, for ``measure``. Raises OSError."""
        for entry in self._files.entries():
            if SEGMENT_NAME.fullmatch(entry.name):
                self.changed(entry.name)

    def changed(self, name: str) -> None:
        """A segment was written to or punched."""
        with self._lock:
            self._changed.add(name)

    def gone(self, name: str) -> None:
        """A segment was removed."""
        with self._lock:
            self._changed.discard(name)
            self._count(name, 0)

    def measure(self) -> None:
        """Look at each segment that changed. Blocks; raises OSError."""
        with self._lock:
            changed, self._changed = self._changed, set()
        for name in changed:
            try:
                taken = self._measured(name)
            except ReplicaLost:
                taken = 0
            with self._lock:
                self._count(name, taken)

    def _measured(self, name: str) -> int:
        fd = self._files.open(name, on_disk.READ)
        try:
            data = sum(allocated(end, self._align) - start for start, end in data_ranges(fd))
            return max(0, os.fstat(fd).st_blocks * 512 - data)
        finally:
            os.close(fd)

    def _count(self, name: str, taken: int) -> None:
        self.bytes += taken - self._blocks.pop(name, 0)
        if taken:
            self._blocks[name] = taken


def data_ranges(fd: int) -> list[tuple[int, int]]:
    """Start and end of each range of a file that has blocks (lseek(2), SEEK_DATA), rising."""
    ranges = []
    end = 0
    try:
        while True:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            ranges.append((start, end))
    except OSError as error:
        if error.errno != errno.ENXIO:  # no data behind ``end``
            raise
    return ranges
