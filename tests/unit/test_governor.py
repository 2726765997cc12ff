"""What is copied, in what order, and how copies give way to others: in simulated sources, too."""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.prefetch.ahead import Walks
from monarchfs.prefetch.chunks import CLAIMED, MISSING, PRESENT, ChunkMap
from monarchfs.prefetch.governor import (
    BURST_SECONDS,
    FIRST_SECONDS,
    MOST_RETRY_SECONDS,
    BesideReaders,
    Governor,
    RateLimiter,
)
from monarchfs.prefetch.queue import CopyJob, CopyQueue, Priority
from monarchfs.prefetch.readahead import Readahead

MIB = 1 << 20
BANDWIDTH = 150e6


@dataclass
class Source:
    """Servers with a queue each: a read takes ``latency``, then its turn at ``bandwidth``."""

    bandwidth: float = BANDWIDTH
    latency: float = 1e-3
    servers: int = 1
    free: list[float] = field(default_factory=list)

    def read(self, now: float, size: int) -> float:
        """When it ends."""
        self.free = self.free or [0.0] * self.servers
        server = min(range(self.servers), key=self.free.__getitem__)
        begin = max(now + self.latency, self.free[server])
        self.free[server] = begin + size / self.bandwidth
        return self.free[server]


@dataclass
class Party:
    """A node that copies, or (without a governor) so many readers of another job."""

    begins: float = 0.0
    ends: float = math.inf
    readers: int = 0
    size: int = MIB
    governor: Governor | None = None
    done: list[float] = field(default_factory=list)

    def rate(self, since: float, until: float) -> float:
        """Bytes a second."""
        return self.size * sum(since <= at < until for at in self.done) / (until - since)


def node(begins: float = 0.0, floor: float = 0.25, most: int = 4, size: int = MIB) -> Party:
    return Party(begins, size=size, governor=Governor(most, floor))


def simulate(source: Source, parties: list[Party], seconds: float) -> None:
    numbers = itertools.count()
    heap: list[tuple[float, int, Party, float | None]]
    heap = [(party.begins, next(numbers), party, None) for party in parties]
    heapq.heapify(heap)

    def read(party: Party, now: float) -> None:
        heapq.heappush(heap, (source.read(now, party.size), next(numbers), party, now))

    def begin(party: Party, now: float) -> None:
        assert party.governor is not None
        while (wait := party.governor.wait(now, None)) == 0:
            party.governor.limit(None).began()
            read(party, now)
        if wait is not None:
            heapq.heappush(heap, (now + wait + 1e-6, next(numbers), party, None))

    while heap and heap[0][0] < seconds:
        now, _, party, began = heapq.heappop(heap)
        if began is not None:
            party.done.append(now)
            if party.governor is not None:
                party.governor.record(now, None, now - began, party.size, 1, (0, 0))
                party.governor.limit(None).ended(now, now - began)
        if now >= party.ends:
            continue
        if party.governor is not None:
            begin(party, now)
        elif began is None:
            for _ in range(party.readers):
                read(party, now)
        else:
            read(party, now)


@pytest.mark.parametrize("servers", [1, 2, 8])
@pytest.mark.parametrize("size", [110_000, MIB])
def test_a_source_without_others_is_used_fully(servers: int, size: int) -> None:
    governed, free = node(size=size), node(size=size, floor=1.0)
    for one in (governed, free):
        simulate(Source(BANDWIDTH / servers, servers=servers), [one], 30)
    assert governed.rate(0, 30) >= 0.98 * free.rate(0, 30)
    assert governed.governor is not None
    assert governed.governor.reason is None


@pytest.mark.parametrize(
    ("floor", "readers", "share"),
    # One slot is left. Without a governor there would be three or four, and they have no less.
    [*((0.25, readers, readers / (readers + 1)) for readers in (1, 2, 4, 8)), (1.0, 4, 0.5)],
)
def test_it_gives_way_to_others_and_comes_back(floor: float, readers: int, share: float) -> None:
    copies, others = node(floor=floor), Party(10, 30, readers)
    simulate(Source(), [copies, others], 40)
    assert others.rate(15, 30) == pytest.approx(share * BANDWIDTH, rel=0.05)
    assert copies.rate(34, 40) > 0.98 * BANDWIDTH
    assert copies.governor is not None
    assert copies.governor.reason is None


