"""Jobs that read some files more often than others, with tiers that are too small: what of an epoch
comes from the source, by eviction policy.

The project's own placement decides, for files that do not exist. One job is also read through a
real mount, to see that both are the same.
"""

from __future__ import annotations

import heapq
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Mount, Source, forget_pages, monarchfs
from bench.processes import cpu_seconds
from bench.report import Result
from bench.task import Task
from monarchfs.insight.replay import Setup, SimulatedNode
from monarchfs.types import EvictionPolicy

FITS = (0.10, 0.25, 0.56)
FILES = 2_000
EPOCHS = 15
WARM_UP = 3
"""So many epochs are left out of the mean: tiers fill up, and opens are counted."""

SIZE = 126_976
"""Of each file: whole blocks."""

MOUNT_FILES = 1_000
MOUNT_EPOCHS = 8
MOUNT_FIT = 0.25
MOST_DIFFERENCE = 0.03
OPENED_FILES, OPENED_BYTES, OPENED_PASSES = 2_000, 20_000, 10
DRIFT = 0.8
"""The correlation of a sample's importance with that of the epoch before (its logarithm)."""


@dataclass(frozen=True)
class Epoch:
    """``opens``: files in order; ``weights``: what their draw was proportional to."""

    weights: Mapping[int, float]
    opens: Sequence[int]


def shuffled(files: int, epochs: int, rng: random.Random) -> list[Epoch]:
    """Each file once, in random order."""
    weights = dict.fromkeys(_numbers(files), 1.0)
    return [Epoch(weights, rng.sample(list(weights), files)) for _ in range(epochs)]


def zipf(exponent: float) -> Callable[[int, int, random.Random], list[Epoch]]:
    def job(files: int, epochs: int, rng: random.Random) -> list[Epoch]:
        ranks = rng.sample(_numbers(files), files)
        weights = {ino: 1 / rank**exponent for rank, ino in enumerate(ranks, 1)}
        return [Epoch(weights, _draw(weights, rng)) for _ in range(epochs)]

    return job


def importance(files: int, epochs: int, rng: random.Random) -> list[Epoch]:
    """As SHADE draws samples: by their importance, which drifts from epoch to epoch."""
    logs = [rng.gauss(0, 1) for _ in range(files)]
    job = []
    for _ in range(epochs):
        weights = {ino: math.exp(log) for ino, log in zip(_numbers(files), logs, strict=True)}
        job.append(Epoch(weights, _draw(weights, rng)))
        logs = [DRIFT * log + math.sqrt(1 - DRIFT**2) * rng.gauss(0, 1) for log in logs]
    return job


JOBS = {
    "each file once": shuffled,
    "Zipf, s = 0.6": zipf(0.6),
    "Zipf, s = 0.9": zipf(0.9),
    "Zipf, s = 1.2": zipf(1.2),
    "importance that drifts": importance,
}


def _numbers(files: int) -> range:
    return range(100, 100 + files)


def _draw(weights: Mapping[int, float], rng: random.Random) -> list[int]:
    return rng.choices(list(weights), list(weights.values()), k=len(weights))


def misses(
    job: Sequence[Epoch], held: int, policy: EvictionPolicy, *, tells: bool
) -> tuple[list[float], float]:
    """What each epoch reads of the source, as a share of what it reads, and how many files an open
    brings into the tier. ``tells``: the job gives its weights before each epoch."""
    node = SimulatedNode(Setup(((held + 1) * SIZE,), policy, scans=False, immutable=True))
    shares = []
    for epoch in job:
        if tells:
            node.weigh(list(epoch.weights.items()))
        shares.append(sum(1 - node.open(ino, SIZE) for ino in epoch.opens) / len(epoch.opens))
    return shares, node.stored / sum(len(epoch.opens) for epoch in job)


def least_misses(job: Sequence[Epoch], held: int) -> list[float]:
    """The same for who knows the future: the file goes, or is not kept, that is opened again last
    (Belady, with bypass)."""
    opens = [ino for epoch in job for ino in epoch.opens]
    again = [0] * len(opens)
    next_open: dict[int, int] = {}
    for at in range(len(opens) - 1, -1, -1):
        again[at] = next_open.get(opens[at], len(opens))
        next_open[opens[at]] = at
    kept: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    missed = []
    for at, ino in enumerate(opens):
        missed.append(ino not in kept)
        if ino not in kept and len(kept) == held:
            while kept.get(latest[0][1]) != -latest[0][0]:
                heapq.heappop(latest)
            if -latest[0][0] <= again[at]:
                continue
            del kept[latest[0][1]]
        kept[ino] = again[at]
        heapq.heappush(latest, (-again[at], ino))
    ends = [sum(len(epoch.opens) for epoch in job[: n + 1]) for n in range(len(job))]
    return [
        sum(missed[end - len(epoch.opens) : end]) / len(epoch.opens)
        for end, epoch in zip(ends, job, strict=True)
    ]


def steady(shares: Sequence[float]) -> float:
    return sum(shares[WARM_UP:]) / len(shares[WARM_UP:])


