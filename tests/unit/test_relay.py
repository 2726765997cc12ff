"""The threads of the C part, with a socket in the place of the kernel."""

import ctypes
import errno
import os
import random
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import psutil
import pytest

from monarchfs.cache.store.files import fan_out, replica_file
from monarchfs.fuse import packing
from monarchfs.fuse.handle_table import ANSWERED, make_table
from monarchfs.fuse.session import hooks
from monarchfs.metadata.freshness import FOREVER_SECONDS
from monarchfs.metadata.tree import Entry
from monarchfs.types import Node, SourceStat
from tests.support.mounting import REPOSITORY, wait_for
from tests.support.programs import execute

BOUNDS = (10**9, 2 * 10**9)
IN = struct.Struct("=IIQQIIIHH")
READ = struct.Struct("=QQIIQII")
OPEN = struct.Struct("=II")
RELEASE = struct.Struct("=QIIQ")
IOCTL = struct.Struct("=QIIQII")
OUT = struct.Struct("=IiQ")
OPENED = struct.Struct("=QIi")
FUSE_LOOKUP = 1
FUSE_OPEN, FUSE_READ, FUSE_RELEASE, FUSE_IOCTL = 14, 15, 18, 39
KEEP_CACHE = 2
ALWAYS = (1 << 63) - 1
MOST_FILES = 4
MINUTE_NS = 60 * 10**9


class File(NamedTuple):
    """A replica in a tier's directory."""

    ino: int
    path: Path
    name: bytes
    checksum: int
    data: bytes
    segment: int = 0
    offset: int = 0


class Reading(ctypes.Structure):
    """As in _resident.h."""

    _fields_ = (
        *(("ino", ctypes.c_uint64), ("start", ctypes.c_uint64), ("size", ctypes.c_uint64)),
        *(("stamp", ctypes.c_uint32), ("fd", ctypes.c_int), ("place", ctypes.c_int)),
    )


