"""What goes for another file, as lists of actions."""

from __future__ import annotations

import pytest

from monarchfs.placement.events import (
    Abandoned,
    Accessed,
    Action,
    Evict,
    Evicted,
    EvictionFailed,
    EvictionReason,
    Grant,
    Known,
    Owner,
    Place,
    RefusalReason,
    Refuse,
    RoomWanted,
    Stored,
    TierSeen,
    Wanted,
    Weighed,
)
from monarchfs.placement.victims import MOST_EXAMINED
from monarchfs.types import EvictionPolicy, Space
from tests.placement.tools import BLOCK, GIB, MIB, Node, evicted, placed
from tests.support.accounts import writable_bytes

OUTDATED, POLICY = EvictionReason.OUTDATED, EvictionReason.POLICY
TRACKING = [EvictionPolicy.LRU, EvictionPolicy.SIEVE]


def full_node(eviction: EvictionPolicy, *more: int) -> Node:
    """Ten replicas, 20 to 29, of ten blocks each fill the first tier. Later files weigh more."""
    node = Node(100 * BLOCK, *more, eviction=eviction)
    node.run(Weighed([(ino, float(ino)) for ino in range(20, 60)]))
    for ino in range(20, 30):
        assert node.store(ino, 10) == [placed(ino, 0, 9 * BLOCK)]
    return node


def wanted(node: Node, ino: int, blocks: int, evicts: bool = True) -> list[Action]:
    """A file whose reservation is so many blocks."""
    return node.run(Wanted(ino, (blocks - 1) * BLOCK, evicts))


def refused(ino: int, blocks: int) -> Refuse:
    return Refuse(ino, RefusalReason.NO_ROOM, blocks * BLOCK)


@pytest.mark.parametrize("eviction", TRACKING)
def test_the_coldest_go_for_a_file_that_was_opened_and_no_more_of_them_than_needed(
    eviction: EvictionPolicy,
) -> None:
    node = full_node(eviction)
    node.run(Accessed(20, 0), Accessed(22, 0))
    assert wanted(node, 50, 20) == [
        Evict(21, 0, 10 * BLOCK, POLICY),
        Evict(23, 0, 10 * BLOCK, POLICY),
        Place(50, 0, 20 * BLOCK, True),
    ]


@pytest.mark.parametrize("eviction", EvictionPolicy)
@pytest.mark.parametrize("evicts", [False, True])
def test_outdated_replicas_go_first_and_always(eviction: EvictionPolicy, evicts: bool) -> None:
    node = full_node(eviction)
    node.lookup.stale |= {25, 27}
    assert wanted(node, 50, 20, evicts) == [
        Evict(25, 0, 10 * BLOCK, OUTDATED),
        Evict(27, 0, 10 * BLOCK, OUTDATED),
        Place(50, 0, 20 * BLOCK, True),
    ]


def test_outdated_replicas_of_one_tier_go_before_others_of_a_slower_one() -> None:
    node = full_node(EvictionPolicy.LRU, 20 * BLOCK)
    node.store(40, 20)
    node.lookup.stale.add(29)
    assert evicted(wanted(node, 50, 10)) == [29]


def test_the_policy_fills_up_what_outdated_ones_leave_short() -> None:
    node = full_node(EvictionPolicy.LRU)
    node.lookup.stale.add(27)
    assert evicted(wanted(node, 50, 30)) == [27, 20, 21]


def test_all_go_from_one_tier_the_slowest_where_enough_can() -> None:
    node = full_node(EvictionPolicy.LRU, 50 * BLOCK, 30 * BLOCK)
    node.store(40, 50)
    node.store(41, 30)
    assert wanted(node, 50, 40) == [
        Evict(40, 1, 50 * BLOCK, POLICY),
        Place(50, 1, 40 * BLOCK, True),
    ]


@pytest.mark.parametrize("eviction", TRACKING)
def test_what_is_open_stays_and_is_not_forgotten(eviction: EvictionPolicy) -> None:
    node = full_node(eviction)
    node.lookup.open.add(20)
    assert evicted(wanted(node, 50, 90)) == [*range(21, 30)]
    node.lookup.open.clear()
    assert evicted(wanted(node, 51, 10)) == [20]


