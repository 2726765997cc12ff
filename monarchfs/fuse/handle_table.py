"""The table of open files, in memory that outlives the worker.

The kernel goes on using the handle numbers that a dead worker gave out, so the next worker must
know what they stand for. The supervisor makes the memory (``make_table``) and trusts nothing in it,
because a worker may write anything there. Only one worker uses it at a time.

Layout, in the byte order of the machine: a header of 4096 bytes, then slots of 32 bytes.

====== ======= ======================================================================
offset type    header
====== ======= ======================================================================
0      u64     MAGIC
8      u32     how many slots there are
12     u32     slots from this one on were never used
16     u64     beats: rises while the worker's event loop turns, or it checks its index
24     u64     answered: rises with each request that was answered
32     u64     the index gives out inode numbers from here on, and never one twice
40     u64     how many relay threads there are
48     u64     when a directory was last seen moved (``Recorder``), ns since 1970
56     u64     whether the source has layouts (``PosixSource``): 1 no, 2 yes, 0 not known
64     u64     who reads resident files: 1 the daemon, 2 the kernel; 0: not decided
1024   u64[64] since when each relay thread has been busy, CLOCK_MONOTONIC in ns; 0: it waits
====== ======= ======================================================================

====== ======= ======================================================================
offset type    slot
====== ======= ======================================================================
0      u64     inode number; 0: free, and nothing else counts. Written last, so that a slot
               counts when it is whole, and ends with one store
8      u64     ``unique`` of the OPEN request, without RESENT
16     u32     generation: rises when the slot is taken
20     u32     backing id: reads do not come here but go to this file; 0: they come here
24     u64     flags of the worker that uses the table (_table.h)
====== ======= ======================================================================
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from monarchfs.types import OperationError

MAGIC = int.from_bytes(b"mnrchfs1", "little")
HEADER_BYTES = 4096
MOST_SLOTS = 1 << 20
BEATS, ANSWERED, NUMBERS, THREADS, MOVED_NS, LAYOUTS = 16, 24, 32, 40, 48, 56
DATA_PATH, BUSY_SINCE = 64, 1024
MOST_THREADS = 64

RESENT = 1 << 63
"""FUSE_UNIQUE_RESEND: set in ``unique`` of a request that another worker has had before."""

_HEAD = struct.Struct("=QII")
_U64 = struct.Struct("=Q")
_SLOT = struct.Struct("=QQIIQ")
_HIGH_WATER = struct.Struct("=I")
_HIGH_WATER_AT = 12
_MOST = (1 << 64) - 1
_READ_SLOTS = 1 << 15
_BY_DAEMON, _BY_KERNEL = 1, 2


class HandleSlot(NamedTuple):
    """One open of a file, as it was answered to the kernel."""

    number: int
    ino: int
    unique: int
    backing_id: int


class Vitals(NamedTuple):
    """What a worker shows of itself in the header. ``stuck_since``: if all relay threads are at a
    request, when the last of them took its own (CLOCK_MONOTONIC, ns); else 0."""

    beats: int
    answered: int
    stuck_since: int


def read_vitals(fd: int) -> Vitals:
    """For the supervisor, which does not trust the worker: nothing is mapped. Raises OSError."""
    header = os.pread(fd, HEADER_BYTES, 0)
    beats, answered = (_U64.unpack_from(header, at)[0] for at in (BEATS, ANSWERED))
    threads = min(_U64.unpack_from(header, THREADS)[0], MOST_THREADS)
    busy = [_U64.unpack_from(header, BUSY_SINCE + 8 * n)[0] for n in range(threads)]
    return Vitals(beats, answered, max(busy) if busy and all(busy) else 0)


def make_table(slots: int = MOST_SLOTS) -> int:
    """``make_memory`` for a new, empty table."""
    fd = make_memory("monarchfs-handles", HEADER_BYTES + slots * _SLOT.size)
    os.pwrite(fd, _HEAD.pack(MAGIC, slots, 0), 0)
    return fd


def make_memory(name: str, size: int) -> int:
    """A descriptor of new, empty memory of ``size`` bytes that cannot change its size, whoever has
    it (memfd_create(2)). Takes memory only where it is written to."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def open_slots(fd: int) -> Iterator[HandleSlot]:
    """What is open, without trust in the writers of the table: nothing is mapped. Raises
    OSError."""
    used, index = _HIGH_WATER.unpack(os.pread(fd, _HIGH_WATER.size, _HIGH_WATER_AT))[0], 0
    while index < used:
        part = os.pread(fd, _READ_SLOTS * _SLOT.size, HEADER_BYTES + index * _SLOT.size)
        if not part:
            break  # there are not that many
        slots = _SLOT.iter_unpack(part[: len(part) // _SLOT.size * _SLOT.size])
        for at, (ino, unique, generation, backing_id, _) in enumerate(slots, index):
            if ino:
                yield HandleSlot(generation << 32 | at, ino, unique, backing_id)
        index += _READ_SLOTS


def backing_ids(fd: int) -> set[int]:
    """The backing ids that open files use. As ``open_slots``."""
    return {slot.backing_id for slot in open_slots(fd) if slot.backing_id}


class HandleTable:
    """A worker's view of the table, of which a process has one. Threads of the C part (_table.c)
    add to it and take from it, too.

    Constant: the C part; the memory of the header, which is written here.
    """

    def __init__(self, fd: int, hooks: ModuleType) -> None:
        """Takes over what is open in the table. ``hooks`` is the C part. Raises OperationError
        for a table of another release, OSError."""
        try:
            hooks.table_attach(fd)
        except ValueError as error:
            raise OperationError(f"{error} of this release: unmount, and mount again") from None
        self._hooks = hooks
        self._memory = mmap.mmap(fd, HEADER_BYTES)
        self._words = memoryview(self._memory).cast("Q")

    def __len__(self) -> int:
        """How many files are open."""
        return int(self._hooks.table_length())

    def __iter__(self) -> Iterator[HandleSlot]:
        """What is open, in no particular order."""
        for slot in self._hooks.table_list():
            yield HandleSlot(*slot)

    def add(self, ino: int, unique: int) -> tuple[int, int]:
        """The number of a new handle, never given out before, and the backing id that the open is
        to be answered with, 0: none. ``opened`` follows. The request ``unique`` may have been
        carried out by an earlier worker: then they are what it had. Raises OSError ENFILE where too
        many files are open."""
        number, backing_id = self._hooks.table_add(ino, unique)
        return number, backing_id

    def opened(self, number: int, *, accepted: bool) -> bool:
        """Whether the kernel accepted the answer with it. True if it has no other answer with it
        either: then it has to end."""
        return bool(self._hooks.table_opened(number, accepted))

    def end_handle(self, number: int) -> int | None:
        """The inode number of the handle, which is open no more; None if it was not."""
        ino: int | None = self._hooks.table_end(number)
        return ino

    def ino(self, number: int) -> int | None:
        """The inode number of an open handle; None for one that is not open."""
        ino: int | None = self._hooks.table_ino(number)
        return ino

    def own(self, number: int) -> bool:
        """Have this process' Python get its RELEASE; whether it is open."""
        return bool(self._hooks.table_own(number))

    # -- the header

    def beat(self) -> None:
        """Show that the event loop turns."""
        self._words[BEATS // 8] = (self._words[BEATS // 8] + 1) & _MOST

    def enter_worker(self, threads: int) -> None:
        """A new worker, with so many relay threads, none of which is at a request."""
        for index in range(MOST_THREADS):
            self._words[BUSY_SINCE // 8 + index] = 0
        self._words[THREADS // 8] = threads

    @property
    def numbers(self) -> int:
        """From where on the last worker's index gave out inode numbers; 0: there was none."""
        return self._words[NUMBERS // 8]

    @numbers.setter
    def numbers(self, first: int) -> None:
        self._words[NUMBERS // 8] = first

    @property
    def moved_ns(self) -> int:
        """When an earlier worker saw a directory moved; 0: never."""
        return self._words[MOVED_NS // 8]

    def note_moved(self, now_ns: int) -> None:
        """A directory was seen moved."""
        self._words[MOVED_NS // 8] = now_ns

    @property
    def has_layouts(self) -> bool | None:
        """What an earlier worker found of the source; None: nothing."""
        return (None, False, True)[min(self._words[LAYOUTS // 8], 2)]

    @has_layouts.setter
    def has_layouts(self, found: bool) -> None:
        self._words[LAYOUTS // 8] = 1 + found

    @property
    def kernel_reads(self) -> bool | None:
        """Whether the kernel reads the resident files of this mount; None where no worker has
        decided that yet. It cannot be changed: with free opens no opens come any more."""
        decided = self._words[DATA_PATH // 8]
        return None if decided == 0 else decided == _BY_KERNEL

    @kernel_reads.setter
    def kernel_reads(self, decided: bool) -> None:
        self._words[DATA_PATH // 8] = _BY_KERNEL if decided else _BY_DAEMON

    def close(self) -> None:
        """Give the memory back; what is open stays so."""
        self._hooks.table_detach()
        self._words.release()
        self._memory.close()
