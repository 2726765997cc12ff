"""The eviction policies, against plain models."""

import random
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.cache.placement import policies
from monarchfs.cache.placement.events import Accessed, Evict, EvictionReason, Move, Wanted, Weighed
from monarchfs.cache.placement.ledger import reservation
from monarchfs.cache.placement.policies import (
    AGEING_OPENS,
    MARGIN_OPENS,
    MARGIN_SHARE,
    Lru,
    Policy,
    Sieve,
    Weighted,
)
from monarchfs.types import EvictionPolicy
from tests.placement.tools import BLOCK, Node, evicted

Trace = list[int]


def replay(policy: Policy, trace: Trace, capacity: int) -> list[bool]:
    """Which requests found their file, in a cache of ``capacity`` files of one size."""
    held: set[int] = set()
    hits = []
    for ino in trace:
        hits.append(ino in held)
        if ino in held:
            policy.accessed(0, ino)
            continue
        if len(held) == capacity:
            victim = next(policy.victims(0))
            held.remove(victim)
            policy.removed(0, victim)
        held.add(ino)
        policy.added(0, ino)
    return hits


def model_lru(trace: Trace, capacity: int) -> list[bool]:
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for ino in trace:
        hits.append(ino in held)
        if ino in held:
            held.move_to_end(ino)
        else:
            if len(held) == capacity:
                held.popitem(last=False)
            held[ino] = None
    return hits


def model_sieve(trace: Trace, capacity: int) -> list[bool]:
    """A list, oldest first, of [inode, visited], and the index at which the hand is."""
    queue: list[list[int]] = []
    hand = 0
    hits = []
    for ino in trace:
        entry = next((entry for entry in queue if entry[0] == ino), None)
        hits.append(entry is not None)
        if entry is not None:
            entry[1] = 1
            continue
        if len(queue) == capacity:
            if hand == len(queue):
                hand = 0
            while queue[hand][1]:
                queue[hand][1] = 0
                hand = (hand + 1) % len(queue)
            # Past the newest it starts over, also if something newer arrives meanwhile.
            last = hand == len(queue) - 1
            del queue[hand]
            if last:
                hand = 0
        queue.append([ino, 0])
    return hits


MODELS: list[tuple[Callable[[], Policy], Callable[[Trace, int], list[bool]]]] = [
    (Lru, model_lru),
    (Sieve, model_sieve),
]


@given(st.lists(st.integers(0, 12), max_size=200), st.integers(1, 8))
@settings(max_examples=300, deadline=None)
def test_a_policy_agrees_with_its_model_on_anything(trace: Trace, capacity: int) -> None:
    for policy, model in MODELS:
        assert replay(policy(), trace, capacity) == model(trace, capacity)


@pytest.mark.parametrize(("policy", "most_bytes"), [(Lru(), 45), (Sieve(), 35), (Weighted(), 60)])
def test_a_tracked_replica_costs_a_few_bytes(policy: Policy, most_bytes: int) -> None:
    """Also when others have taken its place."""
    count = 20_000
    tracemalloc.start()
    try:
        policy.weigh([(ino, 1.0) for ino in range(1000, 1000 + count)], replace=False)
        for ino in range(1000, 1000 + count):
            policy.missed(ino)
            policy.added(0, ino)
        assert tracemalloc.get_traced_memory()[0] < most_bytes * count
        for ino in range(1000, 1000 + count):
            policy.removed(0, ino)
            policy.added(0, ino + count)
        assert tracemalloc.get_traced_memory()[0] < 2 * most_bytes * count
    finally:
        tracemalloc.stop()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["added", "known", "accessed", "removed", "moved", "victims"]),
        st.integers(0, 1),
        st.integers(-70, 200),
        st.lists(st.booleans(), max_size=5),
    ),
    max_size=60,
)


@given(OPERATIONS)
@settings(max_examples=300, deadline=None)
def test_nothing_is_lost_or_invented(operations: list[tuple[str, int, int, list[bool]]]) -> None:
    for policy in (Lru(), Sieve(), Weighted()):
        held: dict[int, set[int]] = {0: set(), 1: set()}
        for operation, tier, ino, takes in operations:
            match operation:
                case "moved":
                    policy.moved(ino, tier, 1 - tier)
                    held[tier].discard(ino)
                    held[1 - tier].add(ino)
                case "removed":
                    policy.removed(tier, ino)
                    held[tier].discard(ino)
                case "victims":
                    offered: list[int] = []
                    for victim, take in zip(policy.victims(tier), takes, strict=False):
                        assert victim in held[tier]
                        assert victim not in offered
                        offered.append(victim)
                        if take:
                            policy.removed(tier, victim)
                            held[tier].discard(victim)
                        else:
                            policy.spared(tier, victim)
                case _:
                    getattr(policy, operation)(tier, ino)
                    held[tier].add(ino)
        for tier in (0, 1):
            assert sorted(policy.victims(tier)) == sorted(held[tier])


class Counts:
    """Opens of files, aged, as exact numbers."""

    def __init__(self) -> None:
        self.opens: dict[int, Fraction] = {}
        self.period = 0

    def count(self, ino: int) -> None:
        self.opens[ino] = self.opens.get(ino, Fraction(0)) + 1
        self.period += 1
        if self.period >= AGEING_OPENS * len(self.opens):
            self.period = 0
            self.opens = {ino: opens / 2 for ino, opens in self.opens.items()}

    def displaces(self, ino: int, victim: int) -> bool:
        others = self.opens.get(victim, Fraction(0))
        return self.opens[ino] - others >= MARGIN_OPENS + Fraction(MARGIN_SHARE) * others


