"""What ``--data-path auto`` chooses where both are possible."""

from __future__ import annotations

import pytest

from monarchfs.fuse.datapath import Dataset, kernel_reads

GIB = 1 << 30
NOTHING, SMALL, LARGE = Dataset(0, 0), Dataset(1_000_000, 110_000_000_000), Dataset(100, 100 * GIB)


@pytest.mark.parametrize(
    ("dataset", "memory", "free_opens", "expected"),
    [
        (NOTHING, 512 * GIB, True, True),
        (NOTHING, 512 * GIB, False, True),
        (SMALL, 512 * GIB, True, False),
        (SMALL, 512 * GIB, False, True),
        (SMALL, 256 * GIB, True, True),  # it would leave no memory for anything else
        (LARGE, 512 * GIB, True, True),
        (LARGE, 64 * GIB, False, True),
    ],
)
def test_the_choice(dataset: Dataset, memory: int, free_opens: bool, expected: bool) -> None:
    assert kernel_reads(dataset, memory, free_opens=free_opens) is expected
