"""The layers below FUSE, composed as the worker composes them, over directories of a test."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from monarchfs import types
from monarchfs.cache.accounts import Accounts
from monarchfs.cache.cache import Cache
from monarchfs.cache.index import Index
from monarchfs.cache.store.allocator import SMALL_BYTES, allocated
from monarchfs.cache.tier_threads import TierThreads
from monarchfs.core.misses import Misses
from monarchfs.fs.files import FileHandle, Files
from monarchfs.fs.xattrs import Xattrs
from monarchfs.metadata.freshness import NS, Freshness
from monarchfs.metadata.shared_names import NamePeers
from monarchfs.metadata.tree import Missing, Tree
from monarchfs.metrics import Metrics
from monarchfs.prefetch.copier import Copier
from monarchfs.prefetch.fetch import State
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.small_files import SmallFiles
from monarchfs.source.source import Source
from monarchfs.system.memory import MemoryHeadroom
from tests.layers.whole import RecordingKernel, WholeReaders, WholeReads
from tests.support.accounts import check_accounts
from tests.support.faults import FaultySource, FaultyTier, keep_no_directories
from tests.support.timing import WAIT_SECONDS, Stopwatch

KIB, MIB = 1 << 10, 1 << 20
ALL_ROOM = 1 << 30


def content(size: int, seed: int = 1) -> bytes:
    """Bytes that differ from each other at each place, and are no zeros."""
    block = bytes((i * 7 + i // 251 + seed * 31) % 255 + 1 for i in range(4099))
    return (block * (size // len(block) + 1))[:size]


class Area:
    """The directories of a test: the source, the state, the tiers. They outlive the mounts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = path / "source"
        self.state = path / "state"
        for directory in (self.source, self.state):
            directory.mkdir()

    def tier(self, number: int) -> Path:
        path = self.path / f"tier{number}"
        path.mkdir(exist_ok=True)
        return path

    def write(self, name: str, data: bytes) -> bytes:
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return data

    def replace(self, name: str, data: bytes) -> bytes:
        self.write("other", data)
        (self.source / "other").rename(self.source / name)
        return data

    def write_files(self, count: int, size: int = 10_000, below: str = "") -> list[str]:
        names = [f"{below}f{number:03d}" for number in range(count)]
        for number, name in enumerate(names):
            self.write(name, content(size, number))
        return names

    async def settled(self) -> None:
        """Until no file could be changed without its version changing."""
        root = self.source.stat().st_dev
        for path in self.source.rglob("*"):
            version = types.SourceStat.of(path.lstat(), root).version
            await until(lambda: version.past_racy_window(time.time_ns()), "the clock to tick")  # noqa: B023

    @asynccontextmanager
    async def mount(
        self,
        tiers: Sequence[int] = (ALL_ROOM,),
        *,
        keeps: bool = True,
        copies: bool = True,
        mode: types.FreshnessMode = types.FreshnessMode.IMMUTABLE,
        ttl: float = 60.0,
        deadline: float = 5.0,
        copy_workers: int = 2,
        rate: int = 0,
        floor: float = 1.0,
        boot_id: bytes = b"first boot",
        partial_min_bytes: int = 2 * MIB,
        eviction: types.EvictionPolicy = types.EvictionPolicy.KEEP,
        headroom: Callable[[], MemoryHeadroom] | None = None,
        shares: bool = True,
        sound: bool = True,
        peers: NamePeers | None = None,
    ) -> AsyncIterator[Mirror]:
        """``tiers`` are capacities in bytes; ``keeps`` is False for ``--prefetch none``, and
        without ``copies`` nothing is copied that nobody reads. Another ``boot_id`` than the last
        mount's: the machine was restarted. Not ``shares``: each replica is a file of its own.
        Not ``sound``: the books are not looked at in the end."""
        with ExitStack() as stack:
            root_fd = os.open(self.source, os.O_PATH | os.O_DIRECTORY)
            stack.callback(os.close, root_fd)
            index = Index.open(str(self.state), source_id="test", trust_after_kill=True)
            stack.callback(index.close)
            opened = []
            for number in range(1, len(tiers) + 1):
                path = self.tier(number)
                fd = os.open(path, os.O_DIRECTORY)
                tier = FaultyTier(fd, str(path), number)
                os.close(fd)
                stack.callback(tier.close)
                opened.append(tier)
            async with trio.open_nursery() as nursery:
                posix = FaultySource(root_fd)
                stack.callback(keep_no_directories, posix)
                whole = WholeReads(posix)
                stack.callback(whole.close)
                metrics = Metrics()
                threads = TierThreads(8)
                accounts = Accounts(
                    index,
                    [
                        (tier, types.TierSize(bytes=capacity))
                        for tier, capacity in zip(opened, tiers, strict=True)
                    ],
                    metrics,
                    threads,
                    nursery,
                    WholeReaders(),
                    eviction=eviction,
                    reserve_percent=1,
                    partial_min_bytes=partial_min_bytes,
                    shared_bytes=SMALL_BYTES if shares else 0,
                    headroom=headroom,
                )
                cache = Cache(accounts)
                freshness = Freshness(mode, int(ttl * NS), time.time_ns())
                mirror = Mirror(
                    self, index, posix, whole, opened, cache, threads, metrics, freshness, nursery,
                    keeps=keeps, deadline=deadline, workers=copy_workers, rate=rate, floor=floor,
                    peers=peers,
                )  # fmt: skip
                stack.callback(mirror.cache.close)
                await nursery.start(mirror.source.watch)
                mirror.cache.load(boot_id)
                await mirror.tree.attributes.load_root()
                if copies:
                    mirror.start_copying()
                try:
                    yield mirror
                finally:
                    mirror.end_faults()
                    nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await mirror.copier.suspend()
                await mirror.cache.accounts.sync()
            if sound:
                mirror.check_books()

    @asynccontextmanager
    async def mounted(self, *tiers: Sequence[int], **options: Any) -> AsyncIterator[Mirror]:
        """As ``mount``. All handles are closed when it ends, and nothing is held then."""
        async with self.mount(*tiers, **options) as mirror:
            yield mirror
            if options.get("sound", True):
                await mirror.settled()


