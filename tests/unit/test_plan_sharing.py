"""What nodes that share keep, and read from where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarchfs.plan.sharing import Fits, Reads, SharedPlan, plan_sharing


def plan(dataset: int, room: int, nodes: int, share: str) -> SharedPlan:
    return plan_sharing(
        *(dataset, room, nodes), own_first=share != "replicate", keeps_foreign=share != "partition"
    )


def test_what_nodes_keep_and_read() -> None:
    everywhere = SharedPlan(Fits.EACH_NODE, 300, 600, Reads(900, 600), Reads(0, 0))
    assert plan(900, 1000, 3, "auto") == plan(900, 1000, 3, "replicate") == everywhere
    apart = SharedPlan(Fits.EACH_NODE, 300, 0, Reads(900, 600), Reads(0, 600))
    assert plan(900, 1000, 3, "partition") == apart
    together = SharedPlan(Fits.ALL_TOGETHER, 550, 450, Reads(2200, 1650), Reads(0, 1200))
    assert plan(2200, 1000, 4, "auto") == together, "it leaves the source once"
    # What comes first stays: of 16 files that a node lacks, 6 are at no owner's either.
    replicated = plan(2200, 1000, 4, "replicate")
    assert (replicated.own_bytes, replicated.foreign_bytes) == (250, 750)
    assert replicated.later_epoch.source_bytes > 1000
    nowhere = SharedPlan(Fits.NOWHERE, 1000, 0, Reads(2000 + 2 * 2000, 1000), Reads(4000, 1000))
    assert plan(4000, 1000, 2, "auto") == nowhere


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 1000),
    st.sampled_from(["auto", "replicate", "partition"]),
)
def test_each_byte_comes_from_somewhere(dataset: int, room: int, nodes: int, share: str) -> None:
    found = plan(dataset, room, nodes, share)
    kept = found.own_bytes + found.foreign_bytes
    for reads, local in ((found.first_epoch, 0), (found.later_epoch, kept)):
        assert min(reads.source_bytes, reads.network_bytes) >= 0
        assert abs(reads.source_bytes / nodes + reads.network_bytes + local - dataset) < 4
    assert found.own_bytes + found.foreign_bytes <= min(room, dataset) + 1
    assert found.first_epoch.source_bytes >= dataset - 1
