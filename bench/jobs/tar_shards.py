"""webdataset: samples of 100 kB in tar files of some 8 MB, shards shuffled in every epoch."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch.utils.data import DataLoader

from bench.jobs.files import BATCH, READERS, SEED, Epochs, collated, main, seen
from bench.jobs.training import Batch

SAMPLE_BYTES = 100_000
SHARD_SAMPLES = 80


def generate(root: Path, size: int) -> None:
    rng = np.random.default_rng(SEED)
    count = size // SAMPLE_BYTES
    for first in range(0, count, SHARD_SAMPLES):
        with tarfile.open(root / f"shard-{first // SHARD_SAMPLES:04d}.tar", "w") as shard:
            for number in range(first, min(first + SHARD_SAMPLES, count)):
                entry = tarfile.TarInfo(f"{number:06d}.bin")
                entry.size = SAMPLE_BYTES
                shard.addfile(entry, io.BytesIO(rng.bytes(SAMPLE_BYTES)))


def look(sample: dict[str, Any]) -> Any:
    data = bytearray(sample["bin"])
    return torch.frombuffer(data, dtype=torch.uint8), *seen(data)


def epochs(root: Path) -> Epochs:
    shards = [str(path) for path in sorted(root.glob("shard-*.tar"))]

    def epoch(number: int) -> Iterator[Batch]:
        dataset = webdataset.WebDataset(
            shards, shardshuffle=len(shards), seed=number, empty_check=False
        )
        dataset = dataset.shuffle(SHARD_SAMPLES).map(look)
        loader = DataLoader(dataset, batch_size=BATCH, num_workers=READERS)
        return collated(loader)

    return epoch


if __name__ == "__main__":
    main(generate, epochs)