@given(st.lists(st.integers(0, 12), max_size=300), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_by_opens_the_one_opened_much_less_goes(trace: list[int], capacity: int) -> None:
    policy, model, held = Weighted(), Counts(), set[int]()
    for ino in trace:
        model.count(ino)
        if ino in held:
            policy.accessed(0, ino)
            continue
        policy.missed(ino)
        if len(held) == capacity:
            victim = next(policy.victims(0))
            assert model.opens[victim] == min(model.opens[one] for one in held)
            assert policy.displaces(ino, victim) == model.displaces(ino, victim)
            if not policy.displaces(ino, victim):
                continue
            policy.removed(0, victim)
            held.remove(victim)
        policy.added(0, ino)
        held.add(ino)


def opened(node: Node, ino: int) -> bool:
    """Whether a file that was opened is local; else it is copied if it finds room."""
    if ino in node.lookup.replicas:
        node.run(Accessed(ino, node.lookup.replicas[ino][0]))
        return True
    node.run(Accessed(ino, None))
    node.store(ino, 10)
    return False


@given(st.integers(0, 1_000_000), st.integers(1, 40), st.integers(1, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_one_read_an_epoch_evicts_none(seed: int, files: int, held: int, given_equal: bool) -> None:
    """Whatever the order, and wherever the ageing falls: what does not fit is missed, no more."""
    rng, node = random.Random(seed), Node(held * 10 * BLOCK, eviction=EvictionPolicy.WEIGHTED)
    if given_equal:
        node.run(Weighed([(20 + n, 7.0) for n in range(files)]))
    for epoch in range(25):
        misses = sum(not opened(node, 20 + n) for n in rng.sample(range(files), files))
        assert misses == (files if epoch == 0 else max(0, files - held))


def test_a_popular_file_displaces_and_old_fame_fades() -> None:
    node = Node(20 * BLOCK, eviction=EvictionPolicy.WEIGHTED)
    for _ in range(5):
        opened(node, 20)
        opened(node, 21)
    opened(node, 22)
    assert set(node.lookup.replicas) == {20, 21}
    for _ in range(60):
        opened(node, 22)
        opened(node, 23)
    assert set(node.lookup.replicas) == {22, 23}


def test_given_weights_decide_and_may_change() -> None:
    node = Node(30 * BLOCK, eviction=EvictionPolicy.WEIGHTED)
    node.run(Weighed([(20, 1.0), (21, 2.0), (22, 3.0), (23, 2.0), (24, 2.5)]))
    for ino in (20, 21, 22):
        opened(node, ino)
    opened(node, 23)
    assert set(node.lookup.replicas) == {21, 22, 23}
    opened(node, 20)  # weighs less than all
    assert set(node.lookup.replicas) == {21, 22, 23}
    opened(node, 24)
    assert len({21, 23} & set(node.lookup.replicas)) == 1
    node.run(Weighed([(20, 9.0)]))
    opened(node, 20)
    assert set(node.lookup.replicas) == {20, 22, 24}
    # Files that are not named any more weigh nothing.
    node.run(Weighed([(24, 1.0), (25, 1.0), (26, 1.0)], replace=True))
    opened(node, 25)
    opened(node, 26)
    assert set(node.lookup.replicas) == {24, 25, 26}
    opened(node, 22)
    assert set(node.lookup.replicas) == {24, 25, 26}


def test_a_large_file_goes_before_only_what_weighs_less() -> None:
    node = Node(40 * BLOCK, eviction=EvictionPolicy.WEIGHTED)
    node.run(Weighed([(20, 1.0), (21, 1.0), (22, 5.0), (23, 5.0), (50, 3.0)]))
    for ino in (20, 21, 22, 23):
        opened(node, ino)
    assert evicted(node.run(Wanted(50, 29 * BLOCK, True))) == []
    assert sorted(evicted(node.run(Wanted(50, 19 * BLOCK, True)))) == [20, 21]
    files = 2_500
    node = Node(files * 10 * BLOCK, eviction=EvictionPolicy.WEIGHTED)
    node.run(Weighed([(20 + files - 1, 1.0), (10_000, 2.0)]))
    for n in range(files):
        opened(node, 20 + n)
    node.lookup.open |= set(range(20, 20 + files - 1))
    for _ in range(4):  # each looks at a thousand
        opened(node, 10_000)
    assert 10_000 in node.lookup.replicas
    assert 20 + files - 1 not in node.lookup.replicas
    # They come back in their turn.
    node.lookup.open.clear()
    node.run(Weighed([(10_001, 3.0)]))
    opened(node, 10_001)
    assert len({10_000, 10_001} & set(node.lookup.replicas)) == 2
    node = Node(21 * BLOCK, 21 * BLOCK, eviction=EvictionPolicy.WEIGHTED)
    node.run(Weighed([(20, 3.0), (21, 4.0), (22, 1.0), (23, 9.0)]))
    for ino in (20, 21, 22, 23):
        opened(node, ino)
    need = reservation(10 * BLOCK)
    gone, down = node.run(Accessed(23, 1))
    assert gone == Evict(22, 1, 10 * BLOCK, EvictionReason.POLICY)
    assert down == Move(20, 0, 1, need)
    node.gone([gone])
    (up,) = node.moved(down)
    assert up == Move(23, 1, 0, need)
    node.moved(up)
    assert {ino: tier for ino, (tier, _) in node.lookup.replicas.items()} == {20: 1, 21: 0, 23: 0}
    # No file weighs more than those that lie higher.
    assert node.run(Accessed(20, 1), Accessed(21, 0), Accessed(23, 0)) == []


def test_counts_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_LARGE", 4.0)
    test_a_popular_file_displaces_and_old_fame_fades()
