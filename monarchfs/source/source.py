"""The source, asynchronous: each blocking function of ``PosixSource`` is called in a thread of its
lane, counted and timed."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import trio

from monarchfs.core.units import Unit
from monarchfs.metrics import DURATION_BOUNDS_NS, NS
from monarchfs.source.direct import DirectDescriptor
from monarchfs.source.lanes import Call, LaneThreads, SourceCounters, lend
from monarchfs.source.posix import AttributeNames, AttributeNamesEach, Batch, FoundEach, PosixSource
from monarchfs.source.releases import Releases
from monarchfs.system.threads import RunSync, run_sync
from monarchfs.types import DirRef, Lane, SourceChanged, SourceStat, SourceVersion

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")

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

_DISCONNECTED = frozenset({errno.EIO, errno.ENOTCONN, errno.ESHUTDOWN})
"""What a client answers while it has no server: so does one of Lustre that was evicted, for up to
two seconds (docs/LUSTRE.md)."""

TRANSIENT = _DISCONNECTED | {
    errno.EAGAIN,
    errno.EHOSTDOWN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
"""Errors of what may work in a moment. Whoever nobody waits for tries again then."""

_TRIED_AGAIN = frozenset(
    {"stat", "found", "open", "read_for_reader", "read_once", "readlink", "access", "getxattr"}
)
"""Functions of ``posix`` that may be called twice in place of once."""

OPENED_SECONDS = 5.0
"""A file that was opened to learn its attributes is closed after that, if nobody reads it."""

ONE_MORE_TRY_EVERY_SECONDS = 10.0
"""After a second try that failed like the first, errors are final for so long: readers of what is
broken for good do not wait each time."""


class Source:
    """The lanes of one trio run, and what was asked of the source: ``call`` of a function of
    ``posix``, or the method here of what takes more than that.

    A cancelled caller leaves at once; its call goes on in its thread, keeps its slot, and what it
    opens is closed. ``DEMAND`` and ``BACKGROUND`` calls never wait for each other's slots.
    ``watch`` must run for stuck calls to lend theirs: at most ``max_stuck`` slots in all, demand
    first. A DEMAND call that finds the source disconnected is made once more.

    Constant: all but ``counters`` and ``_final_until`` (trio's clock), before which errors are
    final. ``demand`` and ``background`` are the lanes, to be looked at.
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
        reconnect_seconds: float = 2.0,
        behind: RunSync = run_sync,
        reads_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        """``deadline`` (seconds) is that of ``responding``; ``reconnect_seconds`` pass before a
        call is made once more; ``behind`` runs BACKGROUND calls;
        ``reads_elsewhere`` says whether a reader waits for a read that does not go through here
        (``count_elsewhere``). To be called inside the trio run."""
        self.posix = posix
        self.counters = SourceCounters()
        self.root = posix.root
        self.device = posix.device
        self.has_layouts = posix.has_layouts
        """Whether it is worth to ask for the layout of a file."""
        self.on_local_disk = os.major(posix.device) != 0
        """Whether it lies on a block device of this node. Network file systems have none."""
        self.releases = Releases(stuck_seconds=stuck_seconds)
        self.demand = LaneThreads(Lane.DEMAND, demand_threads, self.releases)
        self.background = LaneThreads(Lane.BACKGROUND, background_threads, self.releases)
        self._stuck_seconds = stuck_seconds
        self._max_stuck = max_stuck
        self._deadline = deadline
        self._reconnect_seconds = reconnect_seconds
        self._final_until = 0.0
        self._behind = behind
        self._reads_elsewhere = reads_elsewhere
        self._token = trio.lowlevel.current_trio_token()

    async def watch(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Lend the slots of stuck calls and take them back, and start threads for releases that
        wait, until cancelled."""
        task_status.started()
        while True:
            self.counters.stuck = lend(
                (self.demand, self.background), self._stuck_seconds, self._max_stuck
            )
            self.releases.go_on()
            for fd in self.posix.stale_descriptors(OPENED_SECONDS):
                self.close_soon(fd)
            await trio.sleep(self._stuck_seconds / 4)

    @property
    def responding(self) -> bool:
        """False while the source seems to hang, so that not every request waits for it anew.

        True unless a DEMAND call has been out for longer than the deadline and none came back
        within that time. Only further calls show that the source responds again: go on asking,
        without waiting for the answer.
        """
        return not self.demand.hangs(self._deadline)

    @property
    def demand_waiting(self) -> bool:
        """Whether a DEMAND call that does not hang is in the source now."""
        return self._reads_elsewhere() or self.demand.moving(self._stuck_seconds)

    @property
    def reads_for_readers(self) -> tuple[int, int]:
        """How many reads were made for readers, and their bytes."""
        reads = self.counters.of(Lane.DEMAND, "read").operations
        return reads, self.counters.demand_read_bytes

    def count_elsewhere(
        self, lane: Lane, function: str, size: int, duration_ns: int, counts: Sequence[int]
    ) -> None:
        """Calls like those of a function of ``posix`` that did not go through here: the bytes that
        they read, the time that they took together, and how many took at most as long as each of
        DURATION_BOUNDS_NS."""
        operations = sum(counts)
        kind = self.counters.of(lane, function)
        self.counters.operations += operations
        self.counters.seconds += duration_ns / NS
        self._count_bytes(lane, size)
        kind.operations += operations
        kind.durations.total_ns += duration_ns
        # There are fewer bounds here: the shortest are missing.
        missing = len(DURATION_BOUNDS_NS) - len(kind.durations.bounds_ns)
        for bucket, count in enumerate(counts):
            kind.durations.counts[max(0, bucket - missing)] += count

    async def call(
        self,
        lane: Lane,
        fn: Callable[[Unpack[Ts]], T],
        *args: Unpack[Ts],
        dispose: Callable[[T], object] | None = None,
        skipped: Callable[[], object] | None = None,
    ) -> T:
        """What a function of ``posix`` returns or raises. ``dispose`` and ``skipped`` as of
        ``Call``."""
        try:
            return await self._call(lane, fn, args, dispose, skipped)
        except OSError as error:
            if (
                error.errno not in _DISCONNECTED
                or lane is not Lane.DEMAND
                or fn.__name__ not in _TRIED_AGAIN
                or trio.current_time() < self._final_until
            ):
                raise
        await trio.sleep(self._reconnect_seconds)
        try:
            return await self._call(lane, fn, args, dispose, skipped)
        except OSError as error:
            if error.errno in _DISCONNECTED:
                self._final_until = trio.current_time() + ONE_MORE_TRY_EVERY_SECONDS
            raise

    async def _call(
        self,
        lane: Lane,
        fn: Callable[[Unpack[Ts]], T],
        args: tuple[Unpack[Ts]],
        dispose: Callable[[T], object] | None,
        skipped: Callable[[], object] | None,
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

    async def found_each(
        self,
        directory: DirRef,
        names: Sequence[bytes],
        lane: Lane,
        seconds: float = math.inf,
        opens_bytes: int = 0,
    ) -> FoundEach:
        """Counts as one operation per name. Some dozens of names at a time: it holds one slot.
        ``opens_bytes`` as in PosixSource."""
        ask = self.posix.opened_each if opens_bytes else self.posix.found_each
        found = await self.call(lane, ask, directory, names, seconds, opens_bytes)
        self._count_others(lane, ask.__name__, len(found))
        return found

    async def open(self, directory: DirRef, name: bytes, lane: Lane) -> tuple[int, SourceStat]:
        return await self.call(lane, self.posix.open, directory, name, dispose=_close_opened)

    async def open_directories(self, directories: Iterable[DirRef]) -> None:
        """Open them for a while, for threads that nobody waits for. Whoever then asks for a file in
        one that cannot be opened gets the error. Raises nothing."""
        for directory in directories:
            with suppress(OSError, SourceChanged):
                await self.call(Lane.BACKGROUND, self.posix.open_directory, directory)

    def close_soon(self, fd: int) -> None:
        """Close ``fd`` without waiting: no slot. Does not block; raises nothing."""
        self.releases.soon(partial(self.posix.close, fd))

    async def list(
        self, directory: DirRef, lane: Lane, batch: int = 1000
    ) -> AsyncGenerator[Batch, None]:
        """``async with aclosing(source.list(...)) as batches: async for entries in batches: ...``

        Closing a directory may tell a server: whoever stops early does not wait for that."""
        batches = self.posix.list(directory, batch)

        def close(_: object = None) -> None:
            batches.close()

        entries: Batch
        while entries := await self.call(lane, next, batches, [], dispose=close, skipped=close):
            may_follow = len(entries) == batch  # else nothing is open any more
            try:
                yield entries
            except GeneratorExit:
                if may_follow:
                    self.releases.soon(close)
                raise
            if not may_follow:
                return

    async def lists_all(self, directory: DirRef, name: bytes, lane: Lane) -> bool:
        if (known := self.posix.known_to_list_all(directory)) is not None:
            return known
        return await self.call(lane, self.posix.lists_all, directory, name)

    async def read(
        self, fd: int, offset: int, size: int, lane: Lane, *, once: bool = False
    ) -> tuple[bytes, SourceVersion]:
        """As PosixSource.read_for_reader, or ``read_once``. After a cancelled read ``fd`` may be
        closed at once: the thread may then read something else under that number, but nobody sees
        it."""

        def count_late(result: tuple[bytes, SourceVersion]) -> None:
            self._count_late_bytes(lane, len(result[0]))

        read = self.posix.read_once if once else self.posix.read_for_reader
        result = await self.call(lane, read, fd, offset, size, dispose=count_late)
        self._count_bytes(lane, len(result[0]))
        return result

    async def read_unit(self, fd: int, direct: DirectDescriptor, unit: Unit, lane: Lane) -> None:
        """As PosixSource.read_unit. Both descriptors may be closed after a cancelled one, too, if
        the unit was stopped."""
        dispose = partial(self._count_late_bytes, lane)
        try:
            await self.call(lane, self.posix.read_unit, fd, direct, unit, dispose=dispose)
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

    async def listxattr(
        self, directory: DirRef, name: bytes, version: SourceVersion | None, lane: Lane
    ) -> AttributeNames:
        self._count_others(lane, "listxattr", 2)
        return await self.call(lane, self.posix.listxattr, directory, name, version)

    async def listxattr_each(
        self,
        directory: DirRef,
        entries: Sequence[tuple[bytes, SourceVersion | None]],
        lane: Lane,
        seconds: float = math.inf,
    ) -> AttributeNamesEach:
        """As ``found_each``, but two operations a name: the list, and whether there is an ACL."""
        found = await self.call(lane, self.posix.listxattr_each, directory, entries, seconds)
        self._count_others(lane, "listxattr_each", 2 * len(found))
        return found

    def _count_others(self, lane: Lane, function: str, count: int) -> None:
        """A call that was counted as one operation was made for ``count`` names."""
        self.counters.operations += max(0, count - 1)
        self.counters.of(lane, function).operations += max(0, count - 1)

    def _count_bytes(self, lane: Lane, size: int) -> None:
        self.counters.read_bytes += size
        if lane is Lane.DEMAND:
            self.counters.demand_read_bytes += size
        else:
            self.counters.prefetch_read_bytes += size

    def _count_late_bytes(self, lane: Lane, size: int) -> None:
        """``_count_bytes`` for threads: of a read that nobody waited for to the end. The source
        served it all the same."""
        try:
            self._token.run_sync_soon(self._count_bytes, lane, size)
        except trio.RunFinishedError:
            return  # and with it whoever could have asked


def _close_opened(opened: tuple[int, SourceStat]) -> None:
    os.close(opened[0])
