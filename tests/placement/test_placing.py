"""Where files are placed, as lists of actions, while nothing goes for them."""

from __future__ import annotations

import pytest

from monarchfs.placement.events import (
    Abandoned,
    Accessed,
    Action,
    Dropped,
    Evicted,
    EvictionFailed,
    Grant,
    Known,
    Loaded,
    Moved,
    MoveFailed,
    Place,
    PlacementEvent,
    RefusalReason,
    Refuse,
    Resumed,
    RoomWanted,
    Stored,
    Suspended,
    TierBack,
    TierLost,
    TierSeen,
    Wanted,
)
from monarchfs.placement.ledger import reservation
from monarchfs.placement.placement import Placement
from monarchfs.types import EvictionPolicy, Space
from tests.placement.tools import BLOCK, GIB, KIB, MIB, ROOMY, FakeLookup, placed, placement_of, run
from tests.support.accounts import check_accounts


def test_a_reservation_is_whole_blocks_and_one_more() -> None:
    assert reservation(0) == BLOCK
    assert reservation(1) == reservation(BLOCK) == 2 * BLOCK
    assert reservation(BLOCK + 1) == 3 * BLOCK
    assert reservation(9 * GIB) == 9 * GIB + 3 * BLOCK


def no_room(ino: int, missing: int) -> Refuse:
    return Refuse(ino, RefusalReason.NO_ROOM, missing)


def no_tier(ino: int) -> Refuse:
    return Refuse(ino, RefusalReason.NO_TIER, 0)


Steps = list[tuple[PlacementEvent, Action | None]]

DISK = Space(100 * MIB, 15 * MIB, 1000, 500)
COUNTED, WITHOUT_INODES = Space(GIB, GIB, 100, 12), Space(GIB, GIB, 0, 0)

