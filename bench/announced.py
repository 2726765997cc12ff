"""Epochs of PyTorch and webdataset, of a dataset that does not fit: with the order announced,
without, and from the source alone."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench import order
from bench.frameworks import run_program
from bench.harness import MIB, Mount, Unusable, drop_caches, memory_place
from bench.job import Job, Program
from bench.pfs import ParallelFileSystem, Profile
from bench.report import Result
from bench.task import Task

PROFILE = Profile("announced", 1000e6, 0.002, 0.002, metadata_in_flight=64)
SHARES = (0.56, 0.25)
EPOCHS = 4
"""Of each arm; the first one is left out."""

ANNOUNCED, UNKNOWN, SOURCE = "order announced", "no order", "the source alone"


@dataclass(frozen=True, slots=True)
class Loader:
    """``needs``: what it imports; ``shards``: whether the files are shards."""

    name: str
    needs: str
    shards: bool

    @property
    def program(self) -> Program:
        return Program(self.name, "bench.jobs.announced", self.needs)

    def generate(self, root: Path, task: Task) -> None:
        if not self.shards:
            return order.generate(root, 600 if task.quick else 3000)
        module = ["-m", "bench.jobs.tar_shards", "generate", str(root)]
        size = str((128 if task.quick else 512) * MIB)
        run_program([self.program.python(), *module, size], task.place / "generate.log")


LOADERS = (
    Loader("PyTorch, files of 110 KB", "torch", shards=False),
    Loader("webdataset, shards of 8 MB", "webdataset", shards=True),
)


class Epochs(NamedTuple):
    """Of one job, the first left out: the median seconds, what the source gave for one, and the
    checksums of what was read."""

    seconds: float
    source_bytes: float
    checksums: set[int]


def epochs(
    loader: Loader, root: Path, pfs: ParallelFileSystem, errors: Path, *options: str
) -> Epochs:
    """Each begins with empty caches."""
    words = [root, *(["--shards"] if loader.shards else []), *options]
    found = []
    before = pfs.counts()
    with Job(loader.program, words, errors) as job:
        for number in range(1, EPOCHS + 1):
            drop_caches()
            found.append(job.epoch(number))
            if number == 1:
                before = pfs.counts()
    seconds = statistics.median(epoch.seconds for epoch in found[1:])
    read = (pfs.counts() - before).read_bytes / (EPOCHS - 1)
    return Epochs(seconds, read, {epoch.checksum for epoch in found})


def measure(result: Result, loader: Loader, data: Path, place: Path, task: Task) -> None:
    size = sum(path.stat().st_blocks * 512 for path in data.rglob("*") if path.is_file())
    with ExitStack() as undo:
        pfs = undo.enter_context(ParallelFileSystem(data, place / "source", PROFILE))
        task.say(f"{loader.name}: {SOURCE}")
        alone = epochs(loader, pfs.path, pfs, place / "errors")
        result.figure(f"epoch, {SOURCE}", alone.seconds, "s", arm=loader.name)
        checksums = alone.checksums
        for share in SHARES:
            own = place / f"n{int(100 * share)}"
            words = ("--freshness", "immutable")
            mount = undo.enter_context(Mount(pfs.path, own, *words, size=str(int(share * size))))
            figure = partial(result.figure, arm=f"{loader.name}, {share:.0%} fits")
            seconds = {}
            for arm, options in ((UNKNOWN, ()), (ANNOUNCED, ("--announce",))):
                task.say(f"{loader.name}, {share:.0%} fits: {arm}")
                found = epochs(loader, mount.path, pfs, place / "errors", *options)
                checksums |= found.checksums
                seconds[arm] = found.seconds
                figure(f"epoch, {arm}", found.seconds, "s")
                figure(f"read of the source, {arm}", found.source_bytes / size, "x data")
            ratio = seconds[ANNOUNCED] / seconds[UNKNOWN]
            figure(f"{ANNOUNCED}, over {UNKNOWN}", ratio, "x")
            result.notes.append(f"{loader.name}, {share:.0%}: {mount.status()['window']}")
            task.keep(result)
    if len(checksums) != 1:
        raise ValueError(f"epochs differ in what was read: {checksums}")


def run(task: Task) -> Result:
    result = Result("announced", "Epochs of loaders with 4 processes, by announced order")
    for number, loader in enumerate(LOADERS):
        place = task.place / str(number)
        place.mkdir()
        try:
            with memory_place() as memory:
                loader.generate(memory / "data", task)
                measure(result, loader, memory / "data", place, task)
        except Unusable as error:
            result.leave_out(loader.name, str(error))
    result.notes.append(
        f"{EPOCHS - 1} epochs after the first of each arm, their median, in other orders each;"
        " nothing is computed; the page cache is emptied before each epoch"
    )
    return result
