"""One training job over one arm: under the memory limit, from empty caches on, checked."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.arms import Arm, Reached, ReachedMount, place_for
from bench.harness import drop_caches
from bench.job import Epoch, Job, Program
from bench.memory import MemoryLimit
from bench.pfs import Counts, ParallelFileSystem
from bench.processes import cpu_seconds, idle_seconds
from bench.sampling import Sample, sampled, served_by
from bench.shards import RECORD_BYTES, Shards

BATCH = 64
PROCESSORS = os.cpu_count() or 1


@dataclass(frozen=True)
class Model:
    """``rate``: bytes of images a second that the accelerators get through."""

    name: str
    rate: float

    @property
    def batch_seconds(self) -> float:
        return BATCH * RECORD_BYTES / self.rate


class Measured(NamedTuple):
    """One epoch, and what the parallel file system was asked meanwhile; ``daemon_seconds`` is the
    processor time of the processes that served it, ``idle_share`` what of this machine's processors
    nobody used."""

    epoch: Epoch
    counts: Counts
    daemon_seconds: float
    idle_share: float


@dataclass
class Run:
    """Of one arm."""

    ready_seconds: float
    epochs: list[Measured] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """What was opened locally, over time; of a mount of this project."""

    def seconds(self, first: int = 0) -> float:
        """Of all epochs from this one on."""
        return sum(measured.epoch.seconds for measured in self.epochs[first:])


@dataclass(frozen=True)
class Setting:
    """Where jobs run. ``memory`` are the bytes that pages of files may take, ``capacity`` those of
    local storage that an arm may use (None: enough); ``local`` is a directory there."""

    pfs: ParallelFileSystem
    shards: Shards
    local: Path
    memory: int
    capacity: int | None


def run_job(setting: Setting, arm: Arm, program: Program, model: Model, epochs: int) -> Run:
    """One job over one arm, from an empty page cache on, under the same weather every time. Raises
    ValueError if it did not get the dataset's very bytes, Unusable where the arm cannot be."""
    pfs = setting.pfs
    with (
        place_for(setting.local, arm) as place,
        arm.reach(pfs, place, capacity=setting.capacity) as reached,
        MemoryLimit("monarch") as limit,
    ):
        arguments: list[object] = [reached.path, "--batch", BATCH, "--compute", model.batch_seconds]
        if reached.cache is not None:
            arguments += ["--cache", reached.cache]
        with Job(program, arguments, place / "errors") as job:
            limit.add([job.pid, *reached.pids])
            limit.hold(setting.memory)
            # What is still to be written could not be dropped.
            os.sync()
            drop_caches()
            pfs.restart_noise()
            with watched(reached) as samples:
                run = Run(reached.ready_seconds, samples=samples)
                for epoch in range(1, epochs + 1):
                    counts, used = pfs.counts(), cpu_seconds(reached.pids)
                    idle, began = idle_seconds(), time.monotonic()
                    done = job.epoch(epoch)
                    idle = (idle_seconds() - idle) / (time.monotonic() - began) / PROCESSORS
                    counts, used = pfs.counts() - counts, cpu_seconds(reached.pids) - used
                    check(setting.shards, done, arm)
                    run.epochs.append(Measured(done, counts, used, idle))
    return run


@contextmanager
def watched(reached: Reached) -> Iterator[list[Sample]]:
    """Samples of what it serves locally, where that can be known."""
    if not isinstance(reached, ReachedMount):
        yield []
        return
    with sampled(served_by(reached.path)) as samples:
        yield samples


def check(shards: Shards, epoch: Epoch, arm: Arm) -> None:
    """Every arm must deliver the same records."""
    found = (epoch.samples, epoch.bytes, epoch.checksum)
    if found != (shards.samples, shards.payload_bytes, shards.checksum):
        raise ValueError(f"{arm.name}: the job read other bytes than the dataset's: {epoch}")
