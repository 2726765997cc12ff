"""What nodes ask and tell each other: the formats.

All of it comes from another node: a decoder raises PeerError for whatever no node would say. What
is about replicas is binary, little-endian. Names and attributes are JSON. An entry is an array:
name, type (as in d_type), inode number; then, if the attributes are known, size, mtime_ns,
ctime_ns, atime_ns, mode, nlink, uid, gid, rdev, blocks, blksize, and of a symbolic link its target.
Bytes that are not UTF-8 are surrogates (PEP 383).
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from monarchfs.types import (
    MOST_LISTED,
    FileType,
    MonarchError,
    PeerListing,
    PeerNames,
    SourceStat,
)


class PeerError(MonarchError):
    """A peer does not answer, or its answer is wrong. It never reaches a reader."""


def is_path(path: bytes) -> bool:
    """Whether ``path`` is a path below the source."""
    return all(part not in (b"", b".", b"..") for part in path.split(b"/")) and b"\0" not in path


# -- small replicas: what a node has

PAGE_ROWS = 1024
"""The most rows in an answer: a few milliseconds of the event loop's time."""

_MAGIC = b"mfpc"
_FORMAT = 1
_HEADER = struct.Struct("<4sHHQQI")
_ROW = struct.Struct("<16sQIIQQ")


class Row(NamedTuple):
    """A replica in a segment of a tier. ``segment`` 0: there is no such replica any more."""

    name: bytes
    checksum: int = 0
    size: int = 0
    tier: int = 0
    segment: int = 0
    offset: int = 0


class PageState(IntEnum):
    """What an answer says beside its rows."""

    MORE = 0
    """There are more rows now."""
    ALL = 1
    """These were all, until something changes."""
    AGAIN = 2
    """The changes asked for are not known any more: list all again."""


class Page(NamedTuple):
    """An answer. ``sequence``: the number of the first change that it does not contain."""

    state: PageState
    incarnation: int
    sequence: int
    rows: Sequence[Row]


def encode_page(page: Page) -> bytes:
    """The bytes of an answer."""
    head = _HEADER.pack(
        _MAGIC, _FORMAT, page.state, page.incarnation, page.sequence, len(page.rows)
    )
    return head + b"".join([_ROW.pack(*row) for row in page.rows])


def decode_page(data: bytes) -> Page:
    """Raises PeerError if it is none."""
    if len(data) < _HEADER.size:
        raise PeerError("the peer's catalogue is cut off")
    magic, form, state, incarnation, sequence, count = _HEADER.unpack_from(data)
    if (magic, form) != (_MAGIC, _FORMAT) or state not in tuple(PageState):
        raise PeerError("the peer's catalogue is of another release")
    if len(data) != _HEADER.size + count * _ROW.size or count > PAGE_ROWS:
        raise PeerError("the peer's catalogue has not the length that it says")
    rows = [Row(*values) for values in _ROW.iter_unpack(memoryview(data)[_HEADER.size :])]
    return Page(PageState(state), incarnation, sequence, rows)


# -- small replicas: what a node wants

MAX_WANTED = 128
"""The most files in a request."""

_WANTED_REPLICA = struct.Struct("<16sQH")


class WantedReplica(NamedTuple):
    """A file that a peer wants: the name of its replica, its size, its path below the source."""

    name: bytes
    size: int
    path: bytes


def encode_wanted(wanted: Sequence[WantedReplica]) -> bytes:
    """The request."""
    return _encode_rows(wanted, _WANTED_REPLICA)


def decode_wanted(data: bytes) -> list[WantedReplica]:
    """Raises PeerError if it is no request."""
    return [WantedReplica(*row) for row in _decoded_rows(data, _WANTED_REPLICA, MAX_WANTED)]


def _encode_rows(rows: Iterable[tuple[Any, ...]], form: struct.Struct) -> bytes:
    """Rows that end with a path. Its length is the last field of ``form``."""
    return b"".join([form.pack(*row, len(path)) + path for *row, path in rows])


