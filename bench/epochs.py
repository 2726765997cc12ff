"""Epochs over 2 GiB of mixed files: what is read from the source, and how long it takes."""

from __future__ import annotations

import random
import shutil
import time
import zlib
from multiprocessing.pool import Pool
from pathlib import Path
from typing import NamedTuple

from bench.harness import MIB, Mount, Source, forget_pages, reader_processes, write_random
from bench.report import Result
from bench.task import Task

DATASET_BYTES = 2 << 30
SMALLEST, LARGEST = 4 << 10, 64 << 20
READERS = 4
ROUNDS = 3
DELAY_SECONDS = 0.001
RATE_BYTES_PER_SECOND = 400e6
MOST_SECONDS = 600.0


class File(NamedTuple):
    path: str
    checksum: int


def generate(root: Path) -> list[File]:
    """Files whose sizes are spread evenly on a logarithmic scale."""
    rng = random.Random(1)
    files: list[File] = []
    left = DATASET_BYTES
    while left:
        size = min(left, int(SMALLEST * (LARGEST / SMALLEST) ** rng.random()))
        path = f"{len(files) % 16:02d}/{len(files):05d}.bin"
        files.append(File(path, write_random(root / path, size, rng)))
        left -= size
    return files


def read(task: tuple[str, File]) -> bool:
    """Whether the file's content is right; runs in a reader process."""
    root, expected = task
    checksum = 0
    with open(f"{root}/{expected.path}", "rb", buffering=0) as file:
        forget_pages(file.fileno())
        while data := file.read(MIB):
            checksum = zlib.crc32(data, checksum)
    return checksum == expected.checksum


def epoch(pool: Pool, root: Path, files: list[File], seed: int) -> float:
    """Seconds for all files in random order; raises ValueError if a byte is wrong, TimeoutError
    after ten minutes."""
    order = random.Random(seed).sample(files, len(files))
    started = time.perf_counter()
    answers = pool.map_async(read, [(str(root), file) for file in order], chunksize=1)
    wrong = answers.get(MOST_SECONDS).count(False)
    seconds = time.perf_counter() - started
    if wrong:
        raise ValueError(f"{wrong} files had the wrong content")
    return seconds


def run(task: Task) -> Result:
    place = task.place
    result = Result(
        "epochs", f"2 GiB, 4 KiB to 64 MiB, random order, {READERS} readers, empty cache at first"
    )
    backing = place / "data"
    files = generate(backing)
    direct: list[float] = []
    first: list[float] = []
    second: list[float] = []
    direct_bytes, first_bytes, first_status, second_bytes, second_operations = 0, 0, 0, 0, 0
    with Source(backing, place / "source") as source, reader_processes(READERS) as pool:
        source.faults(delay=DELAY_SECONDS, rate=RATE_BYTES_PER_SECOND)
        for number in range(ROUNDS):
            source.take_counts()
            direct.append(epoch(pool, source.path, files, number))
            direct_bytes = max(direct_bytes, source.take_counts()[0])
            here = place / f"mount{number}"
            with Mount(source.path, here, "--freshness", "immutable") as mount:
                source.take_counts()
                first.append(epoch(pool, mount.path, files, number))
                status = mount.wait_idle()
                first_bytes = max(first_bytes, source.take_counts()[0])
                first_status = max(first_status, status["source_io"]["read_bytes"])
                second.append(epoch(pool, mount.path, files, number + ROUNDS))
                mount.wait_idle()
                read_bytes, operations = source.take_counts()
                second_bytes = max(second_bytes, read_bytes)
                second_operations = max(second_operations, operations)
            shutil.rmtree(here)
    size = DATASET_BYTES
    result.figure("source reads, direct epoch", direct_bytes / size, "x data")
    result.figure("source reads, first epoch", first_bytes / size, "x data", at_most=1.02)
    result.figure("the same by status", first_status / size, "x data", at_most=1.02)
    result.figure("source reads, second epoch", second_bytes, "bytes", at_most=0)
    result.figure("source operations, second epoch", second_operations, "", at_most=0)
    result.compare("time of the first epoch", "s", first, direct)
    result.compare("time of the second epoch", "s", second, direct)
    result.notes = [
        f"{len(files)} files; the source takes {DELAY_SECONDS * 1000:g} ms an operation and gives"
        f" {RATE_BYTES_PER_SECOND / 1e6:g} MB/s; every byte is compared with its checksum",
        f"{ROUNDS} rounds of direct, first, second epoch, each with an empty cache; counts are the"
        " largest of the rounds, times the medians",
        "each reader drops a file's pages before it reads it, as a data set larger than memory"
        " would; freshness immutable",
    ]
    return result