class Threads:
    """Of one process, which can start them once only: hence the functions that a process runs."""

    def __init__(self, directory: Path) -> None:
        # Not by start_relay: that needs a session of libfuse.
        self._open_before = open_files()
        self.hooks: ModuleType = hooks
        self._numbers: dict[str, int] = {}
        self._durations: dict[str, tuple[int, list[int]]] = {}
        self.tier = directory / "tier"
        self.tier.mkdir()
        self.table = make_table(16)
        hooks.table_attach(self.table)
        hooks.resident_start(MOST_FILES, os.geteuid(), MINUTE_NS, False, True)
        self.serve(True)
        self.kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.kernel.settimeout(10)
        for end in (self.kernel, device):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.library = library = ctypes.CDLL(hooks.__file__, use_errno=True)
        library.counts_start((ctypes.c_uint64 * len(BOUNDS))(*BOUNDS), len(BOUNDS))
        news = library.relay_start(device.detach(), 4, 8, False)
        assert news >= 0

    @property
    def numbers(self) -> dict[str, int]:
        self._count()
        return self._numbers

    def opened(self) -> tuple[int, int, int]:
        """Resident files: opens, the sizes of those files, and opens that nobody is told of."""
        numbers = self.numbers
        return numbers["resident_opens"], numbers["resident_bytes"], numbers["unlisted_opens"]

    @property
    def durations(self) -> dict[str, tuple[int, list[int]]]:
        self._count()
        return self._durations

    def _count(self) -> None:
        numbers, durations = hooks.counts_take()
        for name, more in numbers.items():
            self._numbers[name] = self._numbers.get(name, 0) + more
        for name, (total_ns, counts) in durations.items():
            before_ns, before = self._durations.get(name, (0, [0] * len(counts)))
            added = [one + other for one, other in zip(before, counts, strict=True)]
            self._durations[name] = before_ns + total_ns, added

    def serve(self, readable: bool) -> None:
        fd = os.open(self.tier, os.O_RDONLY | os.O_DIRECTORY)
        self.hooks.resident_tier(3, fd if readable else -1)
        os.close(fd)

    def make(self, ino: int, size: int) -> File:
        rng = random.Random(ino)
        name, checksum, data = rng.randbytes(16), rng.getrandbits(64), rng.randbytes(size)
        path = self.tier / fan_out(name) / replica_file(name, checksum)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return File(ino, path, name, checksum, data)

    def put(self, file: File, until_ns: int = ALWAYS) -> None:
        replica = (3, file.name, file.checksum, len(file.data))
        place = (file.segment, file.offset)
        assert self.hooks.resident_put(file.ino, *replica, until_ns, False, *place)

    def make_segment(self, number: int, sizes: dict[int, int]) -> dict[int, File]:
        """A segment with a record of such a size for each inode; other bytes between them."""
        path = self.tier / "segments" / f"{number:016x}"
        path.parent.mkdir(exist_ok=True)
        files, content = {}, b""
        for ino, size in sizes.items():
            rng = random.Random(ino)
            content += b"\xee" * (4096 + -len(content) % 4096)
            files[ino] = File(
                ino, path, rng.randbytes(16), ino, rng.randbytes(size), number, len(content)
            )
            content += files[ino].data
        path.write_bytes(content + b"\xee" * 4096)
        return files

    def enter(self, ino: int) -> Reading:
        """Begin to read it, as a thread."""
        reading, enter = Reading(), self.library.resident_enter
        enter.restype = ctypes.c_bool
        assert enter(ctypes.c_uint64(ino), ctypes.c_uint64(0), ctypes.byref(reading))
        return reading

    def added(self, ino: int, size: int = 10_000, until_ns: int = ALWAYS) -> File:
        file = self.make(ino, size)
        self.put(file, until_ns)
        return file

    def send(self, opcode: int, unique: int, ino: int, body: bytes) -> None:
        self.kernel.send(IN.pack(IN.size + len(body), opcode, unique, ino, 0, 0, 1, 0, 0) + body)

    def ask(self, unique: int, ino: int, offset: int, size: int) -> None:
        self.send(FUSE_READ, unique, ino, READ.pack(0, offset, size, 0, 0, 0, 0))

    def answer(self) -> tuple[int, int, bytes]:
        """unique, errno and what follows. What comes out of a pipe comes in several messages."""
        message = self.kernel.recv(2 << 20)
        length, error, unique = OUT.unpack_from(message)
        while len(message) < length:
            message += self.kernel.recv(2 << 20)
        assert length == len(message)
        return unique, -error, message[OUT.size :]

    def read(self, file: File, offset: int = 0, size: int = 1 << 20) -> None:
        self.ask(2, file.ino, offset, size)
        assert self.answer() == (2, 0, file.data[offset : offset + size])

    def read_many(self, file: File, places: list[tuple[int, int]], at_once: int = 5) -> int:
        """So many at once, in whatever order they come back. How many bytes."""
        asked: dict[int, bytes] = {}
        total = 0
        for number in range(len(places) + at_once):
            if number >= at_once and asked:
                unique, error, got = self.answer()
                assert (error, got) == (0, asked.pop(unique))
                total += len(got)
            if number < len(places):
                offset, size = places[number]
                self.ask(2 * number + 2, file.ino, offset, size)
                asked[2 * number + 2] = file.data[offset : offset + size]
        assert not asked
        return total

    def open(self, ino: int, unique: int = 2, flags: int = os.O_RDONLY) -> tuple[int, int]:
        """Number and flags."""
        self.send(FUSE_OPEN, unique, ino, OPEN.pack(flags, 0))
        back, error, body = self.answer()
        assert (back, error) == (unique, 0)
        number, flags, _ = OPENED.unpack(body)
        return number, flags

    def release(self, number: int) -> None:
        self.send(FUSE_RELEASE, 4, 1, RELEASE.pack(number, 0, 0, 0))
        assert self.answer() == (4, 0, b"")

    def left_to_python(self, send: Callable[[], None]) -> None:
        before = self.numbers["queued"]
        send()
        wait_for(lambda: self.numbers["queued"] != before, "Python to get the request")
        assert self.numbers["queued"] == before + 1

    def read_by_python(self, ino: int, offset: int = 0, size: int = 10) -> None:
        self.left_to_python(lambda: self.ask(99, ino, offset, size))

    def opened_by_python(self, ino: int, flags: int = os.O_RDONLY) -> None:
        self.left_to_python(lambda: self.send(FUSE_OPEN, 99, ino, OPEN.pack(flags, 0)))

    def retire(self, *files: File) -> None:
        """All that there are."""
        for file in files:
            wait_for(partial(self.hooks.resident_retire, file.ino), "the last reader to leave")
        self.wait_open(0)

    def wait_open(self, count: int) -> None:
        """Until so many files are open: who reads one closes it after the answer."""
        wait_for(lambda: len(self.kept_open()) == count, "the last readers to have left")

    def kept_open(self) -> list[str]:
        return [path for path, _fd in self.open_files() if "/tier" in path]

    def open_files(self) -> set[tuple[str, int]]:
        """But for those that were open before: Python 3.14 has a library open."""
        return open_files() - self._open_before


