"""The lists beside segments: which replicas lie in them (``store.listed``), and their size."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence

from monarchfs.cache.store import files as on_disk
from monarchfs.cache.store import listed
from monarchfs.cache.store.directory import Directory
from monarchfs.types import ReplicaLost, TierFile

SEGMENT_NAME = re.compile(r"[0-9a-f]{16}")
_LIST = re.compile(r"[0-9a-f]{16}\.list")


def segment_name(segment: int) -> str:
    return f"{segment:016x}"


def _list_name(segment: int) -> str:
    return f"{segment:016x}.list"


class SegmentLists:
    """Changing, under the lock, which keeps batches apart: ``_blocks``, the bytes that each list
    occupies, and their sum ``bytes``, which anybody may read.

    All methods block and raise OSError. Thread-safe.
    """

    def __init__(self, files: Directory) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._blocks: dict[int, int] = {}
        self.bytes = 0

    def count(self) -> None:
        """Find out what the lists occupy, for ``bytes``."""
        with self._lock:
            for name, st in self._files.ours():
                if _LIST.fullmatch(name):
                    self._count(int(name[:16], 16), st.st_blocks * 512)

    def append(self, segment: int, rows: Sequence[TierFile]) -> None:
        """Note replicas whose data are on the disk. The list itself is not synced."""
        if not rows:
            return
        with self._lock:
            fd = self._open(_list_name(segment))
            try:
                before = os.fstat(fd).st_size
                try:
                    on_disk.write_all(fd, before, memoryview(listed.batch(segment, rows)))
                except BaseException:
                    # Nothing that follows a torn batch is ever read.
                    os.ftruncate(fd, before)
                    raise
                finally:
                    self._count(segment, os.fstat(fd).st_blocks * 512)
            finally:
                os.close(fd)
            if self._files.stat(segment_name(segment)) is None:
                # The segment was removed meanwhile.
                self._remove(segment)

    def read(self, segment: int) -> tuple[bytes, int]:
        """At most 4 MiB of a list, and when it was last written (ns since 1970); nothing if there
        is none."""
        try:
            fd = self._files.open(_list_name(segment), on_disk.READ)
        except ReplicaLost:
            return b"", 0
        with open(fd, "rb") as file:
            return file.read(listed.MAX_BYTES), os.fstat(fd).st_mtime_ns

    def remove(self, segment: int) -> None:
        with self._lock:
            self._remove(segment)

    def _remove(self, segment: int) -> None:
        self._files.remove(_list_name(segment))
        self._count(segment, 0)

    def _open(self, file: str) -> int:
        try:
            return self._files.create(file)
        except FileExistsError:
            return self._files.open(file, on_disk.WRITE)

    def _count(self, segment: int, allocated_bytes: int) -> None:
        self.bytes += allocated_bytes - self._blocks.pop(segment, 0)
        if allocated_bytes:
            self._blocks[segment] = allocated_bytes
