"""A mount that lives in a thread of its own, so that a test can do one thing after another with it,
and that can be left as a process leaves that is killed."""

import errno
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import trio
import trio.testing

from monarchfs.cache.index.recovery import set_aside
from monarchfs.fs.files import FileHandle
from monarchfs.types import IndexUnusable, IndexWriteError
from tests.support.faults import Gate
from tests.support.mirror import Area, Mirror, until

T = TypeVar("T")

TIER_CALLS = (
    *("write_whole", "create_part", "open_part", "open_replica", "write", "finish_part"),
    *("mark_synced", "remove", "remove_part", "discard", "probe", "reopen", "sync"),
)
SEGMENT_CALLS = (
    *("create", "punch", "remove", "open", "note", "data_ranges", "found", "frees_punched"),
)


class Runner:
    """One mount and its trio run. All methods are for the test's thread."""

    mirror: Any
    _error: BaseException | None = None

    def __init__(self, area: Area, **options: Any) -> None:
        self.violations: list[str] = []
        self.gates: list[Gate] = []
        self.synced_index: bytes | None = None
        self._area = area
        self._options = options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._join()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as exc:  # noqa: BLE001 - it is raised in the test's thread
            self._error = exc
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._end = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        mounted: Any = self._area.mount(sound=False, **self._options)
        async with mounted as self.mirror:
            self._watch_evictions()
            self._watch_syncs()
            self._ready.set()
            await self._end.wait()

    def _watch_evictions(self) -> None:
        cache = self.mirror.cache
        evict = cache.accounts._evict

        def watched(actions: Any) -> Any:
            for action in actions:
                if action.ino in cache.accounts.opened:
                    self.violations.append(f"inode {action.ino} was evicted while it was open")
                if cache.index.pins.pinned(action.ino):
                    self.violations.append(f"inode {action.ino} was evicted while it was pinned")
            return evict(actions)

        cache.accounts._evict = watched

    def _watch_syncs(self) -> None:
        """What a restart of the machine may leave of the index is the last that was synced."""
        sync, data = self.mirror.index.environment.sync, self._area.state / "index/data.mdb"

        def look() -> None:
            if data.exists():
                self.synced_index = data.read_bytes()

        def watched() -> None:
            sync()
            try:
                # What is committed but not synced may reach the disk as well.
                trio.from_thread.run_sync(look)
            except RuntimeError:
                look()  # it is the event loop's thread

        self.mirror.index.environment.sync = watched

    def do(self, fn: Callable[..., Awaitable[T]], *args: object) -> T:
        async def bounded() -> T:
            with trio.fail_after(20):
                return await fn(*args)

        try:
            return trio.from_thread.run(bounded, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise self._end_of_run() from None

    def do_now(self, fn: Callable[..., T], *args: object) -> T:
        try:
            return trio.from_thread.run_sync(fn, *args, trio_token=self._token)
        except trio.RunFinishedError:
            raise self._end_of_run() from None

    def _end_of_run(self) -> BaseException:
        self._thread.join()
        return self._error or AssertionError("the mount has ended")

    def wait_idle(self) -> None:
        """Until nothing moves any more but what waits at gates."""
        self.do(self._wait_idle)

    async def _wait_idle(self) -> None:
        mirror = self.mirror
        while True:
            await until(self._threads_wait, "the threads to wait")
            await trio.testing.wait_all_tasks_blocked(0.0005)
            if self._threads_wait() and (self.waiting or mirror._is_idle()):
                return

    def _join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _threads_wait(self) -> bool:
        source = self.mirror.source
        running = len(source.demand.running) + len(source.background.running)
        return bool(self.mirror.local.borrowed_tokens + running == self.waiting)

    @property
    def waiting(self) -> int:
        return sum(gate.waiting for gate in self.gates)

    def hold(self, call: str, most: int = 2) -> None:
        """The next calls of the tiers by that name wait, until the faults are ended."""

        def hold() -> None:
            for tier in self.mirror.tiers:
                gate = Gate()
                self.gates.append(gate)
                tier.faults._gates.append(gate)

                def meet(gate: Gate = gate) -> None:
                    if gate.waiting < most:
                        gate.meet()

                tier.faults.before(call, meet)

        self.do_now(hold)

    def end_faults(self) -> None:
        self.do_now(self.mirror.end_faults)
        self.gates.clear()
        self.wait_idle()

    # -- the end

    def unmount(self) -> None:
        self.do_now(self._end.set)
        self._join()

    def give_up(self) -> None:
        """After a failure, which is what is to be reported."""
        if self._thread.is_alive():
            with suppress(trio.RunFinishedError):
                trio.from_thread.run_sync(self._end.set, trio_token=self._token)
        self._thread.join()

    def kill(self, handles: Sequence[FileHandle]) -> None:
        """Leave the directories as they are at this moment: nothing that the mount does from now
        on reaches them, and what its threads are doing comes to its end."""

        def die() -> None:
            self._die()
            for handle in handles:
                handle.release()

        self.do_now(die)
        self._join()

    def _die(self) -> None:
        mirror = self.mirror
        for tier in mirror.tiers:
            for call in TIER_CALLS:
                setattr(tier, call, _dead_tier)
            for call in SEGMENT_CALLS:
                setattr(tier.segments, call, _dead_tier)
            tier.segments.write_each = _dead_segments
        mirror.index.environment.write = _dead_index
        mirror.index.environment.sync = _dead_index

        async def without_close() -> None:
            mirror.index.close(clean=False)

        mirror.cache.accounts.sync = without_close
        self._end.set()


def _dead_tier(*args: object, **kwargs: object) -> NoReturn:
    raise OSError(errno.EIO, "the process is dead")


def _dead_segments(records: Sequence[object]) -> list[OSError]:
    return [OSError(errno.EIO, "the process is dead") for _ in records]


def _dead_index(*args: object, **kwargs: object) -> NoReturn:
    raise IndexWriteError("the process is dead")


def mounted(area: Area, **options: Any) -> Runner:
    """A mount; an index that cannot be used is set aside, as the worker does."""
    try:
        return Runner(area, **options)
    except IndexUnusable:
        set_aside(str(area.state))
    return Runner(area, **options)


walk = Mirror.walk


async def retried(fn: Callable[..., Awaitable[T]], *args: object) -> T:
    """ESTALE once: the kernel then walks the path again (fs/namei.c, LOOKUP_REVAL)."""
    try:
        return await fn(*args)
    except OSError as exc:
        if exc.errno != errno.ESTALE:
            raise
    return await fn(*args)


async def open_path(mirror: Mirror, path: str) -> FileHandle | None:
    node = await walk(mirror, path)
    if node is None or not node.stat.is_regular:
        return None
    return await mirror.open_ino(node.ino)


def allocated_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                total += path.stat().st_blocks * 512
    return total