def open_files() -> set[tuple[str, int]]:
    return {(entry.path, entry.fd) for entry in psutil.Process().open_files()}


def reads(directory: Path) -> None:
    threads = Threads(directory)
    file = threads.added(7, 3_000_000)
    # All of what is asked for, but at the end of the file; through a pipe, and not.
    places = [(0, 1), (1, 4096), (131071, 1 << 20), (0, 1 << 20), (5000, 128 << 10)]
    places += [(len(file.data) - 10, 100), (len(file.data) - 100_000, 1 << 20), (1 << 40, 9)]
    for offset, size in places:
        threads.read(file, offset, size)
    relayed = sum(len(file.data[offset : offset + size]) for offset, size in places)

    # Many at once, in whatever order they come back.
    relayed += threads.read_many(
        file, [(n * 7919 % len(file.data), 1 + n * 977 % 30_000) for n in range(1, 200)]
    )
    # Counted after the answer.
    least = len(places) + 199
    wait_for(lambda: sum(threads.durations["read_local"][1]) >= least, "all reads to be counted")
    assert threads.numbers["answered_bytes"] == relayed
    assert sum(threads.durations["read_local"][1]) == len(places) + 199
    assert not sum(threads.durations["open_local"][1])

    # Anything else is Python's.
    threads.read_by_python(8)
    threads.left_to_python(lambda: threads.send(FUSE_LOOKUP, 4, 1, b"a\0"))
    threads.hooks.resident_stop(7)
    threads.read_by_python(7)
    threads.wait_open(0)
    answered = struct.pack("=Q", len(places) + 199)
    wait_for(lambda: os.pread(threads.table, 8, ANSWERED) == answered, "all answers to be counted")

    # Whether it is a terminal (Python asks at each open), its flags, its stripes.
    queued = threads.numbers["queued"]
    for command in (termios.TCGETS, 0x80086601, 0x4008669B):
        threads.send(FUSE_IOCTL, 6, 7, IOCTL.pack(0, 0, command, 0, 0, 0))
        assert threads.answer() == (6, errno.ENOTTY, b"")
    assert threads.numbers["queued"] == queued


