"""First and second epochs with nothing to hide behind: sources without added latency, small files.

Each way reads the same files in random order, each file opened, read to its end and closed. The
first epoch begins with nothing local; before each epoch everything is synced and the kernel's
caches are emptied. The second epoch is compared with the copies of ``cp -r``, read from the same
file system on which the tiers lie.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path

import psutil

from bench import mirrors
from bench.gluster import gluster_volume
from bench.harness import (
    MIB,
    Mount,
    Unusable,
    drop_caches,
    memory_place,
    reader_processes,
    write_random,
)
from bench.memory import disk
from bench.processes import Daemon, cpu_seconds
from bench.report import Kind, Result, Series, point
from bench.task import Task

FILES_PER_DIRECTORY = 250
MOST_SECONDS = 900.0
CHECKED_FILES = 100
"""So many of each epoch are compared with the source, byte by byte, after the clock has stopped."""
DISK, MEMORY, GLUSTER = "disk", "tmpfs", "GlusterFS"
DIRECT, BINDFS, COPY, RCLONE = "the files themselves", "bindfs", "cp -r", "rclone"


@dataclass(frozen=True, slots=True)
class Tree:
    """``count`` files of ``size`` bytes."""

    what: str
    count: int
    size: int

    @property
    def bytes(self) -> int:
        return self.count * self.size

    def paths(self) -> list[str]:
        return [f"{n // FILES_PER_DIRECTORY:03d}/{n:06d}.bin" for n in range(self.count)]

    def generate(self, root: Path) -> None:
        rng = random.Random(self.size)
        for path in self.paths():
            write_random(root / path, self.size, rng)


@dataclass(frozen=True, slots=True)
class Way:
    """A mount of ours. ``listed``: the names are known before the first epoch; ``share``: the part
    of the data that the tier has room for."""

    name: str
    options: tuple[str, ...] = ()
    listed: bool = False
    share: float = 2.0
    keeps: bool = True


NONE = Way("monarchfs none", ("--prefetch", "none"), keeps=False)
AUTO = Way("monarchfs auto")
OURS = (
    NONE,
    Way("monarchfs access", ("--prefetch", "access")),
    AUTO,
    Way("monarchfs auto, names listed", listed=True),
    Way("monarchfs all", ("--prefetch", "all")),
    Way("monarchfs auto, lru, room for a third", ("--evict", "lru"), share=1 / 3),
)
OTHERS = (DIRECT, BINDFS, COPY, RCLONE)


@dataclass(frozen=True, slots=True)
class Case:
    """``medium``: where the source lies; the tiers lie there too, those of GlusterFS on disk."""

    medium: str
    tree: Tree
    readers: int
    others: tuple[str, ...] = OTHERS
    ours: tuple[Way, ...] = OURS

    @property
    def name(self) -> str:
        return f"{self.medium}, {self.tree.what}, {self.readers} readers"


def cases(task: Task) -> list[Case]:
    few, some = (DIRECT, BINDFS, COPY), (NONE, AUTO)
    if task.quick:
        small = Tree("110 KB", 1500, 110_000)
        tiny = Tree("4 KB", 3000, 4_000)
        large = Tree("64 MiB", 6, 64 * MIB)
        return [
            Case(DISK, small, 2),
            Case(DISK, tiny, 2, few, some),
            Case(DISK, tiny, 8, few, some),
            Case(DISK, large, 2, few, some),
            Case(MEMORY, small, 2, few, some),
            Case(GLUSTER, small, 2, few, some),
        ]
    trees = (
        Tree("110 KB", 4000, 110_000),
        Tree("4 KB", 10_000, 4_000),
        Tree("400 KB", 1500, 400_000),
        Tree("64 MiB", 16, 64 * MIB),
    )
    found = [Case(DISK, tree, readers) for tree in trees for readers in (2, 8)]
    found += [Case(MEMORY, tree, 2) for tree in trees]
    return found + [Case(GLUSTER, tree, 2) for tree in (trees[0], trees[3])]


def read_files(root: str, paths: Sequence[str], size: int) -> float:
    """Opens, reads and closes each; the processor seconds of that. Runs in a reader process."""
    buffer = bytearray(min(size, MIB))
    found = 0
    began = time.process_time()
    for path in paths:
        fd = os.open(f"{root}/{path}", os.O_RDONLY)
        while count := os.readv(fd, [buffer]):
            found += count
        os.close(fd)
    used = time.process_time() - began
    if found != size * len(paths):
        raise ValueError(f"{found} bytes of {len(paths)} files of {size} in {root}")
    return used


@dataclass(slots=True)
class Found:
    """Of one way, round by round. Processor seconds of daemons count until all is copied."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    reader_cpu: list[float] = field(default_factory=list)
    daemon_cpu: list[float] = field(default_factory=list)
    source_bytes: list[float] = field(default_factory=list)
    source_operations: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Bench:
    """One case at work. Constant: all but ``found`` and ``seed``, which goes on by one an epoch."""

    case: Case
    source: Path
    room: Path
    """A directory on the file system of the tiers."""
    pool: Pool
    found: dict[str, Found] = field(default_factory=lambda: defaultdict(Found))
    seed: int = 0

    def epoch(self, root: Path) -> tuple[float, float]:
        """Wall and processor seconds of the readers. Caches are emptied before."""
        order = self.case.tree.paths()
        random.Random(self.seed).shuffle(order)
        self.seed += 1
        shares = [order[n :: self.case.readers] for n in range(self.case.readers)]
        size = self.case.tree.size
        os.sync()
        drop_caches()
        began = time.perf_counter()
        jobs = self.pool.starmap_async(
            read_files, [(str(root), share, size) for share in shares], chunksize=1
        )
        used = jobs.get(MOST_SECONDS)
        seconds = time.perf_counter() - began
        self.check(root, order[:CHECKED_FILES] if size < MIB else order[:1])
        return seconds, sum(used)

    def check(self, root: Path, paths: Iterable[str]) -> None:
        for path in paths:
            if zlib.crc32((root / path).read_bytes()) != zlib.crc32(
                (self.source / path).read_bytes()
            ):
                raise ValueError(f"{root / path} is not what the source has")

    def ours(self, way: Way, place: Path) -> None:
        tier, capacity = place / "tier", int(self.case.tree.bytes * way.share) + 16 * MIB
        found = self.found[way.name]
        with Mount(self.source, place, *way.options, tier=tier, size=str(capacity)) as mount:
            if way.listed:
                subprocess.run(
                    ["ls", "-lR", str(mount.path)], check=True, stdout=subprocess.DEVNULL
                )
            daemon = Daemon(mount.path)
            before = daemon.cpu_seconds()
            asked = daemon.status()["source_io"]
            seconds, used = self.epoch(mount.path)
            now = mount.wait_idle(MOST_SECONDS)["source_io"]
            found.first.append(seconds)
            found.reader_cpu.append(used)
            found.daemon_cpu.append(daemon.cpu_seconds() - before)
            found.source_bytes.append(now["read_bytes"] - asked["read_bytes"])
            found.source_operations.append(now["operations"] - asked["operations"])
            if way.keeps:
                found.second.append(self.epoch(mount.path)[0])

    def other(self, name: str, place: Path) -> None:
        found = self.found[name]
        if name == COPY:
            os.sync()
            drop_caches()
            used, began = _children_cpu(), time.perf_counter()
            copy = place / "copy"
            subprocess.run(["cp", "-r", "--reflink=never", str(self.source), copy], check=True)
            found.first.append(time.perf_counter() - began)
            found.reader_cpu.append(_children_cpu() - used)
            found.daemon_cpu.append(0.0)
            found.second.append(self.epoch(copy)[0])
            return
        with ExitStack() as stack:
            root, pids = self.source, list[int]()
            if name != DIRECT:
                root = stack.enter_context(mirrors.mirror(name, self.source, place / name))
                everyone = psutil.process_iter(["cmdline"])
                pids = [one.pid for one in everyone if str(root) in (one.info["cmdline"] or ())]
            before = cpu_seconds(pids)
            seconds, used = self.epoch(root)
            found.first.append(seconds)
            found.reader_cpu.append(used)
            found.daemon_cpu.append(cpu_seconds(pids) - before)
            if name == RCLONE:
                found.second.append(self.epoch(root)[0])


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def media(case: Case, task: Task) -> Iterator[tuple[Path, Path]]:
    """An empty directory for the source, one for the tiers."""
    room = case.tree.bytes * 4 + case.tree.count * 16384 + (256 << 20)
    with ExitStack() as stack:
        if case.medium == MEMORY:
            here = stack.enter_context(memory_place())
        else:
            here = stack.enter_context(disk(room, "ingest", task.place))
        source = here / "source"
        if case.medium == GLUSTER:
            source = stack.enter_context(gluster_volume(here / "gluster")) / "source"
        yield source, here


