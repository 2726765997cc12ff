"""Work that a file system is measured by, and what it costs."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing.pool import Pool
from pathlib import Path

from bench.harness import MIB, drop_pages, forget_pages, write_random

READERS = 4


class Data:
    """A file to read in whole, and many small ones in directories of ten. Its paths are relative:
    the same content is seen at several places."""

    def __init__(self, root: Path, large_bytes: int, small: int) -> None:
        self.root = root
        self.large = Path("large")
        self.bytes = large_bytes
        rng = random.Random(1)
        write_random(root / self.large, large_bytes, rng)
        self.folders = [Path(f"folder{number:03}") for number in range(small // 10)]
        self.small = [folder / str(number) for folder in self.folders for number in range(10)]
        for path in self.small:
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_bytes(rng.randbytes(100))


def read_range(
    path: Path, start: int, end: int, begin: float = 0.0, passes: int = 1
) -> tuple[float, float]:
    """Reads it in order from that moment on, of which nothing is cached before another pass; when
    it began and ended (time.monotonic)."""
    buffer = bytearray(MIB)
    fd = os.open(path, os.O_RDONLY)
    time.sleep(max(0.0, begin - time.monotonic()))
    began = time.monotonic()
    for number in range(passes):
        if number:
            forget_pages(fd)
        at = start
        while at < end and (got := os.preadv(fd, [buffer], at)):
            at += got
    ended = time.monotonic()
    os.close(fd)
    return began, ended


def rate(pool: Pool, path: Path, readers: int) -> float:
    """Bytes a second of so many processes that each read a part of it; nothing is cached."""
    drop_pages()
    size = path.stat().st_size
    ends = [size * number // readers for number in range(readers + 1)]
    begin = time.monotonic() + 0.05
    parts = [(path, start, end, begin) for start, end in pairwise(ends)]
    spans = pool.starmap(read_range, parts, chunksize=1)
    return size / (max(end for _, end in spans) - min(began for began, _ in spans))


def each(action: Callable[[Path], object], paths: Sequence[Path]) -> list[float]:
    """The seconds that each took."""
    found = []
    for path in paths:
        started = time.perf_counter()
        action(path)
        found.append(time.perf_counter() - started)
    return found


def open_and_close(path: Path) -> None:
    os.close(os.open(path, os.O_RDONLY))


def page_reads(path: Path, count: int, seed: int) -> list[float]:
    """The seconds of reads of 4 KiB at random places that are not cached."""
    fd = os.open(path, os.O_RDONLY)
    try:
        forget_pages(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        pages = random.Random(seed).sample(range(os.fstat(fd).st_size // 4096), count)
        found = []
        for page in pages:
            started = time.perf_counter()
            os.pread(fd, 4096, page * 4096)
            found.append(time.perf_counter() - started)
        return found
    finally:
        os.close(fd)


def processor_seconds(pid: int) -> float:
    """Of all its threads so far (proc_pid_schedstat(5)); the emulator's never end."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