def opens(directory: Path) -> None:
    threads = Threads(directory)
    now = time.time_ns()
    file = threads.added(7, until_ns=ALWAYS)
    number, flags = threads.open(7, unique=20)
    assert flags == KEEP_CACHE
    threads.read(file)
    assert not threads.hooks.resident_retire(7), "evicted while it is open"
    again, _ = threads.open(7, unique=22)
    resent, _ = threads.open(7, unique=20 | 1 << 63)
    assert resent == number
    assert again != number
    assert threads.hooks.table_length() == 2
    assert {slot[:3] for slot in threads.hooks.table_list()} == {(number, 7, 20), (again, 7, 22)}
    for unknown in (number, number, 12345 << 32):
        threads.release(unknown)
    assert threads.hooks.resident_used(7)
    # One that Python has something for is ended there.
    assert threads.hooks.table_own(again)
    threads.left_to_python(lambda: threads.send(FUSE_RELEASE, 4, 7, RELEASE.pack(again, 0, 0, 0)))
    assert threads.hooks.table_end(again) == 7
    assert threads.hooks.table_length() == 0

    # Opened by Python: where it is too late to believe what is known, or the clock was set back.
    for until_ns in (0, now - 1, now + 2 * MINUTE_NS):
        threads.put(file, until_ns)
        threads.opened_by_python(7)
        threads.read(file)
    threads.hooks.resident_renew(9, ALWAYS)
    threads.opened_by_python(9)
    threads.put(file, 0)
    threads.hooks.resident_renew(7, ALWAYS)
    threads.opened_by_python(7)
    threads.put(file, now - 1)
    threads.hooks.resident_renew(7, now + MINUTE_NS // 2)
    number, _ = threads.open(7, unique=24)
    threads.hooks.resident_expire(7)
    threads.opened_by_python(7)
    threads.read(file)
    threads.release(number)
    threads.put(file)
    threads.opened_by_python(7, os.O_RDWR)
    threads.opened_by_python(9)
    threads.hooks.answer_opens(False)
    threads.opened_by_python(7)
    threads.hooks.answer_opens(True)
    threads.release(threads.open(7)[0])

    # More than the table takes.
    numbers = [threads.open(7, unique=100 + 2 * n)[0] for n in range(16)]
    threads.opened_by_python(7)
    for number in numbers:
        threads.release(number)
    told = threads.hooks.resident_opened()
    assert set(told) == {7}
    assert threads.hooks.resident_opened() == []
    count, size, lost = threads.opened()
    # A repeated one counts again, and one that found no room.
    assert (count, size, lost) == (len(told), len(told) * 10_000, 0)
    assert count == 22


def trouble(directory: Path) -> None:
    threads = Threads(directory)
    # What lies there is not what it was, or not ours.
    file = threads.added(7)
    threads.read(file)
    os.truncate(file.path, 5_000)
    threads.read_by_python(7, 4_000, 2_000)
    os.truncate(file.path, 20_000)
    threads.hooks.resident_stop(7)
    threads.put(file)
    threads.read_by_python(7)
    large = threads.added(8, 300_000)
    threads.read(large, 0, 200_000)
    os.truncate(large.path, 100_000)
    threads.read_by_python(8, 0, 200_000)
    threads.read(threads.added(80, 300_000), 0, 200_000)  # nothing of that was left in a pipe
    for ino, spoil in enumerate((os.unlink, to_link, to_fifo, to_directory, other_owner), 20):
        bad = threads.added(ino)
        spoil(bad.path)
        threads.read_by_python(ino)
    linked = threads.added(30)
    to_link(linked.path.parent)
    threads.read_by_python(30)

    # Another replica of the same inode: the same version at another place.
    first = threads.added(9)
    threads.read(first)
    second = threads.make(10, 10_000)._replace(ino=9)
    threads.put(second)
    threads.read(second)
    wait_for(lambda: str(first.path) not in threads.kept_open(), "its last reader to have left", 10)

    # A tier that is not read; one whose directory is another one.
    threads.serve(False)
    threads.read_by_python(9)
    threads.opened_by_python(9)
    threads.wait_open(0)
    threads.serve(True)
    threads.read(second)
    threads.tier.rename(directory / "old-tier")
    threads.tier.mkdir()
    threads.read(second)
    threads.serve(True)
    threads.read_by_python(9)

    # No more descriptors than were allowed, whatever is read.
    files = [threads.added(ino, 50_000) for ino in range(100, 140)]
    for each in random.Random(1).choices(files, k=120):
        threads.read(each, 10_000, 40_000)
    threads.wait_open(MOST_FILES)
    threads.retire(*files)


def segments(directory: Path) -> None:
    threads = Threads(directory)
    hooks = threads.hooks
    number = 0xFEDCBA9876543210
    files = threads.make_segment(number, {7: 10_000, 8: 110_000, 9: 1 << 20, 10: 0, 11: 4096})
    for file in files.values():
        threads.put(file)
    # Nothing of what lies before or behind a record, through a pipe or not.
    for file in files.values():
        size = len(file.data)
        for offset in (0, 1, 5000, max(0, size - 10), max(0, size - 50_000), size, 1 << 40):
            threads.read(file, offset)
    threads.wait_open(1)  # one descriptor for all of them
    assert threads.kept_open() == [str(files[7].path)]
    wait_for(lambda: hooks.resident_retire(10), "its last reader to have left", 10)
    threads.read_by_python(10)
    threads.read(files[9])
    threads.release(threads.open(7)[0])

    # Another place is another replica; in a file of its own, too.
    other = threads.make_segment(number + 2, {50: 5000, 8: 5000})[8]
    threads.put(other)
    threads.read(other)
    threads.put(other._replace(offset=4096))
    threads.ask(2, 8, 0, 1 << 20)
    assert threads.answer()[2] != other.data, "it was told of another place"
    own = threads.added(8, 110_000)
    threads.read(own)
    threads.put(files[8])
    threads.read(files[8], 50_000, 50_000)
    threads.wait_open(1)  # what was left is not kept open
    assert threads.kept_open() == [str(files[8].path)]

    # Not all of it is there, or it is not ours.
    for ino, spoil in enumerate(
        (os.unlink, to_link, to_fifo, to_directory, other_owner, shortened), 20
    ):
        bad = threads.make_segment(ino, {ino: 5000})[ino]
        threads.put(bad)
        threads.read(bad)
        hooks.resident_stop(ino)
        spoil(bad.path)
        threads.put(bad)
        threads.read_by_python(ino)
    place = (3, bytes(16), 0, len(files[11].data), ALWAYS, False, number)
    assert not hooks.resident_put(30, *place, 1 << 32)

    # No more descriptors than were allowed, and none of a segment that nobody has records in.
    many = [threads.make_segment(n, {2 * n: 9000, 2 * n + 1: 70_000}) for n in range(100, 110)]
    every = [file for segment in many for file in segment.values()]
    for file in every:
        threads.put(file)
    for file in random.Random(1).choices(every, k=100):
        threads.read(file)
    threads.wait_open(MOST_FILES)
    threads.retire(*every, *files.values())


def holding(directory: Path) -> None:
    """A record is held for as long as it is being read, whatever becomes of its inode."""
    threads = Threads(directory)
    hooks, leave = threads.hooks, threads.library.resident_leave
    places = [threads.make_segment(number, {7: 5000})[7] for number in (1, 2)]
    threads.put(places[0])
    first = threads.enter(7)
    assert (first.start, first.size) == (places[0].offset, 5000)
    assert not hooks.resident_retire(7)
    hooks.resident_stop(7)
    assert hooks.resident_reading(7)
    assert not hooks.resident_retire(7)
    # It comes back at another place, and is read there, also when the tier goes.
    threads.put(places[1])
    second = threads.enter(7)
    leave(ctypes.byref(first))
    assert not hooks.resident_reading(7)
    assert not hooks.resident_retire(7)
    assert os.pread(second.fd, 5000, second.start) == places[1].data
    threads.serve(False)
    hooks.resident_stop(7)
    assert hooks.resident_reading(7)
    leave(ctypes.byref(second))
    assert not hooks.resident_reading(7)
    assert hooks.resident_retire(7)
    assert not threads.kept_open()


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5000)


