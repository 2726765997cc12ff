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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from bench.arms import COLD, COPIED, DIRECT, Arm, place_for
from bench.epochs import File
from bench.harness import MIB, Unusable, memory_place, reader_processes, write_random
from bench.pfs import INSTANT, PROFILES, ParallelFileSystem
from bench.programs import EPOCHS, READERS, Dataset, Found, ReachedOtherwise, job
from bench.report import Kind, Result, Series, point
from bench.task import Task

SHARES = (1.0, 0.1)
"""Of the dataset: what the job reads of it."""
IMAGE_BYTES, SHARD_BYTES = 110_000, 32 * MIB
PER_DIRECTORY = 100
MOST_EPOCHS = 1000
IMAGE = "data.squashfs"


class SquashFS:
    """``image`` lies alone in a directory, behind an emulated file system of its own. ``copied``:
    to local storage first, as sbcast does for each node."""

    freshness = "made before"

    def __init__(self, name: str, directory: Path, *, copied: bool) -> None:
        self.name = name
        self._directory = directory
        self._copied = copied

    @contextmanager
    def reach(
        self, pfs: ParallelFileSystem, place: Path, *, capacity: int | None
    ) -> Iterator[ReachedOtherwise]:
        with ParallelFileSystem(self._directory, place / "pfs", pfs.profile, seed=pfs.seed) as own:
            started = time.perf_counter()
            image = own.path / IMAGE
            if self._copied:
                image = Path(shutil.copyfile(image, place / IMAGE))
            path = place / "mnt"
            path.mkdir()
            subprocess.run(["mount", "-t", "squashfs", "-o", "loop,ro", image, path], check=True)
            try:
                yield ReachedOtherwise(path, time.perf_counter() - started, own)
            finally:
                subprocess.run(["umount", path], check=True)


def total(found: Found, epochs: int) -> float:
    """Seconds that a job with so many waits: the median of the rounds; all epochs after the first
    take as long as the second."""
    return statistics.median(
        ready + first + (epochs - 1) * second
        for ready, (first, second) in zip(found.ready, found.seconds, strict=True)
    )


def break_even(mine: Found, other: Found) -> str:
    """For jobs of how many epochs mine is faster: as all later epochs take as long as the second,
    that changes once at most."""
    faster = [total(mine, n) < total(other, n) for n in range(1, MOST_EPOCHS + 1)]
    if faster[0] == faster[-1]:
        return "always" if faster[0] else "never"
    change = faster.index(not faster[0])
    return f"up to {change} epochs" if faster[0] else f"from {change + 1} epochs on"


def generate(root: Path, count: int, size: int) -> Dataset:
    rng = random.Random(1)
    paths = [f"{number // PER_DIRECTORY:03d}/{number:06d}" for number in range(count)]
    return Dataset(
        [File(path, write_random(root / path, size, rng)) for path in paths], count * size
    )


def make_image(source: Path, image: Path) -> float:
    """Seconds. Uncompressed: images and shards are compressed already."""
    plain = ("-noI", "-noD", "-noF", "-noX", "-no-progress", "-quiet", "-noappend")
    started = time.perf_counter()
    subprocess.run(["mksquashfs", source, image, *plain], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(task: Task, what: str, count: int, size: int, result: Result) -> None:
    found: dict[tuple[float, str], Found] = defaultdict(Found)
    with ExitStack() as stack:
        memory = stack.enter_context(memory_place())
        pool = stack.enter_context(reader_processes(READERS))
        data = generate(memory / "data", count, size)
        pfs = ParallelFileSystem(memory / "data", memory / "pfs", INSTANT)
        stack.enter_context(pfs)
        pfs.use(PROFILES["busy"])
        task.say(f"{what}: making the image")
        (memory / "image").mkdir()
        seconds = make_image(pfs.path, memory / "image" / IMAGE)
        result.figure(f"{what}: making the image, once", seconds, "s")
        arms: list[Arm] = [
            DIRECT,
            COPIED,
            SquashFS("image in place", memory / "image", copied=False),
            SquashFS("image copied first", memory / "image", copied=True),
            COLD,
        ]
        for number in range(task.rounds_or(1, 5)):
            for share in SHARES:
                files = random.Random(number).sample(data.files, max(1, round(share * count)))
                for arm in arms:
                    task.say(f"{what}, {share:.0%} of it, round {number + 1}: {arm.name}")
                    result.freshness[arm.name] = arm.freshness
                    with place_for(memory, arm) as place:
                        part = replace(data, files=files)
                        job(arm, pfs, place, pool, part, None, found[share, arm.name], number)
            arms.reverse()
    for share in SHARES:
        ways = {name: one for (of, name), one in found.items() if of == share}
        show(result, f"{what}, {share:.0%} read", ways)


def show(result: Result, case: str, found: dict[str, Found]) -> None:
    mine, direct = found[COLD.name], found[DIRECT.name]
    for name, one in found.items():
        ready = statistics.median(one.ready)
        result.figure(f"{case}: until it may begin", ready, "s", values=one.ready, arm=name)
        for number in range(EPOCHS):
            result.compare(
                *(f"{case}: epoch {number + 1}", "s", one.epoch(number), direct.epoch(number)),
                against=DIRECT.name,
                arm=name,
            )
        if name != COLD.name:
            result.notes.append(f"{case}: faster than {name}: {break_even(mine, one)}")
        totals = [point(f"{n} epochs", [total(one, n)]) for n in (1, 3, 10)]
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
