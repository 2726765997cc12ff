"""Where files are placed, as lists of actions, while nothing goes for them."""

from __future__ import annotations

import pytest

from monarchfs.placement.events import (
    Abandoned,
    Accessed,
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


def test_a_file_goes_whole_to_the_fastest_tier_with_room() -> None:
    assert run(placement_of(MIB, GIB), Wanted(20, 100 * KIB)) == [placed(20, 0, 100 * KIB)]


def test_what_does_not_fit_spills_and_the_next_smaller_one_still_fits() -> None:
    placement = placement_of(MIB, GIB)
    assert run(placement, Wanted(20, 600 * KIB), Wanted(21, 600 * KIB), Wanted(22, 300 * KIB)) == [
        placed(20, 0, 600 * KIB),
        placed(21, 1, 600 * KIB),
        placed(22, 0, 300 * KIB),
    ]


def test_tiers_are_tried_in_the_order_given_not_of_their_numbers() -> None:
    placement = Placement([7, 3], FakeLookup())
    seen = [TierSeen(tier, GIB, ROOMY) for tier in (3, 7)]
    assert run(placement, *seen, Wanted(20, KIB)) == [placed(20, 7, KIB)]


def test_a_tier_is_filled_to_its_last_block_and_no_further() -> None:
    placement = placement_of(10 * BLOCK)
    assert run(placement, Wanted(20, 9 * BLOCK)) == [placed(20, 0, 9 * BLOCK)]
    assert run(placement, Wanted(21, 0)) == [Refuse(21, RefusalReason.NO_ROOM, BLOCK)]
    assert run(placement, Stored([(20, 9 * BLOCK)]), Wanted(21, 0)) == [placed(21, 0, 0)]
    assert placement.ledger(0).usage == (9 * BLOCK, 10 * BLOCK)


def test_a_refusal_says_how_many_bytes_were_missing() -> None:
    placement = placement_of(MIB, 2 * MIB)
    assert run(placement, Wanted(20, 3 * MIB), Wanted(21, KIB)) == [
        Refuse(20, RefusalReason.NO_ROOM, MIB + BLOCK),
        placed(21, 0, KIB),
    ]
    assert run(placement_of(), Wanted(20, 1)) == [Refuse(20, RefusalReason.NO_TIER, 0)]


def test_a_tier_that_was_not_seen_yet_takes_nothing() -> None:
    placement = Placement([0], FakeLookup())
    assert run(placement, Wanted(20, 0)) == [Refuse(20, RefusalReason.NO_TIER, 0)]
    assert run(placement, TierSeen(0, GIB, ROOMY), Wanted(20, 0)) == [placed(20, 0, 0)]


def test_a_large_file_is_placed_in_part_where_there_is_most_room() -> None:
    placement = placement_of(20 * MIB, 40 * MIB)
    assert run(placement, Wanted(20, 64 * MIB)) == [Place(20, 1, 0, False)]
    assert run(placement, RoomWanted(20, 30 * MIB)) == [Grant(20, 30 * MIB)]
    missing = 20 * MIB + 2 * BLOCK
    assert run(placement, RoomWanted(20, 30 * MIB)) == [Refuse(20, RefusalReason.NO_ROOM, missing)]
    assert run(placement, Wanted(21, 64 * MIB)) == [Place(21, 0, 0, False)]


def test_no_part_of_a_file_below_the_minimum_or_in_a_sliver() -> None:
    assert run(placement_of(20 * MIB), Wanted(20, 64 * MIB - 1)) == [
        Refuse(20, RefusalReason.NO_ROOM, 44 * MIB + BLOCK)
    ]
    assert run(placement_of(16 * MIB - 1), Wanted(20, 64 * MIB)) == [
        Refuse(20, RefusalReason.NO_ROOM, 48 * MIB + BLOCK + 1)
    ]
    small = Placement([0], FakeLookup(), partial_min_bytes=17 * MIB, eviction=EvictionPolicy.KEEP)
    small.handle(TierSeen(0, 16 * MIB, ROOMY))
    assert run(small, Wanted(20, 17 * MIB)) == [Place(20, 0, 0, False)]


def test_a_partial_copy_at_rest_counts_what_it_occupies() -> None:
    placement = placement_of(40 * MIB)
    run(placement, Wanted(20, GIB), RoomWanted(20, 30 * MIB), Suspended(20, 5 * MIB))
    assert placement.ledger(0).usage == (5 * MIB, 40 * MIB)
    # 35 MiB are left.
    assert run(placement, Resumed(20, 0, 5 * MIB), RoomWanted(20, 35 * MIB - BLOCK + 1)) == [
        Refuse(20, RefusalReason.NO_ROOM, BLOCK)
    ]
    assert run(placement, RoomWanted(20, 35 * MIB - BLOCK)) == [Grant(20, 35 * MIB - BLOCK)]
    assert run(placement, Wanted(21, 0)) == [Refuse(21, RefusalReason.NO_ROOM, BLOCK)]
    run(placement, Suspended(20, 39 * MIB))
    assert placement.ledger(0).usage == (39 * MIB, 40 * MIB)
    run(placement, Dropped(20, 0, 39 * MIB))
    assert placement.ledger(0).usage == (39 * MIB, 40 * MIB)
    run(placement, Evicted(20))
    assert placement.ledger(0).usage == (0, 40 * MIB)


def test_a_partial_copy_that_was_completed_is_stored_like_any_other() -> None:
    placement = placement_of(100 * MIB)
    run(placement, Loaded(0, 1, 10 * MIB), Resumed(20, 0, 10 * MIB))
    run(
        placement,
        RoomWanted(20, 60 * MIB),
        Stored([(20, 64 * MIB)]),
        Dropped(20, 0, 64 * MIB),
        Evicted(20),
    )
    assert placement.ledger(0).usage == (0, 100 * MIB)


def test_giving_a_copy_up_frees_all_of_it_and_passes_when_repeated() -> None:
    placement = placement_of(100 * MIB)
    run(placement, Loaded(0, 2, 10 * MIB), Resumed(20, 0, 4 * MIB), RoomWanted(20, 80 * MIB))
    run(placement, Wanted(21, MIB), Abandoned(20), Abandoned(21), Abandoned(21))
    assert placement.ledger(0).usage == (6 * MIB, 100 * MIB)
    assert run(placement, Wanted(22, 94 * MIB - BLOCK)) == [placed(22, 0, 94 * MIB - BLOCK)]


@pytest.mark.parametrize("end", [Suspended(20, 3 * MIB), Abandoned(20)])
def test_a_replica_removed_while_it_is_resumed_is_counted_once(end: PlacementEvent) -> None:
    placement = placement_of(100 * MIB)
    run(placement, Loaded(0, 1, 4 * MIB), Resumed(20, 0, 4 * MIB), RoomWanted(20, 8 * MIB))
    run(placement, Dropped(20, 0, 4 * MIB), end, Evicted(20))
    used = 3 * MIB if isinstance(end, Suspended) else 0
    assert placement.ledger(0).usage == (used, 100 * MIB)


def test_the_file_systems_last_part_stays_free() -> None:
    placement = Placement([0], FakeLookup(), reserve_percent=10)
    space = Space(100 * MIB, 15 * MIB, 1000, 500)
    assert run(placement, TierSeen(0, 80 * MIB, space), Wanted(20, 5 * MIB)) == [
        Refuse(20, RefusalReason.NO_ROOM, BLOCK)
    ]
    assert run(placement, Wanted(20, 5 * MIB - BLOCK)) == [placed(20, 0, 5 * MIB - BLOCK)]
    # It was written, but that was not seen: it must not be spent twice.
    assert run(placement, Stored([(20, 5 * MIB)]), Wanted(21, 0)) == [
        Refuse(21, RefusalReason.NO_ROOM, BLOCK)
    ]
    # What is being removed counts as room, once.
    assert run(placement, Dropped(20, 0, 5 * MIB), Wanted(21, 5 * MIB)) == [
        Refuse(21, RefusalReason.NO_ROOM, BLOCK)
    ]
    seen = TierSeen(0, 80 * MIB, space._replace(free_bytes=10 * MIB))
    assert run(placement, seen, Wanted(21, 0), Abandoned(21)) == [placed(21, 0, 0)]
    gone = TierSeen(0, 80 * MIB, space)
    assert run(placement, Evicted(20), gone, Wanted(21, 5 * MIB)) == [
        Refuse(21, RefusalReason.NO_ROOM, BLOCK)
    ]


def test_what_others_eat_of_the_last_part_is_missing_too() -> None:
    placement = Placement([0], FakeLookup(), reserve_percent=10)
    seen = TierSeen(0, 80 * MIB, Space(100 * MIB, 8 * MIB, 1000, 500))
    assert run(placement, seen, Wanted(20, 0)) == [
        Refuse(20, RefusalReason.NO_ROOM, 2 * MIB + BLOCK)
    ]


def test_bytes_already_written_are_not_missing_twice() -> None:
    free = 50 * MIB
    for written, room in ((0, 10 * MIB), (20 * MIB, 30 * MIB)):
        placement = Placement([0], FakeLookup(), reserve_percent=0)
        run(placement, TierSeen(0, GIB, Space(GIB, free, 1000, 1000)), Wanted(20, 20 * MIB - BLOCK))
        # All of the copy is written: 30 MiB are free.
        seen = Space(GIB, free - 20 * MIB, 1000, 1000)
        run(placement, TierSeen(0, GIB, seen, written))
        assert run(placement, Wanted(21, room - BLOCK)) == [placed(21, 0, room - BLOCK)]
        assert run(placement, Wanted(22, 0)) == [Refuse(22, RefusalReason.NO_ROOM, BLOCK)]


def test_inodes_are_promised_like_bytes() -> None:
    placement = Placement([0, 1], FakeLookup(), reserve_percent=10)
    run(placement, TierSeen(0, GIB, Space(GIB, GIB, 100, 12)))
    run(placement, TierSeen(1, GIB, Space(GIB, GIB, 100, 11)))
    assert run(placement, Wanted(20, 1), Stored([(20, BLOCK)]), Wanted(21, 1), Wanted(22, 1)) == [
        placed(20, 0, 1),
        placed(21, 0, 1),
        placed(22, 1, 1),
    ]
    assert run(placement, Wanted(23, 1), Wanted(24, 100 * MIB)) == [
        Refuse(23, RefusalReason.NO_INODES, 0),
        Refuse(24, RefusalReason.NO_INODES, 0),
    ]
    assert run(placement, Abandoned(22), Wanted(23, 1)) == [placed(23, 1, 1)]


def test_a_resumed_copy_needs_no_inode() -> None:
    placement = Placement([0], FakeLookup(), reserve_percent=0)
    run(placement, Loaded(0, 1, MIB), TierSeen(0, GIB, Space(GIB, GIB, 100, 1)))
    run(placement, Resumed(20, 0, MIB))
    assert run(placement, Wanted(21, 1)) == [placed(21, 0, 1)]


def test_a_file_system_that_counts_no_inodes_has_no_limit_of_them() -> None:
    placement = Placement([0], FakeLookup())
    run(placement, TierSeen(0, GIB, Space(GIB, GIB, 0, 0)))
    assert run(placement, Wanted(20, 1)) == [placed(20, 0, 1)]


def test_a_lost_tier_takes_nothing_until_it_is_back() -> None:
    placement = placement_of(GIB, GIB)
    assert run(placement, Wanted(19, 100 * MIB)) == [placed(19, 0, 100 * MIB)]
    assert run(placement, TierLost(0, "input/output error"), Wanted(20, 1)) == [placed(20, 1, 1)]
    assert run(placement, Abandoned(19), TierLost(1, "gone"), Wanted(21, 1)) == [
        Refuse(21, RefusalReason.NO_TIER, 0)
    ]
    assert run(placement, TierBack(0), Wanted(21, 1)) == [placed(21, 0, 1)]


def test_a_partial_copy_does_not_grow_in_a_lost_tier_but_can_end() -> None:
    placement = placement_of(GIB)
    run(placement, Loaded(0, 1, MIB), Resumed(20, 0, MIB), TierLost(0, "gone"))
    assert run(placement, RoomWanted(20, MIB)) == [Refuse(20, RefusalReason.NO_TIER, 0)]
    run(placement, Abandoned(20))
    assert placement.ledger(0).usage == (0, GIB)


def test_what_was_loaded_counts_even_beyond_a_smaller_capacity() -> None:
    placement = Placement([0], FakeLookup())
    run(placement, Loaded(0, 3, 10 * MIB), TierSeen(0, 4 * MIB, ROOMY))
    assert placement.ledger(0).usage == (10 * MIB, 4 * MIB)
    assert run(placement, Wanted(20, 0)) == [Refuse(20, RefusalReason.NO_ROOM, 6 * MIB + BLOCK)]
    run(placement, Dropped(19, 0, 7 * MIB))
    assert run(placement, Wanted(20, 0)) == [placed(20, 0, 0)]


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
