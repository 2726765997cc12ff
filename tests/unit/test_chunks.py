"""The chunk map against a plain model, the copy queue, and the window that is fetched ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from monarchfs.prefetch.chunks import CLAIMED, MISSING, PRESENT, ChunkMap
from monarchfs.prefetch.queue import CopyQueue, Priority
from monarchfs.prefetch.readahead import Readahead

SIZE, CHUNK = 1000, 64


def check_counts(chunks: ChunkMap) -> None:
    assert chunks.present_count == chunks._state.count(PRESENT)
    assert len(chunks._state) == chunks.count


class ChunkMapMachine(RuleBasedStateMachine):
    """Claims are disjoint, and every byte is claimed, arrived or missing."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.map = ChunkMap(SIZE, CHUNK)
        self.model = [MISSING] * self.map.count

    @rule(target=claims, cursor=st.integers(0, 20), most=st.integers(1, 8))
    def claim_next(self, cursor: int, most: int) -> tuple[int, int] | None:
        run = self.map.next_missing(cursor, most)
        if run is None:
            assert MISSING not in self.model
            return None
        first, last = run
        assert 0 < last - first <= most
        assert first // most == (last - 1) // most, "a run crosses an aligned boundary"
        self._claim(first, last)
        return run

    @rule(target=claims, a=st.integers(0, 15), b=st.integers(0, 16))
    def claim_range(self, a: int, b: int) -> tuple[int, int] | None:
        runs = list(self.map.missing_runs(a, min(b, self.map.count)))
        wanted = [c for c in range(a, min(b, self.map.count)) if self.model[c] == MISSING]
        assert [c for first, last in runs for c in range(first, last)] == wanted
        if not runs:
            return None
        self._claim(*runs[0])
        return runs[0]

    def _claim(self, first: int, last: int) -> None:
        assert self.model[first:last] == [MISSING] * (last - first)
        self.map.claim(first, last)
        self.model[first:last] = [CLAIMED] * (last - first)

    @rule(run=consumes(claims))
    def arrive(self, run: tuple[int, int] | None) -> None:
        if run:
            self.map.arrive(*run)
            self.model[run[0] : run[1]] = [PRESENT] * (run[1] - run[0])

    @rule(run=consumes(claims))
    def release(self, run: tuple[int, int] | None) -> None:
        if run:
            self.map.release(*run)
            self.model[run[0] : run[1]] = [MISSING] * (run[1] - run[0])

    @rule()
    def save_and_load(self) -> None:
        again = ChunkMap(SIZE, CHUNK, self.map.saved())
        check_counts(again)
        expected = [PRESENT if s == PRESENT else MISSING for s in self.model]
        assert [again.state(c) for c in range(again.count)] == expected

    @invariant()
    def agrees(self) -> None:
        check_counts(self.map)
        assert [self.map.state(c) for c in range(self.map.count)] == self.model
        assert self.map.complete == all(s == PRESENT for s in self.model)


TestChunkMap = ChunkMapMachine.TestCase


def test_a_saved_map_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="chunks recorded"):
        ChunkMap(SIZE, CHUNK, b"\1" * 3)


def test_the_last_chunk_ends_with_the_file_and_an_empty_file_is_complete() -> None:
    assert ChunkMap(SIZE, CHUNK).span(15, 16) == (960, 1000)
    assert ChunkMap(0, CHUNK).complete
    assert ChunkMap(0, CHUNK).next_missing(0, 4) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(Priority)))))
def test_the_queue_gives_each_file_once_by_best_priority(jobs: list[tuple[int, Priority]]) -> None:
    queue = CopyQueue()
    best: dict[int, Priority] = {}
    for ino, priority in jobs:
        changed = queue.push(ino, priority)
        assert changed == (ino not in best or priority < best[ino])
        best[ino] = min(priority, best.get(ino, priority))
    assert len(queue) == len(best)
    popped = []
    while (job := queue.pop()) is not None:
        popped.append(job)
    assert dict(popped) == best
    assert len(popped) == len(best)
    assert [p for _i, p in popped] == sorted(p for _i, p in popped)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(Priority)[:-1]))),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_a_look_at_the_next_ones_leaves_the_others_in_their_order(
    jobs: list[tuple[int, Priority]], count: int, taken: int
) -> None:
    queue, twin = CopyQueue(), CopyQueue()
    for ino, priority in jobs:
        queue.push(ino, priority)
        twin.push(ino, priority)
    in_turn = list(iter(twin.pop, None))
    for priority in Priority:
        same = [ino for ino, its in in_turn if its is priority is in_turn[0][1]]
        assert queue.next(priority, count) == same[:count]
    dropped = queue.next(queue.first, count)[:taken]
    queue.drop(dropped)
    assert not any(ino in queue for ino in dropped)
    assert list(iter(queue.pop, None)) == in_turn[len(dropped) :]


def test_within_a_priority_it_is_first_come_first_served() -> None:
    queue = CopyQueue()
    for ino in (5, 3, 9):
        queue.push(ino, Priority.SCANNED)
    queue.push(9, Priority.OPENED)
    assert [queue.pop() for _ in range(3)] == [
        (9, Priority.OPENED),
        (5, Priority.SCANNED),
        (3, Priority.SCANNED),
    ]


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
