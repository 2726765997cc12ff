"""Where records go in segments: a model of all that was placed."""

from __future__ import annotations

from itertools import count, pairwise

from hypothesis import given
from hypothesis import strategies as st

from monarchfs.store.segments import ALIGN_BYTES, Allocator, allocated, new_segment

Steps = list[list[int] | None]
"""Sizes to place, or None to seal."""

PAGE = ALIGN_BYTES


@given(
    steps=st.lists(st.none() | st.lists(st.integers(0, 12 * PAGE), max_size=8), max_size=20),
    segment_bytes=st.sampled_from([PAGE, 8 * PAGE, 8 * PAGE + 1, 10 * PAGE - 1]),
    align=st.sampled_from([PAGE, 2 * PAGE]),
)
def test_records_have_places_of_their_own(steps: Steps, segment_bytes: int, align: int) -> None:
    numbers = count(1)
    allocator = Allocator(segment_bytes, align, lambda: next(numbers))
    taken: dict[int, list[tuple[int, int]]] = {}
    announced: list[int] = []
    sealed: set[int] = set()
    for step in steps:
        if step is None:
            sealed |= set(announced)
            allocator.seal()
            assert allocator.current == 0
            continue
        places, begun = allocator.place(step)
        announced += begun
        assert len(places) == len(step)
        assert {segment for segment, _ in places} >= set(begun)
        for (segment, offset), size in zip(places, step, strict=True):
            assert segment in announced
            assert segment not in sealed
            assert offset % align == 0
            end = offset + max(allocated(size, align), align)
            assert end <= segment_bytes or offset == 0
            taken.setdefault(segment, []).append((offset, end))
        small = [
            place
            for place, size in zip(places, step, strict=True)
            if max(size, 1) <= segment_bytes // align * align
        ]
        if small:
            assert allocator.current == small[-1][0]
    assert len(announced) == len(set(announced))
    for ranges in taken.values():
        assert ranges[0][0] == 0
        assert ranges == sorted(ranges)
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
        assert ranges[-1][1] <= segment_bytes or len(ranges) == 1


def test_a_segment_is_gone_on_with_until_the_next_does_not_fit() -> None:
    numbers = count(1)
    allocator = Allocator(4 * PAGE, new=lambda: next(numbers))
    assert allocator.current == 0
    assert allocator.place([]) == ([], [])
    assert allocator.place([1, PAGE]) == ([(1, 0), (1, PAGE)], [1])
    assert allocator.place([5 * PAGE, PAGE + 1]) == ([(2, 0), (1, 2 * PAGE)], [2])
    assert allocator.place([0]) == ([(3, 0)], [3])
    allocator.seal()
    assert allocator.place([1]) == ([(4, 0)], [4])


def test_numbers_are_random_and_not_0() -> None:
    numbers = {new_segment() for _ in range(1000)}
    assert len(numbers) == 1000
    assert min(numbers) > 0
    assert 2**60 < max(numbers) < 2**64
    allocator = Allocator(PAGE)
    (place,), (begun,) = allocator.place([7])
    assert place == (begun, 0)
    assert allocator.current == begun


def test_what_a_record_takes() -> None:
    assert [allocated(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert allocated(4097, 65536) == 65536
