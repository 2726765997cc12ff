"""How fast a tree comes into the cache, against ``cp -r`` and ``rsync -a`` of the same source.

Small files: their opening costs more than their bytes. Large ones: nothing counts but the source's
bandwidth, so they are compared with reading the source and keeping nothing. Sources are the
emulated parallel file system in each of its profiles and, to see what a file costs in processor
time, a directory in memory, which answers at once.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from bench.arms import COLD, COPIED, DIRECT
from bench.harness import MIB, Mount, drop_caches, memory_place, wait_for, write_random
from bench.pfs import PROFILES, Counts, ParallelFileSystem
from bench.processes import Daemon
from bench.report import Kind, Result, Series, point
from bench.task import Task

FILES_PER_DIRECTORY = 250
NO_LATENCY = "in memory"
MOST_SECONDS = 300.0
POLL_SECONDS = 0.02

CP, RSYNC, READ = "cp -r", "rsync -a", "reading alone"
WARM, ALL = "monarchfs warm", "--prefetch all"


@dataclass(frozen=True, slots=True)
class Tree:
    """``count`` files of ``size`` bytes, in directories of 250."""

    what: str
    count: int
    size: int

    @property
    def large(self) -> bool:
        return self.size > MIB


@dataclass(frozen=True, slots=True)
class Case:
    """A tree behind a profile, or in memory; how often it is copied in each way."""

    tree: Tree
    profile: str
    rounds: int


def cases(task: Task) -> list[Case]:
    """The slower the source, the fewer files: cp takes 6 to 12 ms for each of the crowded one."""
    rounds = task.rounds_or(3, 5)
    if task.quick:
        return [
            Case(Tree("110 KB", 1000, 110_000), "fast", rounds),
            Case(Tree("110 KB", 500, 110_000), "busy", rounds),
            Case(Tree("10 KB", 1000, 10_000), "fast", rounds),
            Case(Tree("10 KB", 500, 10_000), "busy", rounds),
            Case(Tree("1 GiB", 1, 1 << 30), "fast", rounds),
            Case(Tree("1 GiB", 1, 1 << 30), "busy", rounds),
            Case(Tree("10 KB", 4000, 10_000), NO_LATENCY, rounds),
        ]
    found = []
    for profile, number in (("fast", 4000), ("busy", 2000), ("crowded", 1000)):
        for what, size in (("110 KB", 110_000), ("10 KB", 10_000)):
            found.append(Case(Tree(what, number, size), profile, rounds))
        large = Tree("1 GiB", 1 if profile == "crowded" else 2, 1 << 30)
        found.append(Case(large, profile, rounds))
    for what, size in (("110 KB", 110_000), ("10 KB", 10_000)):
        found.append(Case(Tree(what, 10_000, size), NO_LATENCY, rounds))
    return found


def generate(root: Path, tree: Tree) -> None:
    rng = random.Random(tree.size)
    for number in range(tree.count):
        folder = root / f"{number // FILES_PER_DIRECTORY:03d}"
        write_random(folder / f"{number:06d}.bin", tree.size, rng)


# The ways. Each takes the source and an empty directory in memory, and returns seconds.


def copy(command: list[str], target: Path) -> float:
    """``command`` with the directory that it makes."""
    started = time.perf_counter()
    subprocess.run([*command, str(target)], check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - started


def cp(source: Path, place: Path) -> float:
    return copy(["cp", "-r", "--reflink=never", str(source)], place / "copy")


def rsync(source: Path, place: Path) -> float:
    return copy(["rsync", "-a", f"{source}/"], place / "copy")


def read_alone(source: Path, _place: Path) -> float:
    """By one reader a file, as many as cores, at most."""
    files = [path for path in source.rglob("*") if path.is_file()]

    def read(path: Path) -> None:
        buffer = bytearray(MIB)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    started = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(read, files))
    return time.perf_counter() - started


def warm(source: Path, place: Path) -> float:
    """From the question that ``monarchfs warm --wait`` asks to its answer."""
    with Mount(source, place / "m", "--freshness", "immutable") as mount:
        daemon = Daemon(mount.path)
        started = time.perf_counter()
        counts = daemon.warm()
        seconds = time.perf_counter() - started
        if counts["copied"] != counts["files"]:
            raise ValueError(f"not all was copied: {counts}")
        return seconds


def all_of_it(source: Path, place: Path) -> float:
    """From the mount command to the last copy."""
    options = ("--freshness", "immutable", "--prefetch", "all")
    started = time.perf_counter()
    with Mount(source, place / "m", *options) as mount:
        daemon = Daemon(mount.path)

        def ended() -> bool:
            return daemon.status()["prefetch"]["idle_since_uptime_seconds"] is not None

        wait_for(ended, "the copies to end", MOST_SECONDS, POLL_SECONDS)
        seconds = time.perf_counter() - started
        files = mount.status()["files"]
        if files["resident"] != sum(1 for path in source.rglob("*") if path.is_file()):
            raise ValueError(f"not all was copied: {files}")
        return seconds


Way = Callable[[Path, Path], float]
SMALL: Mapping[str, Way] = {CP: cp, RSYNC: rsync, WARM: warm, ALL: all_of_it}
LARGE: Mapping[str, Way] = {READ: read_alone, CP: cp, WARM: warm, ALL: all_of_it}


@dataclass(slots=True)
class Found:
    """Of one case: seconds by way, round by round; what was asked of the source by ``warm``."""

    case: Case
    seconds: dict[str, list[float]]
    counts: Counts

    def rates(self, way: str) -> list[float]:
        """Files a second of small ones, MB a second of large ones."""
        tree = self.case.tree
        amount = tree.count * tree.size / 1e6 if tree.large else tree.count
        return [amount / seconds for seconds in self.seconds[way]]


@contextmanager
def source_of(case: Case, data: Path, place: Path) -> Iterator[ParallelFileSystem | None]:
    if case.profile == NO_LATENCY:
        yield None
        return
    with ParallelFileSystem(data, place / "pfs", PROFILES[case.profile]) as pfs:
        yield pfs


def measure(case: Case, task: Task, memory: Path) -> Found:
    """Every way in turn, with empty caches and, behind the emulator, the same weather."""
    data = memory / "data"
    generate(data, case.tree)
    ways = {
        name: way
        for name, way in (LARGE if case.tree.large else SMALL).items()
        if name != RSYNC or shutil.which("rsync")
    }
    found = Found(case, defaultdict(list), Counts())
    numbers = count()
    with source_of(case, data, task.place) as pfs:
        source = data if pfs is None else pfs.path
        order = list(ways)
        for number in range(case.rounds):
            for name in order:
                task.say(f"{case.tree.what} files, {case.profile}, round {number + 1}: {name}")
                here = memory / f"run{next(numbers)}"
                here.mkdir()
                drop_caches()
                if pfs is not None:
                    pfs.restart_noise()
                    before = pfs.counts()
                found.seconds[name].append(ways[name](source, here))
                if pfs is not None and name == WARM:
                    found.counts = pfs.counts() - before
                shutil.rmtree(here)
            order.reverse()
    shutil.rmtree(data)
    return found


# What is said of it.

SLOWER = (
    "with no latency to hide, what a file costs in processor time decides: that of a copy which is"
    " checked, recorded and can be undone, by Python, beside that of four system calls in C"
)


BUSY = (
    "a GiB takes 0.8 s of processor time to copy (read, digest, write) and the emulator 0.5 s: at"
    " 1,000 MB/s two processors have 2.1 s, so that other work shows"
)


def show(result: Result, found: Found) -> None:
    case = found.case
    emulated = case.profile != NO_LATENCY
    what = f"{case.tree.what} files, {case.profile}"
    unit = "MB/s" if case.tree.large else "1/s"
    mine = found.rates(WARM)
    for other in (READ, CP, RSYNC):
        if other not in found.seconds:
            continue
        goal = None if not emulated else {READ: 0.95}.get(other, None if case.tree.large else 1.0)
        shown = other != CP and case.profile == "busy"
        result.compare(
            *(f"{what}: warm against {other}", unit, mine, found.rates(other)),
            at_least=goal,
            against=other,
            arm=COLD.name,
            why="" if goal is None or not case.tree.large else BUSY,
            headline=f"Copying {what}, against {other} (rate)" if shown else "",
        )
    base = READ if case.tree.large else CP
    result.compare(
        *(f"{what}: --prefetch all, with mounting, against {base}", unit),
        *(found.rates(ALL), found.rates(base)),
        against=base,
        arm=COLD.name,
    )
    if emulated:
        size = case.tree.count * case.tree.size
        result.figure(
            f"{what}: read of the source", found.counts.read_bytes / size, "x data", arm=COLD.name
        )
        operations = found.counts.operations / case.tree.count
        result.figure(f"{what}: operations on the source a file", operations, "", arm=COLD.name)


def bars(result: Result, all_found: list[Found]) -> None:
    """Rates by profile; a plot each for small files, for large ones, and for those in memory, whose
    rates are others by far."""
    names = {CP: COPIED.name, RSYNC: RSYNC, READ: DIRECT.name, WARM: COLD.name}
    for found in all_found:
        tree, profile = found.case.tree, found.case.profile
        plot = "Copying large files" if tree.large else "Copying small files"
        label = "rate (MB/s)" if tree.large else "files a second (1/s)"
        if profile == NO_LATENCY:
            plot += " of a source in memory"
        for way, name in names.items():
            if way in found.seconds:
                result.series.append(
                    Series(
                        *(name, "", label, [point(f"files of {tree.what}", found.rates(way))]),
                        *(Kind.BARS, plot, profile),
                    )
                )


def run(task: Task) -> Result:
    result = Result("copying", "a tree comes into the cache; rates against cp -r and rsync -a")
    all_found: list[Found] = []
    with memory_place() as memory:
        for case in cases(task):
            all_found.append(measure(case, task, memory))
            show(result, all_found[-1])
    bars(result, all_found)
    if shutil.which("rsync") is None:
        result.leave_out(RSYNC, "rsync is not installed: run make bench-packages")
    result.notes = [
        "warm: from the question that monarchfs warm --wait asks of a mount to its answer; the"
        " command itself takes 0.2 s to start. --prefetch all: from the mount command on",
        "copies lie in memory, and so do tiers; the kernel's caches are emptied before each; behind"
        " the emulator each way has the same noise; ways take turns, the other way round each time",
        "reading alone: 1 MiB at a time, a thread a file, at most 2; what it brings goes nowhere",
        f"{NO_LATENCY}: the source is a directory in memory, the fastest that there is: {SLOWER}",
    ]
    return result