def to_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def other_owner(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        path.unlink()


def from_source(directory: Path) -> None:
    threads = Threads(directory)
    hooks = threads.hooks
    path = directory / "source"
    data = random.Random(3).randbytes(1_000_000)
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    file = File(7, path, b"", 0, data)

    def put() -> bool:
        st = os.fstat(fd)
        good: bool = hooks.nonresident_source(7, fd, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
        return good

    threads.read_by_python(7)
    assert put()
    assert not hooks.nonresident_used(7)
    places = [(0, 1), (4095, 100_000), (0, 1 << 20), (len(data) - 5, 4096)]
    for offset, size in places:
        threads.read(file, offset, size)
    assert hooks.nonresident_used(7)
    # Many at once, more than there are threads.
    threads.read_many(file, [(n * 1000, 20_000) for n in range(2, 42, 2)], at_once=20)
    asked = sum(len(data[offset : offset + size]) for offset, size in places) + 20 * 20_000
    # Counted after the answer.
    least = len(places) + 20
    for counted in ("source", "read_source"):
        wait_for(lambda: sum(threads.durations[counted][1]) >= least, "all reads to be counted")  # noqa: B023
    assert threads.numbers["answered_bytes"] == threads.numbers["source_bytes"] == asked
    assert not sum(threads.durations["read_local"][1]), "they are counted apart"

    # Behind the end, of another size, after a change: Python's.
    threads.read_by_python(7, len(data), 10)
    threads.read_by_python(7, 1 << 40, 10)
    os.utime(path)
    threads.read_by_python(7)
    assert not put(), "an inode number is one version"
    hooks.nonresident_stop(7)
    assert put()
    threads.read(file, 5, 10)
    with path.open("ab") as end_of_it:
        end_of_it.write(b"more")
    threads.read_by_python(7)
    os.truncate(path, len(data))
    hooks.nonresident_stop(7)
    assert put()
    threads.read(file, 100, 10)
    hooks.nonresident_stop(7)
    threads.read_by_python(7)
    # What is resident comes from the tier.
    assert put()
    threads.read(threads.added(7))
    hooks.resident_stop(7)
    threads.read(file)
    hooks.nonresident_no_source(7)
    wait_for(lambda: len(threads.open_files()) <= 1, "the last reader to close it")
    assert hooks.waiting_leave_older(0, 0) == 0


MISSING, CLAIMED, PRESENT = range(3)
LET_GO = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
ARRIVED = ctypes.CFUNCTYPE(
    *(ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t),
    *(LET_GO, ctypes.c_void_p),
)
"""Of struct nonresident_units (_nonresident.h)."""


def filling(directory: Path) -> None:
    threads = Threads(directory)
    hooks = threads.hooks
    chunk = 4096
    data = random.Random(4).randbytes(9 * chunk + 100)
    file = File(7, directory, b"", 0, data)
    part = (directory / "part").open("wb+")
    part.truncate(len(data))

    def write(first: int, last: int) -> None:
        os.pwrite(part.fileno(), data[first * chunk : last * chunk], first * chunk)

    def waiting() -> int:
        count: int = hooks.waiting_leave_older(0, 0)
        return count

    def wait(unique: int, offset: int, size: int, together: int = 1) -> None:
        threads.ask(unique, 7, offset, size)
        # One that was answered is counted for a moment.
        wait_for(lambda: waiting() == together, "the requests to wait")

    in_use: dict[int, object] = {}
    release = LET_GO(lambda start: in_use.pop(start or 0) and None)

    def arrive(first: int, last: int) -> bool:
        """As a unit that has read these chunks."""
        start, end = first * chunk, min(last * chunk, len(data))
        place = ctypes.pythonapi.PyCapsule_GetPointer
        place.restype, place.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        functions = place(hooks.nonresident_units(), b"monarchfs.core._session.nonresident_units")
        arrived = ARRIVED(ctypes.c_void_p.from_address(functions).value or 0)
        piece = ctypes.create_string_buffer(data[start:end], end - start)
        taken: bool = arrived(7, start, piece, end - start, release, start)
        if taken:
            in_use[start] = piece
        return taken

    def answered(*expected: tuple[int, int, int]) -> None:
        answers = [threads.answer() for _ in expected]
        got = {unique: body for unique, error, body in answers if not error}
        assert got == {unique: data[at : at + size] for unique, at, size in expected}

    assert not hooks.nonresident_fill(7, len(data), chunk, bytes(9))
    assert hooks.nonresident_fill(
        7, len(data), chunk, bytes([*[PRESENT] * 2, *[CLAIMED] * 4, *bytes(4)])
    )
    assert not hooks.nonresident_part(8, part.fileno())
    threads.read_by_python(7, 0, 10)  # where it is has not been said
    write(0, 2)
    assert hooks.nonresident_part(7, part.fileno())
    assert not hooks.nonresident_part(7, part.fileno())
    threads.read(file, 100, 2 * chunk - 100)
    threads.read_by_python(7, 6 * chunk, 10)
    threads.read_by_python(7, 5 * chunk, 2 * chunk)
    threads.read_by_python(7, len(data), 10)

    # Those who wait are answered from what has arrived, but those who wait for more.
    wait(2, 2 * chunk, chunk)
    wait(4, 3 * chunk + 5, chunk, together=2)
    wait(6, chunk, 2 * chunk, together=3)
    wait(8, 4 * chunk, 2 * chunk, together=4)
    assert arrive(2, 3)
    assert arrive(3, 5)
    assert not arrive(3, 4), "these are there already"
    answered((2, 2 * chunk, chunk), (4, 3 * chunk + 5, chunk))
    threads.read(file, 3 * chunk + 1, chunk)  # from memory: it is not in the part
    assert waiting() == 2, "one lies half in the part, and is read there in a moment"
    threads.read(file, 2 * chunk + 7, 2 * chunk)  # from two pieces
    assert in_use.keys() == {2 * chunk, 3 * chunk}
    write(2, 5)
    hooks.nonresident_chunks(7, 2, 5, PRESENT)
    wait_for(lambda: not in_use, "the threads that answered to be done with the pieces")
    answered((6, chunk, 2 * chunk))
    threads.read(file, 0, 5 * chunk)
    # The last one can be read from the part when all of it is there.
    write(5, 6)
    hooks.nonresident_chunks(7, 5, 6, PRESENT)
    answered((8, 4 * chunk, 2 * chunk))
    assert hooks.nonresident_used(7)

    # What failed is Python's.
    hooks.nonresident_chunks(7, 6, 10, CLAIMED)
    wait(10, 6 * chunk, 10)
    threads.left_to_python(lambda: hooks.nonresident_chunks(7, 6, 8, MISSING))
    wait(10, 8 * chunk, 1 << 20)
    assert arrive(9, 10)
    assert arrive(8, 9)
    answered((10, 8 * chunk, chunk + 100))
    # And what takes long.
    hooks.nonresident_chunks(7, 8, 10, CLAIMED)
    wait(12, 9 * chunk, 100)
    threads.left_to_python(lambda: hooks.waiting_leave_older((1 << 64) - 1, 0))
    wait(14, 9 * chunk, 100)

    # Who reads as far as is said is told of, once.
    hooks.nonresident_ahead(7, 3)
    threads.left_to_python(lambda: threads.read(file, 0, 2 * chunk + 1))
    queued = threads.numbers["queued"]
    threads.read(file, 0, 5 * chunk)
    assert threads.numbers["queued"] == queued

    # The end: nobody waits for ever, and nothing stays open.
    threads.left_to_python(lambda: hooks.nonresident_stop(7))
    threads.read_by_python(7, 0, 10)
    assert not arrive(0, 1)
    assert not in_use
    part.close()
    wait_for(lambda: not threads.open_files(), "all files to be closed")


def names(directory: Path) -> None:
    threads = Threads(directory)
    stat = SourceStat(0, 9, 1000, -1, 5, 10**18, 0o100640, 2, 3, 4, 0, 8, 4096)
    node = Node(77, stat, 1, b"a", 0, False, b"")
    expected = packing.entry(Entry(node, 0, 0))
    for name, seconds, left in ((b"a", 100.0, 99), (b"ever", FOREVER_SECONDS, FOREVER_SECONDS)):
        threads.hooks.names_put(1, name, seconds, False, node)
        threads.send(FUSE_LOOKUP, 4, 1, name + b"\0")
        unique, error, body = threads.answer()
        assert (unique, error) == (4, 0)
        assert body[:16] + body[40:] == expected[:16] + expected[40:]
        assert struct.unpack_from("=QQ", body, 16) == (left, left)

    # Anything else is Python's.
    threads.hooks.names_put(1, b"over", 1e-9, False, node)
    for parent, name in ((2, b"a\0"), (1, b"ab\0"), (1, b"over\0"), (1, b"a"), (1, b"")):
        threads.left_to_python(partial(threads.send, FUSE_LOOKUP, 6, parent, name))
    threads.hooks.names_forget_ino(77)
    threads.left_to_python(lambda: threads.send(FUSE_LOOKUP, 6, 1, b"a\0"))
    wait_for(lambda: sum(threads.durations["lookup"][1]) == 2, "both answers to be counted")


def revalidating(directory: Path) -> None:
    """Names about which the source is asked each time, and opens of what they stand for."""
    threads = Threads(directory)
    source = directory / "source"
    source.mkdir()
    hooks.revalidate_start(source.stat().st_dev)
    fd = os.open(source, os.O_PATH)
    hooks.directories_put(0, 5, fd, b"")
    os.close(fd)
    path = source / "a"

    def entered(ino: int = 7, asked_about: bool = True) -> bytes:
        """What the answer to a look-up begins and ends with."""
        stat = SourceStat.of(path.stat(), source.stat().st_dev)
        node = Node(ino, stat, 5, b"a", 0, False, b"")
        hooks.names_put(5, b"a", 0.0, asked_about, node)
        return packing.entry(Entry(node, 0, 1))[:40]

    def look_up(parent: int = 5, name: bytes = b"a") -> None:
        threads.send(FUSE_LOOKUP, 4, parent, name + b"\0")

    def found(expected: bytes) -> None:
        look_up()
        unique, error, body = threads.answer()
        assert (unique, error, body[:40]) == (4, 0, expected)

    def other() -> None:
        (source / "b").write_bytes(b"other")
        (source / "b").rename(path)

    def rewrite() -> None:
        """Nothing but its bytes and its ctime is otherwise, as after ``cp -p``."""
        before = path.stat()

        def is_later() -> bool:
            path.write_bytes(b"x" * before.st_size)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            return path.stat().st_ctime_ns != before.st_ctime_ns

        wait_for(is_later, "the next tick")

    path.write_bytes(b"1234567")
    found(entered())
    (source / "d").mkdir()
    found(entered())  # whatever becomes of the directory
    # Anything else that the source says is Python's to find out.
    changes: list[Callable[[], object]] = [
        rewrite,
        partial(path.write_bytes, b"longer than that"),
        partial(path.chmod, 0o600),
        partial(os.utime, path, ns=(0, 12345)),
        partial(os.link, path, source / "c"),
        other,
        path.unlink,
    ]
    for change in changes:
        entered()
        change()
        threads.left_to_python(look_up)
    other()
    entered(asked_about=False)
    threads.left_to_python(look_up)
    entered()
    threads.left_to_python(partial(look_up, 6))
    threads.left_to_python(partial(look_up, 5, b"b"))
    hooks.names_forget(5, b"a")
    threads.left_to_python(look_up)

    # An open, once its time is over. What was never to be opened here is not.
    file = threads.added(7, until_ns=time.time_ns() - 10**9)
    threads.opened_by_python(7)
    entered()
    number, flags = threads.open(7)
    assert flags == KEEP_CACHE
    threads.read(file)
    threads.release(number)
    threads.opened_by_python(7, os.O_RDWR)
    threads.put(file, 0)
    threads.opened_by_python(7)
    threads.put(file, time.time_ns() - 10**9)
    entered(8)  # the name stands for another
    threads.opened_by_python(7)
    entered()
    other()
    threads.opened_by_python(7)
    entered()
    hooks.resident_stop(7)
    threads.opened_by_python(7)
    asked = len(changes) + 4  # the source, in all
    wait_for(lambda: sum(threads.durations["stat"][1]) == asked, "all questions to be counted")
    assert sum(threads.durations["lookup_source"][1]) == 2


@pytest.mark.parametrize(
    "what",
    [*(reads, opens, trouble, segments, holding), *(from_source, filling, names, revalidating)],
)
def test_the_threads(what: Callable[[Path], None], tmp_path: Path) -> None:
    name = f"tests.unit.test_relay as t; t.{what.__name__}"
    code = f"import sys; from pathlib import Path; import {name}(Path(sys.argv[1])); print('done')"
    done = execute([sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
