"""MONARCH's experiment (Dantas et al., CCGrid 2022), scaled down in bytes but not in ratios.

There: ImageNet in record files, 100 GiB and 200 GiB of it; nodes with 68 GiB of memory and an SSD
that held 115 GiB; three epochs; LeNet and AlexNet, which wait for data, and ResNet-50, which
computes. Here a gigabyte stands for a hundred, memory and disk with it (`bench.memory`), the
accelerator is a sleep (`bench.jobs.training`), and the parallel file system is the emulated one.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.arms import COLD, DIRECT, FRAMEWORK_CACHE, LOCAL, WARM, Arm, place_for
from bench.harness import Unusable, drop_caches
from bench.job import TFDATA, THREADS, Epoch, Job, Program
from bench.memory import MemoryLimit, disk
from bench.pfs import PROFILES, Counts, ParallelFileSystem, Profile
from bench.processes import cpu_seconds
from bench.shards import RECORD_BYTES, Shards, generate

EPOCHS = 3
# Of the smaller dataset: 68 GiB of memory and 115 GiB of disk for 100 GiB of data.
MEMORY_SHARE = 0.68
DISK_SHARE = 1.15
# What of the larger dataset the disk holds.
FITTING_SHARE = 0.56
SHARD_BYTES = 8 << 20
BATCH = 64


@dataclass(frozen=True)
class Model:
    """``rate``: bytes of images a second that the accelerators get through."""

    name: str
    rate: float

    @property
    def batch_seconds(self) -> float:
        return BATCH * RECORD_BYTES / self.rate


# About what four accelerators of that time did with images of 110 kB: 23,000, 9,000 and 1,400 a
# second. The first two are faster than any of the file systems, the last slower than most.
MODELS = (Model("LeNet", 2500e6), Model("AlexNet", 1000e6), Model("ResNet-50", 150e6))


class Measured(NamedTuple):
    """One epoch, and what the parallel file system was asked meanwhile; ``daemon_seconds`` is the
    processor time of the processes that served it."""

    epoch: Epoch
    counts: Counts
    daemon_seconds: float


@dataclass
class Run:
    """Of one arm."""

    ready_seconds: float
    epochs: list[Measured] = field(default_factory=list)

    @property
    def total_seconds(self) -> float:
        return sum(measured.epoch.seconds for measured in self.epochs)


@dataclass(frozen=True)
class Setting:
    """Where jobs run. ``memory`` are the bytes that pages of files may take, ``capacity`` those of
    local storage that an arm may use (None: enough); ``local`` is a directory there."""

    pfs: ParallelFileSystem
    shards: Shards
    local: Path
    memory: int
    capacity: int | None


def run_job(
    setting: Setting, arm: Arm, program: Program, model: Model, epochs: int, number: int
) -> Run:
    """One job over one arm, from an empty page cache on, under the same weather every time. Raises
    ValueError if it did not get the dataset's very bytes, Unusable where the arm cannot be."""
    pfs = setting.pfs
    with (
        place_for(setting.local, arm, number) as place,
        arm.reach(pfs, place, capacity=setting.capacity) as reached,
        MemoryLimit("monarch") as limit,
    ):
        arguments: list[object] = [reached.path, "--batch", BATCH, "--compute", model.batch_seconds]
        if reached.cache is not None:
            arguments += ["--cache", reached.cache]
        run = Run(reached.ready_seconds)
        with Job(program, arguments, place / "errors") as job:
            limit.add([job.pid, *reached.pids])
            limit.hold(setting.memory)
            os.sync()
            drop_caches()
            pfs.restart_noise()
            for epoch in range(1, epochs + 1):
                counts, used = pfs.counts(), cpu_seconds(reached.pids)
                done = job.epoch(epoch)
                check(setting.shards, done, arm)
                counts, used = pfs.counts() - counts, cpu_seconds(reached.pids) - used
                run.epochs.append(Measured(done, counts, used))
    return run


def check(shards: Shards, epoch: Epoch, arm: Arm) -> None:
    """Every arm must deliver the same records."""
    found = (epoch.samples, epoch.bytes, epoch.checksum)
    if found != (shards.samples, shards.payload_bytes, shards.checksum):
        raise ValueError(f"{arm.name}: the job read other bytes than the dataset's: {epoch}")