def _decoded_rows(data: bytes, form: struct.Struct, most: int) -> Iterator[tuple[Any, ...]]:
    at = count = 0
    while at < len(data):
        if len(data) - at < form.size or count == most:
            raise PeerError("a question is cut off, or too long")
        *row, length = form.unpack_from(data, at)
        at += form.size
        path = data[at : at + length]
        if len(path) < length or not is_path(path):
            raise PeerError("a question has a path that is none")
        yield *row, path
        at += length
        count += 1


# -- spans of large files: a question names some, and the answer has a row for each, in their order

MOST_SPANS = 16
"""The most spans in a question. The answer about each has some 4 KiB."""

_WANTED_SPAN = struct.Struct("<16sIIIBH")
_PATH = re.compile(r"(/[a-z0-9.]+)*")
_HELD = struct.Struct("<?HI")


class WantedSpan(NamedTuple):
    """A span of a file that a node wants: the name of the file's replica; the part of the span that
    a reader will probably want soon, if any; the priority of the copy; the file's path below the
    source."""

    name: bytes
    span: int
    offset: int
    size: int
    priority: int
    path: bytes


class HeldSpan(NamedTuple):
    """What an owner has of a span. ``coming``: it is copying what it lacks. ``path``: the file's
    path for nginx. ``digests``: 8 bytes for each block of 128 KiB, zeros if it lacks the block;
    empty if it has no block."""

    coming: bool
    path: str = ""
    digests: bytes = b""


def encode_spans(wanted: Sequence[WantedSpan]) -> bytes:
    """The question."""
    return _encode_rows(wanted, _WANTED_SPAN)


def decode_spans(data: bytes) -> list[WantedSpan]:
    """Raises PeerError if it is no question."""
    return [WantedSpan(*row) for row in _decoded_rows(data, _WANTED_SPAN, MOST_SPANS)]


def encode_held(held: Sequence[HeldSpan]) -> bytes:
    """The answer."""
    rows = []
    for one in held:
        path = one.path.encode()
        rows.append(_HELD.pack(one.coming, len(path), len(one.digests)) + path + one.digests)
    return b"".join(rows)


def decode_held(data: bytes, count: int) -> list[HeldSpan]:
    """The answer to a question about ``count`` spans. Raises PeerError if it is none."""
    held: list[HeldSpan] = []
    at = 0
    try:
        for _ in range(count):
            coming, length, size = _HELD.unpack_from(data, at)
            at += _HELD.size
            path = data[at : at + length].decode("ascii")
            at += length
            held.append(HeldSpan(coming, path, data[at : at + size]))
            at += size
    except (struct.error, ValueError):
        raise PeerError("the answer about spans is none") from None
    # The path follows a host's name in a URL, and must not change the host.
    if at != len(data) or not all(_PATH.fullmatch(one.path) for one in held):
        raise PeerError("the answer about spans is none")
    return held


# -- names and attributes

MOST_NAMES = 256
"""In one question."""

_MOST_AGE = 1 << 63


class NamesQuestion(NamedTuple):
    """Names of the directory with this path and inode number, none for its listing; the answer may
    be so old when the question is sent. ``demand``: a reader waits."""

    path: bytes
    ino: int
    names: list[bytes]
    most_age_ns: int
    demand: bool


def encode_names_question(question: NamesQuestion) -> bytes:
    """The question."""
    path, ino, names, *rest = question
    return _json([os.fsdecode(path), ino, list(map(os.fsdecode, names)), *rest])


def decode_names_question(data: bytes) -> NamesQuestion:
    """Raises PeerError if it is none."""
    match _parsed(data):
        case [str(path), int(ino), list(names), int(most_age_ns), bool(demand)] if (
            0 < ino < 1 << 64 and 0 <= most_age_ns < _MOST_AGE and len(names) <= MOST_NAMES
        ):
            found = NamesQuestion(_bytes(path), ino, list(map(_bytes, names)), most_age_ns, demand)
            if (not found.path or is_path(found.path)) and all(map(_is_name, found.names)):
                return found
    raise PeerError("a question about names is none")


def encode_names(answer: PeerNames) -> bytes:
    """The answer."""
    rows = [
        [*_named(name, FileType.of_mode(found.mode), found.ino), *found[2:], *_target(target)]
        for name, found, target in answer.found
    ]
    return _json([answer.age_ns, rows])


