"""The list beside a segment: the replicas that lie in it, in case the index is lost.

A list consists of batches: a header (magic, version, number of rows, CRC-32), then its rows (name,
size, checksum, offset). The CRC covers the segment's number, the rest of the header and the rows. A
torn or damaged batch ends the list. Where rows overlap, the later one is right.
"""

from __future__ import annotations

import bisect
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterable, Sequence

from monarchfs.cache.store import files as on_disk
from monarchfs.cache.store.directory import Directory
from monarchfs.types import ReplicaLost, TierFile

MAX_BYTES = 4 << 20
"""The most that is read of a list: six times one row for each block of a segment."""

_MAGIC = b"mfsl"
_VERSION = 1
_HEADER = struct.Struct("<4sIII")
_ROW = struct.Struct("<16sQQQ")
_SEED = struct.Struct("<QII")


def batch(segment: int, rows: Sequence[TierFile]) -> bytes:
    """The bytes of one batch."""
    body = b"".join([_ROW.pack(row.name, row.size, row.checksum, row.offset) for row in rows])
    crc = zlib.crc32(body, zlib.crc32(_SEED.pack(segment, _VERSION, len(rows))))
    return _HEADER.pack(_MAGIC, _VERSION, len(rows), crc) + body


def rows(segment: int, data: bytes, made_ns: int) -> list[TierFile]:
    """The rows of the intact batches at the start of ``data``, unchecked; their allocated bytes are
    0."""
    found: list[TierFile] = []
    at = 0
    while at + _HEADER.size <= len(data):
        magic, version, count, crc = _HEADER.unpack_from(data, at)
        body = memoryview(data)[at + _HEADER.size : at + _HEADER.size + count * _ROW.size]
        if (magic, version) != (_MAGIC, _VERSION) or not count or len(body) < count * _ROW.size:
            break
        if crc != zlib.crc32(body, zlib.crc32(_SEED.pack(segment, version, count))):
            break
        found += [
            TierFile(name, checksum, size, 0, True, made_ns, segment, offset)
            for name, size, checksum, offset in _ROW.iter_unpack(body)
        ]
        at += _HEADER.size + len(body)
    return found


def sound(found: Iterable[TierFile], *, segment_bytes: int, align: int) -> list[TierFile]:
    """The plausible rows, with their allocated bytes, by rising offset.

    Leaves out rows that are empty, unaligned or beyond the segment's ``segment_bytes``, and those
    that a later row overlaps.
    """
    kept: list[TierFile] = []
    starts: list[int] = []
    for row in reversed(list(found)):
        if not row.size or row.offset % align or row.offset + row.size > segment_bytes:
            continue
        end = row.offset + -(-row.size // align) * align
        n = bisect.bisect_left(starts, row.offset)
        if n < len(starts) and starts[n] < end:
            continue
        if n and starts[n - 1] + kept[n - 1].allocated_bytes > row.offset:
            continue
        starts.insert(n, row.offset)
        kept.insert(n, row._replace(allocated_bytes=end - row.offset))
    return kept


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
                    on_disk.write_all(fd, before, memoryview(batch(segment, rows)))
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
            return file.read(MAX_BYTES), os.fstat(fd).st_mtime_ns

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
