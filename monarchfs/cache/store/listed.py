"""The list beside a segment: the replicas that lie in it, in case the index is lost.

A list consists of batches: a header (magic, version, number of rows, CRC-32), then its rows (name,
size, checksum, offset). The CRC covers the segment's number, the rest of the header and the rows. A
torn or damaged batch ends the list. Where rows overlap, the later one is right.
"""

from __future__ import annotations

import bisect
import struct
import zlib
from collections.abc import Iterable, Sequence

from monarchfs.types import TierFile

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