def measure(case: Case, task: Task, result: Result) -> dict[str, Found]:
    installed = mirrors.installed()
    ways: list[str | Way] = [
        name for name in case.others if name in (DIRECT, COPY) or name in installed
    ]
    for name in set(case.others) - set(ways):
        result.leave_out(f"{name}, {case.name}", "not installed: run make bench-packages")
    ways += case.ours
    rounds = task.rounds_or(3, 3)
    with media(case, task) as (source, room), reader_processes(case.readers) as pool:
        task.say(f"{case.name}: files are made")
        case.tree.generate(source)
        bench = Bench(case, source, room, pool)
        for number in range(rounds):
            for way in ways:
                name = way if isinstance(way, str) else way.name
                task.say(f"{case.name}, round {number + 1} of {rounds}: {name}")
                place = room / f"run{number}"
                place.mkdir()
                if isinstance(way, str):
                    bench.other(way, place)
                else:
                    bench.ours(way, place)
                shutil.rmtree(place)
            ways.reverse()
    return bench.found


# The goals. First epoch: rates against bindfs by way. Second: against the copies of cp -r.
FIRST_GOALS = {NONE.name: 0.9, AUTO.name: 0.6}
SECOND_GOALS = {DISK: 0.9}
DAEMON_MS_PER_FILE = 0.4
DAEMON_SECONDS_PER_GB = {NONE.name: 0.3, AUTO.name: 0.5}


