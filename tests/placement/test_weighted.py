"""The policy ``weighted``: against plain models, and what it promises."""

from __future__ import annotations

import random
import sys
from array import array
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.placement import weighted
from monarchfs.placement.by_inode import InodeHeap
from monarchfs.placement.events import Accessed, Evict, EvictionReason, Move, Wanted, Weighed
from monarchfs.placement.ledger import reservation
from monarchfs.placement.weighted import AGEING_OPENS, MARGIN_OPENS, MARGIN_SHARE, Weighted
from monarchfs.types import EvictionPolicy
from tests.placement.tools import BLOCK, Node, evicted

CHANGES = st.lists(
    st.tuples(st.integers(0, 30), st.one_of(st.none(), st.integers(0, 9))), max_size=80
)


@given(CHANGES, st.data())
@settings(max_examples=200, deadline=None)
def test_the_heap_agrees_with_a_sorted_list(
    changes: list[tuple[int, int | None]], data: st.DataObject
) -> None:
    heap, model = InodeHeap(), dict[int, int]()
    for ino, key in changes:
        if key is not None:
            heap.put(ino, key)
            model[ino] = key
        elif ino in model:
            heap.remove(ino)
            del model[ino]
    assert [model[ino] for ino in heap.ascending()] == sorted(model.values())
    # Each is given once, whatever goes meanwhile.
    given = []
    for ino in heap.ascending():
        given.append(ino)
        if data.draw(st.booleans()):
            heap.remove(ino)
            del model[ino]
    assert len(given) == len(set(given))
    assert sorted(heap.ascending()) == sorted(model)


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
def test_by_opens_the_one_that_was_opened_least_goes_if_that_is_much_less(
    trace: list[int], capacity: int
) -> None:
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
def test_where_each_file_is_read_once_an_epoch_nothing_goes(
    seed: int, files: int, held: int, given_equal: bool
) -> None:
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


def test_pinned_files_do_not_hide_those_that_may_go() -> None:
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


def test_the_heavier_file_moves_up_and_the_lightest_of_all_goes() -> None:
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
    monkeypatch.setattr(weighted, "_LARGE", 4.0)
    test_a_popular_file_displaces_and_old_fame_fades()
    test_where_each_file_is_read_once_an_epoch_nothing_goes()


def test_a_tracked_replica_costs_a_few_bytes() -> None:
    count = 20_000
    policy = Weighted()
    for ino in range(1000, 1000 + count):
        policy.missed(ino)
        policy.added(0, ino)
    policy.weigh([(ino, 1.0) for ino in range(1000, 1000 + count)], replace=False)
    heap = policy._tiers[0]
    assert policy._given is not None
    kept: list[object] = [heap.inos, heap.keys]
    for pages in (heap.places.pages, policy._opens.pages, policy._given.pages):
        kept += [pages, *pages.values()]
    assert all(isinstance(one, array | dict) for one in kept)
    assert sum(map(sys.getsizeof, kept)) < 60 * count
