"""First reads of an emulated source, by their pattern, beside those of the source itself: where a
mount could make them slower. Nothing is local before."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import MIB, Mount, Unusable, drop_caches, memory_place, reader_processes
from bench.pfs import ParallelFileSystem, Profile
from bench.report import Result
from bench.task import Task

SOURCE = Profile("a busy source", 150e6, 0.0005, 0.0005)
READERS = 8
MOST_SECONDS = 300.0
WHOLE = 1 << 62

Read = tuple[str, Sequence[tuple[int, int]]]
"""A file, and what is read of it: offsets and sizes, at most up to its end. Without any it is only
looked up."""


def read_each(root: str, reads: Sequence[Read]) -> None:
    """Runs in a reader process."""
    for name, ranges in reads:
        path = f"{root}/{name}"
        if not ranges:
            os.stat(path)
            continue
        with open(path, "rb", buffering=0) as file:
            for offset, size in ranges:
                file.seek(offset)
                left = size
                while left and (data := file.read(min(left, MIB))):
                    left -= len(data)


@dataclass(frozen=True, slots=True)
class Pattern:
    """``reads`` says what is read of the files' names. ``beside`` large files are there, too."""

    name: str
    files: int
    size_bytes: int
    per_directory: int
    reads: Callable[[list[str], random.Random], list[Read]]
    options: tuple[str, ...] = ()
    beside: int = 0

    def generate(self, root: Path) -> list[str]:
        block = os.urandom(MIB)
        places = [
            (f"d{n // self.per_directory:04d}", n, self.size_bytes) for n in range(self.files)
        ]
        places += [("beside", n, 40 * MIB) for n in range(self.beside)]
        for directory, number, size in places:
            (root / directory).mkdir(parents=True, exist_ok=True)
            with open(root / directory / f"{number:06d}", "wb") as file:
                for at in range(0, size, MIB):
                    file.write(block[: size - at])
        return [f"{directory}/{number:06d}" for directory, number, _size in places[: self.files]]


def shuffled(names: list[str], rng: random.Random) -> list[Read]:
    return [(name, [(0, WHOLE)]) for name in rng.sample(names, len(names))]


def some(share: float) -> Callable[[list[str], random.Random], list[Read]]:
    return lambda names, rng: shuffled(rng.sample(names, int(share * len(names))), rng)


def at_random(size: int, count: int) -> Callable[[list[str], random.Random], list[Read]]:
    """Of one file of a GiB: each of the readers opens it once."""

    def reads(names: list[str], rng: random.Random) -> list[Read]:
        places = [(rng.randrange((1 << 30) // size) * size, size) for _ in range(count)]
        return [(names[0], places[reader::READERS]) for reader in range(READERS)]

    return reads


def columns(names: list[str], rng: random.Random) -> list[Read]:
    """The end of each, as parquet's readers do, then three pieces of 300 KB."""
    end = 16 * MIB
    pieces = [[(rng.randrange(15 * MIB), 300 << 10) for _ in range(3)] for _ in names]
    return [
        (n, [(end - 8, 8), (end - 65536, 65536), *p]) for n, p in zip(names, pieces, strict=True)
    ]


def heads(names: list[str], _rng: random.Random) -> list[Read]:
    return [(name, [(0, 4096)]) for name in names]


def in_order(names: list[str], _rng: random.Random) -> list[Read]:
    return [(name, []) for name in names]


PATTERNS = (
    Pattern("whole files of 110 KB, shuffled", 2000, 110_000, 100, shuffled),
    Pattern("shards of 64 MB, in sequence", 10, 64 * MIB, 10, shuffled),
    Pattern(
        *("files of 4 KB, shuffled, while large ones are copied", 600, 4000, 60, shuffled),
        options=("--prefetch", "all"),
        beside=20,
    ),
    Pattern("4 KB at random of one file", 1, 1 << 30, 1, at_random(4096, 4000)),
    Pattern("128 KB at random of one file", 1, 1 << 30, 1, at_random(128 << 10, 1600)),
    Pattern("1 MB at random of one file", 1, 1 << 30, 1, at_random(MIB, 400)),
    Pattern("the end and three pieces of files of 16 MB", 60, 16 * MIB, 60, columns),
    Pattern("the first 4 KB of files of 10 MB", 100, 10 * MIB, 100, heads),
    Pattern("the first 4 KB of files of 1 MB", 800, MIB, 100, heads),
    Pattern("5% of the files of small directories", 20_000, 4000, 200, some(0.05)),
    Pattern("3% of the files of a large directory", 100_000, 16, 100_000, some(0.03)),
    Pattern("names in order", 4000, 16, 100, in_order),
)


def measure(pattern: Pattern, place: Path, rounds: int, result: Result) -> None:
    with memory_place() as memory, reader_processes(READERS) as pool:
        reads = pattern.reads(pattern.generate(memory / "backing"), random.Random(3))
        shares = [reads[reader::READERS] for reader in range(READERS)]

        def seconds(root: Path) -> float:
            drop_caches()
            started = time.perf_counter()
            pool.starmap_async(read_each, [(str(root), share) for share in shares]).get(
                MOST_SECONDS
            )
            return time.perf_counter() - started

        with ParallelFileSystem(memory / "backing", place / "pfs", SOURCE, targets=4) as pfs:
            direct, mounted = [], []
            for number in range(rounds):
                direct.append(seconds(pfs.path))
                with Mount(pfs.path, place / f"m{number}", *pattern.options, size="8G") as mount:
                    mounted.append(seconds(mount.path))
    result.compare(pattern.name, "s", mounted, direct, at_most=1.2)


def run(task: Task) -> Result:
    result = Result("patterns", "first reads by their pattern, beside the source itself")
    if os.geteuid() != 0:
        raise Unusable("only root can drop the kernel's caches: run it as root")
    for number, pattern in enumerate(PATTERNS):
        task.say(pattern.name)
        place = task.place / str(number)
        place.mkdir()
        measure(pattern, place, task.rounds_or(1, 3), result)
    result.notes.append(
        f"an emulated source of {SOURCE.bandwidth / 1e6:.0f} MB/s, {SOURCE.read_seconds * 1e3} ms;"
        f" {READERS} readers; a mount without any copy each time"
    )
    return result
