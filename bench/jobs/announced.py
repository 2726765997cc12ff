"""PyTorch and webdataset with 4 processes, whose order is announced or not. Another one in each
epoch."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import webdataset
from torch.utils.data import DataLoader, Dataset, RandomSampler

from bench.jobs.files import BATCH, SEED, collated, seen
from bench.jobs.training import Batch, train
from monarchfs import hints

READERS = 4
SHUFFLED_SAMPLES = 64


class Files(Dataset):  # type: ignore[misc]
    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index], "rb") as file:
            return sample(file.read())


def sample(data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), *seen(data)


def samples_of_shard(entry: dict[str, Any]) -> Any:
    return sample(entry["bin"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--announce", action="store_true")
    parser.add_argument("--shards", action="store_true", help="the files are shards of webdataset")
    arguments = parser.parse_args()
    files = sorted(str(path) for path in arguments.root.rglob("*") if path.is_file())
    generator = torch.Generator().manual_seed(SEED)

    def from_files() -> DataLoader:
        dataset = Files(files)
        sampler = RandomSampler(dataset, generator=generator)
        if arguments.announce:
            sampler = hints.announce(sampler, files)
        return DataLoader(
            dataset,
            batch_size=BATCH,
            sampler=sampler,
            num_workers=READERS,
            persistent_workers=True,
        )

    def from_shards(number: int) -> DataLoader:
        drawn = random.Random(number).sample(files, len(files))
        if arguments.announce:
            hints.announce_files(drawn)
        dataset = webdataset.WebDataset(drawn, shardshuffle=False, empty_check=False)
        dataset = dataset.shuffle(SHUFFLED_SAMPLES).map(samples_of_shard)
        return DataLoader(dataset, batch_size=BATCH, num_workers=READERS)

    loader = None if arguments.shards else from_files()

    def epoch(number: int) -> Iterator[Batch]:
        return collated(from_shards(number) if loader is None else loader)

    train(0.0, epoch)


if __name__ == "__main__":
    main()
