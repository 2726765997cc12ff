"""What moves between tiers, and what goes where a tier has to shrink, as lists of actions."""

from __future__ import annotations

import pytest

from monarchfs.placement.events import (
    Accessed,
    Dropped,
    Evict,
    Evicted,
    EvictionReason,
    Move,
    MoveFailed,
    TierSeen,
    Wanted,
    Weighed,
)
from monarchfs.placement.ledger import reservation
from monarchfs.types import EvictionPolicy, Space
from tests.placement.tools import BLOCK, GIB, ROOMY, Node, evicted

OUTDATED, POLICY = EvictionReason.OUTDATED, EvictionReason.POLICY
PRESSURE = EvictionReason.PRESSURE


def full_node(eviction: EvictionPolicy, *more: int) -> Node:
    """Ten replicas, 20 to 29, of ten blocks each fill the first tier."""
    node = Node(100 * BLOCK, *(blocks * BLOCK for blocks in more), eviction=eviction)
    node.run(Weighed([(ino, float(ino)) for ino in range(20, 60)]))
    for ino in range(20, 30):
        node.store(ino, 10)
    return node


def move(ino: int, tier: int, to: int, blocks: int) -> Move:
    return Move(ino, tier, to, reservation(blocks * BLOCK))


# Pressure.


@pytest.mark.parametrize("eviction", EvictionPolicy)
def test_a_tier_that_shrinks_gives_up_as_much_as_is_missing(eviction: EvictionPolicy) -> None:
    node = full_node(eviction)
    assert node.shrink(100) == []
    assert node.shrink(75) == [Evict(ino, 0, 10 * BLOCK, PRESSURE) for ino in (20, 21, 22)]
    # What is leaving is not missing again.
    assert node.shrink(75) == []
    assert evicted(node.shrink(65)) == [23]
    node.run(*(Evicted(ino) for ino in (20, 21, 22, 23)))
    assert node.shrink(65) == []


def test_what_the_policy_does_not_know_goes_too() -> None:
    node = Node(100 * BLOCK, eviction=EvictionPolicy.LRU)
    node.load(0, {20: 30, 21: 30})
    node.store(22, 40)
    assert evicted(node.shrink(40)) == [22, 20]


@pytest.mark.parametrize("eviction", EvictionPolicy)
def test_others_files_push_replicas_out_of_the_last_part(eviction: EvictionPolicy) -> None:
    node = full_node(eviction)

    def seen(free: int, written: int = 0) -> list[int]:
        space = Space(1000 * BLOCK, free * BLOCK, 0, 0)
        return evicted(node.run(TierSeen(0, 100 * BLOCK, space, written * BLOCK)))

    assert seen(100) == []
    assert seen(85) == [20, 21]
    # They are not gone yet.
    assert seen(85) == []
    node.run(Evicted(20), Evicted(21))
    assert seen(105) == []
    # Nothing goes for what a copy has written a moment ago.
    node.run(Wanted(50, 4 * BLOCK))
    assert seen(101) == []
    assert seen(98, written=4) == []
    assert seen(94, written=4) == [22]


def test_others_files_take_inodes_too() -> None:
    node = full_node(EvictionPolicy.KEEP)
    inodes = Space(GIB, GIB, 1000, 98)
    assert evicted(node.run(TierSeen(0, 100 * BLOCK, inodes))) == [20, 21]
    assert node.run(TierSeen(0, 100 * BLOCK, inodes)) == []


# Demotion.


def test_under_pressure_replicas_move_down_where_there_is_room() -> None:
    node = full_node(EvictionPolicy.LRU, 5, 1000)
    node.lookup.stale.add(29)
    (out, down) = node.shrink(85, demote=True)
    assert out == Evict(29, 0, 10 * BLOCK, OUTDATED)
    assert down == move(20, 0, 2, 10)
    assert node.shrink(85, demote=True) == []
    assert node.moved(down) == []
    assert node.shrink(85, demote=True) == []
    assert node.placement.ledger(2).used_bytes == 10 * BLOCK
    # 29 is leaving still.
    assert node.placement.ledger(0).usage[0] == 90 * BLOCK


def test_more_than_may_move_is_evicted() -> None:
    node = full_node(EvictionPolicy.LRU, 1000)
    assert node.shrink(82, demote=True) == [move(20, 0, 1, 10), move(21, 0, 1, 10)]
    assert node.shrink(75, demote=True) == [Evict(22, 0, 10 * BLOCK, PRESSURE)]


def test_without_room_below_or_in_great_need_replicas_do_not_move() -> None:
    node = full_node(EvictionPolicy.LRU, 5)
    assert node.shrink(80, demote=True) == [Evict(ino, 0, 10 * BLOCK, PRESSURE) for ino in (20, 21)]
    node = full_node(EvictionPolicy.LRU, 1000)
    assert evicted(node.shrink(75, demote=False)) == [20, 21, 22]
    node = full_node(EvictionPolicy.LRU, 1000)
    assert evicted(node.shrink(70, demote=True)) == [20, 21, 22]


