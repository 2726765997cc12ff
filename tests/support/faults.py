"""A source and a tier that fail, or wait, when a test says so."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import trio

from monarchfs.core.units import Unit
from monarchfs.source import posix
from monarchfs.source.direct import DirectDescriptor
from monarchfs.source.posix import Batches, Found, FoundEach, PosixSource, SourceEntry
from monarchfs.store.replica_files import ReplicaFiles
from monarchfs.store.segments import SegmentFiles
from monarchfs.store.tier import Tier
from monarchfs.types import Data, DirRef, IndexWriteError, SourceStat, SourceVersion, Space


class Gate:
    """Where threads wait until the test, on the event loop, lets them go."""

    def __init__(self) -> None:
        self.passed = 0
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()
        self._waiting: list[threading.Event] = []
        self._is_open = False
        self._arrival = trio.Event()

    def meet(self) -> None:
        """For the threads."""
        with self._lock:
            if self._is_open:
                return
            event = threading.Event()
            self._waiting.append(event)
        self._token.run_sync_soon(self._tell)
        assert event.wait(60), "the test never opened the gate"

    def _tell(self) -> None:
        self._arrival.set()
        self._arrival = trio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def arrived(self, count: int = 1) -> None:
        """Until so many wait here."""
        while len(self._waiting) < count:
            await self._arrival.wait()

    def release(self, which: int = 0) -> None:
        """Let one go."""
        with self._lock:
            event = self._waiting.pop(which)
        self.passed += 1
        event.set()

    def open(self) -> None:
        """Let all go, now and later."""
        with self._lock:
            self._is_open = True
        while self._waiting:
            self.release()


class Faults:
    """What is to happen before the calls of an object, by the name of the call."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self._hooks: dict[str, list[Callable[[], object]]] = {}
        self._gates: list[Gate] = []

    def meet(self, call: str) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        for hook in list(self._hooks.get(call, ())):
            hook()

    def expects(self, call: str) -> bool:
        """Whether anything is to happen before such a call."""
        return bool(self._hooks.get(call))

    def before(self, call: str, hook: Callable[[], object]) -> None:
        self._hooks.setdefault(call, []).append(hook)

    def fail(self, call: str, code: int, *, after: int = 0, times: int = 1 << 30) -> None:
        """Raise OSError from the next ``times`` calls after the next ``after``."""
        first = self.calls.get(call, 0) + after + 1

        def hook() -> None:
            if first <= self.calls[call] < first + times:
                raise OSError(code, os.strerror(code))

        self.before(call, hook)

    def gate(self, *calls: str) -> Gate:
        gate = Gate()
        self._gates.append(gate)
        for call in calls:
            self.before(call, gate.meet)
        return gate

    def end(self) -> None:
        """No faults any more, and nobody waits."""
        self._hooks.clear()
        for gate in self._gates:
            gate.open()


def disk_is_full(*_: object, **_options: object) -> NoReturn:
    """In place of what writes to the index."""
    raise IndexWriteError("the disk is full")


class Read(NamedTuple):
    """Bytes that the source handed out, of the file with this st_ino."""

    ino: int
    offset: int
    size: int


class FaultySource(PosixSource):
    """``reads`` has every read of a file that the source answered. ``lists_as`` says which inode
    number a directory lists for an entry, in place of the true one. Names of ``unlisted`` are in no
    listing. ``finds_any_case``: a name is found by its small letters. Then the file system is not
    known to list all names."""

    def __init__(self, root_fd: int) -> None:
        super().__init__(root_fd)
        self.faults = Faults()
        self.reads: list[Read] = []
        self.lists_as: Callable[[SourceEntry], int] = lambda entry: entry.ino
        self.unlisted: frozenset[bytes] = frozenset()
        self.finds_any_case = False

    def found(self, directory: DirRef, name: bytes) -> Found:
        self.faults.meet("found")
        return super().found(directory, self._in_source(name))

    def found_each(
        self, directory: DirRef, names: Sequence[bytes], seconds: float = math.inf
    ) -> FoundEach:
        self.faults.meet("found_each")
        if self.faults.expects("found"):
            return posix._each(partial(self.found, directory), names, seconds)
        return super().found_each(directory, [self._in_source(n) for n in names], seconds)

    def list(self, directory: DirRef, batch: int) -> Batches:
        self.faults.meet("list")
        for entries in super().list(directory, batch):
            yield [
                entry._replace(ino=self.lists_as(entry))
                for entry in entries
                if entry.name not in self.unlisted
            ]

    def known_to_list_all(self, directory: DirRef) -> bool | None:
        lists_less = self.unlisted or self.finds_any_case
        return False if lists_less else super().known_to_list_all(directory)

    def _in_source(self, name: bytes) -> bytes:
        return name.lower() if self.finds_any_case else name

    def stat(self, directory: DirRef, name: bytes) -> SourceStat:
        self.faults.meet("stat")
        return super().stat(directory, name)

    def open(self, directory: DirRef, name: bytes) -> tuple[int, SourceStat]:
        self.faults.meet("open")
        return super().open(directory, self._in_source(name))

    def getxattr(self, directory: DirRef, name: bytes, attribute: bytes) -> bytes:
        self.faults.meet("getxattr")
        return super().getxattr(directory, name, attribute)

    def access(self, directory: DirRef, name: bytes, mask: int) -> bool:
        self.faults.meet("access")
        return super().access(directory, name, mask)

    def statvfs(self) -> os.statvfs_result:
        self.faults.meet("statvfs")
        return super().statvfs()

    def gate_at(self, path: Path) -> Gate:
        """Where whoever is about to read this file waits."""
        return self.faults.gate(f"read {path.stat().st_ino}")

    def read(self, fd: int, offset: int, size: int) -> tuple[bytes, SourceVersion]:
        self.faults.meet("read")
        self.faults.meet(f"read {os.fstat(fd).st_ino}")
        data, version = super().read(fd, offset, size)
        self.reads.append(Read(version.ino, offset, len(data)))
        self.faults.meet("after_read")
        return data, version

    def read_unit(self, fd: int, direct: DirectDescriptor, unit: Unit) -> int:
        self.faults.meet("read")
        try:
            return super().read_unit(fd, direct, unit)
        finally:
            if unit.read_bytes:
                self.reads.append(Read(os.fstat(fd).st_ino, unit.start, unit.read_bytes))
            self.faults.meet("after_read")


