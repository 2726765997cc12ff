"""Epochs of a dataset that does not fit: with the order announced, without, in the order of the
epoch before, and with a wrong order announced.

The order saves no bytes of the source, but the wait for them. Four readers share an order as the
processes of a loader do: each takes every fourth batch.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from statistics import median

from bench.harness import Mount, drop_caches, reader_processes
from bench.pfs import ParallelFileSystem, Profile
from bench.processes import cpu_seconds, processes_of
from bench.report import Result
from bench.task import Task
from monarchfs.hints import find_mount

READERS, BATCH, DIRECTORY = 4, 16, 200
FILE_BYTES = 110_000
BANDWIDTH = 1000e6
LATENCIES = (0.0, 0.001, 0.002, 0.005)
SHARES = (0.56, 0.25)
COMPUTE = (0.0, 0.005, 0.02)
ANNOUNCED, UNKNOWN, WRONG = "order announced", "no order", "a wrong order"
AGAIN = "no order, that of the epoch before"


@dataclass(frozen=True, slots=True)
class Epoch:
    """``seconds`` until the last reader has ended; ``cpu_ms`` of the daemon a file; ``remote``,
    the bytes that the source gave."""

    seconds: float
    cpu_ms: float = 0.0
    remote: int = 0


def name_of(number: int) -> str:
    return f"{number // DIRECTORY:03d}/{number:06d}"


def generate(path: Path, files: int) -> None:
    rng = random.Random(1)
    for number in range(files):
        file = path / name_of(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(number.to_bytes(8, "big") + rng.randbytes(FILE_BYTES - 8))
        os.utime(file, (1.6e9, 1.6e9))
    for directory in path.iterdir():
        os.utime(directory, (1.6e9, 1.6e9))


def order_of(files: int, seed: int) -> list[int]:
    order = list(range(files))
    random.Random(seed).shuffle(order)
    return order


def read_share(task: tuple[str, list[int], int, float]) -> None:
    """What one reader does: its batches, and ``compute`` seconds after each. ValueError for wrong
    bytes."""
    root, order, reader, compute = task
    for start in range(reader * BATCH, len(order), READERS * BATCH):
        for number in order[start : start + BATCH]:
            with open(f"{root}/{name_of(number)}", "rb") as file:
                data = file.read()
            if len(data) != FILE_BYTES or int.from_bytes(data[:8], "big") != number:
                raise ValueError(f"file {number} has wrong bytes")
        time.sleep(compute)


def read_epoch(pool: Pool, root: Path, order: list[int], compute: float) -> float:
    work = [(str(root), order, reader, compute) for reader in range(READERS)]
    started = time.perf_counter()
    pool.map(read_share, work, chunksize=1)
    return time.perf_counter() - started


def announce(mount: Mount, order: list[int]) -> None:
    found = find_mount(mount.path)
    assert found is not None
    names = b"\0".join(name_of(number).encode() for number in order)
    with found.connect() as connection:
        connection.send_list({"command": "order", "stream": "bench"}, [names])


@dataclass(frozen=True)
class Bench:
    """One dataset, and who reads it."""

    task: Task
    data: Path
    files: int
    pool: Pool

    def epoch(
        self, mount: Mount, pfs: ParallelFileSystem, seed: int, arm: str, compute: float
    ) -> Epoch:
        order = order_of(self.files, seed)
        drop_caches()
        before, cpu = pfs.counts(), cpu_seconds(processes_of(mount.path))
        if arm in (ANNOUNCED, WRONG):
            announce(mount, order if arm == ANNOUNCED else order_of(self.files, seed + 1000))
        seconds = read_epoch(self.pool, mount.path, order, compute)
        cpu_ms = 1000 * (cpu_seconds(processes_of(mount.path)) - cpu) / self.files
        return Epoch(seconds, cpu_ms, (pfs.counts() - before).read_bytes)

    def alone(self, root: Path, seed: int, compute: float) -> Epoch:
        drop_caches()
        return Epoch(read_epoch(self.pool, root, order_of(self.files, seed), compute))


def middle(epochs: list[Epoch]) -> Epoch:
    return Epoch(
        median(one.seconds for one in epochs),
        median(one.cpu_ms for one in epochs),
        int(median(one.remote for one in epochs)),
    )


def measure(
    result: Result, bench: Bench, latency: float, share: float, local: dict[float, float]
) -> None:
    """All arms and computing times, in turn, on one mount."""
    task, rounds = bench.task, bench.task.rounds_or(1, 3)
    place = task.place / f"m{int(1e6 * latency)}-{int(100 * share)}"
    place.mkdir()
    size = str(int(share * bench.files * -(-FILE_BYTES // 4096) * 4096))
    profile = Profile("order", BANDWIDTH, latency, latency, metadata_in_flight=64)
    row = f"{1000 * latency:g} ms, {share:.0%} fits"
    with ExitStack() as undo:
        pfs = undo.enter_context(ParallelFileSystem(bench.data, place / "source", profile))
        words = ("--freshness", "immutable")
        mount = undo.enter_context(Mount(place / "source", place / "n", *words, size=size))
        task.say(f"{row}: first epoch")
        bench.epoch(mount, pfs, 1, UNKNOWN, 0.0)
        mount.wait_idle()
        seed = 10
        for compute in COMPUTE:
            arms_in_turn = (ANNOUNCED, UNKNOWN, AGAIN, WRONG)
            found: dict[str, list[Epoch]] = {arm: [] for arm in (*arms_in_turn, "source")}
            for number in range(rounds):
                task.say(f"{row}, {1000 * compute:g} ms a batch, round {number + 1} of {rounds}")
                for arm in arms_in_turn:
                    seed += arm != AGAIN
                    found[arm].append(bench.epoch(mount, pfs, seed, arm, compute))
                found["source"].append(bench.alone(pfs.path, seed, compute))
            arms = {arm: middle(epochs) for arm, epochs in found.items()}
            computing = compute * -(-bench.files // (READERS * BATCH))
            bound = max(computing, arms[UNKNOWN].remote / BANDWIDTH, local[compute])
            where = f"{row}, {1000 * compute:g} ms a batch"
            figure = partial(result.figure, arm=where)
            for arm, epoch in arms.items():
                figure(f"epoch, {arm}", epoch.seconds, "s")
            figure("the bound", bound, "s")
            figure(f"{ANNOUNCED}, over the bound", arms[ANNOUNCED].seconds / bound, "x")
            for arm in (ANNOUNCED, AGAIN, WRONG):
                ratio = arms[arm].seconds / arms[UNKNOWN].seconds
                figure(f"{arm}, over {UNKNOWN}", ratio, "x")
            for arm in arms_in_turn:
                figure(f"processor time of the daemon a file, {arm}", arms[arm].cpu_ms, "ms")
            for arm in (ANNOUNCED, AGAIN, WRONG):
                more = arms[arm].remote / max(1, arms[UNKNOWN].remote)
                figure(f"read of the source, {arm} over {UNKNOWN}", more, "x")
            task.keep(result)
        status = mount.status()["window"]
        result.notes.append(f"{row}: {status}")


def all_local(bench: Bench) -> dict[float, float]:
    """Seconds of an epoch, by computing time, where all fits."""
    place = bench.task.place / "local"
    with Mount(bench.data, place, "--freshness", "immutable", "--prefetch", "all") as mount:
        mount.wait_idle()
        rounds = bench.task.rounds_or(1, 3)
        return {
            compute: median(bench.alone(mount.path, 5, compute).seconds for _ in range(rounds))
            for compute in COMPUTE
        }


def run(task: Task) -> Result:
    files = 600 if task.quick else 3000
    result = Result(
        "order",
        f"{READERS} readers, {files:,} files of {FILE_BYTES / 1e6:.2g} MB in random order,"
        f" {BATCH} a batch; epochs after the first",
    )
    data = task.place / "data"
    generate(data, files)
    with reader_processes(READERS) as pool:
        bench = Bench(task, data, files, pool)
        task.say("all local")
        local = all_local(bench)
        for compute, seconds in local.items():
            result.figure("epoch", seconds, "s", arm=f"all local, {1000 * compute:g} ms a batch")
        for latency in LATENCIES:
            for share in SHARES:
                measure(result, bench, latency, share, local)
    shutil.rmtree(data)
    return result
