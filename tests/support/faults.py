"""A source and a tier that fail, or wait, when a test says so."""

import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import trio

from monarchfs.cache.store.replica_files import ReplicaFiles
from monarchfs.cache.store.segments import SegmentFiles
from monarchfs.cache.store.tier import Tier
from monarchfs.core.units import Unit
from monarchfs.source import posix
from monarchfs.source.direct import DirectDescriptor
from monarchfs.source.posix import Batches, Found, FoundEach, PosixSource, SourceEntry
from monarchfs.types import Data, DirRef, IndexWriteError, SourceStat, SourceVersion

P = ParamSpec("P")
T = TypeVar("T")


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
        with self._lock:
            if self._is_open:
                return
            event = threading.Event()
            self._waiting.append(event)
        with suppress(trio.RunFinishedError):  # the test may have seen who waits, and ended
            self._token.run_sync_soon(self._tell)
        assert event.wait(60), "the test never opened the gate"

    def _tell(self) -> None:
        self._arrival.set()
        self._arrival = trio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def arrived(self, count: int = 1) -> None:
        while len(self._waiting) < count:
            await self._arrival.wait()

    def release(self, which: int = 0) -> None:
        with self._lock:
            event = self._waiting.pop(which)
        self.passed += 1
        event.set()

    def open(self) -> None:
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
        self._hooks.clear()
        for gate in self._gates:
            gate.open()


def met(method: Callable[P, T], *before: str, after: str = "") -> Callable[P, T]:
    """A method of an object with ``faults``, which has these happen before and after it. Looked up
    at each call: a test may have replaced it."""
    owner = getattr(sys.modules[method.__module__], method.__qualname__.rpartition(".")[0])
    called = method.__name__

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        this: Any = args[0]
        for name in before:
            this.faults.meet(name)
        result: T = getattr(owner, called)(*args, **kwargs)
        if after:
            this.faults.meet(after)
        return result

    return call


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
        self,
        directory: DirRef,
        names: Sequence[bytes],
        seconds: float = math.inf,
        opens_bytes: int = 0,
    ) -> FoundEach:
        self.faults.meet("found_each")
        if self.faults.expects("found"):
            return posix._each(partial(self.found, directory), names, seconds)
        there = [self._in_source(name) for name in names]
        return super().found_each(directory, there, seconds, opens_bytes)

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

    stat = met(PosixSource.stat, "stat")
    getxattr = met(PosixSource.getxattr, "getxattr")
    access = met(PosixSource.access, "access")
    statvfs = met(PosixSource.statvfs, "statvfs")
    layout = met(PosixSource.layout, "layout")

    def open(self, directory: DirRef, name: bytes) -> tuple[int, SourceStat]:
        self.faults.meet("open")
        opened = super().open(directory, self._in_source(name))
        self.faults.meet("after_open")
        return opened

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

    open = met(SegmentFiles.open, "open_replica")
    punch = met(SegmentFiles.punch, "remove", after="after_remove")
    remove = met(SegmentFiles.remove, "remove", after="after_remove")


class FaultyFiles(ReplicaFiles):
    def __init__(self, dir_fd: int, path: str, uid: int, faults: Faults) -> None:
        self.faults = faults
        super().__init__(dir_fd, path, uid)

    write_whole = met(ReplicaFiles.write_whole, "write_whole", "after_write")
    create_part = met(ReplicaFiles.create_part, "create_part")
    open_part = met(ReplicaFiles.open_part, "open_part")
    open = met(ReplicaFiles.open, "open_replica")
    write_unit = met(ReplicaFiles.write_unit, "write", after="after_write")
    finish_part = met(ReplicaFiles.finish_part, "finish_part", after="after_finish")
    allocated = met(ReplicaFiles.allocated, "allocated")
    remove = met(ReplicaFiles.remove, "remove", after="after_remove")
    remove_part = met(ReplicaFiles.remove_part, "remove_part")


class FaultyTier(Tier):
    def __init__(self, dir_fd: int, path: str, tier_id: int) -> None:
        self.faults = Faults()
        super().__init__(dir_fd, path, tier_id, directory=path)

    def _new_files(self, dir_fd: int) -> ReplicaFiles:
        return FaultyFiles(dir_fd, self.path, os.geteuid(), self.faults)

    def _new_segments(self, dir_fd: int) -> SegmentFiles:
        return FaultySegments(dir_fd, self.path, os.geteuid(), self.faults)

    probe = met(Tier.probe, "probe")
    space = met(Tier.space, "space")
    sync = met(Tier.sync, "sync")


def close_directories(posix: PosixSource, path: bytes = b"") -> None:
    """Those of ``path`` and of everything below it; those in use as soon as they are not."""
    handles, below = posix._dirs, path + b"/"
    with handles._lock:
        cached = list(handles._handles)
    for ref in cached:
        if not path or ref.path == path or ref.path.startswith(below):
            handle = handles.known(ref)
            if handle is not None:
                handles.release(handle, drop=True)


def keep_no_directories(posix: PosixSource) -> None:
    """The same of all, at the end: a thread that hung may open another one later."""
    posix._dirs._limit = 0
    close_directories(posix)
