"""The asynchronous facade: each blocking function of the source, in a thread of its lane."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import trio

from monarchfs.engine.units import Unit
from monarchfs.metrics import DURATION_BOUNDS_NS, NS
from monarchfs.source.direct import DirectDescriptor
from monarchfs.source.lanes import Call, LaneThreads, SourceCounters, lend
from monarchfs.source.layout import Layout
from monarchfs.source.posix import (
    AttributeNames,
    AttributeNamesEach,
    Batch,
    Batches,
    Found,
    FoundEach,
    PosixSource,
)
from monarchfs.source.releases import Release, Releases
from monarchfs.system.threads import RunSync, run_sync
from monarchfs.types import DirRef, Lane, SourceStat, SourceVersion

T = TypeVar("T")
ReadResult = tuple[bytes, SourceVersion]

# Errors that answer the question asked. Others (EIO, ESTALE, ETIMEDOUT, ...) mean trouble.
_ANSWERS = frozenset(
    {
        errno.EACCES,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENODATA,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.ERANGE,
    }
)


class Source:
    """The source, for one trio run. The functions' contracts are those of PosixSource.

    A cancelled caller leaves at once; its call goes on in its thread, keeps its slot, and what it
    opens is closed. ``DEMAND`` and ``BACKGROUND`` calls never wait for each other's slots.
    ``watch`` must run for stuck calls to lend theirs: at most ``max_stuck`` slots in all, demand
    first.

    Constant: all but ``counters``. ``demand`` and ``background`` are the lanes, to be looked at.
    """

    def __init__(
        self,
        posix: PosixSource,
        *,
        demand_threads: int = 64,
        background_threads: int = 8,
        stuck_seconds: float = 1.0,
        max_stuck: int = 512,
        deadline: float = 5.0,
        behind: RunSync = run_sync,
        reads_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        """``deadline`` (seconds) is what ``responding`` goes by; ``behind`` runs BACKGROUND calls;
        ``reads_elsewhere`` says whether somebody waits for a read that does not go through here
        (``count_elsewhere``). Call it inside the trio run."""
        self.counters = SourceCounters()
        self.root = posix.root
        self.device = posix.device
        self._posix = posix
        self.releases = Releases(stuck_seconds=stuck_seconds)
        self.demand = LaneThreads(Lane.DEMAND, demand_threads, self.releases)
        self.background = LaneThreads(Lane.BACKGROUND, background_threads, self.releases)
        self._stuck_seconds = stuck_seconds
        self._max_stuck = max_stuck
        self._deadline = deadline
        self._behind = behind
        self._reads_elsewhere = reads_elsewhere
        self._token = trio.lowlevel.current_trio_token()
        self._count_late: dict[Lane, Callable[[ReadResult], None]] = {
            lane: partial(self._count_from_thread, lane) for lane in Lane
        }

    async def watch(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Lend the slots of stuck calls, and take them back; see to releases that wait; runs until
        it is cancelled."""
        task_status.started()
        while True:
            self.counters.stuck = lend(
                (self.demand, self.background), self._stuck_seconds, self._max_stuck
            )
            self.releases.go_on()
            await trio.sleep(self._stuck_seconds / 4)

    @property
    def responding(self) -> bool:
        """False while the source seems to hang: not worth waiting for with each request anew.

        True unless a DEMAND call has been out for longer than the deadline and none came back
        within that time. Whoever asks nothing of a source that is not responding never learns that
        it does again: go on asking, without waiting for it.
        """
        return not self.demand.hangs(self._deadline)

    @property
    def demand_waiting(self) -> bool:
        """Whether a DEMAND call is in the source now, those that hang left out."""
        return self._reads_elsewhere() or self.demand.moving(self._stuck_seconds)

    def count_elsewhere(self, lane: Lane, size: int, took_ns: int, counts: list[int]) -> None:
        """Reads that did not go through here: their bytes, how long they took together, and how
        many took at most so long as each of DURATION_BOUNDS_NS."""
        operations = sum(counts)
        kind = self.counters.of(lane, "read")
        self.counters.operations += operations
        self.counters.seconds += took_ns / NS
        self._count_bytes(lane, size)
        kind.operations += operations
        kind.durations.total_ns += took_ns
        # There are fewer bounds here: the shortest are missing.
        missing = len(DURATION_BOUNDS_NS) - len(kind.durations.bounds_ns)
        for bucket, count in enumerate(counts):
            kind.durations.counts[max(0, bucket - missing)] += count

    def forget(self, path: bytes) -> None:
        """Drop what is cached about a directory and all below it. Does not block."""
        self._posix.forget(path)

    def shutdown(self) -> None:
        """Close the cached directories. Does not block."""
        self._posix.shutdown()

    async def stat(self, directory: DirRef, name: bytes, lane: Lane) -> SourceStat:
        return await self._call(lane, self._posix.stat, (directory, name))

    async def readlink(self, directory: DirRef, name: bytes, lane: Lane) -> bytes:
        return await self._call(lane, self._posix.readlink, (directory, name))

    async def found(self, directory: DirRef, name: bytes, lane: Lane) -> Found:
        return await self._call(lane, self._posix.found, (directory, name))

    async def found_each(
        self,
        directory: DirRef,
        names: Sequence[bytes],
        lane: Lane,
        seconds: float = math.inf,
    ) -> FoundEach:
        """Counts as one operation per name. Some dozens of names at a time: it holds one slot."""
        found = await self._call(lane, self._posix.found_each, (directory, names, seconds))
        self._count_others(lane, "found_each", len(found))
        return found

    def _count_others(self, lane: Lane, function: str, count: int) -> None:
        """A call was made for so many names, and counted once."""
        self.counters.operations += max(0, count - 1)
        self.counters.of(lane, function).operations += max(0, count - 1)

    async def open_directory(self, directory: DirRef, lane: Lane) -> None:
        await self._call(lane, self._posix.open_directory, (directory,))

    async def open(self, directory: DirRef, name: bytes, lane: Lane) -> tuple[int, SourceStat]:
        return await self._call(lane, self._posix.open, (directory, name), _close_opened)

    async def fstat(self, fd: int, lane: Lane) -> SourceStat:
        return await self._call(lane, self._posix.fstat, (fd,))

    async def close(self, fd: int, lane: Lane) -> None:
        """Close ``fd``; if cancelled, it is closed all the same."""
        await self._call(lane, self._posix.close, (fd,), None, partial(self._posix.close, fd))

    def close_soon(self, fd: int) -> None:
        """Close ``fd`` without waiting, for clean-up: no slot. Does not block; raises nothing."""
        self.releases.soon(partial(self._posix.close, fd))

    def list(self, directory: DirRef, lane: Lane, batch: int = 1000) -> SourceListing:
        """``async with source.list(...) as batches: async for entries in batches: ...``"""
        batches = self._posix.list(directory, batch)
        return SourceListing(partial(self._next_batch, lane), batches, batch, self.releases.soon)

    async def read(self, fd: int, offset: int, size: int, lane: Lane) -> ReadResult:
        """As PosixSource.read_for_reader. After a cancelled read ``fd`` may be closed at once: the
        thread may then read something else under that number, but nobody sees it.
        """
        return await self._counted_read(lane, self._posix.read_for_reader, (fd, offset, size))

    async def read_once(self, fd: int, offset: int, size: int, lane: Lane) -> ReadResult:
        """As PosixSource.read_once, and as ``read`` when it is cancelled."""
        return await self._counted_read(lane, self._posix.read_once, (fd, offset, size))

    async def read_unit(self, fd: int, direct: DirectDescriptor, unit: Unit, lane: Lane) -> None:
        """As PosixSource.read_unit. Both descriptors may be closed after a cancelled one, too, if
        the unit was stopped."""
        dispose = partial(self._count_late_bytes, lane)
        try:
            await self._call(lane, self._posix.read_unit, (fd, direct, unit), dispose)
        except trio.Cancelled:
            raise
        except BaseException:
            self._count_bytes(lane, unit.read_bytes)
            raise
        finally:
            opens = direct.take_opens()
            self.counters.operations += opens
            self.counters.of(lane, "open").operations += opens
        self._count_bytes(lane, unit.read_bytes)

    async def touch(self, directory: DirRef, name: bytes, lane: Lane) -> None:
        await self._call(lane, self._posix.touch, (directory, name))

    async def getxattr(self, directory: DirRef, name: bytes, attribute: bytes, lane: Lane) -> bytes:
        return await self._call(lane, self._posix.getxattr, (directory, name, attribute))

    async def listxattr(self, directory: DirRef, name: bytes, lane: Lane) -> AttributeNames:
        self._count_others(lane, "listxattr", 2)
        return await self._call(lane, self._posix.listxattr, (directory, name))

    async def listxattr_each(
        self,
        directory: DirRef,
        names: Sequence[bytes],
        lane: Lane,
        seconds: float = math.inf,
    ) -> AttributeNamesEach:
        """As ``found_each``, but two operations a name: the list, and whether there is an ACL."""
        found = await self._call(lane, self._posix.listxattr_each, (directory, names, seconds))
        self._count_others(lane, "listxattr_each", 2 * len(found))
        return found

    async def access(self, directory: DirRef, name: bytes, mask: int, lane: Lane) -> bool:
        return await self._call(lane, self._posix.access, (directory, name, mask))

    @property
    def has_layouts(self) -> bool:
        """Whether it is worth to ask for the ``layout`` of a file."""
        return self._posix.has_layouts

    async def layout(self, fd: int, lane: Lane) -> Layout | None:
        return await self._call(lane, self._posix.layout, (fd,))

    async def statvfs(self, lane: Lane) -> os.statvfs_result:
        return await self._call(lane, self._posix.statvfs, ())

    async def _call(
        self,
        lane: Lane,
        fn: Callable[..., T],
        args: tuple[Any, ...],
        dispose: Callable[[T], object] | None = None,
        skipped: Callable[[], object] | None = None,
    ) -> T:
        demand = lane is Lane.DEMAND
        threads, in_thread = (self.demand, run_sync) if demand else (self.background, self._behind)
        counters = self.counters
        counters.operations += 1
        kind = counters.of(lane, fn.__name__)
        kind.operations += 1
        call = Call(threads, fn, args, dispose, skipped)
        try:
            result = await in_thread(call, abandon_on_cancel=True, limiter=threads.limiter)
        except trio.Cancelled:
            call.abandon()
            raise
        except OSError as error:
            if error.errno not in _ANSWERS:
                counters.errors += 1
                counters.errors_by.count(error.errno)
            raise
        finally:
            if call.seconds:
                counters.seconds += call.seconds
                kind.durations.observe(int(call.seconds * NS))
        return cast(T, result)

    async def _next_batch(self, lane: Lane, batches: Batches) -> Batch:
        """The next batch, empty at the end; closes ``batches`` if cancelled."""

        def close(_: object = None) -> None:
            batches.close()

        return await self._call(lane, next, (batches, []), close, close)

    async def _counted_read(
        self, lane: Lane, fn: Callable[..., ReadResult], args: tuple[Any, ...]
    ) -> ReadResult:
        result = await self._call(lane, fn, args, self._count_late[lane])
        self._count_read(lane, result)
        return result

    def _count_read(self, lane: Lane, result: ReadResult) -> None:
        self._count_bytes(lane, len(result[0]))

    def _count_bytes(self, lane: Lane, size: int) -> None:
        self.counters.read_bytes += size
        if lane is Lane.DEMAND:
            self.counters.demand_read_bytes += size
        else:
            self.counters.prefetch_read_bytes += size

    def _count_from_thread(self, lane: Lane, result: ReadResult) -> None:
        """Count a read that nobody waited for to the end: the source served it all the same."""
        self._soon(self._count_read, lane, result)

    def _count_late_bytes(self, lane: Lane, size: int) -> None:
        self._soon(self._count_bytes, lane, size)

    def _soon(self, fn: Callable[..., object], *args: object) -> None:
        """Call it on the event loop; for threads."""
        try:
            self._token.run_sync_soon(fn, *args)
        except trio.RunFinishedError:
            return  # and with it whoever could have asked


class SourceListing:
    """A directory being listed: ``async with`` closes it, ``async for`` gives its batches.

    ``_batches`` is the iterator while this object has to close it; None once it is exhausted or a
    thread that may still be using it will.
    """

    def __init__(
        self,
        fetch: Callable[[Batches], Awaitable[Batch]],
        batches: Batches,
        size: int,
        release: Callable[[Release], None],
    ) -> None:
        self._fetch = fetch
        self._size = size
        self._release = release
        self._batches: Batches | None = batches

    async def __aenter__(self) -> SourceListing:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Closing a directory may tell a server, and there may be no time to wait for that.
        if self._batches is not None:
            self._release(self._batches.close)
            self._batches = None

    def __aiter__(self) -> SourceListing:
        return self

    async def __anext__(self) -> Batch:
        batches = self._batches
        if batches is None:
            raise StopAsyncIteration
        # Until the batch is here, the iterator is the thread's.
        self._batches = None
        batch = await self._fetch(batches)
        if not batch:
            raise StopAsyncIteration
        if len(batch) == self._size:
            self._batches = batches
        return batch


def _close_opened(opened: tuple[int, SourceStat]) -> None:
    os.close(opened[0])