class FaultySegments(SegmentFiles):
    """With the faults of a tier, under the names of what it does with files."""

    def __init__(self, dir_fd: int, path: str, uid: int, faults: Faults) -> None:
        self.faults = faults
        super().__init__(dir_fd, path, uid)

    def write_each(self, records: Sequence[tuple[int, int, Data]]) -> list[int | OSError]:
        results: list[int | OSError] = []
        for record in records:
            try:
                self.faults.meet("write_whole")
                self.faults.meet("after_write")
                results += super().write_each([record])
            except OSError as error:
                results.append(error)
        return results

    def open(self, segment: int, end: int) -> int:
        self.faults.meet("open_replica")
        return super().open(segment, end)

    def punch(self, segment: int, ranges: Sequence[tuple[int, int]]) -> None:
        self.faults.meet("remove")
        super().punch(segment, ranges)
        self.faults.meet("after_remove")

    def remove(self, segment: int) -> None:
        self.faults.meet("remove")
        super().remove(segment)
        self.faults.meet("after_remove")


class FaultyFiles(ReplicaFiles):
    def __init__(self, dir_fd: int, path: str, uid: int, faults: Faults) -> None:
        self.faults = faults
        super().__init__(dir_fd, path, uid)

    def write_whole(self, name: bytes, data: Data) -> tuple[int, int]:
        self.faults.meet("write_whole")
        self.faults.meet("after_write")
        return super().write_whole(name, data)

    def create_part(self, name: bytes, size: int) -> int:
        self.faults.meet("create_part")
        return super().create_part(name, size)

    def open_part(self, name: bytes, size: int) -> int:
        self.faults.meet("open_part")
        return super().open_part(name, size)

    def open(self, name: bytes, checksum: int, size: int | None) -> int:
        self.faults.meet("open_replica")
        return super().open(name, checksum, size)

    def write_unit(self, fd: int, unit: Unit) -> bool:
        self.faults.meet("write")
        done = super().write_unit(fd, unit)
        self.faults.meet("after_write")
        return done

    def finish_part(self, fd: int, name: bytes, checksum: int) -> int:
        self.faults.meet("finish_part")
        allocated = super().finish_part(fd, name, checksum)
        self.faults.meet("after_finish")
        return allocated

    def allocated(self, fd: int) -> int:
        self.faults.meet("allocated")
        return super().allocated(fd)

    def remove(self, name: bytes, checksum: int) -> None:
        self.faults.meet("remove")
        super().remove(name, checksum)
        self.faults.meet("after_remove")

    def remove_part(self, name: bytes) -> None:
        self.faults.meet("remove_part")
        super().remove_part(name)


class FaultyTier(Tier):
    def __init__(self, dir_fd: int, path: str, tier_id: int) -> None:
        self.faults = Faults()
        super().__init__(dir_fd, path, tier_id, directory=path)

    def _new_files(self, dir_fd: int) -> ReplicaFiles:
        return FaultyFiles(dir_fd, self.path, os.geteuid(), self.faults)

    def _new_segments(self, dir_fd: int) -> SegmentFiles:
        return FaultySegments(dir_fd, self.path, os.geteuid(), self.faults)

    def probe(self) -> None:
        self.faults.meet("probe")
        super().probe()

    def space(self) -> Space:
        self.faults.meet("space")
        return super().space()

    def sync(self) -> None:
        self.faults.meet("sync")
        super().sync()