def show(result: Result, case: Case, found: dict[str, Found]) -> None:
    tree = case.tree
    large = tree.size > MIB
    unit = "MB/s" if large else "files/s"
    amount = tree.bytes / 1e6 if large else tree.count

    def rates(seconds: list[float]) -> list[float]:
        return [amount / one for one in seconds]

    flagship = case.medium == DISK and case.readers == 2 and tree.what == "110 KB"
    base = BINDFS if BINDFS in found else DIRECT
    for name, one in found.items():
        if name != DIRECT:
            result.compare(
                f"{case.name}: first epoch", unit, rates(one.first), rates(found[DIRECT].first),
                against=DIRECT, arm=name,
                at_least=0.95 if case.medium == GLUSTER and name == AUTO.name else None,
            )  # fmt: skip
        if name in FIRST_GOALS and base == BINDFS:
            result.compare(
                f"{case.name}: first epoch, against bindfs", unit,
                rates(one.first), rates(found[BINDFS].first),
                against=BINDFS, arm=name,
                at_least=FIRST_GOALS[name] if flagship else None,
                headline=f"First epoch, {case.name}, {name}" if flagship else "",
            )  # fmt: skip
        if one.second and name != COPY and COPY in found:
            goal = SECOND_GOALS.get(case.medium) if name == AUTO.name and not large else None
            result.compare(
                f"{case.name}: second epoch", unit, rates(one.second), rates(found[COPY].second),
                against="the copies of cp -r", arm=name, at_least=goal,
                headline=f"Second epoch, {case.name}" if flagship and name == AUTO.name else "",
            )  # fmt: skip
        costs(result, case, name, one, large)
    for what, seconds in (
        ("first epoch", {name: one.first for name, one in found.items()}),
        ("second epoch", {name: one.second for name, one in found.items() if one.second}),
    ):
        for name, values in seconds.items():
            result.series.append(
                Series(
                    *(name, "", f"rate ({unit})", [point(what, rates(values))]),
                    *(Kind.BARS, "Epochs of a source without latency", case.name),
                )
            )


def costs(result: Result, case: Case, name: str, one: Found, large: bool) -> None:
    """Processor time by file, or by GB of large files; what was asked of the source."""
    tree = case.tree
    per, unit = (tree.bytes / 1e9, "s/GB") if large else (tree.count / 1e3, "ms/file")
    reader = [value / per for value in one.reader_cpu]
    result.figure(
        f"{case.name}: processors, reader", _median(reader), unit, values=reader, arm=name
    )
    if name in (DIRECT, COPY):
        return
    daemons = [value / per for value in one.daemon_cpu]
    goals = DAEMON_SECONDS_PER_GB if large else {AUTO.name: DAEMON_MS_PER_FILE}
    result.figure(
        f"{case.name}: processors, daemons", _median(daemons), unit, values=daemons, arm=name,
        at_most=goals.get(name),
    )  # fmt: skip
    if one.source_bytes:
        shares = [value / tree.bytes for value in one.source_bytes]
        result.figure(f"{case.name}: read of the source", _median(shares), "x data", arm=name)
        asked = [value / tree.count for value in one.source_operations]
        result.figure(f"{case.name}: operations of the source a file", _median(asked), "", arm=name)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def run(task: Task) -> Result:
    if os.geteuid() != 0:
        raise Unusable("emptying the kernel's caches takes root")
    result = Result("ingest", "first and second epochs of sources without added latency")
    task.keep(result)
    for case in cases(task):
        try:
            show(result, case, measure(case, task, result))
        except Unusable as error:
            result.leave_out(case.name, str(error))
    result.notes = [
        "each file is opened, read and closed, in random order; before each epoch everything is"
        " synced and all of the kernel's caches are emptied; ways take turns, reversed each round",
        f"{DISK}: an ext4 on a loop device on this machine's disk, source and tiers;"
        f" {GLUSTER}: three bricks and the client on this machine, tiers on {DISK}",
        "cp -r: the first epoch is the copying, the second reads the copies; daemons' processor"
        " time counts until the last copy is made; monarchfs as it comes but for what is named",
        f"a first epoch counts until the readers have all; of each, {CHECKED_FILES} files (one of"
        " 64 MiB) are compared with the source after the clock has stopped",
    ]
    return result
