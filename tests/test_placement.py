"""Placement's decisions, as lists of actions, and its accounts under any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from monarchfs.placement import (
    Abandoned,
    Action,
    Dropped,
    Event,
    Eviction,
    Grant,
    Kept,
    Loaded,
    Place,
    Placement,
    RefusalReason,
    Refuse,
    Resumed,
    RoomWanted,
    Stored,
    TierBack,
    TierLost,
    TierSeen,
    Wanted,
)
from monarchfs.placement.ledger import reservation
from monarchfs.types import Space

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCK = 4 * KIB

ROOMY = Space(1000 * GIB, 1000 * GIB, 1_000_000, 1_000_000)


def placement_of(*capacities: int) -> Placement:
    """Tiers 0, 1, ... of these capacities on file systems with plenty of room."""
    placement = Placement(range(len(capacities)))
    for tier, capacity in enumerate(capacities):
        placement.handle(TierSeen(tier, capacity, ROOMY))
    return placement


def run(placement: Placement, *events: Event) -> list[Action]:
    actions = []
    for event in events:
        actions += placement.handle(event)
        placement.check_invariants()
    return actions


def placed(ino: int, tier: int, size: int) -> Place:
    return Place(ino, tier, reservation(size), True)


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
    placement = Placement([7, 3])
    seen = [TierSeen(tier, GIB, ROOMY) for tier in (3, 7)]
    assert run(placement, *seen, Wanted(20, KIB)) == [placed(20, 7, KIB)]


def test_a_tier_is_filled_to_its_last_block_and_no_further() -> None:
    placement = placement_of(10 * BLOCK)
    assert run(placement, Wanted(20, 9 * BLOCK)) == [placed(20, 0, 9 * BLOCK)]
    assert run(placement, Wanted(21, 0)) == [Refuse(21, RefusalReason.NO_ROOM, BLOCK)]
    assert run(placement, Stored(20, 9 * BLOCK), Wanted(21, 0)) == [placed(21, 0, 0)]
    assert placement.usage(0) == (9 * BLOCK, 10 * BLOCK)


def test_a_refusal_says_how_many_bytes_were_missing() -> None:
    placement = placement_of(MIB, 2 * MIB)
    assert run(placement, Wanted(20, 3 * MIB), Wanted(21, KIB)) == [
        Refuse(20, RefusalReason.NO_ROOM, MIB + BLOCK),
        placed(21, 0, KIB),
    ]
    assert run(placement_of(), Wanted(20, 1)) == [Refuse(20, RefusalReason.NO_TIER, 0)]


def test_a_tier_that_was_not_seen_yet_takes_nothing() -> None:
    placement = Placement([0])
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
    small = Placement([0], partial_min_bytes=17 * MIB, eviction=Eviction.KEEP)
    small.handle(TierSeen(0, 16 * MIB, ROOMY))
    assert run(small, Wanted(20, 17 * MIB)) == [Place(20, 0, 0, False)]


def test_a_partial_copy_at_rest_counts_what_it_occupies() -> None:
    placement = placement_of(40 * MIB)
    run(placement, Wanted(20, GIB), RoomWanted(20, 30 * MIB), Kept(20, 5 * MIB))
    assert placement.usage(0) == (5 * MIB, 40 * MIB)
    # 35 MiB are left.
    assert run(placement, Resumed(20, 0, 5 * MIB), RoomWanted(20, 35 * MIB - BLOCK + 1)) == [
        Refuse(20, RefusalReason.NO_ROOM, BLOCK)
    ]
    assert run(placement, RoomWanted(20, 35 * MIB - BLOCK)) == [Grant(20, 35 * MIB - BLOCK)]
    assert run(placement, Wanted(21, 0)) == [Refuse(21, RefusalReason.NO_ROOM, BLOCK)]
    run(placement, Kept(20, 39 * MIB))
    assert placement.usage(0) == (39 * MIB, 40 * MIB)
    run(placement, Dropped(20, 0, 39 * MIB))
    assert placement.usage(0) == (0, 40 * MIB)


def test_a_partial_copy_that_was_completed_is_stored_like_any_other() -> None:
    placement = placement_of(100 * MIB)
    run(placement, Loaded(0, 1, 10 * MIB), Resumed(20, 0, 10 * MIB))
    run(placement, RoomWanted(20, 60 * MIB), Stored(20, 64 * MIB), Dropped(20, 0, 64 * MIB))
    assert placement.usage(0) == (0, 100 * MIB)


def test_giving_a_copy_up_frees_all_of_it_and_passes_when_repeated() -> None:
    placement = placement_of(100 * MIB)
    run(placement, Loaded(0, 2, 10 * MIB), Resumed(20, 0, 4 * MIB), RoomWanted(20, 80 * MIB))
    run(placement, Wanted(21, MIB), Abandoned(20), Abandoned(21), Abandoned(21))
    assert placement.usage(0) == (6 * MIB, 100 * MIB)
    assert run(placement, Wanted(22, 94 * MIB - BLOCK)) == [placed(22, 0, 94 * MIB - BLOCK)]


@pytest.mark.parametrize("end", [Kept(20, 3 * MIB), Abandoned(20)])
def test_a_replica_removed_while_it_is_resumed_is_counted_once(end: Event) -> None:
    placement = placement_of(100 * MIB)
    run(placement, Loaded(0, 1, 4 * MIB), Resumed(20, 0, 4 * MIB), RoomWanted(20, 8 * MIB))
    run(placement, Dropped(20, 0, 4 * MIB), end)
    used = 3 * MIB if isinstance(end, Kept) else 0
    assert placement.usage(0) == (used, 100 * MIB)


def test_the_file_systems_last_part_stays_free() -> None:
    placement = Placement([0], reserve_percent=10)
    space = Space(100 * MIB, 15 * MIB, 1000, 500)
    assert run(placement, TierSeen(0, 80 * MIB, space), Wanted(20, 5 * MIB)) == [
        Refuse(20, RefusalReason.NO_ROOM, BLOCK)
    ]
    assert run(placement, Wanted(20, 5 * MIB - BLOCK)) == [placed(20, 0, 5 * MIB - BLOCK)]
    # It was written, but that was not seen: it must not be spent twice.
    assert run(placement, Stored(20, 5 * MIB), Wanted(21, 0)) == [
        Refuse(21, RefusalReason.NO_ROOM, BLOCK)
    ]
    # What a removal gave back counts once it is seen.
    assert run(placement, Dropped(20, 0, 5 * MIB), Wanted(21, 0)) == [
        Refuse(21, RefusalReason.NO_ROOM, BLOCK)
    ]
    assert run(placement, TierSeen(0, 80 * MIB, space), Wanted(21, 0)) == [placed(21, 0, 0)]


def test_what_others_eat_of_the_last_part_is_missing_too() -> None:
    placement = Placement([0], reserve_percent=10)
    seen = TierSeen(0, 80 * MIB, Space(100 * MIB, 8 * MIB, 1000, 500))
    assert run(placement, seen, Wanted(20, 0)) == [
        Refuse(20, RefusalReason.NO_ROOM, 2 * MIB + BLOCK)
    ]


def test_bytes_already_written_are_not_missing_twice() -> None:
    free = 50 * MIB
    for written, room in ((0, 10 * MIB), (20 * MIB, 30 * MIB)):
        placement = Placement([0], reserve_percent=0)
        run(placement, TierSeen(0, GIB, Space(GIB, free, 1000, 1000)), Wanted(20, 20 * MIB - BLOCK))
        # All of the copy is written: 30 MiB are free.
        seen = Space(GIB, free - 20 * MIB, 1000, 1000)
        run(placement, TierSeen(0, GIB, seen, written))
        assert run(placement, Wanted(21, room - BLOCK)) == [placed(21, 0, room - BLOCK)]
        assert run(placement, Wanted(22, 0)) == [Refuse(22, RefusalReason.NO_ROOM, BLOCK)]


def test_inodes_are_promised_like_bytes() -> None:
    placement = Placement([0, 1], reserve_percent=10)
    run(placement, TierSeen(0, GIB, Space(GIB, GIB, 100, 12)))
    run(placement, TierSeen(1, GIB, Space(GIB, GIB, 100, 11)))
    assert run(placement, Wanted(20, 1), Stored(20, BLOCK), Wanted(21, 1), Wanted(22, 1)) == [
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
    placement = Placement([0], reserve_percent=0)
    run(placement, Loaded(0, 1, MIB), TierSeen(0, GIB, Space(GIB, GIB, 100, 1)))
    run(placement, Resumed(20, 0, MIB))
    assert run(placement, Wanted(21, 1)) == [placed(21, 0, 1)]


def test_a_file_system_that_counts_no_inodes_has_no_limit_of_them() -> None:
    placement = Placement([0])
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
    assert placement.usage(0) == (0, GIB)


def test_what_was_loaded_counts_even_beyond_a_smaller_capacity() -> None:
    placement = Placement([0])
    run(placement, Loaded(0, 3, 10 * MIB), TierSeen(0, 4 * MIB, ROOMY))
    assert placement.usage(0) == (10 * MIB, 4 * MIB)
    assert run(placement, Wanted(20, 0)) == [Refuse(20, RefusalReason.NO_ROOM, 6 * MIB + BLOCK)]
    run(placement, Dropped(19, 0, 7 * MIB))
    assert run(placement, Wanted(20, 0)) == [placed(20, 0, 0)]


@pytest.mark.parametrize(
    "event",
    [
        Wanted(20, 1),
        Resumed(20, 0, 1),
        Resumed(30, 0, 5 * MIB),
        Stored(99, 1),
        Kept(99, 1),
        RoomWanted(99, 1),
        Dropped(99, 0, 2 * MIB),
        Loaded(0, 1, 1),
        Loaded(5, 1, 1),
        TierSeen(5, 1, ROOMY),
        TierLost(5, "gone"),
    ],
)
def test_a_contradiction_is_an_error_and_changes_nothing(event: Event) -> None:
    placement = placement_of(GIB)
    run(placement, Loaded(0, 1, MIB), Wanted(20, MIB))
    with pytest.raises(ValueError, match=r"tier|inode"):
        placement.handle(event)
    placement.check_invariants()
    assert run(placement, Stored(20, MIB), Dropped(21, 0, MIB), Dropped(20, 0, MIB)) == []
    assert placement.usage(0) == (0, GIB)


# Any sequence of events.

TIERS = st.integers(0, 2)
SIZES = st.integers(0, 200).map(lambda n: n * MIB + n)
FILE_SYSTEM = Space(500 * MIB, 500 * MIB, 60, 60)
RESERVE_BYTES, RESERVE_INODES = 50 * MIB, 6


class PlacementMachine(RuleBasedStateMachine):
    """Real tiers beside the accounts: what is on them never exceeds capacity or file system."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = Placement(range(3), reserve_percent=10)
        self.next_ino = 16
        self.capacity = [100 * MIB, 300 * MIB, 1000 * MIB]
        self.rest: dict[int, tuple[int, int]] = {}  # ino: tier, allocated
        self.copies: dict[int, list[int]] = {}  # ino: tier, written, granted, base
        self.lost: set[int] = set()

    @initialize(loaded=st.lists(st.tuples(TIERS, st.integers(0, 8 * MIB)), max_size=6))
    def mount(self, loaded: list[tuple[int, int]]) -> None:
        for tier, allocated in loaded:
            self.rest[self.next_ino] = (tier, allocated)
            self.next_ino += 1
        for tier in range(3):
            held = [allocated for at, allocated in self.rest.values() if at == tier]
            assert self.placement.handle(Loaded(tier, len(held), sum(held))) == []
            self.see(tier)

    def on_tier(self, tier: int) -> tuple[int, int]:
        """Bytes and files that are really there, copies as far as they were written."""
        sizes = [allocated for at, allocated in self.rest.values() if at == tier]
        sizes += [written + base for at, written, _, base in self.copies.values() if at == tier]
        return sum(sizes), len(sizes)

    def see(self, tier: int) -> None:
        used, files = self.on_tier(tier)
        written = sum(copy[1] for copy in self.copies.values() if copy[0] == tier)
        space = FILE_SYSTEM._replace(
            free_bytes=FILE_SYSTEM.free_bytes - used, free_inodes=FILE_SYSTEM.free_inodes - files
        )
        assert self.placement.handle(TierSeen(tier, self.capacity[tier], space, written)) == []

    @rule(tier=TIERS)
    def seen(self, tier: int) -> None:
        self.see(tier)

    @rule(size=SIZES)
    def wanted(self, size: int) -> None:
        ino = self.next_ino
        self.next_ino += 1
        (action,) = self.placement.handle(Wanted(ino, size))
        match action:
            case Place(placed_ino, tier, reserved, whole):
                assert placed_ino == ino
                assert tier not in self.lost
                assert reserved == (reservation(size) if whole else 0)
                assert whole or size >= 64 * MIB
                self.copies[ino] = [tier, 0, reserved, 0]
            case Refuse(refused, reason, missing):
                assert refused == ino
                assert (missing > 0) == (reason is RefusalReason.NO_ROOM)
                assert (reason is RefusalReason.NO_TIER) == (len(self.lost) == 3)
            case _:
                raise AssertionError(action)

    @rule(data=st.data(), size=SIZES)
    def room_wanted(self, data: st.DataObject, size: int) -> None:
        if self.copies:
            ino = data.draw(st.sampled_from(sorted(self.copies)))
            (action,) = self.placement.handle(RoomWanted(ino, size))
            if isinstance(action, Grant):
                assert action == Grant(ino, size)
                self.copies[ino][2] += reservation(size)

    @rule(data=st.data(), share=st.floats(0, 1))
    def written(self, data: st.DataObject, share: float) -> None:
        """The copier fills what was granted, up to a share of it."""
        if self.copies:
            copy = self.copies[data.draw(st.sampled_from(sorted(self.copies)))]
            copy[1] = max(copy[1], int(copy[2] * share))

    @rule(data=st.data(), event=st.sampled_from([Stored, Kept]))
    def comes_to_rest(self, data: st.DataObject, event: type[Stored] | type[Kept]) -> None:
        if self.copies:
            ino = data.draw(st.sampled_from(sorted(self.copies)))
            tier, written, _, base = self.copies.pop(ino)
            assert self.placement.handle(event(ino, base + written)) == []
            self.rest[ino] = (tier, base + written)

    @rule(data=st.data())
    def abandoned(self, data: st.DataObject) -> None:
        if self.copies:
            ino = data.draw(st.sampled_from(sorted(self.copies)))
            del self.copies[ino]
            assert self.placement.handle(Abandoned(ino)) == []

    @rule(data=st.data())
    def resumed(self, data: st.DataObject) -> None:
        if self.rest:
            ino = data.draw(st.sampled_from(sorted(self.rest)))
            tier, allocated = self.rest.pop(ino)
            assert self.placement.handle(Resumed(ino, tier, allocated)) == []
            self.copies[ino] = [tier, 0, 0, allocated]

    @rule(data=st.data())
    def dropped(self, data: st.DataObject) -> None:
        if self.rest:
            ino = data.draw(st.sampled_from(sorted(self.rest)))
            tier, allocated = self.rest.pop(ino)
            assert self.placement.handle(Dropped(ino, tier, allocated)) == []

    @rule(tier=TIERS)
    def lost_or_back(self, tier: int) -> None:
        if tier in self.lost:
            self.lost.discard(tier)
            self.placement.handle(TierBack(tier))
        else:
            self.lost.add(tier)
            self.placement.handle(TierLost(tier, "gone"))

    @invariant()
    def promises_hold(self) -> None:
        self.placement.check_invariants()
        for tier in range(3):
            used, files = self.on_tier(tier)
            assert used <= self.capacity[tier]
            assert FILE_SYSTEM.free_bytes - used >= RESERVE_BYTES
            assert FILE_SYSTEM.free_inodes - files >= RESERVE_INODES
            # Also when every copy writes all that it was granted.
            granted = sum(c[2] - c[1] for c in self.copies.values() if c[0] == tier)
            assert used + granted <= self.capacity[tier]
            assert FILE_SYSTEM.free_bytes - used - granted >= RESERVE_BYTES

    @invariant()
    def nothing_is_counted_that_is_not_there(self) -> None:
        for tier in range(3):
            at_rest = sum(allocated for at, allocated in self.rest.values() if at == tier)
            base = sum(copy[3] for copy in self.copies.values() if copy[0] == tier)
            assert self.placement.usage(tier)[0] == at_rest + base

    def teardown(self) -> None:
        """Once everything is gone, every tier takes what it took at first."""
        for ino in list(self.copies):
            self.placement.handle(Abandoned(ino))
        for ino, (tier, allocated) in self.rest.items():
            self.placement.handle(Dropped(ino, tier, allocated))
        self.rest.clear()
        self.copies.clear()
        for tier in range(3):
            assert self.placement.usage(tier)[0] == 0
            self.placement.handle(TierBack(tier))
            self.see(tier)
            (action,) = self.placement.handle(Wanted(tier, 100 * MIB - BLOCK))
            assert action == placed(tier, tier, 100 * MIB - BLOCK)
            self.placement.handle(TierLost(tier, "full"))
        self.placement.check_invariants()


TestPlacementMachine = PlacementMachine.TestCase
TestPlacementMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
