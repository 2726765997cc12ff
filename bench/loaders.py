"""Real loaders over each arm: the programs of ``bench/jobs`` that bring their own dataset.

Every epoch begins with an empty page cache, as with a dataset larger than memory, and must deliver
the same bytes over every arm.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.arms import COLD, DIRECT, LOCAL, WARM, Arm, place_for, tree_bytes
from bench.frameworks import program, run_program
from bench.harness import MIB, Unusable, drop_caches, drop_pages, memory_place
from bench.job import Epoch, Job, Program
from bench.pfs import PROFILES, Counts, ParallelFileSystem
from bench.processes import cpu_seconds
from bench.report import Kind, Result, Series, point
from bench.task import Task

ARMS = (DIRECT, LOCAL, COLD, WARM)
PROFILE = PROFILES["busy"]
EPOCHS = 3
QUICK_BYTES, FULL_BYTES = 128 * MIB, 512 * MIB
FIRST_EPOCH_GOAL = 1.05

LOADERS = (
    Program("torch ImageFolder", "bench.jobs.image_folder", "torchvision"),
    Program("torch HDF5", "bench.jobs.hdf5_file", "torch"),
    Program("webdataset", "bench.jobs.tar_shards", "webdataset"),
    Program("numpy memmap", "bench.jobs.numpy_memmap", "numpy"),
    Program("parquet", "bench.jobs.parquet_file", "pyarrow"),
)


@dataclass(frozen=True, slots=True)
class Timed:
    """An epoch, what the parallel file system was asked for it, and the processor time of the
    processes that served it."""

    epoch: Epoch
    asked: Counts
    daemon_seconds: float


Rounds = dict[str, list[list[Timed]]]
"""By arm, then by round, then by epoch."""


def one(
    loader: Program, arm: Arm, pfs: ParallelFileSystem, memory: Path, number: int
) -> list[Timed]:
    """One job over one arm. What it asks while it starts counts with its first epoch."""
    epochs = []
    with (
        place_for(memory, arm) as own,
        arm.reach(pfs, own, capacity=None) as reached,
    ):
        os.sync()
        drop_caches()
        before = pfs.counts()
        with Job(loader, ["train", reached.path], own / "errors") as job:
            pfs.restart_noise()
            for epoch in range(1, EPOCHS + 1):
                # Pages alone: what a node knows of names is small.
                drop_pages()
                used = cpu_seconds(reached.pids)
                done, now = job.epoch(epoch), pfs.counts()
                epochs.append(Timed(done, now - before, cpu_seconds(reached.pids) - used))
                before = now
    return epochs


def check(epochs: Sequence[Timed]) -> None:
    """Raises ValueError unless all of them read the same samples."""
    read = {(e.epoch.samples, e.epoch.bytes, e.epoch.checksum) for e in epochs}
    if len(read) != 1:
        raise ValueError(f"epochs differ in what was read: {sorted(read)}")


def alternate(loader: Program, task: Task, rounds: int) -> tuple[Rounds, int]:
    """Runs the loader over each arm in turn; what was found, and the dataset's size."""
    found: Rounds = {arm.name: [] for arm in ARMS}
    with memory_place() as memory:
        backing = memory / "backing"
        size = QUICK_BYTES if task.quick else FULL_BYTES
        task.say(f"{loader.name}: writing {size // MIB} MiB")
        module = ["-m", loader.module, "generate", str(backing), str(size)]
        run_program([loader.python(), *module], task.place / "generate.log")
        with ParallelFileSystem(backing, task.place / "pfs", PROFILE) as pfs:
            for number in range(rounds):
                for arm in ARMS:
                    task.say(f"{loader.name}: round {number + 1} of {rounds}, {arm.name}")
                    found[arm.name].append(one(loader, arm, pfs, memory, number))
        check([epoch for runs in found.values() for run in runs for epoch in run])
        return found, tree_bytes(backing)


def first(run: Sequence[Timed]) -> float:
    """Seconds of the first epoch."""
    return run[0].epoch.seconds


def later(run: Sequence[Timed]) -> float:
    """Seconds of an epoch from the second on."""
    return statistics.mean(timed.epoch.seconds for timed in run[1:])


def tell(result: Result, name: str, rounds: Rounds, size: int) -> None:
    """Adds the figures of one loader, of which the dataset is ``size`` bytes."""
    rest = f"epochs 2 to {EPOCHS}"
    direct, local = rounds[DIRECT.name], rounds[LOCAL.name]
    for arm, runs in rounds.items():
        result.series += [
            Series(
                *(
                    arm,
                    "loader",
                    "time of an epoch (s)",
                    [point(name, [when(run) for run in runs])],
                ),
                *(Kind.BARS, "Real loaders: epoch times", panel),
            )
            for panel, when in (("epoch 1", first), (rest, later))
        ]
    for arm in (COLD.name, WARM.name):
        runs = rounds[arm]
        result.compare(
            f"{name}: epoch 1",
            *("s", [first(run) for run in runs], [first(run) for run in direct]),
            at_most=FIRST_EPOCH_GOAL,
            against=DIRECT.name,
            arm=arm,
        )
        if result.rows[-1].holds is False:
            used = statistics.median(run[0].daemon_seconds for run in runs)
            alone = statistics.median(first(run) for run in local)
            result.rows[-1].why = (
                f"both processors are busy: the loader takes {alone:.2f} s from local storage, and"
                f" the daemon {used:.2f} s of processor time beside it"
            )
        for other, others in ((DIRECT, direct), (LOCAL, local)):
            result.compare(
                f"{name}: {rest}",
                *("s", [later(run) for run in runs], [later(run) for run in others]),
                against=other.name,
                arm=arm,
            )
    for when, part in (("epoch 1", slice(0, 1)), (rest, slice(1, None))):
        for arm in (DIRECT.name, COLD.name):
            read = [sum(e.asked.read_bytes for e in run[part]) / size for run in rounds[arm]]
            what = f"{name}: read of the parallel FS, {when}"
            result.figure(what, statistics.median(read), "x data", values=read, arm=arm)


def run(task: Task) -> Result:
    program("python")
    result = Result("loaders", "Epochs of real loaders, by arm")
    for loader in LOADERS:
        try:
            rounds, size = alternate(loader, task, task.rounds_or(1, 5))
        except Unusable as error:
            result.leave_out(loader.name, str(error))
            continue
        tell(result, loader.name, rounds, size)
    result.freshness = {arm.name: arm.freshness for arm in ARMS}
    result.notes += [
        f"{EPOCHS} epochs a job, {(QUICK_BYTES if task.quick else FULL_BYTES) // MIB} MiB each,"
        f" profile {PROFILE.name}; two readers; each sample's checksum is compared",
        "the page cache is emptied when an epoch begins, as a dataset larger than memory would do;"
        " replicas and local copies lie on tmpfs",
        "nothing is computed: the loaders themselves are the limit, and what an open or a read"
        " costs more than on local storage shows in full",
        "ImageFolder reads PPM files of 110 kB, HDF5 and webdataset samples of 100 kB, memmap rows"
        " of 64 KiB, parquet row groups of 2 MB, each in random order",
    ]
    return result
