"""Two jobs of one user on a node that read the same dataset, at different places of their epochs:
what the source is asked for, how long they take, and how long one waits beside a greedy one."""

from __future__ import annotations

import math
import os
import random
import statistics
import threading
import time
from contextlib import ExitStack
from multiprocessing.pool import Pool
from pathlib import Path

from bench.harness import Mount, drop_caches, reader_processes
from bench.pfs import ParallelFileSystem, Profile
from bench.report import Result
from bench.sharing import Dataset, generate, name_of, read_all
from bench.task import Task

MB = 1e6
PROFILE = Profile("shared", 150 * MB, 1e-3, 1e-3)
LATENT = Profile("far", math.inf, 1e-3, 4e-3, metadata_in_flight=64)
"""A source that serves any number at once, each after a while: all queues are the mount's."""

EPOCHS = 2
LATER = 0.4
"""The second job begins after such a part of the first one's first epoch."""

SOURCE, SHARED, APART = "source alone", "one mount", "a mount each"
GREEDY_THREADS = (0, 64, 256)
FAIR_SECONDS = 4.0


def a_job(task: tuple[str, Dataset, int, bool, float]) -> float:
    """All epochs of a job, in an order of its own, after a while; seconds."""
    root, dataset, seed, drops, later = task
    time.sleep(later)
    return sum(read_all((root, dataset, 10 * seed + epoch, drops)) for epoch in range(EPOCHS))


def two_jobs(
    arm: str, task: Task, data: Path, dataset: Dataset, pool: Pool, result: Result
) -> None:
    place = data.parent / f"p{(SOURCE, SHARED, APART).index(arm)}"
    place.mkdir()
    later = LATER * dataset.bytes / PROFILE.bandwidth
    with ExitStack() as undo:
        source = place / "source"
        pfs = undo.enter_context(ParallelFileSystem(data, source, PROFILE))
        # One after the other is what the jobs are compared with.
        for way in ("at once", "one after the other"):
            task.say(f"{arm}, {way}")
            drop_caches()
            before = pfs.counts()
            with ExitStack() as mounted:
                roots = [source, source]
                if arm is not SOURCE:
                    mounts = [
                        mounted.enter_context(
                            Mount(
                                *(source, place / f"{way[0]}{n}", "--freshness", "immutable"),
                                tier=place / f"{way[0]}tier",
                            )
                        )
                        for n in range(1 if arm is SHARED else 2)
                    ]
                    roots = [mounts[0].path, mounts[-1].path]
                both = way == "at once"
                work = [
                    (str(root), dataset, seed, arm is SOURCE, later if both and seed else 0.0)
                    for seed, root in enumerate(roots)
                ]
                if both:
                    seconds = pool.map(a_job, work, chunksize=1)
                    for name, value in zip(("first", "second"), seconds, strict=True):
                        result.figure(f"{way}, the {name} job", value, "s", arm=arm)
                else:
                    total = sum(pool.apply(a_job, (one,)) for one in work)
                    result.figure(f"{way}, both jobs", total, "s", arm=arm)
            read = (pfs.counts() - before).read_bytes / dataset.bytes
            goal = 1.02 if arm is SHARED else None
            result.figure(f"{way}, read of the source", read, "x data", at_most=goal, arm=arm)


def latencies(root: Path, files: list[str], seconds: float, seed: int) -> list[float]:
    """Of reads of whole files in random order, none of which is in the page cache."""
    rng, took = random.Random(seed), []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        fd = os.open(root / rng.choice(files), os.O_RDONLY)
        try:
            while os.read(fd, 1 << 20):
                pass
            took.append(time.perf_counter() - began)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return took


def greedy(task: tuple[str, list[str], int]) -> int:
    """So many threads of one process read all the time; how many files they read."""
    root, files, count = task
    os.setpgid(0, 0)  # as another job
    read = [0] * count

    def reader(number: int) -> None:
        read[number] = len(latencies(Path(root), files, FAIR_SECONDS + 1, number))

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(read)


def fairness(task: Task, data: Path, dataset: Dataset, pool: Pool, result: Result) -> None:
    """One reader, of files that are not kept, beside a process that reads with many threads."""
    names = [name_of(number) for number in range(dataset.files)]
    own, theirs = names[::2], names[1::2]
    place = data.parent / "fair"
    place.mkdir()
    with ExitStack() as undo:
        source = place / "source"
        undo.enter_context(ParallelFileSystem(data, source, LATENT))
        words = ("--freshness", "immutable", "--prefetch", "none")
        mount = undo.enter_context(Mount(source, place / "m", *words))
        for arm, root in ((SOURCE, source), (SHARED, mount.path)):
            for count in GREEDY_THREADS:
                task.say(f"fairness, {arm}, {count} greedy threads")
                beside = pool.apply_async(greedy, ((str(root), theirs, count),))
                time.sleep(0.5)
                took = latencies(root, own, FAIR_SECONDS, 1000)
                rate = beside.get() / (FAIR_SECONDS + 1)
                row = f"{arm}, beside {count} threads of another process"
                result.figure("a file, median", 1000 * statistics.median(took), "ms", arm=row)
                slow = statistics.quantiles(took, n=20)[-1]
                result.figure("a file, 95th percentile", 1000 * slow, "ms", arm=row)
                if count:
                    result.figure("the other process reads", rate, "files/s", arm=row)


def run(task: Task) -> Result:
    dataset = Dataset("files", 1200 if task.quick else 6000, 110_000, ())
    result = Result(
        "jobs",
        f"two jobs read {dataset.files:,} files of 110 KB, {EPOCHS} epochs each in its own order",
    )
    data = task.place / "data"
    generate(data, dataset)
    with reader_processes(2) as pool:
        for arm in (SOURCE, SHARED, APART):
            two_jobs(arm, task, data, dataset, pool, result)
        fairness(task, data, dataset, pool, result)
    result.notes = [
        f"the source: {PROFILE.bandwidth / MB:g} MB/s, {1000 * PROFILE.read_seconds:g} ms an"
        " operation; the second job begins when the first has read"
        f" {LATER:.0%} of the dataset, or would have",
        "beside a greedy process: a source that serves any number at once, 4 ms a read, and"
        " files that are not kept (--prefetch none)",
    ]
    return result
