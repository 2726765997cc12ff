"""MONARCH's experiment (Dantas et al., CCGrid 2022), scaled down in bytes but not in ratios.

There: ImageNet in record files, 100 GiB and 200 GiB of it; nodes with 68 GiB of memory and an SSD
that held 115 GiB; three epochs; LeNet and AlexNet, which wait for data, and ResNet-50, which
computes. Here a gigabyte stands for a hundred, memory and disk with it (`bench.memory`), the
accelerator is a sleep (`bench.jobs.training`), and the parallel file system is the emulated one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.arms import COLD, DIRECT, FRAMEWORK_CACHE, LOCAL, WARM, Arm
from bench.harness import Unusable, memory_place
from bench.job import PYTORCH, TFDATA, THREADS, Program
from bench.memory import disk
from bench.monarch_rows import Case, first_epoch_rows, rows
from bench.monarch_runs import Model, Run, Setting, run_job
from bench.pfs import PROFILES, ParallelFileSystem
from bench.report import Result
from bench.shards import Shards, generate
from bench.task import Task

EPOCHS = 3
# Of the smaller dataset: 68 GiB of memory and 115 GiB of disk for 100 GiB of data.
MEMORY_SHARE = 0.68
DISK_SHARE = 1.15
# What of the larger dataset the disk holds, and what else the first epoch is tried with.
FITTING_SHARE = 0.56
SWEPT_SHARES = (0.10, 0.25, FITTING_SHARE, 1.0)
SHARD_BYTES = 8 << 20
ARMS: tuple[Arm, ...] = (DIRECT, LOCAL, FRAMEWORK_CACHE, COLD, WARM)

# About what four accelerators of that time did with images of 110 kB: 23,000, 9,000 and 1,400 a
# second. The first two are faster than any of the file systems, the last slower than most.
LENET, ALEXNET, RESNET = Model("LeNet", 2500e6), Model("AlexNet", 1000e6), Model("ResNet-50", 150e6)


@dataclass(frozen=True)
class Plan:
    """Jobs to compare: a program, a model, a dataset that fits or does not, and how often."""

    program: Program
    model: Model
    fits: bool
    rounds: int
    profile: str = "busy"
    headline: bool = False


def plans(task: Task) -> list[Plan]:
    if task.quick:
        return [
            Plan(TFDATA, LENET, True, task.rounds or 2, headline=True),
            Plan(THREADS, LENET, False, task.rounds or 3, headline=True),
            Plan(THREADS, RESNET, True, 1),
        ]
    rounds = task.rounds or 5
    return [
        Plan(TFDATA, LENET, True, rounds, headline=True),
        Plan(TFDATA, LENET, False, rounds, headline=True),
        *(Plan(TFDATA, model, True, rounds) for model in (ALEXNET, RESNET)),
        *(Plan(PYTORCH, LENET, fits, rounds) for fits in (True, False)),
        *(Plan(THREADS, LENET, True, rounds, name) for name in PROFILES),
    ]


@dataclass(frozen=True)
class Data:
    """The smaller and the larger dataset, and a disk that would hold either: how much of it an arm
    may use, each setting says."""

    small: Shards
    large: Shards
    disk: Path

    @property
    def memory(self) -> int:
        return int(MEMORY_SHARE * self.small.file_bytes)

    @contextmanager
    def reached(self, shards: Shards, profile: str, share: float) -> Iterator[Setting]:
        """With local storage for that share of the dataset."""
        path = shards.root.with_suffix(".pfs")
        with ParallelFileSystem(shards.root, path, PROFILES[profile]) as pfs:
            capacity = int(share * shards.file_bytes)
            yield Setting(pfs, shards, self.disk, self.memory, capacity)


def compare(
    task: Task, setting: Setting, plan: Plan, arms: Sequence[Arm], result: Result
) -> dict[str, list[Run]]:
    """Rounds of all arms, each round the other way round; those that cannot be are left out."""
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    for number in range(plan.rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            if arm.name not in runs:
                continue
            task.say(f"{describe(plan)}: round {number + 1} of {plan.rounds}, {arm.name}")
            try:
                runs[arm.name].append(run_job(setting, arm, plan.program, plan.model, EPOCHS))
            except Unusable as error:
                if arm is DIRECT:
                    raise
                result.leave_out(f"{describe(plan)}: {arm.name}", str(error))
                del runs[arm.name]
    return runs


def describe(plan: Plan) -> str:
    fits = "all fits" if plan.fits else f"{FITTING_SHARE:.0%} fits"
    return f"{plan.model.name}, {plan.program.name}, {plan.profile}, {fits}"


def measure(task: Task, data: Data, plan: Plan, result: Result) -> None:
    shards, share = (data.small, DISK_SHARE) if plan.fits else (data.large, FITTING_SHARE)
    arms = [arm for arm in ARMS if arm is not FRAMEWORK_CACHE or plan.program is TFDATA]
    with data.reached(shards, plan.profile, share) as setting:
        runs = compare(task, setting, plan, arms, result)
    rows(result, Case(describe(plan), plan.fits, shards.file_bytes, plan.headline), runs)


def sweep(task: Task, data: Data, result: Result) -> None:
    """The first epoch alone, with little and much room, in each profile. Of the larger dataset:
    what a job has to do once at its beginning counts less then."""
    rounds = task.rounds_or(2, 5)
    profiles = ["busy"] if task.quick else list(PROFILES)
    for profile in profiles:
        for share in SWEPT_SHARES[:2] if task.quick else SWEPT_SHARES:
            what = f"{profile}, {share:.0%} fits"
            runs: dict[str, list[Run]] = {DIRECT.name: [], COLD.name: []}
            with data.reached(data.large, profile, share) as setting:
                for number in range(rounds):
                    for arm in (DIRECT, COLD) if number % 2 == 0 else (COLD, DIRECT):
                        task.say(f"first epoch, {what}: round {number + 1} of {rounds}, {arm.name}")
                        runs[arm.name].append(run_job(setting, arm, THREADS, LENET, 1))
            first_epoch_rows(result, profile, share, data.large.file_bytes, runs)


def usable(plan: Plan, result: Result) -> Plan:
    """The same with reader threads where its framework is missing."""
    try:
        plan.program.python()
    except Unusable as error:
        result.leave_out(describe(plan), f"{error}; measured with {THREADS.name} instead")
        return replace(plan, program=THREADS)
    return plan


def run(task: Task) -> Result:
    size = (512 if task.quick else 1024) << 20
    result = Result(
        "monarch",
        "is training faster through the mount than from the parallel file system alone?",
        freshness={arm.name: arm.freshness for arm in ARMS},
    )
    with memory_place() as place:
        task.say(f"{3 * size >> 20} MiB of records are written")
        small = generate(place / "small", size, SHARD_BYTES)
        large = generate(place / "large", 2 * size, SHARD_BYTES, seed=2)
        with disk(large.file_bytes, "monarch") as local:
            data = Data(small, large, local)
            seen: set[Plan] = set()
            for plan in plans(task):
                plan = usable(plan, result)
                if plan not in seen:
                    seen.add(plan)
                    measure(task, data, plan, result)
            sweep(task, data, result)
    result.notes = [
        f"ImageNet-like records of 110 kB in shards of {SHARD_BYTES >> 20} MiB, {size >> 20} MiB in"
        f" all, or twice that where {FITTING_SHARE:.0%} fit; {EPOCHS} epochs in random order"
        " (shards interleaved, then a shuffle buffer); every epoch's records are compared by count,"
        " bytes and checksum",
        f"page cache of job and daemons: a memory cgroup holds it at {MEMORY_SHARE:.0%} of the"
        " smaller dataset, as 68 GiB were of 100 GiB; local storage: ext4 on a loop device on"
        f" tmpfs, {DISK_SHARE:.0%} of the smaller dataset",
        "the accelerator is a sleep a batch: LeNet 2,500 MB/s, AlexNet 1,000 MB/s, ResNet-50"
        " 150 MB/s of images; nothing is decoded",
        "each run begins with empty caches and the same weather on the parallel file system; the"
        " mount is at rest when the job begins; monarchfs warm: an earlier job's mount has filled"
        " the tier",
        "job, daemons, emulated file system and the disk's loop thread share this machine's"
        " processors: where these are all busy, what the mount does costs the job its time",
    ]
    return result
