"""What ``monarchfs top`` makes of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.insight.live import KEPT_FILES, Interval, LiveRates
from monarchfs.insight.recording import EVENT, AnsweredBy, File, Kind

NS = 1_000_000_000
BEGIN = 1000 * NS


def packed(
    kind: Kind,
    by: AnsweredBy = AnsweredBy.TIER,
    *,
    at: float = 0.0,
    took: float = 0.0,
    ino: int = 7,
    pid: int = 1,
    size: int = 0,
) -> bytes:
    return EVENT.pack(BEGIN + round(at * NS), ino, 0, took, size, pid, kind, by)


def packed_reads(*inos: int) -> bytes:
    """Each of as many bytes as its number says."""
    return b"".join(packed(Kind.READ, ino=ino, size=ino) for ino in inos)


def one_after_the_other(*events: bytes, seconds: float = 1.0, sample: int = 1) -> LiveRates:
    interval = Interval(by_directory=False)
    for event in events:
        interval.add(event, sample)
    (found,) = interval.close(seconds).values()
    return found


def test_rates_are_per_second_and_closing_is_nothing() -> None:
    opened = packed(Kind.LOOKUP), packed(Kind.OPEN), packed(Kind.RELEASE)
    reads = [packed(Kind.READ, size=1000) for _ in range(6)]
    found = one_after_the_other(*opened, *reads, seconds=2.0)
    assert (found.lookups, found.opens, found.reads, found.bytes) == (0.5, 0.5, 3, 3000)
    interval = Interval(by_directory=False)
    interval.add(opened[-1], 1)
    assert interval.close(1.0) == {}


def test_what_a_sample_stands_for() -> None:
    found = one_after_the_other(packed(Kind.READ, size=10, took=0.1), sample=4)
    assert (found.reads, found.bytes) == (4, 40)
    assert found.waiting == pytest.approx(0.4)


def test_bytes_that_came_with_the_open_are_of_who_answered_that() -> None:
    interval = Interval(by_directory=False)
    interval.add(packed(Kind.OPEN, AnsweredBy.SOURCE, ino=1), 1)
    interval.add(packed(Kind.OPEN, AnsweredBy.MEMORY, ino=2), 1)
    interval.close(1.0)
    for ino, by in ((1, AnsweredBy.MEMORY), (2, AnsweredBy.MEMORY), (2, AnsweredBy.TIER)):
        interval.add(packed(Kind.READ, by, ino=ino), 1)
    interval.add(packed(Kind.OPEN, AnsweredBy.KERNEL, ino=3), 1)
    (found,) = interval.close(1.0).values()
    assert found.answered == dict.fromkeys(
        (AnsweredBy.SOURCE, AnsweredBy.MEMORY, AnsweredBy.TIER, AnsweredBy.KERNEL), 0.25
    )


def test_opens_that_asked_about_changes_bring_nothing() -> None:
    """Where the kernel got the file, it reads by itself; else reads say who has the bytes."""
    found = one_after_the_other(
        packed(Kind.OPEN, AnsweredBy.CHECKED_KERNEL, ino=1),
        packed(Kind.OPEN, AnsweredBy.SOURCE, ino=2),
        packed(Kind.OPEN, AnsweredBy.CHECKED, ino=2),
        packed(Kind.READ, AnsweredBy.MEMORY, ino=2),
    )
    assert found.answered == {AnsweredBy.KERNEL: 0.5, AnsweredBy.MEMORY: 0.5}


def test_directories() -> None:
    interval = Interval(by_directory=True)
    interval.know({1: File("a/b/f", 1)})
    interval.add(packed_reads(1, 2, 3, 4), 1)
    interval.know({2: File("a/b/g", 1), 3: File("top", 1)})
    found = interval.close(1.0)
    assert {key: one.bytes for key, one in found.items()} == {"a/b": 3, ".": 3, "?": 4}


def test_few_files_are_remembered() -> None:
    interval = Interval(by_directory=True)
    for ino in range(1, KEPT_FILES + 1000, 500):
        interval.know({n: File("d/f", 1) for n in range(ino, ino + 500)})
    interval.know({KEPT_FILES // 2: File("e/f", 1)})
    interval.add(packed_reads(KEPT_FILES // 2, 1), 1)
    assert set(interval.close(1.0)) == {"e", "?"}


def test_a_long_request_counts_when_it_ends_and_once() -> None:
    interval = Interval(by_directory=False)
    interval.add(packed(Kind.READ, at=0.5, took=0.5), 1)
    assert interval.close(1.0)[1].waiting == pytest.approx(0.5)
    interval.add(packed(Kind.READ, at=0.75, took=3.25), 1)
    found = interval.close(1.0)[1]
    assert found.waiting == 1
    assert found.waited_seconds == pytest.approx(3)


SPAN = st.tuples(st.integers(0, 40), st.integers(0, 20))


@given(st.lists(st.lists(SPAN, min_size=1, max_size=8), min_size=1, max_size=3))
def test_waiting_is_the_time_with_a_request_under_way(
    intervals: list[list[tuple[int, int]]],
) -> None:
    interval = Interval(by_directory=False)
    until = 0
    for spans in intervals:
        slots = {tick for begin, took in spans for tick in range(begin, begin + took)}
        waited = len([tick for tick in slots if tick >= until])
        for begin, took in spans:
            interval.add(packed(Kind.READ, at=begin, took=float(took)), 1)
        (found,) = interval.close(100.0).values()
        assert found.waited_seconds == pytest.approx(waited, abs=1e-3)
        until = max(until, *(begin + took for begin, took in spans))
