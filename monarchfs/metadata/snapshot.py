"""The file that names and attributes travel in: JSON, one array a line, compressed by gzip.

================================  ================================================================
line                              holds
================================  ================================================================
``["monarchfs index", 1, SOURCE,  first: format and version, the source's path, its root's inode
ROOT_INO, TAKEN_NS]``             number, and when the walk over it began
``["d", PATH, MTIME, CTIME]``     a directory, after the one that it lies in: its path below the
                                  root (empty: the root), its times (ns) from before it was listed
``["e", [ENTRY, ...]]``           at most 100 of its entries: [name, type, inode number] (type: as
                                  in d_type), then, if the attributes are known, size, mtime_ns,
                                  ctime_ns, atime_ns, mode, nlink, uid, gid, rdev, blocks, blksize,
                                  and of a symbolic link its target
``["."]``                         the directory has no further entries
``["end", DIRECTORIES, ENTRIES]`` last: how many there were
================================  ================================================================

Bytes that are not UTF-8 are surrogates (PEP 383). The reader trusts only what the file says about
the source: it checks every value that could do harm.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, TypeAlias

from monarchfs.types import FileType, OperationError, SourceStat

FORMAT = "monarchfs index"
VERSION = 1
ENTRIES_PER_LINE = 100
"""Entries that are recorded in one step of an event loop: about a millisecond."""

MOST_LINE_BYTES = 4 << 20
_MOST_NAME_BYTES = 255
_MOST_PATH_BYTES = 1 << 16
_STAT_FIELDS = 11
_U64, _U32 = 1 << 64, 1 << 32
_LIMITS = (_U64 >> 1, None, None, None, _U32, _U32, _U32, _U32, _U64, _U64 >> 1, _U32)
"""The attributes, in order. Times may be negative and have more than 64 bits."""
_MOST_TIME = 1 << 80


class Head(NamedTuple):
    """The source of a file: its path, its root's inode number, and when it was walked, in ns since
    the epoch."""

    source: str
    root_ino: int
    taken_ns: int


class FoundName(NamedTuple):
    """A name in a directory; ``stat`` is None if its attributes are unknown."""

    name: bytes
    type: FileType
    ino: int
    stat: SourceStat | None
    target: bytes


class Begin(NamedTuple):
    """A directory begins; ``path`` has the names that lead to it from the root."""

    path: tuple[bytes, ...]
    mtime_ns: int
    ctime_ns: int


class Entries(NamedTuple):
    """Some of its entries."""

    found: list[FoundName]


class Complete(NamedTuple):
    """The directory has no further entries."""


class End(NamedTuple):
    """The end of the file."""

    directories: int
    entries: int


Record: TypeAlias = Begin | Entries | Complete | End


class MalformedSnapshot(OperationError):
    """The file is not what it should be; the message says what is wrong."""


class Writer:
    """Writes such a file. Changing: what was written."""

    def __init__(self, file: IO[bytes], head: Head) -> None:
        """``file`` stays the caller's. Methods raise OSError where it cannot be written."""
        self.directories = 0
        self.entries = 0
        # Without time and name in the header: the same dataset gives the same file.
        self._file = gzip.GzipFile("", "wb", 6, file, 0)
        self._put([FORMAT, VERSION, head.source, head.root_ino, head.taken_ns])

    def begin_directory(self, path: bytes, mtime_ns: int, ctime_ns: int) -> None:
        """A directory, after the one it lies in; ``path`` is relative to the root."""
        self.directories += 1
        self._put(["d", os.fsdecode(path), mtime_ns, ctime_ns])

    def add(self, found: list[FoundName]) -> None:
        """Entries of the directory."""
        self.entries += len(found)
        for start in range(0, len(found), ENTRIES_PER_LINE):
            part = found[start : start + ENTRIES_PER_LINE]
            self._put(["e", [encode_entry(one) for one in part]])

    def complete(self) -> None:
        """The directory has no further entries."""
        self._put(["."])

    def close(self) -> None:
        """Write the end."""
        self._put(["end", self.directories, self.entries])
        self._file.close()

    def _put(self, line: list[Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def encode_entry(found: FoundName) -> list[Any]:
    """One entry, for JSON."""
    entry: list[Any] = [os.fsdecode(found.name), int(found.type), found.ino]
    if found.stat is not None:
        entry += found.stat[2:]
        if found.target:
            entry.append(os.fsdecode(found.target))
    return entry


class Reader:
    """Reads such a file. Constant: ``head``. Each method waits for the file, and raises Malformed
    or OSError."""

    def __init__(self, file: IO[bytes]) -> None:
        """``file`` stays the caller's."""
        self._file = gzip.GzipFile(fileobj=file, mode="rb")
        line = self._line()
        match line:
            case [str(form), int(version), str(source), int(ino), int(taken_ns)]:
                if form != FORMAT:
                    raise MalformedSnapshot("it is no exported index")
                if version != VERSION:
                    raise MalformedSnapshot(
                        f"it has version {version}; this program reads {VERSION}"
                    )
                _check(0 < ino < _U64 and abs(taken_ns) < _MOST_TIME, "a number is out of range")
                self.head = Head(source, ino, taken_ns)
            case _:
                raise MalformedSnapshot("it is no exported index")

    def __iter__(self) -> Iterator[Record]:
        """All that follows. Raises Malformed if the end is missing or wrong."""
        directories = entries = 0
        while True:
            record = _record(self._line())
            match record:
                case Begin():
                    directories += 1
                case Entries(found):
                    entries += len(found)
                case End():
                    counted = (directories, entries) == (record.directories, record.entries)
                    _check(counted, "its end does not fit what it holds")
                    # The end is where its checksum is compared.
                    _check(self._ends(), "something follows its end")
                    yield record
                    return
            _check(directories > 0, "it does not begin with a directory")
            yield record

    def _ends(self) -> bool:
        return not self._read(1)

    def _read(self, most: int) -> bytes:
        try:
            return self._file.readline(most)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise MalformedSnapshot(f"it is damaged: {error}") from None

    def _line(self) -> list[Any]:
        line = self._read(MOST_LINE_BYTES)
        _check(line.endswith(b"\n"), "it is cut off, or a line is too long")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise MalformedSnapshot("a line is no JSON") from None
        _check(isinstance(found, list), "a line is no array")
        return found  # type: ignore[no-any-return]


def _record(line: list[Any]) -> Record:
    match line:
        case ["d", str(path), int(mtime_ns), int(ctime_ns)]:
            _check(abs(mtime_ns) < _MOST_TIME and abs(ctime_ns) < _MOST_TIME, "a time is too far")
            return Begin(_path(path), mtime_ns, ctime_ns)
        case ["e", list(entries)] if len(entries) <= ENTRIES_PER_LINE:
            return Entries([decode_entry(entry) for entry in entries])
        case ["."]:
            return Complete()
        case ["end", int(directories), int(entries)]:
            return End(directories, entries)
        case _:
            raise MalformedSnapshot("a line is not known")


def decode_entry(entry: object) -> FoundName:
    """What ``encode_entry`` gave. Raises Malformed for anything else."""
    match entry:
        case [str(name), int(type_), int(ino), *attributes]:
            pass
        case _:
            raise MalformedSnapshot("an entry is not known")
    _check(0 < ino < _U64, "an inode number is out of range")
    try:
        kind = FileType(type_)
    except ValueError:
        raise MalformedSnapshot(f"there is no file type {type_}") from None
    if not attributes:
        return FoundName(_name(name), kind, ino, None, b"")
    target = b""
    if len(attributes) == _STAT_FIELDS + 1 and isinstance(text := attributes.pop(), str):
        target = _bytes(text)
        _check(0 < len(target) < 4096, "a target is too long")
    _check(len(attributes) == _STAT_FIELDS, "attributes are missing")
    found = SourceStat(0, ino, *map(_number, attributes, _LIMITS))
    # Numbers are compared: a damaged mode may have no file type.
    _check(stat.S_IFMT(found.mode) >> 12 == kind, "a type is another than the mode's")
    _check(bool(target) == stat.S_ISLNK(found.mode), "a target of no symbolic link, or none of one")
    return FoundName(_name(name), kind, ino, found, target)


def _number(value: object, limit: int | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedSnapshot("an attribute is no number")
    fits = abs(value) < _MOST_TIME if limit is None else 0 <= value < limit
    _check(fits, "an attribute is out of range")
    return value


def _path(text: str) -> tuple[bytes, ...]:
    path = _bytes(text)
    _check(len(path) <= _MOST_PATH_BYTES, "a path is too long")
    return tuple(_name(os.fsdecode(name)) for name in path.split(b"/")) if path else ()


def _name(text: str) -> bytes:
    name = _bytes(text)
    good = 0 < len(name) <= _MOST_NAME_BYTES and name not in (b".", b"..")
    _check(good and not set(name) & {0, ord("/")}, f"{text!a} is no name")
    return name


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise MalformedSnapshot("a name has surrogates that stand for no byte") from None


def _check(fine: bool, otherwise: str) -> None:
    if not fine:
        raise MalformedSnapshot(otherwise)
