"""The window in which a reader's file is fetched ahead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarchfs.prefetch.readahead import Readahead


def test_a_sequential_reader_gets_a_growing_window() -> None:
    ahead = Readahead(32)
    stops = [ahead.advance(chunk, chunk + 1) for chunk in range(40)]
    windows = [stop - chunk for chunk, stop in enumerate(stops)]
    assert max(windows) > 16
    assert max(stops) >= 40
    assert sum(stop > chunk + 1 for chunk, stop in enumerate(stops)) < 12, "not in portions"


def test_a_random_reader_gets_none() -> None:
    ahead = Readahead(32)
    for first in (100, 7, 55, 300, 12, 80):
        assert ahead.advance(first, first + 2) == first + 2


def test_a_reader_that_jumps_starts_anew() -> None:
    ahead = Readahead(32)
    for chunk in range(20):
        ahead.advance(chunk, chunk + 1)
    assert ahead.advance(500, 501) == 501
    assert 502 < ahead.advance(501, 502) <= 502 + 4


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 8)), max_size=60))
def test_it_never_asks_for_less_than_the_read_or_more_than_the_window(
    reads: list[tuple[int, int]],
) -> None:
    ahead = Readahead(16)
    furthest = 0
    for first, count in reads:
        furthest = max(furthest, first + count)
        assert first + count <= ahead.advance(first, first + count) <= furthest + 16