def test_the_usual_load_is_others_that_stay_and_never_our_own() -> None:
    copies, others = node(), Party(600, 620, 4)
    simulate(Source(), [copies, others], 620)
    assert copies.rate(0, 600) > 0.98 * BANDWIDTH
    assert others.rate(605, 620) == pytest.approx(BANDWIDTH * 4 / 5, rel=0.05)
    copies, others = node(), Party(10, readers=4)
    simulate(Source(), [copies, others], 300)
    assert copies.rate(20, 60) < 0.25 * BANDWIDTH
    assert 0.3 * BANDWIDTH < copies.rate(200, 300) < 0.6 * BANDWIDTH


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0, 20), min_size=2, max_size=5), st.integers(1, 8))
def test_nodes_leave_others_their_share_and_none_starves(begins: list[float], readers: int) -> None:
    nodes = [node(begin) for begin in begins]
    others = Party(40, 70, readers)
    simulate(Source(), [*nodes, others], 130)
    # Each of the nodes is at most a half of what it would be, most of them a quarter.
    assert others.rate(50, 70) > BANDWIDTH * readers / (readers + 4 * len(nodes))
    for since in (20, 50, 80):
        rates = [one.rate(since, since + 20) for one in nodes]
        assert min(rates) > BANDWIDTH / (readers + 4 * len(nodes)) / 2
    # Together they use all of it once the others are gone.
    assert sum(one.rate(80, 130) for one in nodes) > 0.98 * BANDWIDTH


def test_each_storage_target_for_itself() -> None:
    governor = Governor(4, 0.25)

    def read(now: float, target: int, seconds: float) -> None:
        governor.limit(target).began()
        governor.record(now, target, seconds, MIB, 1, (0, 0))
        governor.limit(target).ended(now, seconds)

    for number in range(200):
        for target in (1, 2):
            read(0.05 * number, target, 0.01)
    # One of them gives a fourth.
    for number in range(100):
        read(10 + 0.2 * number, 1, 0.04)
        for part in range(4):
            read(10 + 0.2 * number + 0.05 * part, 2, 0.01)
    assert governor.limit(1).size == 1
    assert governor.limit(2).size == 4
    assert governor.reason is not None
    assert "storage target 1 was" in governor.reason
    for number in range(200):
        read(40 + 0.05 * number, 1, 0.01)
    assert governor.limit(1).size == 4
    assert governor.reason is None


def test_readers_of_our_own_are_no_others() -> None:
    """What they read counts: copies get less, but the source gives as much as ever."""
    governor = Governor(4, 0.25)
    for number in range(200):
        governor.record(0.01 * number, None, 0.04, MIB, 1, (0, 0))
    for number in range(200):  # a reader takes three of four
        reads = 3 * (number + 1)
        governor.record(2 + 0.04 * number, None, 0.1, MIB, 1, (reads, reads * MIB))
    assert governor.limit(None).size > 2
    assert governor.reason is None


@given(
    st.integers(1, 1 << 30),
    st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 10)), min_size=1, max_size=50),
)
def test_the_rate_is_kept_whatever_is_copied(rate: int, reads: list[tuple[int, float]]) -> None:
    rate_limiter, now, total = RateLimiter(rate), 0.0, 0
    for size, idle in reads:
        now += idle
        wait = rate_limiter.wait(now)
        now += wait
        # Whoever waits as long as it says may begin.
        assert rate_limiter.wait(now + 1e-6) == pytest.approx(0, abs=1e-5)
        # What was begun before is within the rate, but for what may be taken at once.
        assert total <= rate * (now + BURST_SECONDS) * (1 + 1e-6) + 1
        rate_limiter.began(now, size)
        total += size


CHANGES = st.tuples(st.sampled_from("car"), st.integers(0, 15), st.integers(1, 8))


@given(st.lists(CHANGES, max_size=40))
def test_chunks_are_claimed_once_and_saved_if_arrived(changes: list[tuple[str, int, int]]) -> None:
    """What is claimed arrives or is released."""
    chunks, model, claims = ChunkMap(1000, 64), [MISSING] * 16, list[tuple[int, int]]()
    for change, which, most in changes:
        if change == "c" and (run := chunks.next_missing(which, most)):
            assert run[0] // most == (run[1] - 1) // most, "it crosses an aligned boundary"
            assert set(model[slice(*run)]) == {MISSING}
            chunks.claim(*run)
            claims.append(run)
            model[slice(*run)] = [CLAIMED] * (run[1] - run[0])
        elif change == "c":
            assert MISSING not in model
        elif claims:
            run = claims.pop(which % len(claims))
            (chunks.arrive if change == "a" else chunks.release)(*run)
            model[slice(*run)] = [PRESENT if change == "a" else MISSING] * (run[1] - run[0])
        assert [chunks.state(chunk) for chunk in range(16)] == model
    again = ChunkMap(1000, 64, chunks.saved())
    assert [again.state(chunk) == PRESENT for chunk in range(16)] == [s == PRESENT for s in model]
    assert again.present_count == chunks.present_count == model.count(PRESENT)
    with pytest.raises(ValueError, match="chunks recorded"):
        ChunkMap(1000, 64, b"\1" * 3)


