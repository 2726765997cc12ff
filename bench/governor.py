"""Copying beside another job's load on the same source, which comes and goes: what that job sees
while copies give way to it (--prefetch-floor), while they do not, and without them."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import MIB, Mount, drop_caches, wait_for
from bench.pfs import ParallelFileSystem, Profile
from bench.report import Result
from bench.task import Task

MB = 1e6
PROFILE = Profile("limited", 100 * MB, 1e-3, 1e-3)
RIVAL_READERS = 4
RIVAL_FILES, RIVAL_FILE_BYTES = 4, 32 * MIB
CALM_SECONDS, BUSY_SECONDS, TIMES = 3.0, 5.0, 2
"""The other job reads for BUSY_SECONDS, so many times, each after CALM_SECONDS."""

LARGE_BYTES, SMALL_BYTES = 32 * MIB, 110_000
APART, GOVERNED, UNGOVERNED = "without us", "copies give way", "copies do not"
OFF = ("--prefetch-floor", "off")


@dataclass
class Rival:
    """Another job: readers of random MiBs, past the page cache. ``seconds``: what each read
    took."""

    root: Path
    seconds: list[float] = field(default_factory=list)
    busy_seconds: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def coming_and_going(self) -> Iterator[None]:
        thread = threading.Thread(target=self._come_and_go)
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def _come_and_go(self) -> None:
        for _ in range(TIMES):
            time.sleep(CALM_SECONDS)
            began = time.perf_counter()
            readers = [
                threading.Thread(target=self._read, args=(number, began + BUSY_SECONDS))
                for number in range(RIVAL_READERS)
            ]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            self.busy_seconds += time.perf_counter() - began

    def _read(self, seed: int, until: float) -> None:
        rng = random.Random(seed)
        path = self.root / f"{seed % RIVAL_FILES}"
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            while (began := time.perf_counter()) < until:
                os.pread(fd, MIB, rng.randrange(RIVAL_FILE_BYTES // MIB) * MIB)
                self.seconds.append(time.perf_counter() - began)
        finally:
            os.close(fd)

    def report(self, result: Result, arm: str) -> None:
        rate = len(self.seconds) * MIB / MB / self.busy_seconds
        result.figure("the other job reads", rate, "MB/s", arm=arm)
        result.figure("its median read", 1000 * statistics.median(self.seconds), "ms", arm=arm)
        slow = statistics.quantiles(self.seconds, n=20)[-1]
        result.figure("its slowest reads, 95th percentile", 1000 * slow, "ms", arm=arm)


def generate(data: Path, mounts: int, size: int, file_bytes: int) -> None:
    """A directory for each mount, so much of it in all, and the other job's."""
    rng = random.Random(1)
    block = rng.randbytes(max(MIB, file_bytes // 32))
    for mount in range(mounts):
        (data / f"m{mount}").mkdir(parents=True)
        for number in range(size // file_bytes // mounts):
            text = (block * (file_bytes // len(block) + 1))[: file_bytes - 8]
            (data / f"m{mount}" / f"{number:05d}").write_bytes(number.to_bytes(8, "big") + text)
    (data / "rival").mkdir()
    for number in range(RIVAL_FILES):
        (data / "rival" / str(number)).write_bytes(block * (RIVAL_FILE_BYTES // len(block)))
    for path in data.rglob("*"):
        os.utime(path, (1.6e9, 1.6e9))


def copy_all(pfs: Path, place: Path, mounts: int, options: tuple[str, ...]) -> float:
    """Seconds until all mounts have copied all of theirs."""
    with ExitStack() as undo:
        began = time.perf_counter()
        made = [
            undo.enter_context(Mount(pfs / f"m{n}", place / f"n{n}", "--prefetch", "all", *options))
            for n in range(mounts)
        ]

        def copied() -> bool:
            return all(
                mount.status()["prefetch"]["idle_since_uptime_seconds"] is not None
                for mount in made
            )

        wait_for(copied, "the copies to end", 600)
        return time.perf_counter() - began


def measure(task: Task, data: Path, mounts: int, arm: str, *, rivals: bool) -> tuple[float, Rival]:
    """Seconds that copying took, and what the other job saw."""
    place = data.parent / "run"
    place.mkdir()
    drop_caches()
    seconds = 0.0
    with ExitStack() as undo:
        pfs = place / "source"
        undo.enter_context(ParallelFileSystem(data, pfs, PROFILE))
        rival = Rival(pfs / "rival")
        if rivals:
            undo.enter_context(rival.coming_and_going())
        if arm is not APART:
            task.say(f"{mounts} mounts, {arm}")
            seconds = copy_all(pfs, place, mounts, OFF if arm is UNGOVERNED else ())
    shutil.rmtree(place)
    return seconds, rival


def beside_others(task: Task, result: Result, mounts: int, size: int) -> None:
    data = task.place / f"data{mounts}"
    generate(data, mounts, size, LARGE_BYTES)
    name = "1 mount" if mounts == 1 else f"{mounts} mounts at once"
    for arm in (APART, GOVERNED, UNGOVERNED):
        seconds, rival = measure(task, data, mounts, arm, rivals=True)
        row = f"{name}, {arm}"
        rival.report(result, row)
        if seconds:
            result.figure("copying takes", seconds, "s", arm=row)
    shutil.rmtree(data)


def alone(task: Task, result: Result, size: int, file_bytes: int, name: str) -> None:
    """Without anybody else the source is used fully."""
    data = task.place / f"alone{file_bytes}"
    generate(data, 1, size, file_bytes)
    governed, ungoverned = [], []
    for _ in range(task.rounds_or(3, 7)):
        governed.append(measure(task, data, 1, GOVERNED, rivals=False)[0])
        ungoverned.append(measure(task, data, 1, UNGOVERNED, rivals=False)[0])
    result.compare(
        f"rate of copying without others, {name}",
        "MB/s",
        [size / MB / seconds for seconds in governed],
        [size / MB / seconds for seconds in ungoverned],
        at_least=0.98,
        against="--prefetch-floor off",
    )
    shutil.rmtree(data)


def run(task: Task) -> Result:
    size = (1 if task.quick else 3) * 900 * MIB
    result = Result(
        "governor",
        f"copies of {size / MB:.0f} MB beside another job's {RIVAL_READERS} readers",
    )
    for mounts in (1, 3):
        beside_others(task, result, mounts, size)
    alone(task, result, size // 2, LARGE_BYTES, "large files")
    alone(task, result, size // 4, SMALL_BYTES, "files of 110 KB")
    result.notes = [
        f"the source: {PROFILE.bandwidth / MB:g} MB/s for all together,"
        f" {1000 * PROFILE.read_seconds:g} ms an operation",
        f"the other job reads a MiB at a time, {TIMES} times for {BUSY_SECONDS:g} s,"
        f" {CALM_SECONDS:g} s apart",
        "copying: from before the mount until nothing is left to copy (--prefetch all)",
    ]
    return result