def decode_names(data: bytes) -> PeerNames:
    """Raises PeerError if it is none."""
    match _parsed(data):
        case [int(age_ns), list(rows)] if 0 <= age_ns < _MOST_AGE and len(rows) <= MOST_NAMES:
            each = map(_entry, rows)
            return PeerNames(
                age_ns,
                [(name, found, target) for name, _, _, found, target in each if found is not None],
            )
    raise PeerError("an answer about names is none")


def encode_listing(listing: PeerListing | None) -> bytes:
    """The answer; None: there is nothing to say."""
    if listing is None:
        return _json([])
    *others, entries = listing
    rows = [_named(*entry) for entry in entries]
    return _json([*others, rows])


def decode_listing(data: bytes) -> PeerListing:
    """Raises PeerError if it is none."""
    match _parsed(data):
        case [int(age_ns), int(mtime_ns), int(ctime_ns), bool(lists_all), list(rows)] if (
            0 <= age_ns < _MOST_AGE
            and abs(mtime_ns) < _MOST_AGE
            and abs(ctime_ns) < _MOST_AGE
            and len(rows) <= MOST_LISTED
        ):
            entries = [_entry(row)[:3] for row in rows]
            if len({name for name, *_ in entries}) == len(entries):
                return PeerListing(age_ns, mtime_ns, ctime_ns, lists_all, entries)
    raise PeerError("there is no listing")


_STAT_FIELDS = 11
_U64, _U32 = 1 << 64, 1 << 32
_LIMITS = (_U64 >> 1, None, None, None, _U32, _U32, _U32, _U32, _U64, _U64 >> 1, _U32)
"""The attributes, in order. Times may be negative and have more than 64 bits."""
_MOST_TIME = 1 << 80
_MOST_TARGET_BYTES = 4095


def _named(name: bytes, kind: FileType, ino: int) -> list[Any]:
    return [os.fsdecode(name), int(kind), ino]


def _target(target: bytes) -> list[str]:
    return [os.fsdecode(target)] if target else []


def _entry(row: object) -> tuple[bytes, FileType, int, SourceStat | None, bytes]:
    """Name, type, inode number, attributes if they are known, and a symbolic link's target. Raises
    PeerError for anything else."""
    match row:
        case [str(text), int(type_), int(ino), *attributes]:
            name = _bytes(text)
        case _:
            raise PeerError("an entry is not known")
    _check(_is_name(name), "a name is none")
    _check(0 < ino < _U64, "an inode number is out of range")
    try:
        kind = FileType(type_)
    except ValueError:
        raise PeerError(f"there is no file type {type_}") from None
    if not attributes:
        return name, kind, ino, None, b""
    target = b""
    if len(attributes) == _STAT_FIELDS + 1:
        target = _bytes(attributes.pop())
        _check(0 < len(target) <= _MOST_TARGET_BYTES, "a target has a wrong length")
    _check(len(attributes) == _STAT_FIELDS, "attributes are missing")
    found = SourceStat(0, ino, *map(_number, attributes, _LIMITS))
    # Numbers are compared: a wrong mode may have no file type.
    _check(stat.S_IFMT(found.mode) >> 12 == kind, "a type is another than the mode's")
    _check(bool(target) == stat.S_ISLNK(found.mode), "a target of no symbolic link, or none of one")
    return name, kind, ino, found, target


def _number(value: object, limit: int | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise PeerError("an attribute is no number")
    fits = abs(value) < _MOST_TIME if limit is None else 0 <= value < limit
    _check(fits, "an attribute is out of range")
    return value


def _check(fine: bool, otherwise: str) -> None:
    if not fine:
        raise PeerError(f"an answer about names is none: {otherwise}")


def _json(value: list[Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _parsed(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise PeerError("it is no JSON") from None


def _bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise PeerError("a name is no text")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise PeerError("a name has surrogates that stand for no byte") from None


def _is_name(name: bytes) -> bool:
    return len(name) <= 255 and b"/" not in name and is_path(name)