# Capacities of tiers on roomy file systems, and what is answered to one event after the other.
STORIES: dict[str, tuple[list[int], Steps]] = {
    "whole, to the fastest tier with room; else to the next, and a smaller one still fits": (
        [MIB, GIB],
        [
            (Wanted(20, 600 * KIB), placed(20, 0, 600 * KIB)),
            (Wanted(21, 600 * KIB), placed(21, 1, 600 * KIB)),
            (Wanted(22, 300 * KIB), placed(22, 0, 300 * KIB)),
        ],
    ),
    "a tier is filled to its last block and no further": (
        [10 * BLOCK],
        [
            (Wanted(20, 9 * BLOCK), placed(20, 0, 9 * BLOCK)),
            (Wanted(21, 0), no_room(21, BLOCK)),
            (Stored([(20, 9 * BLOCK)]), None),
            (Wanted(21, 0), placed(21, 0, 0)),
        ],
    ),
    "a refusal says how many bytes are missing where there is most room": (
        [MIB, 2 * MIB],
        [(Wanted(20, 3 * MIB), no_room(20, MIB + BLOCK)), (Wanted(21, KIB), placed(21, 0, KIB))],
    ),
    "what was loaded counts also beyond a capacity that is smaller now": (
        [10 * MIB],
        [
            (Loaded(0, 3, 10 * MIB), None),
            (TierSeen(0, 4 * MIB, ROOMY), None),
            (Wanted(20, 0), no_room(20, 6 * MIB + BLOCK)),
        ],
    ),
    "without a tier": ([], [(Wanted(20, 1), no_tier(20))]),
    "a lost tier takes nothing until it is back": (
        [GIB],
        [
            (Loaded(0, 1, MIB), None),
            (Resumed(20, 0, MIB), None),
            (TierLost(0, "gone"), None),
            (Wanted(21, 1), no_tier(21)),
            (RoomWanted(20, MIB), no_tier(20)),
            (TierBack(0), None),
            (Wanted(21, 1), placed(21, 0, 1)),
        ],
    ),
    "a large file is placed in part where there is most room": (
        [20 * MIB, 40 * MIB],
        [
            (Wanted(20, 64 * MIB), Place(20, 1, 0, False)),
            (RoomWanted(20, 30 * MIB), Grant(20, 30 * MIB)),
            (RoomWanted(20, 30 * MIB), no_room(20, 20 * MIB + 2 * BLOCK)),
            (Wanted(21, 64 * MIB), Place(21, 0, 0, False)),
        ],
    ),
    "no part of a file below the minimum": (
        [20 * MIB],
        [(Wanted(20, 64 * MIB - 1), no_room(20, 44 * MIB + BLOCK))],
    ),
    "no part in a sliver": (
        [16 * MIB - 1],
        [(Wanted(20, 64 * MIB), no_room(20, 48 * MIB + BLOCK + 1))],
    ),
    "a partial copy at rest counts what it occupies": (
        [40 * MIB],
        [
            (Wanted(20, GIB), Place(20, 0, 0, False)),
            (RoomWanted(20, 30 * MIB), Grant(20, 30 * MIB)),
            (Suspended(20, 5 * MIB), None),
            (Resumed(20, 0, 5 * MIB), None),
            (RoomWanted(20, 35 * MIB - BLOCK + 1), no_room(20, BLOCK)),
            (RoomWanted(20, 35 * MIB - BLOCK), Grant(20, 35 * MIB - BLOCK)),
            (Wanted(21, 0), no_room(21, BLOCK)),
        ],
    ),
    "the last part of a file system stays free; what was written or is leaving is counted once": (
        [GIB],
        [
            (TierSeen(0, 80 * MIB, DISK), None),
            (Wanted(20, 5 * MIB), no_room(20, BLOCK)),
            (Wanted(20, 5 * MIB - BLOCK), placed(20, 0, 5 * MIB - BLOCK)),
            (Stored([(20, 5 * MIB)]), None),
            (Wanted(21, 0), no_room(21, BLOCK)),
            (Dropped(20, 0, 5 * MIB), None),
            (Wanted(21, 5 * MIB), no_room(21, BLOCK)),
            (TierSeen(0, 80 * MIB, DISK._replace(free_bytes=10 * MIB)), None),
            (Wanted(21, 0), placed(21, 0, 0)),
            (Abandoned(21), None),
            (Evicted(20), None),
            (TierSeen(0, 80 * MIB, DISK), None),
            (Wanted(21, 5 * MIB), no_room(21, BLOCK)),
        ],
    ),
    "what others eat of the last part is missing too": (
        [GIB],
        [
            (TierSeen(0, 80 * MIB, DISK._replace(free_bytes=8 * MIB)), None),
            (Wanted(20, 0), no_room(20, 2 * MIB + BLOCK)),
        ],
    ),
    "what a copy has written is not missing twice": (
        [GIB],
        [
            (TierSeen(0, GIB, DISK._replace(free_bytes=60 * MIB)), None),
            (Wanted(20, 20 * MIB - BLOCK), placed(20, 0, 20 * MIB - BLOCK)),
            (TierSeen(0, GIB, DISK._replace(free_bytes=40 * MIB), 20 * MIB), None),
            (Wanted(21, 30 * MIB - BLOCK), placed(21, 0, 30 * MIB - BLOCK)),
            (Wanted(22, 0), no_room(22, BLOCK)),
        ],
    ),
    "inodes are promised like bytes": (
        [GIB, GIB],
        [
            (TierSeen(0, GIB, COUNTED), None),
            (TierSeen(1, GIB, COUNTED._replace(free_inodes=11)), None),
            (Wanted(20, 1), placed(20, 0, 1)),
            (Stored([(20, BLOCK)]), None),
            (Wanted(21, 1), placed(21, 0, 1)),
            (Wanted(22, 1), placed(22, 1, 1)),
            (Wanted(23, 1), Refuse(23, RefusalReason.NO_INODES, 0)),
            (Wanted(24, 100 * MIB), Refuse(24, RefusalReason.NO_INODES, 0)),
            (Abandoned(22), None),
            (Wanted(23, 1), placed(23, 1, 1)),
        ],
    ),
    "a resumed copy needs no inode": (
        [GIB],
        [
            (Loaded(0, 1, MIB), None),
            (TierSeen(0, GIB, COUNTED._replace(free_inodes=11)), None),
            (Resumed(20, 0, MIB), None),
            (Wanted(21, 1), placed(21, 0, 1)),
        ],
    ),
    "a file system that counts no inodes has no limit of them": (
        [GIB],
        [(TierSeen(0, GIB, WITHOUT_INODES), None), (Wanted(20, 1), placed(20, 0, 1))],
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
    assert run(placement, Wanted(20, 0)) == [no_tier(20)]
    seen = [TierSeen(tier, GIB, ROOMY) for tier in (3, 7)]
    assert run(placement, *seen, Wanted(20, KIB)) == [placed(20, 7, KIB)]


def test_the_least_size_of_a_file_that_is_placed_in_part_is_given() -> None:
    small = Placement([0], FakeLookup(), partial_min_bytes=17 * MIB, eviction=EvictionPolicy.KEEP)
    small.handle(TierSeen(0, 16 * MIB, ROOMY))
    assert run(small, Wanted(20, 17 * MIB)) == [Place(20, 0, 0, False)]


@pytest.mark.parametrize(
    "event",
    [
        Wanted(20, 1),
        Resumed(20, 0, 1),
        Resumed(30, 0, 5 * MIB),
        Stored([(99, 1)]),
        Suspended(99, 1),
        RoomWanted(99, 1),
        Dropped(99, 0, 2 * MIB),
        Evicted(20),
        EvictionFailed(20),
        Moved(20, 1),
        MoveFailed(20),
        Accessed(20, 5),
        Known(20, 5),
        Loaded(0, 1, 1),
        Loaded(5, 1, 1),
        TierSeen(5, 1, ROOMY),
        TierLost(5, "gone"),
    ],
)
def test_a_contradiction_is_an_error_and_changes_nothing(event: PlacementEvent) -> None:
    placement = placement_of(GIB)
    run(placement, Loaded(0, 1, MIB), Wanted(20, MIB))
    with pytest.raises(ValueError, match=r"tier|inode"):
        placement.handle(event)
    check_accounts(placement)
    assert run(placement, Stored([(20, MIB)]), Dropped(21, 0, MIB), Dropped(20, 0, MIB)) == []
    run(placement, Evicted(20), Evicted(21))
    assert placement.ledger(0).usage == (0, GIB)
