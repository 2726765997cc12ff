"""Staging by hand against a mount: ``cp -r``, one image of the dataset (squashfs) mounted where it
lies, the image copied to the node and mounted there, and monarchfs.

What a job of so many epochs waits for is the time until it may begin, its first epoch, and the
later ones. From these follows for how many epochs which way is the faster one (break-even).
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path

from bench.arms import copy_tree
from bench.epochs import File, epoch
from bench.harness import (
    MIB,
    Mount,
    Unusable,
    drop_caches,
    memory_place,
    reader_processes,
    write_random,
)
from bench.pfs import INSTANT, PROFILES, ParallelFileSystem
from bench.report import Kind, Result, Series, point
from bench.task import Task

READERS = 2
EPOCHS = 2
SHARES = (1.0, 0.1)
"""Of the dataset: what the job reads of it."""
IMAGE_BYTES, SHARD_BYTES = 110_000, 32 * MIB
PER_DIRECTORY = 100
MOST_EPOCHS = 1000
IMAGE, DATA = "data.squashfs", "data"
MONARCHFS, COPIED, DIRECT = "monarchfs", "cp -r first", "parallel FS"

Way = Callable[[Path, Path], AbstractContextManager[Path]]
"""From the parallel file system, with an empty local directory, to the dataset."""


@contextmanager
def directly(pfs: Path, _place: Path) -> Iterator[Path]:
    yield pfs / DATA


@contextmanager
def copied(pfs: Path, place: Path) -> Iterator[Path]:
    copy_tree(pfs / DATA, place / DATA)
    yield place / DATA


@contextmanager
def image_in_place(pfs: Path, place: Path) -> Iterator[Path]:
    with _mounted(pfs / IMAGE, place) as path:
        yield path


@contextmanager
def image_copied(pfs: Path, place: Path) -> Iterator[Path]:
    shutil.copyfile(pfs / IMAGE, place / IMAGE)
    with _mounted(place / IMAGE, place) as path:
        yield path


@contextmanager
def by_monarchfs(pfs: Path, place: Path) -> Iterator[Path]:
    options = ("--freshness", "immutable", "-o", "reserve_percent=0")
    with Mount(pfs / DATA, place / "m", *options, size="100%") as mount:
        yield mount.path


WAYS: dict[str, Way] = {
    DIRECT: directly,
    COPIED: copied,
    "image in place": image_in_place,
    "image copied first": image_copied,
    MONARCHFS: by_monarchfs,
}


@contextmanager
def _mounted(image: Path, place: Path) -> Iterator[Path]:
    path = place / "mnt"
    path.mkdir()
    subprocess.run(["mount", "-t", "squashfs", "-o", "loop,ro", image, path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@dataclass(slots=True)
class Found:
    """Of one way, round by round: seconds until it was ready, and of each epoch."""

    ready: list[float] = field(default_factory=list)
    epochs: list[list[float]] = field(default_factory=list)

    def epoch(self, number: int) -> list[float]:
        return [seconds[number] for seconds in self.epochs]

    def total(self, epochs: int) -> float:
        """Of a job with so many: the median of the rounds; all after the first take as long as the
        second."""
        return statistics.median(
            ready + first + (epochs - 1) * second
            for ready, (first, second) in zip(self.ready, self.epochs, strict=True)
        )


def break_even(mine: Found, other: Found) -> str:
    """For jobs of how many epochs mine is faster: as all later epochs take as long as the second,
    that changes once at most."""
    faster = [mine.total(n) < other.total(n) for n in range(1, MOST_EPOCHS + 1)]
    if faster[0] == faster[-1]:
        return "always" if faster[0] else "never"
    change = faster.index(not faster[0])
    return f"up to {change} epochs" if faster[0] else f"from {change + 1} epochs on"


def generate(root: Path, count: int, size: int) -> list[File]:
    rng = random.Random(1)
    paths = [f"{number // PER_DIRECTORY:03d}/{number:06d}" for number in range(count)]
    return [File(path, write_random(root / DATA / path, size, rng)) for path in paths]


def make_image(source: Path, image: Path) -> float:
    """Seconds. Uncompressed: images and shards are compressed already."""
    plain = ("-noI", "-noD", "-noF", "-noX", "-no-progress", "-quiet", "-noappend")
    started = time.perf_counter()
    subprocess.run(["mksquashfs", source, image, *plain], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def job(
    way: Way, pfs: ParallelFileSystem, place: Path, pool: Pool, files: list[File], seed: int
) -> tuple[float, list[float]]:
    """Seconds until it was ready, and of each epoch; page cache empty before each of these, and
    the noise the same for all."""
    drop_caches()
    pfs.restart_noise()
    started = time.perf_counter()
    with way(pfs.path, place) as path:
        ready = time.perf_counter() - started
        seconds = []
        for number in range(EPOCHS):
            drop_caches()
            pfs.restart_noise()
            seconds.append(epoch(pool, path, files, 10 * seed + number))
    return ready, seconds


def measure(task: Task, what: str, count: int, size: int, result: Result) -> None:
    found: dict[tuple[float, str], Found] = defaultdict(Found)
    with ExitStack() as stack:
        memory = stack.enter_context(memory_place())
        pool = stack.enter_context(reader_processes(READERS))
        files = generate(memory / "backing", count, size)
        pfs = ParallelFileSystem(memory / "backing", memory / "pfs", INSTANT)
        stack.enter_context(pfs)
        pfs.use(PROFILES["busy"])
        drop_caches()
        task.say(f"{what}: making the image")
        seconds = make_image(pfs.path / DATA, memory / "backing" / IMAGE)
        result.figure(f"{what}: making the image, once", seconds, "s")
        ways = list(WAYS)
        for number in range(task.rounds_or(1, 5)):
            for share in SHARES:
                chosen = random.Random(number).sample(files, max(1, round(share * count)))
                for name in ways:
                    task.say(f"{what}, {share:.0%} of it, round {number + 1}: {name}")
                    place = memory / "place"
                    place.mkdir()
                    try:
                        ready, epochs = job(WAYS[name], pfs, place, pool, chosen, number)
                    finally:
                        shutil.rmtree(place)
                    found[share, name].ready.append(ready)
                    found[share, name].epochs.append(epochs)
            ways.reverse()
    for share in SHARES:
        show(result, f"{what}, {share:.0%} read", {name: found[share, name] for name in WAYS})


def show(result: Result, case: str, found: dict[str, Found]) -> None:
    mine, direct = found[MONARCHFS], found[DIRECT]
    for name, one in found.items():
        result.figure(
            f"{case}: until it may begin",
            statistics.median(one.ready),
            "s",
            values=one.ready,
            arm=name,
        )
        for number in range(EPOCHS):
            result.compare(
                *(f"{case}: epoch {number + 1}", "s", one.epoch(number), direct.epoch(number)),
                against=DIRECT,
                arm=name,
            )
        if name != MONARCHFS:
            result.notes.append(f"{case}: faster than {name}: {break_even(mine, one)}")
        totals = [point(f"{n} epochs", [one.total(n)]) for n in (1, 3, 10)]
        label, plot = "time of the job's reads (s)", "Staging by hand, and monarchfs"
        result.series.append(Series(name, "", label, totals, Kind.BARS, plot=plot, panel=case))


def run(task: Task) -> Result:
    result = Result("staging", "staging by hand against a mount: break-evens in epochs")
    if os.geteuid() != 0:
        raise Unusable("only root can mount an image: run it as root")
    if shutil.which("mksquashfs") is None:
        raise Unusable("mksquashfs is not installed: apt-get install squashfs-tools")
    images, shards = (200, 3) if task.quick else (4000, 13)
    measure(task, "images of 110 KB", images, IMAGE_BYTES, result)
    measure(task, "shards of 32 MiB", shards, SHARD_BYTES, result)
    result.notes += [
        f"{READERS} readers, files in random order, every byte checked; behind the profile busy;"
        " the page cache is emptied before each epoch, and each has the same noise",
        "local storage is memory (tmpfs); the image is uncompressed; the kernel mounts it (loop)",
    ]
    return result
