"""Work that a file system is measured by, and what it costs."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from multiprocessing.pool import Pool
from pathlib import Path

from bench.harness import MIB, drop_pages, forget_pages, write_random

READERS = 4


class Data:
    """Files to read in whole, and many small ones in directories of a few."""

    def __init__(self, root: Path, large_bytes: int, small: int) -> None:
        self.root = root
        self.large = [Path(f"large{number}") for number in range(READERS)]
        self.bytes = 0
        rng = random.Random(1)
        for path in self.large:
            write_random(root / path, large_bytes // READERS, rng)
            self.bytes += large_bytes // READERS
        self.folders = [Path(f"folder{number:03}") for number in range(small // 10)]
        self.small = [folder / str(number) for folder in self.folders for number in range(10)]
        for path in self.small:
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_bytes(rng.randbytes(100))


def read_whole(paths: Sequence[Path], begin: float) -> tuple[float, float]:
    """Reads them one after the other from that moment on; when it began and ended."""
    buffer = bytearray(MIB)
    time.sleep(max(0.0, begin - time.monotonic()))
    began = time.monotonic()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        while os.readv(fd, [buffer]):
            pass
        os.close(fd)
    return began, time.monotonic()


def rate(pool: Pool, root: Path, data: Data, readers: int) -> float:
    """Bytes a second of so many processes that read everything once; nothing of it is cached."""
    drop_pages()
    for path in data.large:
        os.stat(root / path)
    begin = time.monotonic() + 0.05
    shares = [[root / path for path in data.large[number::readers]] for number in range(readers)]
    spans = pool.starmap(read_whole, [(share, begin) for share in shares], chunksize=1)
    return data.bytes / (max(end for _, end in spans) - min(began for began, _ in spans))


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