def taken_from(queue: CopyQueue) -> Iterator[tuple[CopyJob, Priority]]:
    """One by one, each with its priority."""
    while next_ones := queue.next(priority := queue.first, 1):
        queue.take(next_ones)
        yield next_ones[0], priority


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(Priority)[:-1]))))
def test_the_queue_gives_each_file_once_by_best_priority(jobs: list[tuple[int, Priority]]) -> None:
    queue, by_ino = CopyQueue(), [CopyJob(ino) for ino in range(10)]
    best: dict[CopyJob, Priority] = {}
    for ino, priority in jobs:
        job = by_ino[ino]
        changed = queue.push(job, priority)
        assert changed == (job not in best or priority < best[job])
        best[job] = min(priority, best.get(job, priority))
    assert len(queue) == len(best)
    popped = list(taken_from(queue))
    assert dict(popped) == best
    assert len(popped) == len(best)
    assert [p for _job, p in popped] == sorted(p for _job, p in popped)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(Priority)[:-1]))),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_a_look_leaves_the_order(jobs: list[tuple[int, Priority]], count: int, taken: int) -> None:
    queues = CopyQueue(), CopyQueue()
    for queue in queues:
        by_ino = [CopyJob(ino) for ino in range(10)]
        for ino, priority in jobs:
            queue.push(by_ino[ino], priority)
    queue, twin = queues
    in_turn = [(job.ino, priority) for job, priority in taken_from(twin)]
    for priority in Priority:
        same = [ino for ino, its in in_turn if its is priority is in_turn[0][1]]
        assert [job.ino for job in queue.next(priority, count)] == same[:count]
    dropped = queue.next(queue.first, count)[:taken]
    queue.take(dropped)
    assert not any(job.queued for job in dropped)
    assert [(job.ino, priority) for job, priority in taken_from(queue)] == in_turn[len(dropped) :]


def test_a_sequential_reader_gets_a_growing_window() -> None:
    ahead = Readahead(32)
    stops = [ahead.advance(chunk, chunk + 1) for chunk in range(40)]
    windows = [stop - chunk for chunk, stop in enumerate(stops)]
    assert max(windows) > 16
    assert max(stops) >= 40
    assert sum(stop > chunk + 1 for chunk, stop in enumerate(stops)) < 12, "not in portions"
    ahead = Readahead(32)
    for chunk in range(20):
        ahead.advance(chunk, chunk + 1)
    for first in (100, 7, 55, 300, 12, 500):
        assert ahead.advance(first, first + 2) == first + 2
    windows = [ahead.advance(chunk, chunk + 1) - chunk for chunk in range(502, 520)]
    assert windows[0] == 1, "not before more is read than of late"
    assert max(windows) > 4


def test_copies_go_on_beside_readers_as_long_as_these_do_not_notice() -> None:
    beside, now = BesideReaders(4), 0.0
    rounds = [(0.001, 0), *((0.0012, n) for n in (1, 2, 4, 4)), (0.002, 4), (0.002, 2), (0.006, 1)]
    for seconds, at_once in rounds:
        beside.record(now, seconds)
        assert (beside.at_once, beside.free) == (at_once, at_once == 4), "two rounds, or a bad one"
        now += FIRST_SECONDS
    beside.record(now := now + MOST_RETRY_SECONDS, 0.001)
    assert beside.at_once == 2, "more is tried again"
    for _ in range(60):
        beside.record(now, 0.003)
    assert beside.at_once == 0
    beside.record(now + MOST_RETRY_SECONDS, 0.003)
    assert beside.at_once == 1, "the source has become slower: that is usual now"


def test_what_was_found_where_something_was_opened_last_comes_first() -> None:
    walks = Walks()
    assert walks.take_files(10, 100) == []
    for directory in (1, 2):
        walks.opened_in(directory)
        walks.found(directory, [(10 * directory + n, 5) for n in range(4)])
    walks.found(3, [])
    assert walks.found_files == 8
    assert walks.take_files(3, 100) == [(20, 5), (21, 5), (22, 5)]
    walks.opened_in(1)
    assert walks.take_files(10, 6) == [(10, 5), (11, 5)], "until they have so many bytes"
    assert walks.take_files(10, 0) == []
    assert walks.take_files(10, 100) == [(12, 5), (13, 5), (23, 5)]
    assert walks.found_files == 0
