"""How figures grow with the number of files: finding, copying, asking, memory, mounting again."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from bench.arms import COLD
from bench.harness import Mount, drop_names, reader_processes, repeated, wait_for
from bench.processes import Daemon, kill, processes_of
from bench.report import Kind, Point, Result, Series
from bench.task import Task

FILES_PER_DIRECTORY = 1000
FILE_BYTES = 1024
READERS = 2
MOST_STATS = MOST_READS = 20_000
REMOUNTS = 3
STATUS_TIMES = 20
SAMPLE_SECONDS = 0.25
MOST_SECONDS = 3600.0
MOST_MB = 150
MOST_REMOUNT_SECONDS = 2
OPTIONS = ("--freshness", "immutable")


def content(number: int) -> bytes:
    return (b"%016d" % number) * (FILE_BYTES // 16)


def path_of(number: int) -> str:
    return f"{number // FILES_PER_DIRECTORY:04d}/{number:07d}.bin"


# What a reader process does.


def make_directory(task: tuple[str, int, int]) -> None:
    """One directory with its files."""
    root, first, end = task
    os.mkdir(f"{root}/{first // FILES_PER_DIRECTORY:04d}")
    for number in range(first, min(first + FILES_PER_DIRECTORY, end)):
        fd = os.open(f"{root}/{path_of(number)}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(fd, content(number))
        os.close(fd)


def read_files(root: str, numbers: list[int]) -> float:
    """Microseconds a file, none of them from its own pages; ValueError for wrong bytes."""
    started = time.perf_counter()
    for number in numbers:
        fd = os.open(f"{root}/{path_of(number)}", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if os.read(fd, FILE_BYTES + 1) != content(number):
            raise ValueError(f"file {number} has wrong bytes")
        os.close(fd)
    return (time.perf_counter() - started) / len(numbers) * 1e6


def stat_files(root: str, numbers: list[int]) -> float:
    """Microseconds a file."""
    paths = [f"{root}/{path_of(number)}" for number in numbers]
    started = time.perf_counter()
    size = sum(os.stat(path).st_size for path in paths)
    seconds = time.perf_counter() - started
    if size != FILE_BYTES * len(numbers):
        raise ValueError("sizes are wrong")
    return seconds / len(numbers) * 1e6


def find_files(root: str, numbers: list[int]) -> float:
    """Microseconds a file for the names and sizes of all; ``numbers`` are not looked at."""
    started = time.perf_counter()
    done = subprocess.run(
        ["find", root, "-type", "f", "-printf", "%s\n"], stdout=subprocess.PIPE, check=True
    )
    seconds = time.perf_counter() - started
    found = done.stdout.count(b"\n")
    if not found or done.stdout != f"{FILE_BYTES}\n".encode() * found:
        raise ValueError("find found wrong sizes")
    return seconds / found * 1e6


class Memory:
    """RssAnon of the worker and the supervisor, in MB. Changing: the most that was seen."""

    def __init__(self, daemon: Daemon) -> None:
        self.most = 0.0
        self._pids = [pid for pid in (daemon.supervisor, daemon.worker) if pid is not None]

    def now(self) -> float:
        value = sum(_anonymous_bytes(pid) for pid in self._pids) / 1e6
        self.most = max(self.most, value)
        return value


def _anonymous_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@contextmanager
def memory_of(daemon: Daemon) -> Iterator[Memory]:
    """Looked at all the time."""
    memory = Memory(daemon)
    with repeated(memory.now, SAMPLE_SECONDS):
        yield memory


def until(daemon: Daemon, done: Callable[[dict[str, Any]], bool], files: int) -> dict[str, Any]:
    """Ask for the status now and then until ``done``; that status."""
    found: dict[str, Any] = {}

    def look() -> bool:
        found.update(daemon.status())
        if found["state"] == "worker not answering":
            return False  # on a busy machine, within 1.5 s: the rest is an earlier report
        if found["state"] != "serving":
            raise ValueError(f"the mount says: {found['state']}")
        return done(found)

    wait_for(look, "the mount to have done its work", MOST_SECONDS, min(1.0, files / 1e5))
    return found


def idle(status: dict[str, Any]) -> bool:
    prefetch = status["prefetch"]
    return not (prefetch["scanning"] or prefetch["queued"] or prefetch["active"])


def index_bytes(state: Path) -> int:
    """What the index occupies on the disk."""
    # Not its blocks: some are allocated ahead of it.
    return (state / "index" / "data.mdb").stat().st_size


@dataclass(slots=True)
class Grown:
    """Of trees of growing size: by figure, the points, those of the mount and those of the source
    directly."""

    mine: dict[str, list[Point]] = field(default_factory=dict)
    direct: dict[str, list[Point]] = field(default_factory=dict)

    def add(self, what: str, files: int, mine: float, direct: float | None = None) -> None:
        self.mine.setdefault(what, []).append(Point(files, mine))
        if direct is not None:
            self.direct.setdefault(what, []).append(Point(files, direct))


class Tree:
    """One size. Constant: all."""

    def __init__(self, files: int, task: Task, result: Result, grown: Grown, pool: Pool) -> None:
        self.files = files
        self.place = task.place / f"n{files}"
        self.source = self.place / "data"
        self._task = task
        self._rounds = task.rounds_or(3, 5)
        self._result = result
        self._grown = grown
        self._pool = pool

    def run(self) -> None:
        self.source.mkdir(parents=True)
        self._say("making the tree")
        firsts = range(0, self.files, FILES_PER_DIRECTORY)
        tasks = [(str(self.source), first, self.files) for first in firsts]
        self._pool.map(make_directory, tasks, chunksize=1)
        self.scanned()
        self.copied()
        self.remounted()
        shutil.rmtree(self.place)

    def _say(self, what: str) -> None:
        self._task.say(f"{self.files:,} files: {what}")

    def _figure(self, name: str, value: float, unit: str, *, at_most: float | None = None) -> None:
        what = f"{self.files:,} files: {name}"
        self._result.figure(what, value, unit, at_most=at_most, arm=COLD.name)

    def _compare(
        self,
        what: str,
        work: Callable[[str, list[int]], float],
        mount: Path,
        *,
        most: int,
        drop: bool = False,
    ) -> None:
        """Microseconds a file, in random order, beside the same of the source."""
        mine: list[float] = []
        others: list[float] = []
        for seed in range(self._rounds):
            numbers = random.Random(seed).sample(range(self.files), min(most, self.files))
            for root, times in ((mount, mine), (self.source, others)):
                if drop:
                    os.sync()
                    drop_names()
                job = self._pool.apply_async(work, (str(root), numbers))
                times.append(job.get(MOST_SECONDS))
        self._result.compare(f"{self.files:,} files: {what}", "us", mine, others, arm=COLD.name)
        self._grown.add(what, self.files, statistics.median(mine), statistics.median(others))

    def scanned(self) -> None:
        """``--prefetch all`` with next to no room: the scan waits for no copy."""
        self._say("scan, find, stat")
        place = self.place / "scan"
        started = time.perf_counter()
        with Mount(self.source, place, *OPTIONS, "--prefetch", "all", size="64K") as mount:
            daemon = Daemon(mount.path)
            until(
                daemon,
                lambda now: not now["prefetch"]["scanning"] and now["files"]["known"] >= self.files,
                self.files,
            )
            seconds = time.perf_counter() - started
            self._figure("scan, from the mount command on", seconds, "s")
            self._grown.add("scan", self.files, seconds)
            until(daemon, idle, self.files)
            index = index_bytes(place / "state")
            self._figure("index, a known file", index / self.files, "B")
            find_files(str(mount.path), [])
            for what, drop in (("warm", False), ("cold", True)):
                if drop and os.geteuid() != 0:
                    continue
                self._compare(f"find, {what}", find_files, mount.path, most=1, drop=drop)
                self._compare(f"stat, {what}", stat_files, mount.path, most=MOST_STATS, drop=drop)
        shutil.rmtree(place)

    def copied(self) -> None:
        self._say("copying all")
        place = self.place / "copied"
        started = time.perf_counter()
        with Mount(self.source, place, *OPTIONS, "--prefetch", "all") as mount:
            daemon = Daemon(mount.path)
            with memory_of(daemon) as memory:
                status = until(daemon, idle_with(self.files), self.files)
                seconds = time.perf_counter() - started
                missing = self.files - status["files"]["resident"]
                self._say("reading")
                what = "open, read, close"
                self._compare(what, read_files, mount.path, most=MOST_READS)
                find_files(str(mount.path), [])
                times = []
                for _ in range(STATUS_TIMES):
                    began = time.perf_counter()
                    daemon.status()
                    times.append((time.perf_counter() - began) * 1e3)
                now = memory.now()
        index = index_bytes(place / "state")
        self._figure("found and copied, from the mount command on", seconds, "s")
        self._figure("files that are not resident then", missing, "", at_most=0)
        self._figure("status", statistics.median(times), "ms")
        self._figure("anonymous memory of both processes, most", memory.most, "MB", at_most=MOST_MB)
        self._figure("anonymous memory, all read and walked", now, "MB")
        self._figure("index, a resident file", index / self.files, "B")
        for name, value in (
            *(("scan and copy", seconds), ("memory", memory.most), ("index", index / 1e6)),
            ("status", statistics.median(times)),
        ):
            self._grown.add(name, self.files, value)

    def remounted(self) -> None:
        """How long a mount of the full cache takes to answer, left in order and not."""
        self._say("mounting again")
        state, tier = self.place / "copied" / "state", self.place / "copied" / "tier"
        options = ("--state-dir", str(state), *OPTIONS, "--prefetch", "all")
        times: dict[str, list[float]] = {"umount": [], "kill -9": []}
        left = "umount"
        for number in range(2 * REMOUNTS):
            mount = Mount(self.source, self.place / f"again{number}", *options, tier=tier)
            started = time.perf_counter()
            with mount:
                (mount.path / path_of(self.files - 1)).stat()
                times[left].append(time.perf_counter() - started)
                resident = mount.status()["files"]["resident"]
                if resident != self.files:
                    raise ValueError(f"after {left} {resident} files are resident")
                # Every second one finds what the one before, which was killed, has left.
                left = "umount" if left == "kill -9" else "kill -9"
                if left == "kill -9":
                    kill(processes_of(mount.path))
        for how, values in times.items():
            worst = max(values)
            self._figure(f"remount after {how}", worst, "s", at_most=MOST_REMOUNT_SECONDS)
            self._grown.add(f"remount after {how}", self.files, worst)


def idle_with(files: int) -> Callable[[dict[str, Any]], bool]:
    """Nothing is left to do, and so many files were found."""
    return lambda status: status["files"]["known"] >= files and idle(status)


COMPARED: dict[str, tuple[str, ...]] = {
    "Growth: names": (
        "time of a file (us)",
        "find, warm",
        "find, cold",
        "stat, warm",
        "stat, cold",
    ),
    "Growth: reading": ("time of a file (us)", "open, read, close"),
}
"""Pictures that have a panel for each of these, with the mount and the source in it."""
ALONE = {
    "time (s)": ("scan", "scan and copy", "remount after umount", "remount after kill -9"),
    "memory (MB)": ("memory",),
    "index (MB)": ("index",),
    "answer (ms)": ("status",),
}
"""Panels of one picture, with a line for each of these."""


def lines(result: Result, grown: Grown) -> None:
    for plot, (label, *names) in COMPARED.items():
        for what in names:
            for arm, points in ((COLD.name, grown.mine), ("direct", grown.direct)):
                if what in points:
                    line = Series(arm, "files", label, points[what], Kind.LINES, plot, what, "xy")
                    result.series.append(line)
    for label, whats in ALONE.items():
        for what in whats:
            if what in grown.mine:
                plot, panel = "Growth: time, memory, index", label.partition(" (")[0]
                line = Series(what, "files", label, grown.mine[what], Kind.LINES, plot, panel, "xy")
                result.series.append(line)


def run(task: Task) -> Result:
    exponents = (3, 4, 5) if task.quick else (3, 4, 5, 6)
    result = Result(
        "growth",
        f"1,000 to {10 ** exponents[-1]:,} files of {FILE_BYTES} bytes in directories of"
        f" {FILES_PER_DIRECTORY:,}; everything on the disk below --temp",
    )
    grown = Grown()
    with reader_processes(READERS) as pool:
        for exponent in exponents:
            Tree(10**exponent, task, result, grown, pool).run()
    lines(result, grown)
    if os.geteuid() != 0:
        result.leave_out("find and stat, cold", "only root can have the kernel forget names")
    result.notes = [
        "direct: the same work done on the source; it is on the local disk, so the kernel answers",
        "scan: with a tier that has room for 16 files; all names and attributes are known then",
        "warm: once more; cold: the kernel's names and attributes were dropped before, those of the"
        " source too; open, read, close: of resident files, never from the file's own pages",
        "anonymous memory is RssAnon of supervisor and worker: the index's pages are the page"
        " cache's, and are given back when memory is short",
        "remount: the mount command and the first answer, the longest of three; after kill -9 of"
        " both processes the old mount was unmounted before",
    ]
    return result
