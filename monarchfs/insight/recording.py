"""The file of ``monarchfs record``: events in compressed blocks. docs/RECORDING.md has the format.

A file without its end (the recorder was killed) is readable up to its last whole block.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from monarchfs.types import OperationError

MAGIC = b"monarchfs-record"
VERSION = 1


class Kind(IntEnum):
    """What the kernel asked for."""

    LOOKUP = 1
    OPEN = 2
    READ = 3
    RELEASE = 4


class AnsweredBy(IntEnum):
    """Where the answer came from."""

    UNKNOWN = 0
    MEMORY = 1
    TIER = 2
    PEER = 3
    SOURCE = 4
    WAITED = 5
    KERNEL = 6
    CHECKED = 7
    CHECKED_KERNEL = 8


HANDED = (AnsweredBy.KERNEL, AnsweredBy.CHECKED_KERNEL)
"""Opens that handed the file to the kernel."""


class Event(NamedTuple):
    """One request. ``begin`` counts from the recording's start; both times are seconds."""

    begin: float
    duration: float
    kind: Kind
    source_of: AnsweredBy
    ino: int
    pid: int
    offset: int
    size: int


class File(NamedTuple):
    """A file of the mount: ``path`` is relative to the mount, other bytes as lone surrogates. That
    of a directory ends with a slash, and its ``size`` is 0."""

    path: str
    size: int

    @property
    def is_directory(self) -> bool:
        return self.path.endswith("/")


EVENT = struct.Struct("<QQQfIIBBxx")
"""begin (CLOCK_MONOTONIC, ns), ino, offset, duration (s), size, pid, kind, answered by."""

BLOCK = struct.Struct("<cIII")
"""Kind of the block, bytes that follow, bytes they become, and the CRC-32 of what follows."""

HEADER, EVENTS, FILES, END = b"H", b"E", b"F", b"Z"
MOST_BLOCK_BYTES = 64 << 20
MOST_SAMPLE = 1 << 16
"""At least one of so many files is recorded."""

EVENTS_A_BLOCK = 16384
_SPREAD = 0x9E3779B97F4A7C15
_KINDS = {kind.value: kind for kind in Kind}
_ANSWERED_BY = {answer.value: answer for answer in AnsweredBy}


def sampled(ino: int, sample: int) -> bool:
    """Whether a recording of one of ``sample`` (a power of two) inode numbers has this one; as
    core/_record.c does."""
    return not (ino * _SPREAD & (1 << 64) - 1) >> 32 & (sample - 1)


def hashed(ino: int) -> int:
    """Of very many files, an analysis looks at those for which some bits of this are 0: the same
    ones in each epoch."""
    return ino * _SPREAD >> 24 & 0xFFFFFFFF