@pytest.mark.parametrize("eviction", TRACKING)
def test_a_bounded_number_is_examined_for_one_event(eviction: EvictionPolicy) -> None:
    node = Node(3000 * BLOCK, eviction=eviction)
    for ino in range(3000):
        node.store(ino + 20, 1)
    node.lookup.open |= set(range(20, 1520))
    node.lookup.asked = 0
    assert wanted(node, 5000, 2) == [refused(5000, 2)]
    assert node.lookup.asked == MOST_EXAMINED
    # The next goes on where that one ended.
    assert len(evicted(wanted(node, 5000, 2))) == 2


def test_what_leaves_is_not_chosen_again_while_the_books_still_show_it() -> None:
    node = full_node(EvictionPolicy.KEEP)
    node.lookup.stale.add(20)
    assert evicted(wanted(node, 50, 10)) == [20]
    node.lookup.replicas[20] = (0, 10 * BLOCK)
    assert wanted(node, 51, 10) == [refused(51, 10)]
    assert evicted(node.shrink(99)) == [21]


@pytest.mark.parametrize("eviction", TRACKING)
def test_what_could_not_be_removed_counts_again_and_is_not_tried_at_once(
    eviction: EvictionPolicy,
) -> None:
    node = full_node(eviction)
    wanted(node, 50, 10)
    node.lookup.replicas[20] = (0, 10 * BLOCK)
    assert node.run(EvictionFailed(20), Abandoned(50)) == []
    assert node.placement.ledger(0).usage == (100 * BLOCK, 100 * BLOCK)
    assert node.placement.ledger(0).leaving_files == 0
    assert evicted(wanted(node, 50, 10)) == [21]


@pytest.mark.parametrize("eviction", TRACKING)
def test_what_an_earlier_mount_left_is_known_once_it_is_told_and_goes_first(
    eviction: EvictionPolicy,
) -> None:
    node = Node(100 * BLOCK, eviction=eviction)
    node.load(0, dict.fromkeys(range(20, 28), 10))
    node.store(40, 20)
    node.run(Accessed(21, 0), Known(21, 0), Known(20, 0), Known(40, 0), Known(99, 0))
    assert evicted(wanted(node, 50, 40)) == [20, 40, 21]
    # The others were never named.
    assert wanted(node, 51, 10) == [refused(51, 10)]


def test_empty_files_go_for_inodes_only() -> None:
    node = Node(10 * BLOCK, eviction=EvictionPolicy.LRU)
    for ino in (20, 21, 22):
        node.run(Wanted(ino, 0, True), Stored([(ino, 0)]))
    node.store(23, 10)
    assert evicted(wanted(node, 50, 5)) == [23]
    node.run(Abandoned(50), Evicted(23))
    node.run(TierSeen(0, 10 * BLOCK, Space(GIB, GIB, 100, 10)))
    assert wanted(node, 51, 1) == [Evict(20, 0, 0, POLICY), Place(51, 0, BLOCK, True)]
    # No file may be made before one is gone.
    assert writable_bytes(node.placement.ledger(0), 0) == 0
    node.run(Evicted(20))
    assert writable_bytes(node.placement.ledger(0), 0) > 0


# Files that are kept in part.

BIG = 40 * MIB


