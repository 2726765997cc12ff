"""Any sequence of events, beside a model of the disks: what lies there never breaks a promise."""

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monarchfs.cache.placement import events
from monarchfs.cache.placement.events import Action, Evict, EvictionReason, Owner
from monarchfs.cache.placement.ledger import reservation
from monarchfs.cache.placement.placement import Placement
from monarchfs.types import EvictionPolicy, Space
from tests.placement.tools import BLOCK, MIB, FakeLookup
from tests.support.accounts import check_accounts, writable_bytes

TIERS = st.integers(0, 2)
OWNERS = st.sampled_from(Owner)
SIZES = st.integers(0, 60).map(lambda n: n * MIB + n)
SMALL = st.integers(0, 20).map(lambda n: n * MIB + n)
PICK = st.integers(0, 1_000_000)

FILE_SYSTEM = Space(200 * MIB, 200 * MIB, 60, 60)
RESERVE_BYTES, RESERVE_INODES = 20 * MIB, 6
CAPACITIES = [40 * MIB, 120 * MIB, 1000 * MIB]
LARGE = 32 * MIB


@dataclass
class Copy:
    tier: int
    granted: int
    base: int = 0
    resumed: bool = False
    created: bool = False
    written: int = 0
    owner: Owner = Owner.NOBODY


@dataclass
class Moving:
    tier: int
    to: int
    allocated: int
    granted: int
    dropped: bool = False


@dataclass
class Leaving:
    ino: int
    tier: int
    allocated: int
    recorded: bool
    """Evicted: the record may come back. Dropped or moved: it is gone."""


