"""What ``--data-path auto`` chooses where both are possible."""

from __future__ import annotations

import pytest

from monarchfs.fuse.datapath import ResidentReplicas, kernel_reads

GIB = 1 << 30
NOTHING, SMALL, LARGE = (
    ResidentReplicas(0, 0),
    ResidentReplicas(1_000_000, 110_000_000_000),
    ResidentReplicas(100, 100 * GIB),
)


@pytest.mark.parametrize(
    ("dataset", "free_opens", "expected"),
    [
        (NOTHING, True, True),
        (NOTHING, False, True),
        (SMALL, True, False),
        (SMALL, False, True),
        (LARGE, True, True),
        (LARGE, False, True),
    ],
)
def test_the_choice(dataset: ResidentReplicas, free_opens: bool, expected: bool) -> None:
    assert kernel_reads(dataset, free_opens=free_opens) is expected
