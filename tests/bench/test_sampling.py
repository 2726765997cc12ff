"""What was served locally, over time."""

from __future__ import annotations

import threading

from bench.report import Kind
from bench.sampling import Sample, local_shares, sampled, share_series
from monarchfs.types import OperationError


def test_the_share_is_of_what_was_opened_in_the_window() -> None:
    samples = [
        *(Sample(0, 0, 0), Sample(1, 0, 100), Sample(2, 50, 150)),
        *(Sample(3, 50, 150), Sample(4, 250, 150)),
    ]
    points = local_shares(samples, 1.0)
    assert [(p.x, p.y) for p in points] == [(1, 0.0), (2, 50.0), (4, 100.0)]


def test_a_replaced_worker_counts_anew_and_is_left_out() -> None:
    samples = [Sample(0, 100, 100), Sample(1, 200, 100), Sample(2, 0, 0), Sample(3, 10, 0)]
    assert [p.x for p in local_shares(samples, 1.0)] == [1, 3]


def test_samples_are_taken_until_the_block_ends() -> None:
    counts = {"local": 0}
    enough = threading.Event()

    def ask() -> tuple[int, int]:
        counts["local"] += 1
        if counts["local"] == 2:
            raise OperationError("being replaced")
        if counts["local"] > 4:
            enough.set()
        return counts["local"], 0

    with sampled(ask, 0.01) as samples:
        assert enough.wait(30)
    assert [sample.local for sample in samples] == [1, *range(3, counts["local"] + 1)]
    assert sorted(samples) == samples
    series = share_series("arm", samples, "plot", epochs=[0.0])
    assert series.kind is Kind.TIME
    assert {p.y for p in series.points} == {100.0}
