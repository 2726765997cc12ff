"""Everything below FUSE against a plain model of the source, under edits, faults and crashes.

``MONARCHFS_MODEL_EXAMPLES`` asks for so many random examples instead of the few fixed ones.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import trio
from hypothesis import HealthCheck, Phase, settings, stateful
from hypothesis import strategies as st

from monarchfs.cache import replicas
from monarchfs.cache import tiers as cache_tiers
from monarchfs.cache.cache import purge
from monarchfs.cache.index.recovery import set_aside
from monarchfs.cache.placement import placement
from monarchfs.cache.scrub import Scrub
from monarchfs.cache.store import read
from monarchfs.fs.files import FileHandle
from monarchfs.prefetch import fill
from monarchfs.prefetch.queue import Priority
from monarchfs.system.memory import MemoryHeadroom
from monarchfs.types import EvictionPolicy, FileType, FreshnessMode, Node
from tests.model.history import EditedSource, File, Name, attributes
from tests.support import on_disk
from tests.support.lookups import Hours, names
from tests.support.mirror import KIB, MIB, Area, Mirror
from tests.support.processes import descriptors
from tests.support.runner import Runner, allocated_bytes, mounted, open_path, retried, walk

EXAMPLES = int(os.environ.get("MONARCHFS_MODEL_EXAMPLES", "0"))
TTL_SECONDS = 60.0

SIZES = st.sampled_from(
    [0, 1, 4096, 70_000, 128 * KIB, 128 * KIB + 1, 300_000, 400_000, 520_000, 900_000]
)
OFFSETS = st.sampled_from([0, 1, 4095, 65_000, 128 * KIB - 1, 128 * KIB, 260_000, 500_000, 899_999])
LENGTHS = st.sampled_from([1, 4096, 100_000, 128 * KIB, 300_000, MIB])
WHICH = st.integers(0, 11)
NAMES = st.sampled_from(["a", "b", "c", "e"])
TIER_FAULTS = (
    *("write_whole", "create_part", "write", "finish_part", "open_replica", "open_part"),
    *("remove", "remove_part", "sync", "space", "read"),
)
HELD = (
    *("create_part", "write", "after_write", "finish_part", "after_finish", "remove"),
    *("after_remove", "write_whole", "remove_part"),
)
CODES = st.sampled_from([errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
ABSENT = (errno.ENOENT, errno.ENOTDIR)

T = TypeVar("T")
Step = Callable[..., None]
steps = 0


def while_mounted(**given: Any) -> Callable[[Step], Step]:
    """A rule for as long as there is a mount."""
    as_rule: Any = stateful.rule(**given)
    return lambda step: stateful.precondition(lambda self: self.mount is not None)(as_rule(step))


@dataclass
class Opened:
    """A handle, what it opened, and the file behind it."""

    handle: FileHandle
    content: bytes
    file: File | None


class Model(stateful.RuleBasedStateMachine):
    """See the rules. ``mount`` is None while nothing is mounted."""

    directory: Path

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.before = descriptors()
        self.hours = Hours()
        patch = mock.patch.object
        for patched in (
            patch(time, "time_ns", self.hours.time_ns),
            patch(cache_tiers, "FIRST_PROBE_SECONDS", 0.0),
            patch(cache_tiers, "LAST_PROBE_SECONDS", 0.0),
            patch(cache_tiers, "SPACE_MAX_AGE_SECONDS", 0.0),
            patch(fill, "WHOLE_BYTES", 200 * KIB),
            patch(placement, "PARTIAL_ROOM_BYTES", 256 * KIB),
            patch(replicas, "read_nowait", self.failing(read.read_nowait)),
            patch(replicas, "read_full", self.failing(read.read_full)),
        ):
            self.stack.enter_context(patched)
        self.directory.mkdir()
        self.area = Area(self.directory)
        self.source = EditedSource(self.area.source, self.hours)
        self.mount: Runner | None = None
        self.handles: list[Opened] = []
        self.boot = 0
        self.mount_ns = 0
        self.reading_fails = False
        self.source_fails = False
        self.available = 1 << 34
        self.synced_index: bytes | None = None
        self.mode = FreshnessMode.IMMUTABLE
        self.options: dict[str, Any] = {}
        self.capacities: list[int] = []

    def failing(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            if self.reading_fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return fn(*args, **kwargs)

        return read

    @stateful.initialize(
        mode=st.sampled_from(FreshnessMode),
        eviction=st.sampled_from(EvictionPolicy),
        capacities=st.lists(
            st.sampled_from([300_000, MIB, 2 * MIB, 64 * MIB]), min_size=1, max_size=2
        ),
        in_memory=st.booleans(),
        files=st.lists(st.tuples(NAMES, SIZES), min_size=2, max_size=6),
        keeps=st.sampled_from([True, True, True, False]),
    )
    def begin(
        self,
        mode: FreshnessMode,
        eviction: EvictionPolicy,
        capacities: list[int],
        in_memory: bool,
        files: list[tuple[str, int]],
        keeps: bool,
    ) -> None:
        for name in ("x", "y", "x/z"):
            (self.area.source / name).mkdir()
        self.source.edited()
        for at, (name, size) in enumerate(files):
            path = ["", "x/", "y/", "x/z/"][at % 4] + name
            if not self.source.exists(path):
                self.source.create(path, size)
        self.source.edited()
        self.mode = mode
        self.in_memory = in_memory
        self.stack.enter_context(
            mock.patch("monarchfs.cache.store.tier.on_disk.is_in_memory", return_value=in_memory)
        )
        self.capacities = capacities
        self.options = {
            "tiers": capacities,
            "eviction": eviction,
            "mode": mode,
            "ttl": TTL_SECONDS,
            "partial_min_bytes": 256 * KIB,
            "headroom": lambda: MemoryHeadroom(self.available, 1 << 30, "the test"),
            "keeps": keeps,
        }
        self.come_up()

    # -- mounts

    @property
    def at(self) -> Runner:
        assert self.mount is not None
        return self.mount

    @property
    def mirror(self) -> Mirror:
        mirror: Mirror = self.at.mirror
        return mirror

    def come_up(self) -> None:
        self.mount_ns = time.time_ns()
        self.mount = mounted(self.area, boot_id=b"boot %d" % self.boot, **self.options)
        self.at.wait_idle()

    def close_handles(self) -> None:
        for opened in self.handles:
            self.at.do_now(opened.handle.release)
        self.handles.clear()

    def end_faults(self) -> None:
        self.reading_fails = self.source_fails = False
        self.at.end_faults()

    @while_mounted(killed=st.booleans())
    def leave(self, killed: bool) -> None:
        """Unmount as the worker does, when readers have gone; or die."""
        if not killed:
            self.close_handles()
        handles, self.handles = self.handles, []
        self.reading_fails = self.source_fails = False
        mount, self.mount = self.at, None
        if killed:
            mount.kill([opened.handle for opened in handles])
        else:
            mount.unmount()
        self.synced_index = mount.synced_index or self.synced_index

    @stateful.precondition(lambda self: self.mount is None)
    @stateful.rule(
        kind=st.sampled_from(["reboot", "reboot", "lost", "deleted", "cut", "wiped"]),
        which=WHICH,
        old_index=st.booleans(),
        fates=st.lists(st.sampled_from(["kept", "zeroed", "gone"]), min_size=1, max_size=7),
    )
    def damage(self, kind: str, which: int, old_index: bool, fates: list[str]) -> None:
        if kind == "reboot":
            self.reboot(old_index, fates)
        elif kind == "wiped":
            shutil.rmtree(self.area.tier(1 + which % len(self.capacities)))
        else:
            self.lose_index(kind)

    def reboot(self, old_index: bool, fates: list[str]) -> None:
        """What was not synced has another fate for each file."""
        self.boot += 1
        at = 0
        for number in range(1, len(self.capacities) + 1):
            tier = self.area.tier(number)
            if self.in_memory:
                shutil.rmtree(tier)
                continue
            for path in sorted(path for path in tier.rglob("*") if path.is_file()):
                if path.name.endswith(".list") or path.stat().st_mode & 0o777 == 0o400:
                    continue
                fate = fates[at % len(fates)]
                at += 1
                if on_disk.is_segment(path):
                    if fate != "kept":
                        on_disk.lose_what_was_not_noted(path, cut=fate == "gone")
                elif fate == "zeroed":
                    size = path.stat().st_size
                    os.truncate(path, 0)
                    os.truncate(path, size)
                elif fate == "gone":
                    path.unlink()
        data = self.area.state / "index/data.mdb"
        if old_index and self.synced_index is not None and data.exists():
            data.write_bytes(self.synced_index)

    def lose_index(self, how: str) -> None:
        data = self.area.state / "index/data.mdb"
        if not data.exists():
            return
        if how == "deleted":
            shutil.rmtree(self.area.state / "index")
        elif how == "cut" and (self.area.state / "index/mark").read_text().startswith("clean"):
            os.truncate(data, data.stat().st_size // 2)
        else:
            set_aside(str(self.area.state))
        self.synced_index = None

    @stateful.precondition(lambda self: self.mount is None)
    @stateful.rule()
    def remount(self) -> None:
        self.come_up()

    remount_soon = remount

    # -- reading

    def since(self) -> int:
        """What was true before then is not to be believed any more."""
        if self.mode is FreshnessMode.TTL:
            return time.time_ns() - int(TTL_SECONDS * 1e9)
        return self.source.now.start_ns

    def candidates(self, path: str, since_ns: int) -> set[Name | None]:
        """What the path may lead to, each step as it was at some time since then."""
        snapshots = self.source.within(since_ns)
        found: set[Name | None] = {Name(self.area.source.stat().st_ino, FileType.DIRECTORY)}
        for name in path.split("/") if path else ():
            found = {
                snapshot.directories.get(parent.ino, {}).get(name) if parent is not None else None
                for parent in found
                for snapshot in snapshots
            }
        return found

    def check_node(self, path: str, node: Node | None, since_ns: int) -> None:
        candidates = self.candidates(path, since_ns)
        if node is None:
            assert None in candidates, f"{path} is there"
            return
        assert Name(node.stat.ino, FileType.of_mode(node.stat.mode)) in candidates, (path, node)
        assert attributes(node.stat) in self.attributes_of(node.stat.ino, since_ns), (path, node)

    def attributes_of(self, ino: int, since_ns: int) -> list[Any]:
        snapshots = self.source.within(since_ns)
        return [attributes(s.stats[ino]) for s in snapshots if ino in s.stats]

    def open(self, path: str) -> Opened | None:
        """As the kernel; None where that failed and may have."""
        since_ns = self.since()
        try:
            handle = self.at.do(retried, open_path, self.mirror, path)
        except OSError as exc:
            if exc.errno in ABSENT:
                assert None in self.candidates(path, since_ns), (path, exc)
            else:
                assert self.source_fails, (path, exc)
            return None
        if handle is None:
            candidates = self.candidates(path, since_ns)
            assert any(c is None or c.type is not FileType.REGULAR for c in candidates), path
            return None
        node = self.at.do_now(self.mirror.index.nodes.node, handle.ino)
        assert node is not None
        stat = node.stat
        candidates = self.candidates(path, since_ns)
        assert Name(stat.ino, FileType.REGULAR) in candidates, (path, stat)
        assert stat.version in [a[0] for a in self.attributes_of(stat.ino, since_ns)], (path, stat)
        return Opened(
            handle, self.source.versions[stat.version], self.source.files_of[stat.version]
        )

    def check_read(self, opened: Opened, offset: int, size: int) -> bytes | None:
        try:
            data = self.at.do(self.mirror.read, opened.handle, offset, size)
        except OSError as exc:
            outdated = opened.file is None or opened.file.content != opened.content
            if exc.errno in (errno.ESTALE, *ABSENT):
                # Nothing of it is local, and its place has another file.
                node = self.at.do_now(lambda: self.mirror.index.nodes.node(opened.handle.ino))
                assert outdated or self.source_fails or self.moved(node), exc
            else:
                assert self.source_fails, exc
            return None
        self.compare(opened, offset, size, data)
        return data

    def moved(self, node: Node | None) -> bool:
        """Whether the version of the node is not in the source any more, or has another place."""
        return node is None or all(
            stat.version != node.stat.version for stat in self.source.now.stats.values()
        )

    def compare(self, opened: Opened, offset: int, size: int, data: bytes) -> None:
        end = min(offset + size, len(opened.content))
        allowed = [opened.content[offset:end]]
        if opened.file is not None:
            # As its source is by now, which may have grown.
            allowed += [opened.file.content[offset:e] for e in (end, offset + size)]
        assert data in allowed, (
            f"{offset}+{size}: {len(data)} bytes, {data[:4].hex()}..{data[-4:].hex()}, not "
            + " or ".join(f"{len(a)} {a[:4].hex()}..{a[-4:].hex()}" for a in allowed)
        )

    def pick(self, which: int, among: list[T]) -> T | None:
        return among[which % len(among)] if among else None

    def find(self, which: int, paths: list[str]) -> Node | None:
        path = self.pick(which, paths)
        return None if path is None else self.at.do(retried, walk, self.mirror, path)

    @while_mounted(which=WHICH, step=st.sampled_from([MIB, 128 * KIB, 50_000]), rest=st.booleans())
    def read_file(self, which: int, step: int, rest: bool) -> None:
        self.read_one(which, step, rest)

    def read_one(self, which: int, step: int, rest: bool) -> None:
        path = self.pick(which, self.source.file_paths())
        if path is None or (opened := self.open(path)) is None:
            return
        offset = 0
        while data := self.check_read(opened, offset, step):
            offset += len(data)
        self.at.do_now(opened.handle.release)
        if rest:
            self.at.wait_idle()

    read_file_again = read_file

    @while_mounted(first=WHICH)
    def read_all(self, first: int) -> None:
        """An epoch."""
        for number in range(len(self.source.file_paths())):
            self.read_one(first + number, MIB, True)

    @while_mounted(which=WHICH)
    def open_file(self, which: int) -> None:
        path = self.pick(which, self.source.file_paths())
        if path is not None and (opened := self.open(path)) is not None:
            self.handles.append(opened)
            self.at.wait_idle()

    @while_mounted(which=WHICH, offset=OFFSETS, size=LENGTHS, rest=st.booleans())
    def read_handle(self, which: int, offset: int, size: int, rest: bool) -> None:
        # No precondition: whether an open worked may depend on time.
        if opened := self.pick(which, self.handles):
            self.check_read(opened, offset, size)
        if rest:
            self.at.wait_idle()

    @while_mounted(which=WHICH)
    def close_file(self, which: int) -> None:
        if opened := self.pick(which, self.handles):
            self.handles.remove(opened)
            self.at.do_now(opened.handle.release)
            self.at.wait_idle()

    @while_mounted(reads=st.lists(st.tuples(WHICH, OFFSETS, LENGTHS), min_size=2, max_size=5))
    def read_at_once(self, reads: list[tuple[int, int, int]]) -> None:
        if not self.handles:
            return
        chosen = [(self.handles[which % len(self.handles)], at, size) for which, at, size in reads]
        results: list[tuple[Opened, int, int, bytes]] = []

        async def read(opened: Opened, offset: int, size: int) -> None:
            try:
                data = await self.mirror.read(opened.handle, offset, size)
            except OSError:
                return  # the other rules look at what may fail
            results.append((opened, offset, size, data))

        async def all_of_them() -> None:
            async with trio.open_nursery() as nursery:
                for opened, offset, size in chosen:
                    nursery.start_soon(read, opened, offset, size)

        self.at.do(all_of_them)
        for opened, offset, size, data in results:
            self.compare(opened, offset, size, data)
        self.at.wait_idle()

    @while_mounted()
    def look_at_names(self) -> None:
        """Every directory's names and every name's attributes, as scandir and lstat have them."""
        if self.source_fails:
            return
        for path in ["", *self.source.directory_paths()]:
            self.look_at_directory(path)

    def look_at_directory(self, path: str) -> None:
        since_ns = self.since()
        mirror = self.mirror

        async def listed() -> tuple[Node | None, dict[bytes, int]]:
            node = await walk(mirror, path)
            if node is None or not node.stat.is_directory:
                return node, {}
            return node, await names(mirror, node.ino)

        node, found = self.at.do(retried, listed)
        if path:
            self.check_node(path, node, since_ns)
        if node is None or not node.stat.is_directory:
            return
        held = [s.directories.get(node.stat.ino, {}) for s in self.source.within(since_ns)]
        for name in {name for names_then in held for name in names_then} | {
            os.fsdecode(name) for name in found
        }:
            is_there = [name in names_then for names_then in held]
            assert any(is_there) if name.encode() in found else not all(is_there), (path, name)
        for name_bytes in found:
            below = f"{path}/{os.fsdecode(name_bytes)}" if path else os.fsdecode(name_bytes)
            child = self.at.do(retried, walk, mirror, below)
            self.check_node(below, child, since_ns)
            if child is not None and child.stat.is_symlink:
                target = self.at.do(mirror.tree.attributes.target, child.ino)
                contents = [s.contents.get(child.stat.ino) for s in self.source.within(since_ns)]
                assert target in contents, (below, target)

    # -- what the cache is told

    @while_mounted(which=WHICH)
    def drop(self, which: int) -> None:
        replicas = self.at.do_now(lambda: [ino for ino, _ in self.mirror.index.replicas.all()])
        if ino := self.pick(which, replicas):
            self.at.do_now(self.mirror.cache.accounts.drop, ino, "the test says so")
            self.at.wait_idle()

    @stateful.precondition(lambda self: not self.source_fails)
    @while_mounted(which=WHICH, directory=st.booleans(), pin=st.booleans())
    def pin(self, which: int, directory: bool, pin: bool) -> None:
        paths = self.source.directory_paths() if directory else self.source.file_paths()
        if node := self.find(which, paths):
            index = self.mirror.cache.index
            self.at.do_now(index.pins.pin if pin else index.pins.unpin, node.ino)

    @stateful.precondition(lambda self: not self.source_fails)
    @while_mounted(which=WHICH)
    def want(self, which: int) -> None:
        node = self.find(which, self.source.file_paths())
        if node is not None and node.stat.is_regular:
            self.at.do_now(self.mirror.copier.jobs.want, node.ino, Priority.SCANNED)
            self.at.wait_idle()

    @while_mounted()
    def sync(self) -> None:
        if not self.at.waiting:
            self.at.do(self.mirror.cache.accounts.sync)

    @while_mounted()
    def look_after(self) -> None:
        if not self.at.waiting:
            self.at.do(self.mirror.cache.maintain)
            self.at.wait_idle()

    @while_mounted()
    def purge(self) -> None:
        self.at.do(purge, self.mirror.index, self.mount_ns)

    @while_mounted(
        available=st.sampled_from([1 << 34, (1 << 30) // 10 - MIB, (1 << 30) // 10 - 200_000])
    )
    def press(self, available: int) -> None:
        self.available = available
        if not self.at.waiting:
            self.at.do(self.mirror.cache.maintain)
            self.at.wait_idle()

    @stateful.precondition(lambda self: self.mode is FreshnessMode.TTL)
    @while_mounted(seconds=st.sampled_from([1.0, 40.0, 61.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.hours.pass_by(seconds)

    # -- faults

    @while_mounted(
        call=st.sampled_from(TIER_FAULTS), code=CODES, which=WHICH, times=st.sampled_from([1, 99])
    )
    def tier_fails(self, call: str, code: int, which: int, times: int) -> None:
        if call == "read":
            self.reading_fails = True
            return
        faults = self.mirror.tiers[which % len(self.mirror.tiers)].faults
        self.at.do_now(lambda: faults.fail(call, code, times=times))

    @while_mounted(call=st.sampled_from(HELD))
    def hold(self, call: str) -> None:
        self.at.hold(call)

    @while_mounted(
        call=st.sampled_from(["read", "open", "found", "stat"]), times=st.sampled_from([1, 3])
    )
    def source_errs(self, call: str, times: int) -> None:
        self.source_fails = True
        self.at.do_now(lambda: self.mirror.posix.faults.fail(call, errno.EIO, times=times))

    @while_mounted()
    def mend(self) -> None:
        self.end_faults()
        self.at.do(self.mirror.mend)
        self.at.wait_idle()

    # -- edits

    def may_edit(self) -> bool:
        return self.mount is None or self.mode is not FreshnessMode.IMMUTABLE

    @stateful.precondition(may_edit)
    @stateful.rule(
        kind=st.sampled_from(["overwrite", "grow", "truncate", "replace", "delete", "chmod"]),
        which=WHICH,
        size=SIZES,
        offset=st.sampled_from([0, 0, 70_000, 200_000]),
    )
    def edit(self, kind: str, which: int, size: int, offset: int) -> None:
        if (path := self.pick(which, self.source.file_paths())) is None:
            return
        match kind:
            case "overwrite":
                self.source.overwrite(path, offset)
            case "grow":
                self.source.append(path, max(size, 1))
            case "truncate":
                self.source.truncate(path, size)
            case "replace":
                self.source.replace(path, size)
            case "delete":
                (self.area.source / path).unlink()
            case "chmod":
                (self.area.source / path).chmod(0o640 if size % 2 else 0o600)
        self.source.edited()

    @stateful.precondition(may_edit)
    @stateful.rule(kind=st.sampled_from("ffffdlst"), which=WHICH, name=NAMES, size=SIZES)
    def create(self, kind: str, which: int, name: str, size: int) -> None:
        directories = ["", *(f"{path}/" for path in self.source.directory_paths())]
        path = directories[which % len(directories)] + name
        target = self.area.source / path
        if kind == "t":
            # A symbolic link that leads elsewhere from now on.
            if (link := self.pick(which, self.source.link_paths())) is None:
                return
            target = self.area.source / link
            target.unlink()
            target.symlink_to(f"again to {size}")
        elif self.source.exists(path) or path.count("/") > 3 or len(self.source.now.stats) > 14:
            return
        elif kind == "f":
            self.source.create(path, size)
        elif kind == "d":
            target.mkdir()
        elif kind == "s":
            target.symlink_to(f"to {size}")
        elif (other := self.pick(which, self.source.file_paths())) is not None:
            os.link(self.area.source / other, target)
        self.source.edited()

    @stateful.precondition(may_edit)
    @stateful.rule(
        kind=st.sampled_from(["rename", "rename", "move", "swap", "remove"]),
        which=WHICH,
        to=WHICH,
        name=NAMES,
    )
    def rearrange(self, kind: str, which: int, to: int, name: str) -> None:
        """Rename a file or a directory, have two directories change places, remove one."""
        directories = self.source.directory_paths()
        path = self.pick(which, self.source.file_paths() if kind == "rename" else directories)
        if path is None:
            return
        if kind == "remove":
            shutil.rmtree(self.area.source / path)
        elif kind == "swap":
            other = directories[to % len(directories)]
            if other == path or other.startswith(f"{path}/") or path.startswith(f"{other}/"):
                return
            self.source.swap(path, other)
        else:
            parents = ["", *(f"{directory}/" for directory in directories)]
            target = parents[to % len(parents)] + name
            if target == path or target.startswith(f"{path}/") or path.startswith(f"{target}/"):
                return
            files = self.source.file_paths()
            if self.source.exists(target) and (kind == "move" or target not in files):
                return
            (self.area.source / path).rename(self.area.source / target)
        self.source.edited()

    @stateful.precondition(lambda self: self.mode is FreshnessMode.OPEN)
    @while_mounted(which=WHICH, times=st.integers(1, 3))
    def race(self, which: int, times: int) -> None:
        """Written and read again and again within a tick, by the clock as it is."""
        path = self.pick(which, self.source.file_paths())
        if path is None or self.source_fails:
            return
        with self.now_as_it_is():
            for _ in range(times):
                self.source.overwrite(path)
                self.source.edited(settled=False)
                opened = self.open(path)
                assert opened is not None
                opened.content = opened.file.content if opened.file is not None else b""
                offset = 0
                while data := self.check_read(opened, offset, MIB):
                    offset += len(data)
                assert offset == len(opened.content)
                self.at.do_now(opened.handle.release)
        self.source.edited()

    @contextmanager
    def now_as_it_is(self) -> Iterator[None]:
        later, self.hours._later = self.hours._later, 0
        try:
            yield
        finally:
            self.hours._later = later

    # -- what always holds

    @stateful.invariant()
    def promises(self) -> None:
        """Capacities are kept, and what is needed stays."""
        global steps
        steps += 1
        for number, capacity in enumerate(self.capacities, 1):
            used = allocated_bytes(self.area.path / f"tier{number}")
            assert used <= capacity, f"tier {number}: {used} of {capacity} bytes"
        if self.mount is not None:
            assert self.mount.violations == []

    def teardown(self) -> None:
        try:
            if self.capacities:
                self.end()
        finally:
            if self.mount is not None:
                self.mount.give_up()
            self.stack.close()
            shutil.rmtree(self.directory)
        deadline = time.monotonic() + 5
        while (left := descriptors() - self.before) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert not left

    def end(self) -> None:
        if self.mount is None:
            self.come_up()
        self.end_faults()
        self.available = 1 << 34
        self.close_handles()
        self.at.do(self.mirror.mend)
        self.at.wait_idle()
        self.look_at_names()
        for number, _path in enumerate(self.source.file_paths()):
            self.read_one(number, MIB, True)
        self.at.do(self.settled)
        mount, self.mount = self.at, None
        mount.unmount()
        self.come_up()
        self.at.do(self.settled)

    async def settled(self) -> None:
        mirror = self.mirror
        await mirror.cache.maintain()
        await mirror.settled()
        assert mirror.index.replicas.journal() == []
        for tier in mirror.tiers:
            await Scrub(mirror.cache.accounts, 1 << 40).round(tier)
        assert mirror.metrics.replicas_corrupt == 0


def test_the_model(tmp_path: Path) -> None:
    number = count()

    def machine() -> Model:
        Model.directory = tmp_path / str(next(number))
        return Model()

    stateful.run_state_machine_as_test(
        machine,  # type: ignore[arg-type]  # any callable will do, its documentation says
        settings=settings(
            max_examples=EXAMPLES or 40,
            stateful_step_count=50 if EXAMPLES else 30,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            phases=[Phase.generate] if EXAMPLES else [Phase.generate, Phase.shrink],
        ),
    )
    print(f"{steps} steps")