def one_of(files: int, most: int) -> int:
    """A power of two: of so many files one is looked at, so that at most ``most`` are."""
    return 1 << max(0, (files - 1) // most).bit_length()


class RecordingWriter:
    """Writes a recording. ``origin_ns`` is CLOCK_MONOTONIC at the recording's start."""

    def __init__(
        self, stream: BinaryIO, begun: float, facts: Mapping[str, Any], origin_ns: int = 0
    ) -> None:
        self._stream = stream
        self._pending = bytearray()
        self.written = stream.write(MAGIC)
        header = {"version": VERSION, "begun": begun, "origin_ns": origin_ns, "facts": dict(facts)}
        self._write_json(HEADER, header)

    def add_packed(self, events: bytes | memoryview) -> None:
        """Events as the C part packs them: EVENT, one after the other."""
        self._pending += events
        if len(self._pending) >= EVENTS_A_BLOCK * EVENT.size:
            self.flush()

    def add_files(self, files: Mapping[int, File]) -> None:
        """Files that events name; they may come before or after those."""
        if files:
            self._write_json(FILES, {str(ino): list(file) for ino, file in files.items()})

    @property
    def pending_bytes(self) -> int:
        """What is still to be compressed and written."""
        return len(self._pending)

    def flush(self) -> None:
        """What was added is in the file: a recorder that is killed now loses none of it."""
        if self._pending:
            self._write_block(EVENTS, bytes(self._pending))
            self._pending.clear()
        self._stream.flush()

    def finish(self, seconds: float, facts: Mapping[str, Any]) -> None:
        """``facts`` that are known now replace those of the header."""
        self.flush()
        self._write_json(END, {"seconds": seconds, "facts": dict(facts)})
        self._stream.flush()

    def _write_json(self, kind: bytes, value: Mapping[str, Any]) -> None:
        self._write_block(kind, json.dumps(value).encode())

    def _write_block(self, kind: bytes, content: bytes) -> None:
        packed = zlib.compress(content, 1)
        self._stream.write(BLOCK.pack(kind, len(packed), len(content), zlib.crc32(packed)))
        self._stream.write(packed)
        self.written += BLOCK.size + len(packed)


@dataclass(frozen=True)
class Recording:
    """A recording that was opened. ``events`` reads the file anew each time, a block at a time."""

    begun: float
    seconds: float
    facts: dict[str, Any]
    files: dict[int, File]
    complete: bool
    """False if the recorder was killed: ``seconds`` then ends with the last event."""
    path: Path
    origin_ns: int
    """CLOCK_MONOTONIC at the start."""
    _event_blocks: list[int] = field(repr=False)

    @property
    def events(self) -> Iterator[Event]:
        origin = self.origin_ns
        make = tuple.__new__  # as Event(), in half the time
        for content in self.blocks():
            for begin, ino, offset, duration, size, pid, kind, answer in EVENT.iter_unpack(content):
                known, by = _KINDS[kind], _ANSWERED_BY.get(answer, AnsweredBy.UNKNOWN)
                yield make(
                    Event, ((begin - origin) * 1e-9, duration, known, by, ino, pid, offset, size)
                )

    def blocks(self) -> Iterator[bytes]:
        """The packed events (EVENT), one block after the other. Sampling may have begun in the
        middle: what came before is sampled here."""
        sample = int(self.facts.get("sampled", 1))
        with self.path.open("rb") as stream:
            for position in self._event_blocks:
                stream.seek(position)
                found = _read_block(stream)
                if found is None:
                    return
                yield found[1] if sample == 1 else _only_sampled(found[1], sample)


def _only_sampled(content: bytes, sample: int) -> bytes:
    inos = array("Q", content)[1::5]
    wanted = {ino for ino in set(inos) if sampled(ino, sample)}
    size = EVENT.size
    return b"".join(
        content[number * size : (number + 1) * size]
        for number, ino in enumerate(inos)
        if ino in wanted
    )


def open_recording(path: str | os.PathLike[str]) -> Recording:
    """Reads header, file table and end; events are read when they are wanted.

    Raises OperationError for what is no recording, or one of a later release, OSError for what
    cannot be read.
    """
    place = Path(path)
    with place.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise OperationError(f"{place}: not a recording of monarchfs")
        first = _read_block(stream)
        if first is None or first[0] != HEADER:
            raise OperationError(f"{place}: the recording ends before its header does")
        header = json.loads(first[1])
        if header["version"] > VERSION:
            raise OperationError(f"{place}: written by a later release of monarchfs")
        files, blocks, end = _scan(stream)
        facts = header["facts"] | (end["facts"] if end else {})
        seconds = end["seconds"] if end else _last_moment(stream, blocks, header["origin_ns"])
    return Recording(
        header["begun"], seconds, facts, files, end is not None, place, header["origin_ns"], blocks
    )


def _scan(stream: BinaryIO) -> tuple[dict[int, File], list[int], dict[str, Any] | None]:
    """The file table, where the blocks of events are, and the end (None: cut off)."""
    files: dict[int, File] = {}
    blocks: list[int] = []
    size = os.fstat(stream.fileno()).st_size
    while True:
        position = stream.tell()
        head = stream.read(BLOCK.size)
        if len(head) < BLOCK.size:
            return files, blocks, None
        kind, length, _raw, _crc = BLOCK.unpack(head)
        if kind == EVENTS:
            if stream.seek(length, os.SEEK_CUR) > size:
                return files, blocks, None
            blocks.append(position)
            continue
        stream.seek(position)
        found = _read_block(stream)
        if found is None:
            return files, blocks, None
        if kind == FILES:
            table = json.loads(found[1])
            files.update((int(ino), File(*file)) for ino, file in table.items())
        elif kind == END:
            return files, blocks, json.loads(found[1])


def _read_block(stream: BinaryIO) -> tuple[bytes, bytes] | None:
    """Kind and content of the block that begins here; None if it is not whole."""
    head = stream.read(BLOCK.size)
    if len(head) < BLOCK.size:
        return None
    kind, length, raw, crc = BLOCK.unpack(head)
    if max(length, raw) > MOST_BLOCK_BYTES:
        return None
    packed = stream.read(length)
    if len(packed) < length or zlib.crc32(packed) != crc:
        return None
    content = zlib.decompressobj().decompress(packed, raw)
    return (kind, content) if len(content) == raw else None


def _last_moment(stream: BinaryIO, blocks: list[int], origin_ns: int) -> float:
    """When the last event ended, in seconds since the start."""
    last = 0.0
    for position in blocks[-2:]:
        stream.seek(position)
        found = _read_block(stream)
        if found is not None:
            for begin, _ino, _offset, took, *_ in EVENT.iter_unpack(found[1]):
                last = max(last, (begin - origin_ns) * 1e-9 + took)
    return last
