"""An order that nobody announced is followed where files are opened in it again, and only there."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.prefetch import learned_order
from monarchfs.prefetch.learned_order import MOST_AHEAD, NEAR, SHORTEST, SURE, LearnedOrder
from monarchfs.prefetch.order import SHORT_LAG, Order
from monarchfs.types import Node


def shuffled(files: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(1000, 1000 + files), files)


def side_by_side(order: list[int], readers: int, seed: int) -> list[int]:
    """By readers that take turns, but not strictly."""
    rest, chance = list(order), random.Random(seed)
    return [rest.pop(chance.randrange(min(readers, len(rest)))) for _ in order]


class Reading:
    def __init__(self) -> None:
        self.order = LearnedOrder()
        self.given: dict[int, int] = {}  # and how many before it
        self.taken = self.reached = 0

    def followed(self) -> bool:
        return self.order.followed

    def read(self, files: Iterable[int]) -> int:
        """How many had been given out before they were opened."""
        known = 0
        for ino in files:
            known += ino in self.given
            self.reached = max(self.reached, self.given.pop(ino, 0))
            self.order.opened(ino)
            taken = self.order.take(self.taken - self.reached)
            assert not taken or self.order.followed
            self.given.update(
                zip(taken, range(self.taken + 1, self.taken + 1 + len(taken)), strict=True)
            )
            self.taken += len(taken)
            assert self.taken - self.reached <= MOST_AHEAD
        return known


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    files=st.integers(600, 3000),
    readers=st.integers(1, 8),
    kept=st.sampled_from([0, 0.3, 0.6]),
)
def test_an_order_that_comes_again(seed: int, files: int, readers: int, kept: float) -> None:
    """Some of its files are local after the first epoch."""
    reading = Reading()
    order = shuffled(files, seed)
    assert reading.read(side_by_side(order, readers, seed)) == 0
    local = set(random.Random(seed).sample(order, int(kept * files)))
    order = [ino for ino in order if ino not in local]
    reading.read(side_by_side(order, readers, seed + 1))
    if len(order) >= 600:
        for epoch in (2, 3):
            known = reading.read(side_by_side(order, readers, seed + epoch))
            assert known >= 0.9 * len(order) - NEAR


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), files=st.integers(600, 3000), epochs=st.integers(2, 5))
def test_random_epochs(seed: int, files: int, epochs: int) -> None:
    reading = Reading()
    for epoch in range(epochs):
        assert reading.read(shuffled(files, seed + epoch)) == 0
    assert not reading.given


def test_one_that_was_lost_has_to_agree_for_longer() -> None:
    reading = Reading()
    order = shuffled(5000, 1)
    reading.read([*order, *order[:1000]])
    assert reading.followed()
    reading.order.lost()
    assert not reading.followed()
    assert reading.order.times_learned == 1
    reading.given.clear()
    reading.taken = reading.reached = 0
    assert 1700 < reading.read(order[2000:4000]) <= 2000 - 2 * SURE
    assert reading.order.times_learned == 2


def test_the_next_epoch_is_expected_while_this_one_is_read() -> None:
    files = [SimpleNamespace(ino=ino, stat=SimpleNamespace(size=10)) for ino in range(1, 1000)]
    nodes = cast(list[Node], files)
    order = Order(b"")
    order.found(nodes)
    for node in nodes:
        order.opened(node.ino, 10, 0.0)
        order.found([node])
        order.fetch(node)
        assert order.passed(4) == []
    assert len(nodes) > SHORT_LAG
    assert order.fetched.keys() == {node.ino for node in nodes}
    assert order.expects(1)


def test_short_ones_are_left_alone() -> None:
    """Several processes may open the same files one after the other."""
    assert Reading().read(shuffled(SHORTEST - 1, 3) * 5) == 0


def test_what_is_too_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_order, "MOST_OPENS", 4000)
    reading = Reading()
    order = shuffled(5000, 4)
    assert reading.read([*order, *order]) == 0
    order = shuffled(1500, 5)
    assert reading.read([*order, *order, *order]) > 2700
    assert len(reading.order._log) < 4000
    assert len(reading.order._marks) < 4000
