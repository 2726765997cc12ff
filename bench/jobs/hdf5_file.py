"""PyTorch's DataLoader over one large HDF5 file: records of 100 kB, read at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader

from bench.jobs.files import BATCH, READERS, SEED, Epochs, collated, main, seen

RECORD_BYTES = 100_000
NAME = "records.h5"


def generate(root: Path, size: int) -> None:
    rng = np.random.default_rng(SEED)
    count = size // RECORD_BYTES
    with h5py.File(root / NAME, "w") as file:
        records = file.create_dataset(
            "records", (count, RECORD_BYTES), dtype="u1", chunks=(1, RECORD_BYTES)
        )
        for number in range(count):
            records[number] = rng.integers(0, 256, RECORD_BYTES, dtype=np.uint8)


class Records:
    """Opened in each process that reads: HDF5 does not survive a fork."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: Any = None
        with h5py.File(path, "r") as file:
            self._count = len(file["records"])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        if self._records is None:
            self._records = h5py.File(self.path, "r")["records"]
        record = self._records[number]
        return torch.from_numpy(record), *seen(record)


def epochs(root: Path) -> Epochs:
    loader = DataLoader(
        Records(root / NAME),
        batch_size=BATCH,
        shuffle=True,
        num_workers=READERS,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(SEED),
    )
    return lambda _number: collated(loader)


if __name__ == "__main__":
    main(generate, epochs)