def big_node(eviction: EvictionPolicy) -> Node:
    """Ten replicas of 40 MiB, 20 to 29, fill the tier."""
    node = Node(10 * BIG, eviction=eviction)
    for ino in range(20, 30):
        node.store(ino, BIG // BLOCK)
    return node


@pytest.mark.parametrize("eviction", TRACKING)
def test_a_large_file_of_up_to_a_quarter_of_the_tier_is_placed_whole(
    eviction: EvictionPolicy,
) -> None:
    node = big_node(eviction)
    size = 100 * MIB - BLOCK
    assert evicted(node.run(Wanted(50, size, True))) == [20, 21, 22]


@pytest.mark.parametrize("eviction", TRACKING)
def test_a_larger_one_pushes_others_out_of_no_more_than_a_quarter(eviction: EvictionPolicy) -> None:
    node = big_node(eviction)
    assert node.run(Wanted(50, GIB, True)) == [
        Evict(20, 0, BIG, POLICY),
        Place(50, 0, 0, False),
    ]
    step = 20 * MIB - BLOCK
    answers = [node.run(RoomWanted(50, step)) for _ in range(6)]
    # The last step makes it 120 of 400 MiB: it may use what is free, but push out nobody.
    assert [evicted(answer) for answer in answers] == [[], [], [21], [], [22], []]
    assert [answer[-1] for answer in answers] == [Grant(50, step)] * 6
    assert node.run(RoomWanted(50, step)) == [Refuse(50, RefusalReason.NO_ROOM, 20 * MIB)]


@pytest.mark.parametrize("eviction", TRACKING)
def test_a_part_that_a_scan_wanted_grows_at_nobodys_cost(eviction: EvictionPolicy) -> None:
    node = big_node(eviction)
    assert node.run(Wanted(50, GIB))[-1] == Refuse(50, RefusalReason.NO_ROOM, GIB + BLOCK)
    node.lookup.stale.add(25)
    assert evicted(node.run(Wanted(50, GIB))) == [25]
    grown = node.run(RoomWanted(50, BIG - BLOCK), RoomWanted(50, MIB))
    assert grown == [Grant(50, BIG - BLOCK), Refuse(50, RefusalReason.NO_ROOM, MIB + BLOCK)]
    node.lookup.stale.add(26)
    assert evicted(node.run(RoomWanted(50, MIB))) == [26]


def owned(node: Node, ino: int, blocks: int, owner: Owner, *, evicts: bool = True) -> list[Action]:
    return node.run(Wanted(ino, (blocks - 1) * BLOCK, evicts, owner))


@pytest.mark.parametrize("eviction", EvictionPolicy)
@pytest.mark.parametrize("evicts", [False, True])
def test_foreign_replicas_go_for_a_file_that_this_node_owns_under_every_policy(
    eviction: EvictionPolicy, evicts: bool
) -> None:
    node = full_node(eviction)
    node.lookup.owned_elsewhere |= {22, 27}
    assert owned(node, 50, 20, Owner.THIS_NODE, evicts=evicts) == [
        Evict(22, 0, 10 * BLOCK, POLICY),
        Evict(27, 0, 10 * BLOCK, POLICY),
        Place(50, 0, 20 * BLOCK, True),
    ]
    # Its own go by the policy alone.
    gone = evicted(owned(node, 51, 10, Owner.THIS_NODE, evicts=evicts))
    assert gone == ([20] if evicts and eviction is not EvictionPolicy.KEEP else [])


@pytest.mark.parametrize("eviction", EvictionPolicy)
def test_no_replica_of_a_file_that_this_node_owns_goes_for_a_foreign_one(
    eviction: EvictionPolicy,
) -> None:
    node = full_node(eviction)
    node.lookup.owned_elsewhere |= {24, 26, 50, 51}
    actions = owned(node, 50, 20, Owner.OTHER_NODE)
    if eviction is EvictionPolicy.KEEP:
        assert actions == [refused(50, 20)]
    else:
        assert evicted(actions) == [24, 26]
    assert owned(node, 51, 10, Owner.OTHER_NODE) == [refused(51, 10)]


def test_a_part_of_a_file_that_this_node_owns_grows_at_the_cost_of_foreign_replicas() -> None:
    node = Node(GIB)
    node.store(20, 100 * MIB // BLOCK)
    node.store(21, 100 * MIB // BLOCK)
    node.lookup.owned_elsewhere.add(21)
    for ino, owner in ((50, Owner.OTHER_NODE), (51, Owner.THIS_NODE)):
        assert not owned(node, ino, 2 * GIB // BLOCK, owner)[0].whole  # type: ignore[union-attr]
        room = node.placement.ledger(0).room_bytes()
        assert node.run(RoomWanted(ino, room - BLOCK)) == [Grant(ino, room - BLOCK)]
        actions = node.run(RoomWanted(ino, 50 * MIB))
        assert evicted(actions) == ([] if owner is Owner.OTHER_NODE else [21])
        node.gone(actions)
        node.run(Abandoned(ino))