@dataclass(eq=False)
class Mirror:
    """One mount. ``posix`` and ``tiers`` are where faults are put in."""

    area: Area
    index: Index
    posix: FaultySource
    whole: WholeReads
    tiers: Sequence[FaultyTier]
    cache: Cache
    threads: TierThreads
    metrics: Metrics
    freshness: Freshness
    nursery: trio.Nursery
    keeps: bool
    deadline: float
    workers: int
    rate: int
    floor: float
    peers: NamePeers | None

    def __post_init__(self) -> None:
        index, cache, nursery = self.index, self.cache, self.nursery
        self.source = Source(
            self.posix,
            background_threads=self.workers + 8,
            stuck_seconds=0.25,
            deadline=self.deadline,
            reconnect_seconds=0.0,
        )
        self.local = self.threads.limiter
        self.placement = cache.accounts.placement
        self.copier = Copier(
            CopyJobs(cache, self.metrics, nursery, keeps=self.keeps),
            *(self.source, cache, self.metrics, nursery),
            workers=self.workers,
            rate=self.rate,
            floor=self.floor,
            trusts_times=self.freshness.mode is types.FreshnessMode.IMMUTABLE,
        )
        self.tree = Tree(
            *(index, self.source, self.freshness, self.metrics, nursery),
            deadline=self.deadline,
            peers=self.peers,
        )
        self.kernel = RecordingKernel()
        self.files = Files(self.tree, self.cache, self.copier, self.metrics, self.kernel)
        self.residency = self.files.residency
        self.xattrs = Xattrs(self.tree, self.residency, self.source, nursery)
        self.misses = Misses(
            self.whole,  # type: ignore[arg-type]
            index.nodes,
            self.posix.opened_directory,
            self.files.only_remote,
            self.files.racy_opens.opens_until,
        )
        self.misses.start(self.posix.device, keeps=self.keeps, layouts=False)
        assert isinstance(cache.readers, WholeReaders)
        cache.readers.misses = self.misses
        self.whole.count = self.source.count_elsewhere
        self.small_files = SmallFiles(
            *(self.misses, self.source, cache, self.copier.jobs, self.copier.files),
            *(self.metrics, nursery, self.files.opened_elsewhere),
        )
        self.copier.bind(self.small_files)
        nursery.start_soon(self.small_files.run, 0, 0)
        self._copying = False

    def start_copying(self) -> None:
        self._copying = True
        self.nursery.start_soon(self.copier.run)

    def end_faults(self) -> None:
        self.posix.faults.end()
        for tier in self.tiers:
            tier.faults.end()

    async def mend(self) -> None:
        """End the faults of the tiers, and have those that failed probed."""
        for tier in self.tiers:
            tier.faults.end()
        await self.cache.maintain()
        await self.idle()
        assert not any(self.cache.accounts.all_tiers.out_of_service(tier.id) for tier in self.tiers)

    @property
    def tier(self) -> FaultyTier:
        return self.tiers[0]

    # -- what the kernel would do

    async def walk(self, path: str) -> types.Node | None:
        """The node at a path, None where there is none. Raises OSError."""
        node = self.index.nodes.node(types.ROOT_INO)
        for name in path.encode().split(b"/") if path else ():
            assert node is not None
            found = await self.tree.names.lookup(node.ino, name)
            if isinstance(found, Missing):
                return None
            node = found.node
        return node

    async def node(self, path: str) -> types.Node:
        node = await self.walk(path)
        assert node is not None, path
        return node

    async def ino(self, path: str) -> int:
        return (await self.node(path)).ino

    async def open(self, path: str) -> FileHandle:
        return await self.open_ino(await self.ino(path))

    async def open_ino(self, ino: int) -> FileHandle:
        return self.files.known_open(ino) or await self.files.open(ino)

    async def read(self, handle: FileHandle, offset: int, size: int) -> bytes:
        data: types.Data | None = handle.known_read(offset, size)
        if data is None:
            data = await handle.read(offset, size)
        return bytes(data)

    async def read_file(self, path: str, step: int = 1 << 30) -> bytes:
        handle = await self.open(path)
        try:
            data = b""
            while piece := await self.read(handle, len(data), step):
                data += piece
            return data
        finally:
            handle.release()

    async def read_each(self, paths: Iterable[str]) -> None:
        for path in paths:
            assert await self.read_file(path) == (self.area.source / path).read_bytes(), path

    async def copied(self, path: str) -> int:
        data = await self.read_file(path)
        await self.idle()
        assert self.residency.state(await self.ino(path)) == "resident"
        assert data == (self.area.source / path).read_bytes()
        self.posix.reads.clear()
        return await self.ino(path)

    # -- what is looked at afterwards

    def bytes_read(self, path: str) -> int:
        ino = (self.area.source / path).stat().st_ino
        return sum(read.size for read in self.posix.reads if read.ino == ino)

    def record(self, ino: int) -> types.Replica | None:
        return self.index.replicas.replica(ino)

    def replica(self, ino: int) -> types.Replica:
        found = self.record(ino)
        assert found is not None
        return found

    async def state(self, path: str) -> str:
        return self.residency.state(await self.ino(path))

    def used(self, number: int = 0) -> int:
        return self.placement.ledger(self.tiers[number].id).usage[0]

    def _is_idle(self) -> bool:
        copier = self.copier
        if copier._slots or copier.jobs.background or (self._copying and len(copier.jobs.queue)):
            return False
        if self.source.demand.running or self.source.background.running:
            return False
        if self.cache.accounts.removals.count or self.cache.reconciling:
            return False
        return not self.local.borrowed_tokens and not any(
            fill.copy.busy
            or (fill.copy.reservation is not None and fill.copy.state is not State.FILLING)
            for fill in copier.jobs.files.values()
        )

    async def idle(self) -> None:
        await until(self._is_idle, "nothing to be under way")

    def _units_are_gone(self) -> bool:
        """They are counted for the whole process. Those of an earlier mount, whose threads were
        left behind, go when their threads end and the garbage is collected."""
        if self.cache.writer.backlog_bytes:
            gc.collect()
        return self.cache.writer.backlog_bytes == 0

    async def settled(self) -> None:
        """With all handles closed: nothing is held any more, and the books are right."""
        await self.idle()
        # What was read may move to a faster tier; its place there is reserved meanwhile.
        await until(lambda: not self.cache.accounts.busy, "moves to end")
        await self.idle()
        assert self.copier.jobs.files == {}
        assert not any(job.over for job in self.copier.jobs._jobs.values())
        assert self.cache.accounts.opened == {}
        await until(self._units_are_gone, "the memory of units to be given back")
        reserved = {
            number: (ledger.reserved_bytes, ledger.copies)
            for number, ledger in self.placement._ledgers.items()
        }
        assert set(reserved.values()) <= {(0, 0)}, reserved
        self.check_books()

    def check_books(self) -> None:
        check_accounts(self.cache.accounts.placement)
        for tier in self.tiers:
            path = Path(tier.path)
            records = [r for _ino, r in self.index.replicas.all() if r.tier == tier.id]
            sharing = [r for r in records if r.segment]
            own = {_file_name(r): r for r in records if not r.segment}
            parts = {name for name, r in own.items() if r.state is types.ReplicaState.PARTIAL}
            whole = own.keys() - parts
            found = sum(r.state is types.ReplicaState.FOUND for r in records)
            assert {file.name for file in (path / "parts").iterdir()} == parts
            assert {file.name for file in path.glob("??/*")} == whole
            occupied = {
                f.name: f.stat().st_blocks * 512
                for f in path.rglob("*")
                if f.is_file() and f.parent.name != "segments"
            }
            assert own.keys() == occupied.keys()
            # ext4 gives a file's extents a block of their own, or takes it back, when it writes the
            # file back.
            differing = [n for n, r in own.items() if abs(r.allocated_bytes - occupied[n]) > 4096]
            assert not differing, (own, occupied)
            in_segments: Counter[int] = Counter()
            for r in sharing:
                in_segments[r.segment] += r.allocated_bytes
            there = tier.segments.found()
            assert in_segments.keys() <= set(there) <= self.index.segments.segments(tier.id).keys()
            align = tier.segments.align
            for segment in there:
                # Without the blocks in which a file system notes where they are.
                data = tier.segments.data_ranges(segment)
                held = sum(allocated(stop, align) - start for start, stop in data)
                assert held == in_segments[segment]
            blocks = sum(r.allocated_bytes for r in records)
            assert self.placement.ledger(tier.id).usage[0] == blocks, (own, tier.id)
            totals = self.index.replicas.tier_totals().get(tier.id, types.TierTotals())
            assert totals == (len(whole) + len(sharing) - found, len(parts), found, blocks)

    def reason(self, ino: int) -> str:
        node = self.index.nodes.node(ino)
        assert node is not None
        return self.residency.sentence(node) or ""

    def states(self, inos: Sequence[int]) -> list[str]:
        return [self.residency.state(ino) for ino in inos]

    async def want(self, path: str, priority: int = Priority.SCANNED) -> None:
        node = await self.tree.names.find(types.ROOT_INO, path.encode(), types.Lane.BACKGROUND)
        assert node is not None
        self.copier.jobs.want(node.ino, Priority(priority))

    async def want_each(self, paths: Iterable[str]) -> None:
        for path in paths:
            await self.want(path)


def _file_name(replica: types.Replica) -> str:
    """That of a replica which is no record of a segment."""
    is_part = replica.state is types.ReplicaState.PARTIAL
    return replica.name.hex() + ("" if is_part else f".{replica.checksum:016x}")


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what threads do; by threads, because the clock may stand still."""
    watch = Stopwatch()
    while not condition():
        watch.check(WAIT_SECONDS, f"waited in vain for: {what}")
        await trio.to_thread.run_sync(time.sleep, 0.0005)