def test_a_demotion_that_fails_ends_in_eviction_if_the_need_is_still_there() -> None:
    node = full_node(EvictionPolicy.KEEP, 1000)
    node.shrink(85, demote=True)
    assert node.run(MoveFailed(20)) == [Evict(20, 0, 10 * BLOCK, PRESSURE)]
    node.run(TierSeen(0, 100 * BLOCK, ROOMY))
    assert node.run(MoveFailed(21)) == []
    assert node.placement.ledger(1).usage[0] == node.placement.ledger(1).reserved_bytes == 0


# Promotion.


@pytest.mark.parametrize("eviction", EvictionPolicy)
def test_what_is_opened_moves_up_where_there_is_room(eviction: EvictionPolicy) -> None:
    node = full_node(eviction, 50, 1000)
    node.store(40, 40)
    node.store(41, 40)
    assert node.run(Accessed(41, 2), Accessed(40, 1), Accessed(25, 0)) == []
    node.gone(node.shrink(50))
    node.shrink(100)
    (action,) = node.run(Accessed(41, 2))
    assert action == move(41, 2, 0, 40)
    # It is on its way.
    assert node.run(Accessed(41, 2)) == []
    assert node.placement.ledger(2).usage[0] == 40 * BLOCK
    node.moved(action)
    assert node.placement.ledger(2).usage[0] == 0
    assert node.placement.ledger(0).usage[0] == 90 * BLOCK


def swapping_node(slow_blocks: int) -> Node:
    node = full_node(EvictionPolicy.LRU, slow_blocks)
    node.store(40, 10)
    node.run(*(Accessed(ino, 0) for ino in range(21, 30)))
    # A move reserves a block more than the replica occupies.
    node.shrink(101)
    return node


def test_with_lru_a_hotter_replica_takes_the_place_of_the_coldest() -> None:
    node = swapping_node(1000)
    # 20 was not opened since 40 was stored.
    (down,) = node.run(Accessed(40, 1))
    assert down == move(20, 0, 1, 10)
    assert node.run(Accessed(40, 1)) == []
    (up,) = node.moved(down)
    assert up == Move(40, 1, 0, 11 * BLOCK)


def test_without_room_below_the_coldest_goes() -> None:
    node = swapping_node(10)
    node.lookup.replicas[20] = (0, 11 * BLOCK)
    node.shrink(102)
    assert node.run(Accessed(40, 1)) == [Evict(20, 0, 11 * BLOCK, POLICY), move(40, 1, 0, 10)]


def test_outdated_replicas_make_way_before_others() -> None:
    node = swapping_node(1000)
    node.lookup.stale.add(25)
    node.lookup.replicas[25] = (0, 11 * BLOCK)
    node.shrink(100)
    assert node.run(Accessed(40, 1)) == [Evict(25, 0, 11 * BLOCK, OUTDATED), move(40, 1, 0, 10)]


def test_outdated_replicas_that_are_not_enough_go_together_with_the_coldest() -> None:
    node = full_node(EvictionPolicy.LRU, 1000)
    node.store(40, 15)
    node.run(*(Accessed(ino, 0) for ino in range(22, 30)))
    node.lookup.stale.add(20)
    assert node.run(Accessed(40, 1)) == []
    node.lookup.stale = {25}
    assert node.run(Accessed(40, 1)) == [
        Evict(25, 0, 10 * BLOCK, OUTDATED),
        Evict(20, 0, 10 * BLOCK, POLICY),
        move(40, 1, 0, 15),
    ]


def test_what_was_not_opened_twice_does_not_change_places() -> None:
    node = swapping_node(1000)
    node.run(Accessed(20, 0))
    assert node.run(Accessed(40, 1)) == []
    sieve = full_node(EvictionPolicy.SIEVE, 1000)
    sieve.store(40, 10)
    assert sieve.run(Accessed(40, 1), Accessed(40, 1)) == []


def test_replicas_whose_sizes_do_not_allow_it_do_not_change_places() -> None:
    node = full_node(EvictionPolicy.LRU, 1000)
    node.store(40, 20)
    node.run(*(Accessed(ino, 0) for ino in range(21, 30)))
    assert node.run(Accessed(40, 1)) == []


def test_what_made_room_for_another_that_is_gone_by_then_is_all_that_moves() -> None:
    node = swapping_node(1000)
    (down,) = node.run(Accessed(40, 1))
    del node.lookup.replicas[40]
    node.run(Dropped(40, 1, 10 * BLOCK))
    assert node.moved(down) == []