class PlacementMachine(FakeLookup, RuleBasedStateMachine):
    """Does what the cache would do. It is the look-up, too."""

    def __init__(self) -> None:
        FakeLookup.__init__(self)
        RuleBasedStateMachine.__init__(self)
        self.next_ino = 16
        self.capacity = list(CAPACITIES)
        self.others = [(0, 0)] * 3
        self.copies: dict[int, Copy] = {}
        self.moves: dict[int, Moving] = {}
        self.leaving: list[Leaving] = []
        self.stuck: list[Leaving] = []
        self.lost: set[int] = set()
        self.owner = Owner.NOBODY

    @initialize(
        loaded=st.lists(st.tuples(TIERS, st.integers(0, 8 * MIB)), max_size=6),
        eviction=st.sampled_from(EvictionPolicy),
    )
    def mount(self, loaded: list[tuple[int, int]], eviction: EvictionPolicy) -> None:
        self.eviction = eviction
        self.placement = Placement(
            range(3), self, eviction=eviction, partial_min_bytes=LARGE, reserve_percent=10
        )
        for tier, allocated in loaded:
            self.replicas[self.next_ino] = (tier, allocated)
            self.next_ino += 1
        for tier in range(3):
            held = [allocated for at, allocated in self.replicas.values() if at == tier]
            assert self.placement.handle(events.Loaded(tier, len(held), sum(held))) == []
            assert self.see(tier) == []

    # The disks.

    def on_tier(self, tier: int) -> tuple[int, int]:
        """Bytes and files that are really there."""
        sizes = [allocated for at, allocated in self.replicas.values() if at == tier]
        sizes += [item.allocated for item in self.leaving + self.stuck if item.tier == tier]
        sizes += [c.written + c.base for c in self.copies.values() if c.tier == tier and c.created]
        return sum(sizes), len(sizes)

    def written(self, tier: int) -> int:
        return sum(copy.written for copy in self.copies.values() if copy.tier == tier)

    def may_write(self, tier: int, size: int) -> bool:
        """As the cache asks: nothing is written that would not fit beside what is leaving."""
        return size <= writable_bytes(self.placement.ledger(tier), self.written(tier)) > 0

    def check_written(self, tier: int) -> None:
        used, files = self.on_tier(tier)
        assert used <= self.capacity[tier]
        other_bytes, other_files = self.others[tier]
        assert FILE_SYSTEM.free_bytes - used - other_bytes >= RESERVE_BYTES
        # Later on, others may take the inodes that were free when a copy was admitted.
        assert other_files or FILE_SYSTEM.free_inodes - files >= RESERVE_INODES

    def check_admitted(self, tier: int) -> None:
        """With the file that was admitted just now, and once everything is where it goes to."""
        _, files = self.on_tier(tier)
        files -= sum(item.tier == tier for item in self.leaving)
        files += sum(copy.tier == tier and not copy.created for copy in self.copies.values())
        files += sum(move.to == tier for move in self.moves.values())
        assert FILE_SYSTEM.free_inodes - files - self.others[tier][1] >= RESERVE_INODES

    # Carrying out.

    def see(self, tier: int, demote: bool = False) -> list[Action]:
        used, files = self.on_tier(tier)
        other_bytes, other_files = self.others[tier]
        space = FILE_SYSTEM._replace(
            free_bytes=FILE_SYSTEM.free_bytes - used - other_bytes,
            free_inodes=FILE_SYSTEM.free_inodes - files - other_files,
        )
        seen = events.TierSeen(tier, self.capacity[tier], space, self.written(tier), demote)
        return self.carry_out(self.placement.handle(seen), {EvictionReason.PRESSURE})

    def handle(self, event: events.PlacementEvent, *reasons: EvictionReason) -> list[Action]:
        return self.carry_out(self.placement.handle(event), set(reasons))

    def carry_out(self, actions: list[Action], reasons: set[EvictionReason]) -> list[Action]:
        """The evictions and moves among them, in the order given; returns the others."""
        answers: list[Action] = []
        evictions = [action for action in actions if isinstance(action, Evict)]
        for eviction in evictions:
            self.check_eviction(eviction, reasons)
        for action in actions:
            match action:
                case Evict(ino, tier, allocated):
                    assert self.replicas.pop(ino) == (tier, allocated)
                    self.leaving.append(Leaving(ino, tier, allocated, True))
                case events.Move(ino, tier, to, reserved):
                    at, allocated = self.replicas[ino]
                    assert at == tier
                    assert ino not in self.moves
                    assert tier not in self.lost
                    assert to not in self.lost
                    assert reserved == reservation(allocated)
                    self.moves[ino] = Moving(tier, to, allocated, reserved)
                    self.check_admitted(to)
                case _:
                    answers.append(action)
        assert len(self.moves) <= 2
        for eviction in evictions:
            if eviction.reason is not EvictionReason.OUTDATED:
                # Whatever outdated one is left could not go.
                for ino in self.outdated(eviction.tier):
                    tier, allocated = self.replicas[ino]
                    busy = ino in self.moves or self.is_leaving(ino, tier)
                    assert ino in self.open or busy or not allocated
        return answers

    def is_leaving(self, ino: int, tier: int) -> bool:
        return any(item.ino == ino and item.tier == tier for item in self.leaving)

    def check_eviction(self, action: Evict, reasons: set[EvictionReason]) -> None:
        assert action.tier not in self.lost
        assert action.ino not in self.open
        assert action.ino not in self.copies
        assert action.ino not in self.moves
        assert action.reason is not EvictionReason.POLICY or not self.awaited(action.ino)
        if action.reason is EvictionReason.OUTDATED:
            assert action.ino in self.stale
        elif self.owner is Owner.OTHER_NODE:
            assert self.is_foreign(action.ino)
            assert action.reason in reasons
            assert self.eviction is not EvictionPolicy.KEEP
        elif self.owner is not Owner.THIS_NODE or not self.is_foreign(action.ino):
            assert action.reason in reasons
            assert (
                action.reason is EvictionReason.PRESSURE or self.eviction is not EvictionPolicy.KEEP
            )

    def pick(self, items: Iterable[int], pick: int) -> int | None:
        choices = sorted(items)
        return choices[pick % len(choices)] if choices else None

    # Files.

    def is_foreign(self, ino: int) -> bool:
        return ino % 3 == 0

    def awaited(self, ino: int) -> bool:
        return ino % 5 == 0

    @rule(size=SIZES, evicts=st.booleans(), again=PICK, owner=OWNERS)
    def wanted(self, size: int, evicts: bool, again: int, owner: Owner) -> None:
        self.owner = owner
        ino = self.next_ino
        gone = {item.ino for item in self.leaving} - set(self.replicas) - set(self.copies)
        if again % 2 and gone:
            # One whose file is still being removed.
            ino = self.pick(gone, again) or 0
        else:
            self.next_ino += 1
        reasons = [EvictionReason.POLICY] if evicts else []
        actions = self.placement.handle(events.Wanted(ino, size, evicts, owner))
        assert not any(isinstance(action, events.Move) for action in actions)
        gone_bytes = [action.allocated_bytes for action in actions if isinstance(action, Evict)]
        (action,) = self.carry_out(actions, set(reasons))
        self.owner = Owner.NOBODY
        match action:
            case events.Place(placed_ino, tier, reserved, whole):
                assert placed_ino == ino
                assert tier not in self.lost
                assert reserved == (reservation(size) if whole else 0)
                assert whole or size >= LARGE
                assert all(a.tier == tier for a in actions if isinstance(a, Evict))
                self.copies[ino] = Copy(tier, reserved, owner=owner)
                self.check_admitted(tier)
                if gone_bytes:
                    # The last one was needed: for its bytes, or for an inode.
                    ledger = self.placement._ledgers[tier]
                    room = ledger.room_bytes() + (0 if whole else -16 * MIB)
                    assert room < gone_bytes[-1] or ledger.room_inodes() <= 0
            case events.Refuse(refused, reason, missing):
                assert refused == ino
                assert not gone_bytes
                assert (missing > 0) == (reason is events.RefusalReason.NO_ROOM)
                assert (reason is events.RefusalReason.NO_TIER) == (len(self.lost) == 3)
            case _:
                raise AssertionError(action)

    @rule(sizes=st.lists(SIZES, max_size=8), evicts=st.booleans(), owner=OWNERS)
    def wanted_together(self, sizes: list[int], evicts: bool, owner: Owner) -> None:
        """Those that have room get it, in their order, up to one that has none; room is made once,
        for all that lack it, and no more than they need."""
        files = [(self.next_ino + n, size) for n, size in enumerate(sizes)]
        self.next_ino += len(files)
        self.owner = owner
        actions = self.placement.handle(events.WantedEach(files, evicts, owner))
        gone_bytes = [action.allocated_bytes for action in actions if isinstance(action, Evict)]
        places: list[events.Place] = []
        for (ino, size), place in zip(
            files,
            self.carry_out(actions, {EvictionReason.POLICY} if evicts else set()),
            strict=False,
        ):
            assert isinstance(place, events.Place)
            assert place == events.Place(ino, place.tier, reservation(size), True)
            assert place.tier not in self.lost
            self.copies[ino] = Copy(place.tier, place.reserved_bytes, owner=owner)
            places.append(place)
        self.owner = Owner.NOBODY
        for tier in {place.tier for place in places}:
            self.check_admitted(tier)
        if gone_bytes:
            assert len(places) == len(files)
            (tier,) = {action.tier for action in actions if isinstance(action, Evict)}
            ledger = self.placement._ledgers[tier]
            elsewhere = sum(place.reserved_bytes for place in places if place.tier != tier)
            room = ledger.room_bytes() - elsewhere
            assert room < gone_bytes[-1] or ledger.room_inodes() <= len(places)
        elif len(places) < len(files):
            need = reservation(files[len(places)][1])
            assert not any(ledger.takes(need) for _, ledger in self.placement._usable)

    @rule(sizes=st.lists(SMALL, min_size=3, max_size=12))
    def filled(self, sizes: list[int]) -> None:
        """Files are opened and copied one after the other, and what goes for them is gone at once,
        so that there is something at rest most of the time."""
        for size in sizes:
            ino = self.next_ino
            self.wanted(size=size, evicts=True, again=0, owner=Owner.NOBODY)
            for item in list(self.leaving):
                self.evicted(pick=self.leaving.index(item))
            copy = self.copies.get(ino)
            if copy is not None and self.may_write(copy.tier, copy.granted):
                copy.created = True
                copy.written = copy.granted
                self.check_written(copy.tier)
                del self.copies[ino]
                self.replicas[ino] = (copy.tier, copy.written)
                assert self.handle(events.Stored([(ino, copy.written)])) == []

    @rule(pick=PICK, size=SIZES)
    def room_wanted(self, pick: int, size: int) -> None:
        ino = self.pick(self.copies, pick)
        if ino is not None:
            self.owner = self.copies[ino].owner
            (action,) = self.handle(events.RoomWanted(ino, size), EvictionReason.POLICY)
            self.owner = Owner.NOBODY
            if isinstance(action, events.Grant):
                assert action == events.Grant(ino, size)
                assert self.copies[ino].tier not in self.lost
                self.copies[ino].granted += reservation(size)
            else:
                assert isinstance(action, events.Refuse)
                assert action.ino == ino

    @rule(pick=PICK, share=st.floats(0, 1))
    def copied(self, pick: int, share: float) -> None:
        """The copier fills what was granted, up to a share of it."""
        ino = self.pick(self.copies, pick)
        if ino is None:
            return
        copy = self.copies[ino]
        more = max(0, int(copy.granted * share) - copy.written)
        if self.may_write(copy.tier, more):
            copy.created = True
            copy.written += more
            self.check_written(copy.tier)

    @rule(count=st.integers(1, 8), whole=st.booleans())
    def come_to_rest(self, count: int, whole: bool) -> None:
        """Complete, several together; or one that is not."""
        created = [ino for ino in sorted(self.copies) if self.copies[ino].created]
        stored = []
        for ino in created[: count if whole else 1]:
            copy = self.copies.pop(ino)
            stored.append((ino, copy.base + copy.written))
            self.replicas[ino] = (copy.tier, copy.base + copy.written)
        assert self.handle(events.Stored(stored)) == []

    @rule(pick=PICK)
    def abandoned(self, pick: int) -> None:
        ino = self.pick(self.copies, pick)
        if ino is not None:
            del self.copies[ino]
            for _again in range(2):
                assert self.handle(events.Abandoned(ino)) == []

    @rule(pick=PICK, evicts=st.booleans(), owner=OWNERS)
    def resumed(self, pick: int, evicts: bool, owner: Owner) -> None:
        ino = self.pick(set(self.replicas) - set(self.moves), pick)
        if ino is not None:
            tier, allocated = self.replicas.pop(ino)
            assert self.handle(events.Resumed(ino, tier, allocated, evicts, owner)) == []
            self.copies[ino] = Copy(tier, 0, allocated, resumed=True, created=True, owner=owner)

    @rule(pick=PICK, blocks=st.integers(-3, 3))
    def grown(self, pick: int, blocks: int) -> None:
        """What the file system says once the data are on the disk."""
        ino = self.pick(self.replicas, pick)
        if ino is None or self.placement.busy(ino, self.replicas[ino][0]):
            return
        tier, allocated = self.replicas[ino]
        more = max(-allocated, blocks * BLOCK)
        if more <= 0 or self.may_write(tier, more):
            self.replicas[ino] = (tier, allocated + more)
            assert self.handle(events.Resized(ino, tier, more)) == []

    @rule(pick=PICK)
    def dropped(self, pick: int) -> None:
        ino = self.pick(self.replicas, pick)
        if ino is not None:
            tier, allocated = self.replicas.pop(ino)
            self.leaving.append(Leaving(ino, tier, allocated, False))
            if ino in self.moves:
                self.moves[ino].dropped = True
            assert self.handle(events.Dropped(ino, tier, allocated)) == []

    @rule(pick=PICK)
    def dropped_while_resumed(self, pick: int) -> None:
        ino = self.pick((ino for ino, copy in self.copies.items() if copy.resumed), pick)
        if ino is not None:
            copy = self.copies[ino]
            self.leaving.append(Leaving(ino, copy.tier, copy.base, False))
            assert self.handle(events.Dropped(ino, copy.tier, copy.base)) == []
            # Another file from then on: nothing of the copy is in it.
            copy.base, copy.resumed, copy.created = 0, False, copy.written > 0

    # What leaves.

    def take_leaving(self, pick: int) -> Leaving:
        """The first one of an inode and tier."""
        chosen = self.leaving[pick % len(self.leaving)]
        item = next(o for o in self.leaving if (o.ino, o.tier) == (chosen.ino, chosen.tier))
        self.leaving.remove(item)
        return item

    @precondition(lambda self: self.leaving)
    @rule(pick=PICK)
    def evicted(self, pick: int) -> None:
        item = self.take_leaving(pick)
        assert self.handle(events.Evicted(item.ino, item.tier)) == []

    @precondition(lambda self: self.leaving)
    @rule(pick=PICK)
    def eviction_failed(self, pick: int) -> None:
        item = self.take_leaving(pick)
        if item.recorded and item.ino not in self.replicas and item.ino not in self.copies:
            self.replicas[item.ino] = (item.tier, item.allocated)
        else:
            self.stuck.append(item)
        assert self.handle(events.EvictionFailed(item.ino, item.tier)) == []

    @precondition(lambda self: self.stuck)
    @rule()
    def tried_again(self) -> None:
        for item in self.stuck:
            if item.ino not in self.copies:
                self.stuck.remove(item)
                item.recorded = False
                self.leaving.append(item)
                assert self.handle(events.Dropped(item.ino, item.tier, item.allocated)) == []
                return

    # What moves.

    @rule(picks=st.lists(PICK, min_size=1, max_size=8), late=st.integers(0, 5))
    def accessed(self, picks: list[int], late: int) -> None:
        swaps = self.eviction in (EvictionPolicy.LRU, EvictionPolicy.WEIGHTED)
        reasons = [EvictionReason.POLICY] if swaps else []
        for pick in picks:
            ino = self.pick(self.replicas, pick)
            if ino is not None:
                # Now and then the replica is elsewhere by now.
                tier = (self.replicas[ino][0] + (late == 0)) % 3
                assert self.handle(events.Accessed(ino, tier), *reasons) == []

    @rule(
        weights=st.lists(st.tuples(st.integers(16, 60), st.integers(0, 5))), replace=st.booleans()
    )
    def weighed(self, weights: list[tuple[int, float]], replace: bool) -> None:
        assert self.handle(events.Weighed(weights, replace)) == []

    @rule(pick=PICK, tier=TIERS)
    def known(self, pick: int, tier: int) -> None:
        ino = self.pick(self.replicas, pick)
        if ino is not None:
            assert self.handle(events.Known(ino, tier)) == []

    @rule(pick=PICK, share=st.floats(0, 1))
    def moved(self, pick: int, share: float) -> None:
        ino = self.pick((ino for ino, move in self.moves.items() if not move.dropped), pick)
        if ino is None:
            return
        move = self.moves[ino]
        allocated = int(move.granted * share)
        if self.may_write(move.to, allocated):
            del self.moves[ino]
            self.replicas[ino] = (move.to, allocated)
            self.leaving.append(Leaving(ino, move.tier, move.allocated, False))
            self.check_written(move.to)
            assert self.handle(events.Moved(ino, allocated)) == []

    @rule(pick=PICK)
    def move_failed(self, pick: int) -> None:
        ino = self.pick(self.moves, pick)
        if ino is not None:
            del self.moves[ino]
            assert self.handle(events.MoveFailed(ino), EvictionReason.PRESSURE) == []

    # Around.

    @rule(pick=PICK)
    def opened(self, pick: int) -> None:
        ino = self.pick(self.replicas, pick)
        if ino is not None:
            self.open.add(ino)

    @precondition(lambda self: self.open)
    @rule(pick=PICK)
    def closed(self, pick: int) -> None:
        self.open.discard(self.pick(self.open, pick) or 0)

    @rule(pick=PICK)
    def outdated_now(self, pick: int) -> None:
        ino = self.pick(self.replicas, pick)
        if ino is not None:
            self.stale.add(ino)

    @rule(tier=TIERS, percent=st.integers(0, 100), demote=st.booleans())
    def resized(self, tier: int, percent: int, demote: bool) -> None:
        self.capacity[tier] = CAPACITIES[tier] * percent // 100
        assert self.see(tier, demote) == []
        self.check_relieved(tier)

    @rule(tier=TIERS, others=st.tuples(st.integers(0, 100 * MIB), st.integers(0, 50)))
    def crowded(self, tier: int, others: tuple[int, int]) -> None:
        """Others' files come and go."""
        self.others[tier] = others
        assert self.see(tier) == []
        self.check_relieved(tier)

    def check_relieved(self, tier: int) -> None:
        """Unless nothing more could go, the promises hold once everything is where it goes to."""
        if tier in self.lost:
            return
        staying = [
            (ino, allocated)
            for ino, (at, allocated) in self.replicas.items()
            if at == tier and ino not in self.moves
        ]
        if any(
            ino not in self.open and not self.is_leaving(ino, tier) and allocated
            for ino, allocated in staying
        ):
            sizes = [allocated for _, allocated in staying]
            sizes += [item.allocated for item in self.stuck if item.tier == tier]
            copies = [copy for copy in self.copies.values() if copy.tier == tier]
            sizes += [copy.base for copy in copies]
            granted = sum(copy.granted for copy in copies)
            granted += sum(move.granted for move in self.moves.values() if move.to == tier)
            assert sum(sizes) + granted <= self.capacity[tier]
            # What the copies wrote had its room when it was granted.
            other_bytes, other_files = self.others[tier]
            assert FILE_SYSTEM.free_bytes - sum(sizes) - other_bytes >= RESERVE_BYTES
            _, files = self.on_tier(tier)
            files -= sum(item.tier == tier for item in self.leaving)
            assert FILE_SYSTEM.free_inodes - files - other_files >= RESERVE_INODES

    @rule(tier=TIERS, lose=st.integers(0, 3))
    def lost_or_back(self, tier: int, lose: int) -> None:
        if lose:
            tier = self.pick(self.lost, tier) or 0
        if tier in self.lost:
            self.lost.discard(tier)
            assert self.handle(events.TierBack(tier)) == []
        elif not lose:
            self.lost.add(tier)
            assert self.handle(events.TierLost(tier, "gone")) == []

    @invariant()
    def accounts_are_true(self) -> None:
        if not hasattr(self, "placement"):
            return
        check_accounts(self.placement)
        for tier in range(3):
            accounts = self.placement.ledger(tier)
            rest = [allocated for at, allocated in self.replicas.values() if at == tier]
            rest += [item.allocated for item in self.stuck if item.tier == tier]
            rest += [c.base for c in self.copies.values() if c.tier == tier and c.resumed]
            leaving = [item.allocated for item in self.leaving if item.tier == tier]
            assert (accounts.used_bytes, accounts.files) == (sum(rest), len(rest))
            assert (accounts.leaving_bytes, accounts.leaving_files) == (sum(leaving), len(leaving))
            assert accounts.usage[0] == sum(rest) + sum(leaving)
            copies = [copy for copy in self.copies.values() if copy.tier == tier]
            granted = [copy.granted for copy in copies]
            granted += [move.granted for move in self.moves.values() if move.to == tier]
            assert accounts.reserved_bytes == sum(granted)
            assert accounts.copies == len(granted) - sum(copy.resumed for copy in copies)


TestPlacementMachine = PlacementMachine.TestCase
TestPlacementMachine.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    # To say which parts matter takes minutes, and says little of so long a story.
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
