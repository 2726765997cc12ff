"""Random records of a large HDF5 file: at first, while it is being copied, and once it is local."""

from __future__ import annotations

import random
import shutil
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from bench.harness import Mount, Source, forget_pages, reader_processes
from bench.report import Result
from bench.task import Task

RECORD_BYTES = 100_000
RECORDS = (1 << 30) // RECORD_BYTES
READ_RECORDS = 1000
ROUNDS = 3
DELAY_SECONDS = 0.005


class Timed(NamedTuple):
    seconds: float
    checksum: int


def generate(path: Path, *, chunked: bool) -> None:
    layout = {"chunks": (1, RECORD_BYTES)} if chunked else {}
    rng = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        records = file.create_dataset("records", (RECORDS, RECORD_BYTES), dtype="u1", **layout)
        step = 500
        for start in range(0, RECORDS, step):
            count = min(step, RECORDS - start)
            records[start : start + count] = rng.integers(
                0, 256, (count, RECORD_BYTES), dtype=np.uint8
            )


def read_records(task: tuple[str, int]) -> Timed:
    """Opens the file and reads records at random; runs in a reader process."""
    path, seed = task
    order = random.Random(seed).sample(range(RECORDS), READ_RECORDS)
    with open(path, "rb") as plain:
        forget_pages(plain.fileno())
    checksum = 0
    started = time.perf_counter()
    with h5py.File(path, "r") as file:
        records = file["records"]
        for number in order:
            checksum = zlib.crc32(records[number], checksum)
    return Timed(time.perf_counter() - started, checksum)


def timed(path: Path, seed: int, expected: int | None = None) -> Timed:
    with reader_processes(1) as pool:
        result = pool.apply(read_records, ((str(path), seed),))
    if expected is not None and result.checksum != expected:
        raise ValueError(f"records of {path} are not those of the source")
    return result


class Case(NamedTuple):
    """A layout of the file and a kind of source; ``goal`` is what the first records may cost."""

    name: str
    chunked: bool
    faults: dict[str, object]
    goal: float | None


READS_ARE_SLOW = {"delay": DELAY_SECONDS, "delayed": ["lookup", "open", "read"]}
CASES = (
    Case("contiguous", False, READS_ARE_SLOW, 1.1),
    Case("chunked", True, READS_ARE_SLOW, 1.1),
    Case("contiguous, 200 MB/s", False, {**READS_ARE_SLOW, "rate": 200e6}, None),
    Case("contiguous, fstat as slow", False, {"delay": DELAY_SECONDS}, None),
)


def measure(result: Result, place: Path, case: Case) -> None:
    backing = place / "data"
    backing.mkdir()
    generate(backing / "a.h5", chunked=case.chunked)
    direct: list[float] = []
    first: list[float] = []
    resident: list[float] = []
    local: list[float] = []
    with Source(backing, place / "source") as source:
        source.faults(**case.faults)

        def read_directly(seed: int) -> Timed:
            return timed(source.path / "a.h5", seed)

        def read_first(seed: int) -> Timed:
            here = place / "mount"
            with Mount(source.path, here, "--freshness", "immutable") as mount:
                found = timed(mount.path / "a.h5", seed)
                mount.wait_idle()
                local.append(timed(backing / "a.h5", seed, found.checksum).seconds)
                resident.append(timed(mount.path / "a.h5", seed, found.checksum).seconds)
            shutil.rmtree(here)
            return found

        for number in range(ROUNDS):
            # In turn, because the machine's speed drifts.
            ways = (read_directly, read_first) if number % 2 else (read_first, read_directly)
            both = {way.__name__: way(number) for way in ways}
            if both["read_directly"].checksum != both["read_first"].checksum:
                raise ValueError("records through the mount are not those of the source")
            direct.append(both["read_directly"].seconds)
            first.append(both["read_first"].seconds)
    shutil.rmtree(backing)
    records = f"{READ_RECORDS:,} records"
    result.compare(f"{case.name}: first {records}", "s", first, direct, at_most=case.goal)
    if case.goal is not None:
        result.compare(f"{case.name}: {records}, resident", "s", resident, direct)
        result.compare(f"{case.name}: the same against a local file", "s", resident, local)


def run(task: Task) -> Result:
    place = task.place
    result = Result("hdf5", "1 GiB HDF5 file, 100 KB records in random order, one reader")
    for case in CASES:
        measure(result, place, case)
    result.notes = [
        f"each lookup, open and read of the source takes {DELAY_SECONDS * 1000:g} ms; 200 MB/s: and"
        " all reads together get no more; fstat as slow: every other operation takes as long too",
        f"prefetch access: the rest of the file is copied while the records are read; {ROUNDS}"
        " rounds in alternating order, each with an empty cache",
        "the reader opens the file and reads, with none of its pages in the page cache; chunked:"
        " one chunk a record; local file: the same file on this machine's disk",
    ]
    return result
