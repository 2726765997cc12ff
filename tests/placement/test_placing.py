"""Where files are placed, what goes for them, and what moves, as lists of actions."""

import pytest

from monarchfs.cache.placement import events
from monarchfs.cache.placement.ledger import reservation
from monarchfs.cache.placement.placement import Placement
from monarchfs.cache.placement.victims import MOST_EXAMINED
from monarchfs.types import EvictionPolicy, Space
from tests.placement.tools import (
    BLOCK,
    GIB,
    KIB,
    MIB,
    ROOMY,
    FakeLookup,
    Node,
    evicted,
    full_node,
    placed,
    placement_of,
    run,
)
from tests.support.accounts import check_accounts, writable_bytes


def no_room(ino: int, missing: int) -> events.Refuse:
    return events.Refuse(ino, events.RefusalReason.NO_ROOM, missing)


def no_tier(ino: int) -> events.Refuse:
    return events.Refuse(ino, events.RefusalReason.NO_TIER, 0)


Steps = list[tuple[events.PlacementEvent, events.Action | None]]

DISK = Space(100 * MIB, 15 * MIB, 1000, 500)
COUNTED, WITHOUT_INODES = Space(GIB, GIB, 100, 12), Space(GIB, GIB, 0, 0)

# Capacities of tiers on roomy file systems, and what is answered to one event after the other.
STORIES: dict[str, tuple[list[int], Steps]] = {
    "whole, to the fastest tier with room; else to the next, and a smaller one still fits": (
        [MIB, GIB],
        [
            (events.Wanted(20, 600 * KIB), placed(20, 0, 600 * KIB)),
            (events.Wanted(21, 600 * KIB), placed(21, 1, 600 * KIB)),
            (events.Wanted(22, 300 * KIB), placed(22, 0, 300 * KIB)),
        ],
    ),
    "a tier is filled to its last block and no further": (
        [10 * BLOCK],
        [
            (events.Wanted(20, 9 * BLOCK), placed(20, 0, 9 * BLOCK)),
            (events.Wanted(21, 0), no_room(21, BLOCK)),
            (events.Stored([(20, 9 * BLOCK)]), None),
            (events.Wanted(21, 0), placed(21, 0, 0)),
        ],
    ),
    "a refusal says how many bytes are missing where there is most room": (
        [MIB, 2 * MIB],
        [
            (events.Wanted(20, 3 * MIB), no_room(20, MIB + BLOCK)),
            (events.Wanted(21, KIB), placed(21, 0, KIB)),
        ],
    ),
    "what was loaded counts also beyond a capacity that is smaller now": (
        [10 * MIB],
        [
            (events.Loaded(0, 3, 10 * MIB), None),
            (events.TierSeen(0, 4 * MIB, ROOMY), None),
            (events.Wanted(20, 0), no_room(20, 6 * MIB + BLOCK)),
        ],
    ),
    "without a tier": ([], [(events.Wanted(20, 1), no_tier(20))]),
    "a lost tier takes nothing until it is back": (
        [GIB],
        [
            (events.Loaded(0, 1, MIB), None),
            (events.Resumed(20, 0, MIB), None),
            (events.TierLost(0, "gone"), None),
            (events.Wanted(21, 1), no_tier(21)),
            (events.RoomWanted(20, MIB), no_tier(20)),
            (events.TierBack(0), None),
            (events.Wanted(21, 1), placed(21, 0, 1)),
        ],
    ),
    "a large file is placed in part where there is most room": (
        [20 * MIB, 40 * MIB],
        [
            (events.Wanted(20, 64 * MIB), events.Place(20, 1, 0, False)),
            (events.RoomWanted(20, 30 * MIB), events.Grant(20, 30 * MIB)),
            (events.RoomWanted(20, 30 * MIB), no_room(20, 20 * MIB + 2 * BLOCK)),
            (events.Wanted(21, 64 * MIB), events.Place(21, 0, 0, False)),
        ],
    ),
    "no part of a file below the minimum": (
        [20 * MIB],
        [(events.Wanted(20, 64 * MIB - 1), no_room(20, 44 * MIB + BLOCK))],
    ),
    "no part in a sliver": (
        [16 * MIB - 1],
        [(events.Wanted(20, 64 * MIB), no_room(20, 48 * MIB + BLOCK + 1))],
    ),
    "a partial copy at rest counts what it occupies": (
        [40 * MIB],
        [
            (events.Wanted(20, GIB), events.Place(20, 0, 0, False)),
            (events.RoomWanted(20, 30 * MIB), events.Grant(20, 30 * MIB)),
            (events.Stored([(20, 5 * MIB)]), None),
            (events.Resumed(20, 0, 5 * MIB), None),
            (events.RoomWanted(20, 35 * MIB - BLOCK + 1), no_room(20, BLOCK)),
            (events.RoomWanted(20, 35 * MIB - BLOCK), events.Grant(20, 35 * MIB - BLOCK)),
            (events.Wanted(21, 0), no_room(21, BLOCK)),
        ],
    ),
    "the last part of a file system stays free; what was written or is leaving is counted once": (
        [GIB],
        [
            (events.TierSeen(0, 80 * MIB, DISK), None),
            (events.Wanted(20, 5 * MIB), no_room(20, BLOCK)),
            (events.Wanted(20, 5 * MIB - BLOCK), placed(20, 0, 5 * MIB - BLOCK)),
            (events.Stored([(20, 5 * MIB)]), None),
            (events.Wanted(21, 0), no_room(21, BLOCK)),
            (events.Dropped(20, 0, 5 * MIB), None),
            (events.Wanted(21, 5 * MIB), no_room(21, BLOCK)),
            (events.TierSeen(0, 80 * MIB, DISK._replace(free_bytes=10 * MIB)), None),
            (events.Wanted(21, 0), placed(21, 0, 0)),
            (events.Abandoned(21), None),
            (events.Evicted(20, 0), None),
            (events.TierSeen(0, 80 * MIB, DISK), None),
            (events.Wanted(21, 5 * MIB), no_room(21, BLOCK)),
        ],
    ),
    "what others eat of the last part is missing too": (
        [GIB],
        [
            (events.TierSeen(0, 80 * MIB, DISK._replace(free_bytes=8 * MIB)), None),
            (events.Wanted(20, 0), no_room(20, 2 * MIB + BLOCK)),
        ],
    ),
    "what a copy has written is not missing twice": (
        [GIB],
        [
            (events.TierSeen(0, GIB, DISK._replace(free_bytes=60 * MIB)), None),
            (events.Wanted(20, 20 * MIB - BLOCK), placed(20, 0, 20 * MIB - BLOCK)),
            (events.TierSeen(0, GIB, DISK._replace(free_bytes=40 * MIB), 20 * MIB), None),
            (events.Wanted(21, 30 * MIB - BLOCK), placed(21, 0, 30 * MIB - BLOCK)),
            (events.Wanted(22, 0), no_room(22, BLOCK)),
        ],
    ),
    "inodes are promised like bytes": (
        [GIB, GIB],
        [
            (events.TierSeen(0, GIB, COUNTED), None),
            (events.TierSeen(1, GIB, COUNTED._replace(free_inodes=11)), None),
            (events.Wanted(20, 1), placed(20, 0, 1)),
            (events.Stored([(20, BLOCK)]), None),
            (events.Wanted(21, 1), placed(21, 0, 1)),
            (events.Wanted(22, 1), placed(22, 1, 1)),
            (events.Wanted(23, 1), events.Refuse(23, events.RefusalReason.NO_INODES, 0)),
            (events.Wanted(24, 100 * MIB), events.Refuse(24, events.RefusalReason.NO_INODES, 0)),
            (events.Abandoned(22), None),
            (events.Wanted(23, 1), placed(23, 1, 1)),
        ],
    ),
    "a resumed copy needs no inode": (
        [GIB],
        [
            (events.Loaded(0, 1, MIB), None),
            (events.TierSeen(0, GIB, COUNTED._replace(free_inodes=11)), None),
            (events.Resumed(20, 0, MIB), None),
            (events.Wanted(21, 1), placed(21, 0, 1)),
        ],
    ),
    "a file system that counts no inodes has no limit of them": (
        [GIB],
        [(events.TierSeen(0, GIB, WITHOUT_INODES), None), (events.Wanted(20, 1), placed(20, 0, 1))],
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_where_files_go(story: str) -> None:
    capacities, steps = STORIES[story]
    placement = placement_of(*capacities)
    for event, answer in steps:
        assert run(placement, event) == ([] if answer is None else [answer]), event


def test_tiers_are_tried_in_the_order_given_and_once_they_were_seen() -> None:
    placement = Placement([7, 3], FakeLookup())
    assert run(placement, events.Wanted(20, 0)) == [no_tier(20)]
    seen = [events.TierSeen(tier, GIB, ROOMY) for tier in (3, 7)]
    assert run(placement, *seen, events.Wanted(20, KIB)) == [placed(20, 7, KIB)]
    small = Placement([0], FakeLookup(), partial_min_bytes=17 * MIB, eviction=EvictionPolicy.KEEP)
    small.handle(events.TierSeen(0, 16 * MIB, ROOMY))
    assert run(small, events.Wanted(20, 17 * MIB)) == [events.Place(20, 0, 0, False)]


@pytest.mark.parametrize(
    "event",
    [
        events.Wanted(20, 1),
        events.Resumed(20, 0, 1),
        events.Resumed(30, 0, 5 * MIB),
        events.Stored([(99, 1)]),
        events.RoomWanted(99, 1),
        events.Dropped(99, 0, 2 * MIB),
        events.Evicted(20, 0),
        events.EvictionFailed(20, 0),
        events.Moved(20, 1),
        events.MoveFailed(20),
        events.Accessed(20, 5),
        events.Known(20, 5),
        events.Loaded(0, 1, 1),
        events.Loaded(5, 1, 1),
        events.TierSeen(5, 1, ROOMY),
        events.TierLost(5, "gone"),
    ],
)
def test_a_contradiction_is_an_error_and_changes_nothing(event: events.PlacementEvent) -> None:
    placement = placement_of(GIB)
    run(placement, events.Loaded(0, 1, MIB), events.Wanted(20, MIB))
    with pytest.raises(ValueError, match=r"tier|inode"):
        placement.handle(event)
    check_accounts(placement)
    assert (
        run(
            placement,
            events.Stored([(20, MIB)]),
            events.Dropped(21, 0, MIB),
            events.Dropped(20, 0, MIB),
        )
        == []
    )
    run(placement, events.Evicted(20, 0), events.Evicted(21, 0))
    assert placement.ledger(0).usage == (0, GIB)


OUTDATED, POLICY = events.EvictionReason.OUTDATED, events.EvictionReason.POLICY
PRESSURE = events.EvictionReason.PRESSURE
TRACKING = [EvictionPolicy.LRU, EvictionPolicy.SIEVE]


def wanted(node: Node, ino: int, blocks: int, evicts: bool = True) -> list[events.Action]:
    """A file whose reservation is so many blocks."""
    return node.run(events.Wanted(ino, (blocks - 1) * BLOCK, evicts))


def refused(ino: int, blocks: int) -> events.Refuse:
    return events.Refuse(ino, events.RefusalReason.NO_ROOM, blocks * BLOCK)


def goes(
    ino: int, reason: events.EvictionReason = POLICY, tier: int = 0, blocks: int = 10
) -> events.Evict:
    return events.Evict(ino, tier, blocks * BLOCK, reason)


def move(ino: int, tier: int, to: int, blocks: int) -> events.Move:
    return events.Move(ino, tier, to, reservation(blocks * BLOCK))


@pytest.mark.parametrize("eviction", TRACKING)
def test_no_more_of_the_coldest_go_for_an_opened_file_than_needed(eviction: EvictionPolicy) -> None:
    node = full_node(eviction)
    node.run(events.Accessed(20, 0), events.Accessed(22, 0))
    assert wanted(node, 50, 20) == [goes(21), goes(23), placed(50, 0, 19 * BLOCK)]


def test_all_go_from_one_tier_the_slowest_where_enough_can() -> None:
    node = full_node(EvictionPolicy.LRU, 50, 30)
    node.store(40, 50)
    node.store(41, 30)
    assert wanted(node, 50, 40) == [goes(40, tier=1, blocks=50), placed(50, 1, 39 * BLOCK)]


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
    node = Node(10 * BLOCK, eviction=EvictionPolicy.LRU)
    for ino in (20, 21, 22):
        node.run(events.Wanted(ino, 0, True), events.Stored([(ino, 0)]))
    node.store(23, 10)
    assert evicted(wanted(node, 50, 5)) == [23]
    node.run(events.Abandoned(50), events.Evicted(23, 0))
    node.run(events.TierSeen(0, 10 * BLOCK, Space(GIB, GIB, 100, 10)))
    assert wanted(node, 51, 1) == [goes(20, blocks=0), placed(51, 0, 0)]
    # No file may be made before one is gone.
    assert writable_bytes(node.placement.ledger(0), 0) == 0
    node.run(events.Evicted(20, 0))
    assert writable_bytes(node.placement.ledger(0), 0) > 0


BIG = 40 * MIB


def big_node(eviction: EvictionPolicy) -> Node:
    """Ten replicas of 40 MiB, 20 to 29, fill the tier."""
    node = Node(10 * BIG, eviction=eviction)
    for ino in range(20, 30):
        node.store(ino, BIG // BLOCK)
    return node


@pytest.mark.parametrize("eviction", TRACKING)
def test_a_large_file_of_up_to_a_quarter_of_a_tier_is_whole(eviction: EvictionPolicy) -> None:
    node = big_node(eviction)
    assert evicted(node.run(events.Wanted(50, 100 * MIB - BLOCK, True))) == [20, 21, 22]


@pytest.mark.parametrize("eviction", TRACKING)
def test_a_larger_one_pushes_others_out_of_no_more_than_a_quarter(eviction: EvictionPolicy) -> None:
    node = big_node(eviction)
    assert node.run(events.Wanted(50, GIB, True)) == [
        goes(20, blocks=BIG // BLOCK),
        events.Place(50, 0, 0, False),
    ]
    step = 20 * MIB - BLOCK
    answers = [node.run(events.RoomWanted(50, step)) for _ in range(6)]
    # The last step makes it 120 of 400 MiB: it may use what is free, but push out nobody.
    assert [evicted(answer) for answer in answers] == [[], [], [21], [], [22], []]
    assert [answer[-1] for answer in answers] == [events.Grant(50, step)] * 6
    assert node.run(events.RoomWanted(50, step)) == [
        events.Refuse(50, events.RefusalReason.NO_ROOM, 20 * MIB)
    ]


@pytest.mark.parametrize("eviction", TRACKING)
def test_a_part_that_a_scan_wanted_grows_at_nobodys_cost(eviction: EvictionPolicy) -> None:
    node = big_node(eviction)
    assert node.run(events.Wanted(50, GIB))[-1] == events.Refuse(
        50, events.RefusalReason.NO_ROOM, GIB + BLOCK
    )
    node.lookup.stale.add(25)
    assert evicted(node.run(events.Wanted(50, GIB))) == [25]
    grown = node.run(events.RoomWanted(50, BIG - BLOCK), events.RoomWanted(50, MIB))
    assert grown == [
        events.Grant(50, BIG - BLOCK),
        events.Refuse(50, events.RefusalReason.NO_ROOM, MIB + BLOCK),
    ]
    node.lookup.stale.add(26)
    assert evicted(node.run(events.RoomWanted(50, MIB))) == [26]


def owned(
    node: Node, ino: int, blocks: int, owner: events.Owner, *, evicts: bool = True
) -> list[events.Action]:
    return node.run(events.Wanted(ino, (blocks - 1) * BLOCK, evicts, owner))


@pytest.mark.parametrize("eviction", EvictionPolicy)
@pytest.mark.parametrize("evicts", [False, True])
def test_foreign_replicas_go_for_owned_files(eviction: EvictionPolicy, evicts: bool) -> None:
    node = full_node(eviction)
    node.lookup.owned_elsewhere |= {22, 27}
    assert owned(node, 50, 20, events.Owner.THIS_NODE, evicts=evicts) == [
        goes(22),
        goes(27),
        placed(50, 0, 19 * BLOCK),
    ]
    # Its own go by the policy alone.
    gone = evicted(owned(node, 51, 10, events.Owner.THIS_NODE, evicts=evicts))
    assert gone == ([20] if evicts and eviction is not EvictionPolicy.KEEP else [])


@pytest.mark.parametrize("eviction", EvictionPolicy)
def test_no_replica_of_a_file_of_ours_goes_for_a_foreign_one(eviction: EvictionPolicy) -> None:
    node = full_node(eviction)
    node.lookup.owned_elsewhere |= {24, 26, 50, 51}
    actions = owned(node, 50, 20, events.Owner.OTHER_NODE)
    if eviction is EvictionPolicy.KEEP:
        assert actions == [refused(50, 20)]
    else:
        assert evicted(actions) == [24, 26]
    assert owned(node, 51, 10, events.Owner.OTHER_NODE) == [refused(51, 10)]


def test_a_part_of_a_file_that_this_node_owns_grows_at_the_cost_of_foreign_replicas() -> None:
    node = Node(GIB)
    node.store(20, 100 * MIB // BLOCK)
    node.store(21, 100 * MIB // BLOCK)
    node.lookup.owned_elsewhere.add(21)
    for ino, owner in ((50, events.Owner.OTHER_NODE), (51, events.Owner.THIS_NODE)):
        assert not owned(node, ino, 2 * GIB // BLOCK, owner)[0].whole  # type: ignore[union-attr]
        room = node.placement.ledger(0).room_bytes()
        assert node.run(events.RoomWanted(ino, room - BLOCK)) == [events.Grant(ino, room - BLOCK)]
        actions = node.run(events.RoomWanted(ino, 50 * MIB))
        assert evicted(actions) == ([] if owner is events.Owner.OTHER_NODE else [21])
        node.gone(actions)
        node.run(events.Abandoned(ino))


@pytest.mark.parametrize("eviction", EvictionPolicy)
def test_a_tier_that_shrinks_gives_up_as_much_as_is_missing(eviction: EvictionPolicy) -> None:
    node = full_node(eviction)
    assert node.shrink(100) == []
    assert node.shrink(75) == [goes(ino, PRESSURE) for ino in (20, 21, 22)]
    # What is leaving is not missing again.
    assert node.shrink(75) == []
    assert evicted(node.shrink(65)) == [23]
    node.run(*(events.Evicted(ino, 0) for ino in (20, 21, 22, 23)))
    assert node.shrink(65) == []


@pytest.mark.parametrize("eviction", EvictionPolicy)
def test_others_files_push_replicas_out_of_the_last_part(eviction: EvictionPolicy) -> None:
    node = full_node(eviction)

    def seen(free: int, written: int = 0) -> list[int]:
        space = Space(1000 * BLOCK, free * BLOCK, 0, 0)
        return evicted(node.run(events.TierSeen(0, 100 * BLOCK, space, written * BLOCK)))

    assert seen(100) == []
    assert seen(85) == [20, 21]
    # They are not gone yet.
    assert seen(85) == []
    node.run(events.Evicted(20, 0), events.Evicted(21, 0))
    assert seen(105) == []
    # Nothing goes for what a copy has written a moment ago.
    node.run(events.Wanted(50, 4 * BLOCK))
    assert seen(101) == []
    assert seen(98, written=4) == []
    assert seen(94, written=4) == [22]


def test_under_pressure_replicas_move_down_where_there_is_room() -> None:
    node = full_node(EvictionPolicy.LRU, 5, 1000)
    node.lookup.stale.add(29)
    (out, down) = node.shrink(85, demote=True)
    assert out == goes(29, OUTDATED)
    assert down == move(20, 0, 2, 10)
    assert node.shrink(85, demote=True) == []
    assert node.moved(down) == []
    assert node.shrink(85, demote=True) == []
    assert node.placement.ledger(2).used_bytes == 10 * BLOCK
    # 29 is leaving still.
    assert node.placement.ledger(0).usage[0] == 90 * BLOCK
    node = full_node(EvictionPolicy.LRU, 5)
    assert node.shrink(80, demote=True) == [goes(ino, PRESSURE) for ino in (20, 21)]
    node = full_node(EvictionPolicy.LRU, 1000)
    assert evicted(node.shrink(75, demote=False)) == [20, 21, 22]
    node = full_node(EvictionPolicy.LRU, 1000)
    assert evicted(node.shrink(70, demote=True)) == [20, 21, 22]
    node = full_node(EvictionPolicy.KEEP, 1000)
    node.shrink(85, demote=True)
    assert node.run(events.MoveFailed(20)) == [goes(20, PRESSURE)]
    node.run(events.TierSeen(0, 100 * BLOCK, ROOMY))
    assert node.run(events.MoveFailed(21)) == []
    assert node.placement.ledger(1).usage[0] == node.placement.ledger(1).reserved_bytes == 0


@pytest.mark.parametrize("eviction", EvictionPolicy)
def test_what_is_opened_moves_up_where_there_is_room(eviction: EvictionPolicy) -> None:
    node = full_node(eviction, 50, 1000)
    node.store(40, 40)
    node.store(41, 40)
    assert node.run(events.Accessed(41, 2), events.Accessed(40, 1), events.Accessed(25, 0)) == []
    node.gone(node.shrink(50))
    node.shrink(100)
    (action,) = node.run(events.Accessed(41, 2))
    assert action == move(41, 2, 0, 40)
    # It is on its way.
    assert node.run(events.Accessed(41, 2)) == []
    assert node.placement.ledger(2).usage[0] == 40 * BLOCK
    node.moved(action)
    assert node.placement.ledger(2).usage[0] == 0
    assert node.placement.ledger(0).usage[0] == 90 * BLOCK


def swapping_node(slow_blocks: int) -> Node:
    node = full_node(EvictionPolicy.LRU, slow_blocks)
    node.store(40, 10)
    node.run(*(events.Accessed(ino, 0) for ino in range(21, 30)))
    # A move reserves a block more than the replica occupies.
    node.shrink(101)
    return node


def test_without_room_below_the_coldest_goes() -> None:
    node = swapping_node(10)
    node.lookup.replicas[20] = (0, 11 * BLOCK)
    node.shrink(102)
    assert node.run(events.Accessed(40, 1)) == [goes(20, blocks=11), move(40, 1, 0, 10)]
    node = swapping_node(1000)
    # 20 was not opened since 40 was stored.
    (down,) = node.run(events.Accessed(40, 1))
    assert down == move(20, 0, 1, 10)
    assert node.run(events.Accessed(40, 1)) == []
    (up,) = node.moved(down)
    assert up == events.Move(40, 1, 0, 11 * BLOCK)
    node = swapping_node(1000)
    node.lookup.stale.add(25)
    node.lookup.replicas[25] = (0, 11 * BLOCK)
    node.shrink(100)
    assert node.run(events.Accessed(40, 1)) == [goes(25, OUTDATED, blocks=11), move(40, 1, 0, 10)]
    node = full_node(EvictionPolicy.LRU, 1000)
    node.store(40, 15)
    node.run(*(events.Accessed(ino, 0) for ino in range(22, 30)))
    node.lookup.stale.add(20)
    assert node.run(events.Accessed(40, 1)) == []
    node.lookup.stale = {25}
    assert node.run(events.Accessed(40, 1)) == [goes(25, OUTDATED), goes(20), move(40, 1, 0, 15)]


def test_what_was_not_opened_twice_does_not_change_places() -> None:
    node = swapping_node(1000)
    node.run(events.Accessed(20, 0))
    assert node.run(events.Accessed(40, 1)) == []
    sieve = full_node(EvictionPolicy.SIEVE, 1000)
    sieve.store(40, 10)
    assert sieve.run(events.Accessed(40, 1), events.Accessed(40, 1)) == []
    node = full_node(EvictionPolicy.LRU, 1000)
    node.store(40, 20)
    node.run(*(events.Accessed(ino, 0) for ino in range(21, 30)))
    assert node.run(events.Accessed(40, 1)) == []
    node = swapping_node(1000)
    (down,) = node.run(events.Accessed(40, 1))
    del node.lookup.replicas[40]
    node.run(events.Dropped(40, 1, 10 * BLOCK))
    assert node.moved(down) == []
