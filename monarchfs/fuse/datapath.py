"""Who reads resident files, the daemon or the kernel: what ``--data-path auto`` chooses.

That is decided once a mount, before the first open, because a mount whose opens cost nothing cannot
have the kernel read a backing file: it is named in the answer to an open. Pure: no I/O, no clock.
"""

from __future__ import annotations

from typing import NamedTuple

SMALL_BYTES = 1 << 20
"""As in store/allocator.py."""


class ResidentReplicas(NamedTuple):
    """What an earlier mount left of a dataset: complete replicas, and their allocated bytes."""

    files: int
    bytes: int


def kernel_reads(dataset: ResidentReplicas, *, free_opens: bool) -> bool:
    """Whether the kernel should read replicas itself, where both are possible.

    ``free_opens``: without passthrough, opens would not reach the daemon. That is best for files
    that are small on average: most of them share a file with others, which the kernel cannot read
    by itself, and opening them costs nothing then. Larger ones are read faster, and without taking
    memory twice, from the replica itself. So is a dataset of which nothing is known yet.
    """
    return not free_opens or dataset.files == 0 or dataset.bytes >= dataset.files * SMALL_BYTES
