"""A numpy array in one file, mapped into memory: rows of 64 KiB, read at random by threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench.jobs.files import BATCH, READERS, SEED, Epochs, batch_of, main, seen
from bench.jobs.training import Batch

ROW_BYTES = 1 << 16
NAME = "rows.npy"


def generate(root: Path, size: int) -> None:
    rng = np.random.default_rng(SEED)
    count = size // ROW_BYTES
    rows = np.lib.format.open_memmap(root / NAME, "w+", np.uint8, (count, ROW_BYTES))
    for number in range(count):
        rows[number] = rng.integers(0, 256, ROW_BYTES, dtype=np.uint8)
    rows.flush()


def epochs(root: Path) -> Epochs:
    def epoch(number: int) -> Iterator[Batch]:
        # Mapped anew each time: mapped pages would stay whoever empties the page cache.
        rows = np.load(root / NAME, mmap_mode="r")
        order = np.random.default_rng(number).permutation(len(rows)).tolist()

        def batch(first: int) -> Batch:
            # Indexing with a list copies the rows out of the map, as a batch is made.
            copied = rows[order[first : first + BATCH]]
            return batch_of(*zip(*map(seen, copied), strict=True))

        with ThreadPoolExecutor(READERS) as pool:
            yield from pool.map(batch, range(0, len(order), BATCH))

    return epoch


if __name__ == "__main__":
    main(generate, epochs)
