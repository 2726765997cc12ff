"""How copies that nobody waits for give way to others: lists of reads, and simulated sources."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.prefetch.governor import SLOW_TIMES, Governor, Lowest, TargetWindow
from monarchfs.prefetch.rate_limiter import BURST_SECONDS, RateLimiter

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
    return Party(begins, size=size, governor=Governor(most, floor, lambda: (0, 0)))


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
            party.governor.window(None).began()
            read(party, now)
        if wait is not None:
            heapq.heappush(heap, (now + wait + 1e-6, next(numbers), party, None))

    while heap and heap[0][0] < seconds:
        now, _, party, began = heapq.heappop(heap)
        if began is not None:
            party.done.append(now)
            if party.governor is not None:
                party.governor.record(now, None, now - began, party.size)
                party.governor.window(None).ended(now, now - began)
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


def test_a_lower_floor_leaves_less_and_never_nothing() -> None:
    copies, others = node(floor=0.05), Party(10, 30, 4)
    simulate(Source(), [copies, others], 40)
    assert others.rate(15, 30) > 0.9 * BANDWIDTH
    assert copies.rate(15, 30) > 0.02 * BANDWIDTH
    assert copies.rate(35, 40) > 0.95 * BANDWIDTH


def test_it_says_why() -> None:
    copies = node()
    assert copies.governor is not None
    simulate(Source(), [copies, Party(10, 30, 8)], 29)
    assert copies.governor.share == 0.25
    assert copies.governor.pressure > SLOW_TIMES
    assert copies.governor.reason is not None
    assert "the source was" in copies.governor.reason


def test_our_own_load_never_becomes_the_usual_however_long_it_lasts() -> None:
    copies, others = node(), Party(600, 620, 4)
    simulate(Source(), [copies, others], 620)
    assert copies.rate(0, 600) > 0.98 * BANDWIDTH
    assert others.rate(605, 620) == pytest.approx(BANDWIDTH * 4 / 5, rel=0.05)


def test_others_that_stay_become_the_usual_and_both_have_a_share() -> None:
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
    governor = Governor(4, 0.25, lambda: (0, 0))

    def read(now: float, target: int, seconds: float) -> None:
        governor.window(target).began()
        governor.record(now, target, seconds, MIB)
        governor.window(target).ended(now, seconds)

    for number in range(200):
        for target in (1, 2):
            read(0.05 * number, target, 0.01)
    # One of them gives a fourth.
    for number in range(100):
        read(10 + 0.2 * number, 1, 0.04)
        for part in range(4):
            read(10 + 0.2 * number + 0.05 * part, 2, 0.01)
    assert governor.window(1).size == 1
    assert governor.window(2).size == 4
    assert governor.reason is not None
    assert "storage target 1 was" in governor.reason
    for number in range(200):
        read(40 + 0.05 * number, 1, 0.01)
    assert governor.window(1).size == 4
    assert governor.reason is None


def test_readers_of_our_own_are_no_others() -> None:
    """What they read counts: copies get less, but the source gives as much as ever."""
    reads = [0, 0]
    governor = Governor(4, 0.25, lambda: (reads[0], reads[1]))
    for number in range(200):
        governor.record(0.01 * number, None, 0.04, MIB)
    for number in range(200):  # a reader takes three of four
        reads[0] += 3
        reads[1] += 3 * MIB
        governor.record(2 + 0.04 * number, None, 0.1, MIB)
    assert governor.window(None).size > 2
    assert governor.reason is None


@dataclass
class Read:
    seconds: float
    size: int
    pause: float


READS = st.builds(Read, st.floats(1e-6, 30), st.integers(0, 1 << 30), st.floats(0, 5))


@given(
    st.integers(1, 16), st.floats(0.01, 1), st.lists(READS, max_size=200), st.lists(st.booleans())
)
def test_whatever_is_read_the_floor_is_kept_and_nothing_is_lost(
    most: int, floor: float, reads: list[Read], hangs: list[bool]
) -> None:
    window, now, under_way = TargetWindow(floor * most, most), 0.0, 0
    end_before = iter([*hangs, *itertools.repeat(False, len(reads))])
    for read in reads:
        wait = window.wait(now)
        if wait is None:
            assert under_way >= 1
            window.ended(now, read.seconds)
            under_way -= 1
            continue
        assert 0 <= wait <= 1
        now += wait
        assert window.wait(now + 1e-9) == pytest.approx(0, abs=1e-6)
        window.began()
        under_way += 1
        assert under_way <= most
        now += read.pause
        window.record(now, read.seconds, read.size, 1, (0, 0))
        if not next(end_before):
            window.ended(now, read.seconds)
            under_way -= 1
        assert min(floor * most, 1.0) <= window.size <= most
        assert 0 < window.share <= 1


@given(st.lists(st.one_of(st.floats(0.001, 1000), st.none()), max_size=300))
def test_the_lowest_of_the_last_periods(steps: list[float | None]) -> None:
    lowest, periods = Lowest(), [math.inf]
    for step in steps:
        if step is None:
            lowest.next_period()
            periods.append(math.inf)
        else:
            lowest.see(step)
            periods[-1] = min(periods[-1], step)
        recent = min(periods[-12:])
        assert recent == math.inf or lowest.value <= recent
        if step is not None:
            assert lowest.value == recent


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
