"""Who reads resident files, the daemon or the kernel: what ``--data-path auto`` chooses.

That is decided once a mount, before the first open, because a mount whose opens cost nothing cannot
have the kernel read a backing file: it is named in the answer to an open. Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import NamedTuple

SMALL_BYTES = 1 << 20
"""Mean size of a file below which an open that costs nothing is worth more than reads that do."""

MEMORY_SHARE = 4
"""One part in so many of the memory is what the dataset may fill in the page cache."""


class Dataset(NamedTuple):
    """What an earlier mount left of a dataset: complete replicas, and their allocated bytes."""

    files: int
    bytes: int


def kernel_reads(dataset: Dataset, memory_bytes: int, *, free_opens: bool) -> bool:
    """Whether the kernel should read replicas itself, where both are possible.

    ``free_opens``: without passthrough, opens would not reach the daemon. Then many small files
    that fit in memory are better off with the page cache: it holds them from the second reading on,
    and opening them costs nothing. Whatever is larger than that is read faster, and without taking
    memory twice, from the replica itself. So is a dataset of which nothing is known yet.
    """
    if not free_opens or dataset.files == 0:
        return True
    small = dataset.bytes < dataset.files * SMALL_BYTES
    return not (small and dataset.bytes * MEMORY_SHARE <= memory_bytes)
