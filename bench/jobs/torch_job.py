"""A training job with PyTorch: a DataLoader whose worker processes read shards of records."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bench.jobs.training import Batch, batch_of, interleaved, parser, shards, shuffled, train


class Shards(IterableDataset):  # type: ignore[misc]
    """Batches of records; each worker has its share of the files."""

    def __init__(self, paths: list[str], batch: int, open_shards: int, shuffle: int) -> None:
        self.paths = paths
        self.batch = batch
        self.open_shards = open_shards
        self.shuffle = shuffle
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, Batch]]:
        worker = get_worker_info()
        # Each worker has this object to itself, and keeps it: so all count alike.
        self.epoch += 1
        order = random.Random(self.epoch).sample(self.paths, len(self.paths))
        mine = order[worker.id :: worker.num_workers]
        width = max(1, self.open_shards // worker.num_workers)
        room = max(1, self.shuffle // worker.num_workers)
        read = shuffled(interleaved(mine, width), room, random.Random(worker.id))
        while samples := list(islice(read, self.batch)):
            whole = bytearray().join(samples)
            yield torch.frombuffer(whole, dtype=torch.uint8), batch_of(samples)


def main() -> None:
    arguments = parser().parse_args()
    torch.set_num_threads(1)
    loader = DataLoader(
        Shards(shards(arguments.data), arguments.batch, arguments.open_shards, arguments.shuffle),
        batch_size=None,
        num_workers=arguments.readers,
        prefetch_factor=max(1, arguments.ahead // arguments.readers),
        persistent_workers=True,
    )

    def epoch(_number: int) -> Iterator[Batch]:
        for images, batch in loader:
            yield batch._replace(bytes=images.numel())

    train(arguments.compute, epoch)


if __name__ == "__main__":
    main()