def simulate(name: str, job: Sequence[Epoch], result: Result) -> None:
    files = len(job[0].weights)
    for fit in FITS:
        arm, held = f"{name}, {fit:.0%} fit", int(files * fit)
        for policy in EvictionPolicy:
            for tells in (False, True) if policy is EvictionPolicy.WEIGHTED else (False,):
                shares, stored = misses(job, held, policy, tells=tells)
                how = f"{policy.value}, told" if tells else policy.value
                result.figure(f"{how}: from the source", steady(shares), "x", arm=arm)
                result.figure(f"{how}: files copied", stored, "an open", arm=arm)
        result.figure("at least (Belady)", steady(least_misses(job, held)), "x", arm=arm)


def read(path: Path, expected: bytes) -> None:
    """As a reader whose pages do not stay in memory. Raises ValueError for a wrong byte."""
    with path.open("rb", buffering=0) as file:
        forget_pages(file.fileno())
        found = b"".join(iter(lambda: file.read(1 << 20), b""))
    if found != expected:
        raise ValueError(f"{path.name} has the wrong content")


def mounted(task: Task, place: Path, source: Source, job: Sequence[Epoch], tells: bool) -> float:
    """What a real mount reads of the source in the steady epochs of the job."""
    held = int(MOUNT_FILES * MOUNT_FIT)
    size = (held + 1) * SIZE >> 10
    options = ("--freshness", "immutable", "--evict", "weighted", "--prefetch", "access")
    shares = []
    with Mount(source.path, place, *options, size=f"{size}K") as mount:
        for number, epoch in enumerate(job, 1):
            task.say(f"a real mount, epoch {number} of {len(job)}")
            if tells:
                lines = (f"{weight}\t{ino}\n" for ino, weight in epoch.weights.items())
                (place / "weights").write_text("".join(lines))
                monarchfs("weigh", str(mount.path), str(place / "weights"))
            source.take_counts()
            for ino in epoch.opens:
                read(mount.path / str(ino), content(ino))
            mount.wait_idle()
            shares.append(source.take_counts()[0] / (len(epoch.opens) * SIZE))
        used = mount.status()["tiers"][0]
        if used["used_bytes"] > used["capacity_bytes"]:
            raise ValueError("the tier holds more than it may")
    return steady(shares)


def content(ino: int) -> bytes:
    return random.Random(ino).randbytes(SIZE)


def prove(task: Task, result: Result) -> None:
    """One job, simulated and read."""
    job = zipf(0.9)(MOUNT_FILES, MOUNT_EPOCHS, random.Random(1))
    data = task.place / "data"
    data.mkdir()
    for ino in job[0].weights:
        (data / str(ino)).write_bytes(content(ino))
    arm = f"Zipf, s = 0.9, {MOUNT_FIT:.0%} fit, {MOUNT_FILES:,} files"
    with Source(data, task.place / "source") as source:
        for tells in (False, True):
            held, how = int(MOUNT_FILES * MOUNT_FIT), "weighted, told" if tells else "weighted"
            expected = steady(misses(job, held, EvictionPolicy.WEIGHTED, tells=tells)[0])
            place = task.place / f"mount{tells:d}"
            os.mkdir(place)
            found = mounted(task, place, source, job, tells)
            result.figure(f"{how}: from the source, simulated", expected, "x", arm=arm)
            result.figure(f"{how}: from the source, a real mount", found, "x", arm=arm)
            result.figure(
                *(f"{how}: difference", abs(found - expected), "x"),
                arm=arm,
                at_most=MOST_DIFFERENCE,
            )


def opens(task: Task, result: Result) -> None:
    """What it costs that policies have to hear of opens: files whose pages the kernel has."""
    data = task.place / "small"
    data.mkdir()
    for number in range(OPENED_FILES):
        (data / str(number)).write_bytes(random.Random(number).randbytes(OPENED_BYTES))
    for policy in (EvictionPolicy.KEEP, EvictionPolicy.LRU, EvictionPolicy.WEIGHTED):
        task.say(f"opens, {policy.value}")
        options = ("--freshness", "immutable", "--data-path", "relay", "--prefetch", "all")
        place = task.place / f"opens-{policy.value}"
        with Mount(data, place, *options, "--evict", policy.value) as mount:
            mount.wait_idle()
            paths = [str(mount.path / str(number)) for number in range(OPENED_FILES)]
            _read_all(paths)
            pid = mount.status()["worker"]["pid"]
            before, here = cpu_seconds([pid]), time.process_time()
            for _ in range(OPENED_PASSES):
                _read_all(paths)
            reader = time.process_time() - here
            worker = cpu_seconds([pid]) - before
        count = OPENED_PASSES * OPENED_FILES
        arm = f"opens of files of {OPENED_BYTES // 1000} KB in the page cache"
        result.figure(f"{policy.value}: daemon", worker / count * 1e6, "us", arm=arm)
        result.figure(f"{policy.value}: reader", reader / count * 1e6, "us", arm=arm)


def _read_all(paths: Sequence[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.read(fd, OPENED_BYTES)
        os.close(fd)


def run(task: Task) -> Result:
    result = Result(
        "importance",
        f"{FILES:,} files of {SIZE / 1e3:g} KB, as many opens an epoch, drawn by weight; {EPOCHS}"
        f" epochs, means without the first {WARM_UP}",
    )
    for name, make in JOBS.items():
        task.say(name)
        simulate(name, make(FILES, EPOCHS, random.Random(1)), result)
    prove(task, result)
    opens(task, result)
    result.notes = [
        "simulated, but for a real mount, and opens (processor time); told: the job gives its"
        " weights before each epoch; at least: what knowing the future brings",
    ]
    return result
