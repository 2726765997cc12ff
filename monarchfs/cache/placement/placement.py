"""Which tier a file is copied to, and what goes for it: events in, actions out, no clock, no I/O.

The rule: a whole file goes to the fastest tier that has room for it. Where none has, outdated
replicas go; then, if somebody opened the file, those that the policy names: all in one tier, the
slowest where that is enough, and only if it is enough. The default policy names none: inside a job,
filling and keeping is the best there is, because each epoch reads every file once in an order that
says nothing of the next. What does not fit is refused without holding up the next file, which may
be smaller.

A large file that fits nowhere is kept in part, where there is most room. It pushes out replicas
that are still of use only as long as it holds no more than a quarter of its tier, whole or in part:
one pass over a file larger than the tier must not empty it.

Where nodes share, a file that this node owns goes before files of others (``Owner``).

Capacity, and the room kept for others, are promises: where one shrinks, replicas go under every
policy, outdated ones first. What is opened moves up where there is room (``promotion``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from monarchfs.cache.placement.events import (
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
    Owner,
    Place,
    PlacementEvent,
    RefusalReason,
    Refuse,
    Resized,
    Resumed,
    RoomWanted,
    Stored,
    TierBack,
    TierLost,
    TierSeen,
    Wanted,
    WantedEach,
    Weighed,
)
from monarchfs.cache.placement.ledger import Ledger, reservation
from monarchfs.cache.placement.policies import make_policy
from monarchfs.cache.placement.shifting import Shifting
from monarchfs.cache.placement.traffic import CopiesUnderWay, Traffic
from monarchfs.cache.placement.victims import Budget, ReplicaLookup, Victims
from monarchfs.types import EvictionPolicy

PARTIAL_MIN_BYTES = 64 << 20
"""A smaller file is placed whole or not at all."""

PARTIAL_ROOM_BYTES = 16 << 20
"""A tier with less room takes no partial replica: it would hold next to nothing."""

LARGE_SHARE = 4
"""A file of ``partial_min_bytes`` or more pushes others out of one part in so many of a tier."""

RESERVE_PERCENT = 10.0


class Placement:
    """Decides where replicas go, and keeps the tiers' accounts.

    Constant: the tiers, the options, the look-up of replicas. Changing, in ``handle`` only: the
    ledgers, the copies in progress, what is leaving and moving, the policy. For an event that
    contradicts earlier ones (a programming error) ``handle`` raises ValueError and changes nothing.
    """

    def __init__(
        self,
        tiers: Iterable[int],
        lookup: ReplicaLookup,
        *,
        eviction: EvictionPolicy = EvictionPolicy.KEEP,
        partial_min_bytes: int = PARTIAL_MIN_BYTES,
        reserve_percent: float = RESERVE_PERCENT,
    ) -> None:
        """``tiers`` are their numbers, fastest first. A tier takes nothing before ``TierSeen``."""
        self._partial_min_bytes = partial_min_bytes
        self._reserve_percent = reserve_percent
        self._ledgers = {tier: Ledger() for tier in tiers}
        self._policy = make_policy(eviction)
        self._copies = CopiesUnderWay(self._ledgers, self._policy)
        self._traffic = Traffic(self._ledgers, self._policy)
        self._victims = Victims(lookup, self._policy, self._traffic.busy)
        self._shifting = Shifting(self._ledgers, self._policy, self._traffic, self._victims)
        self._usable: list[tuple[int, Ledger]] = []

    @property
    def tracks(self) -> bool:
        """Whether ``Accessed`` is wanted for every open, and ``Known`` for every replica."""
        return self._policy.tracks

    def handle(self, event: PlacementEvent) -> list[Action]:
        match event:
            case Accessed(ino, None):
                self._policy.missed(ino)
            case Accessed(ino, int(tier)):
                self.ledger(tier)
                return self._shifting.accessed(ino, tier)
            case Wanted():
                return self._place(event)
            case WantedEach():
                return self._place_each(event)
            case Weighed(weights, replace):
                self._policy.weigh(weights, replace=replace)
            case RoomWanted(ino, size_bytes):
                return self._grow(ino, size_bytes)
            case Stored(files):
                self._copies.store(files)
            case Resized(ino, tier, more_bytes):
                self._traffic.resize(ino, tier, more_bytes)
            case Abandoned(ino):
                self._copies.abandon(ino)
            case Resumed(ino, tier):
                self.ledger(tier)
                if self._traffic.moving(ino) is not None:
                    raise ValueError(f"inode {ino} is being moved")
                self._copies.resume(event)
            case Dropped(ino, tier, allocated_bytes):
                self._drop(ino, tier, allocated_bytes)
            case Evicted(ino, tier):
                self._traffic.removed(ino, tier)
            case EvictionFailed(ino, tier):
                self._traffic.removal_failed(ino, tier)
            case Known(ino, tier):
                self.ledger(tier)
                self._policy.known(tier, ino)
            case Moved(ino, allocated_bytes):
                return self._shifting.moved(ino, allocated_bytes)
            case MoveFailed(ino):
                return self._shifting.failed(ino)
            case TierSeen():
                return self._see(event)
            case Loaded(tier, files, allocated_bytes):
                self._load(tier, files, allocated_bytes)
            case TierLost(tier, reason):
                self._set_lost(tier, reason)
            case TierBack(tier):
                self._set_lost(tier, None)
        return []

    def busy(self, ino: int, tier: int) -> bool:
        """Whether the replica of ``ino`` in the tier is leaving, or moves."""
        return self._traffic.busy(ino, tier)

    def quiet(self, tier: int) -> bool:
        """Whether no copy to the tier, and no move from or to it, is in progress."""
        return not self._copies.in_tier(tier) and not self._traffic.touches(tier)

    def ledger(self, tier: int) -> Ledger:
        """The tier's accounts: to be read."""
        try:
            return self._ledgers[tier]
        except KeyError:
            raise ValueError(f"there is no tier {tier}") from None

    # Room for copies.

    def _place(self, wanted: Wanted) -> list[Action]:
        ino, size_bytes = wanted.ino, wanted.size_bytes
        self._copies.refuse([ino])
        need = reservation(size_bytes)
        if (tier := self._taker(need)) is not None:
            return self._start(ino, tier, need, wanted)
        budget = Budget()
        large = size_bytes >= self._partial_min_bytes
        at, actions = self._free_somewhere(need, 1, large, wanted, budget)
        if at is not None:
            return actions + self._start(ino, at, need, wanted)
        if large:
            at = self._roomiest()
            if at is None:
                at, actions = self._free_somewhere(PARTIAL_ROOM_BYTES, 1, True, wanted, budget)
            if at is not None:
                return actions + self._start(ino, at, 0, wanted, whole=False)
        return [self._refusal(ino, need)]

    def _place_each(self, wanted: WantedEach) -> list[Action]:
        files = wanted.files
        self._copies.refuse(ino for ino, _ in files)
        actions: list[Action] = []
        freed = False
        for n, (ino, size_bytes) in enumerate(files):
            need = reservation(size_bytes)
            tier = self._taker(need)
            if tier is None and not freed:
                freed = True
                actions += self._free_for_all([size for _, size in files[n:]], wanted)
                tier = self._taker(need)
            if tier is None:
                break
            actions += self._start(ino, tier, need, wanted)
        return actions

    def _taker(self, need: int) -> int | None:
        """The fastest tier that has room for the reservation of one more file."""
        for tier, ledger in self._usable:
            if ledger.takes(need):
                return tier
        return None

    def _free_for_all(self, sizes: Sequence[int], wanted: WantedEach) -> list[Action]:
        """Make room for files of these sizes in one tier, unless one may be kept in part, or each
        has to be compared with what goes for it."""
        if self._policy.selective or max(sizes) >= self._partial_min_bytes:
            return []
        need = sum(map(reservation, sizes))
        return self._free_somewhere(need, len(sizes), False, wanted, Budget())[1]

    def _start(
        self,
        ino: int,
        tier: int,
        reserved_bytes: int,
        wanted: Wanted | WantedEach,
        *,
        whole: bool = True,
    ) -> list[Action]:
        self._copies.start(ino, tier, reserved_bytes, evicts=wanted.evicts, owner=wanted.owner)
        return [Place(ino, tier, reserved_bytes, whole)]

    def _roomiest(self) -> int | None:
        """Where there is most room for a part; None where there is next to nothing."""
        takers = [item for item in self._usable if item[1].takes(PARTIAL_ROOM_BYTES)]
        return max(takers, key=lambda taker: taker[1].room_bytes())[0] if takers else None

    def _free_somewhere(
        self, need: int, files: int, large: bool, wanted: Wanted | WantedEach, budget: Budget
    ) -> tuple[int | None, list[Action]]:
        """Make room for so many more files in one tier; None where that cannot be done."""
        ino = wanted.ino if isinstance(wanted, Wanted) else wanted.files[0][0]
        for live_for in (None, ino) if wanted.evicts and self._policy.tracks else (None,):
            for tier, ledger in reversed(self._usable):
                if live_for is not None and large and need > ledger.capacity_bytes // LARGE_SHARE:
                    continue
                actions = self._free(tier, need, files, live_for, wanted.owner, budget)
                if actions is not None:
                    return tier, actions
        return None, []

    def _free(
        self, tier: int, need: int, files: int, live_for: int | None, owner: Owner, budget: Budget
    ) -> list[Action] | None:
        ledger = self._ledgers[tier]
        victims = self._victims.enough(tier, ledger, need, files, live_for, owner, budget)
        if victims is None:
            return None
        return [self._traffic.evict(tier, victim) for victim in victims]

    def _refusal(self, ino: int, need: int) -> Refuse:
        if not self._usable:
            return Refuse(ino, RefusalReason.NO_TIER, 0)
        rooms = [ledger.room_bytes() for _, ledger in self._usable if ledger.room_inodes() > 0]
        if not rooms:
            return Refuse(ino, RefusalReason.NO_INODES, 0)
        return Refuse(ino, RefusalReason.NO_ROOM, need - max(rooms))

    def _grow(self, ino: int, size_bytes: int) -> list[Action]:
        copy = self._copies.get(ino)
        ledger = self._ledgers[copy.tier]
        if not ledger.usable:
            return [Refuse(ino, RefusalReason.NO_TIER, 0)]
        need = reservation(size_bytes)
        missing = need - ledger.room_bytes()
        actions: list[Action] | None = []
        if missing > 0:
            held = copy.base_bytes + copy.reserved_bytes + need
            live = copy.evicts and held <= ledger.capacity_bytes // LARGE_SHARE
            actions = self._free(copy.tier, need, 0, ino if live else None, copy.owner, Budget())
        if actions is None:
            return [Refuse(ino, RefusalReason.NO_ROOM, missing)]
        copy.reserved_bytes += need
        ledger.reserved_bytes += need
        return [*actions, Grant(ino, size_bytes)]

    # Copies in progress, and replicas at rest.

    def _drop(self, ino: int, tier: int, allocated_bytes: int) -> None:
        ledger = self.ledger(tier)
        if allocated_bytes > ledger.used_bytes or not ledger.files:
            raise ValueError(f"tier {tier} holds no such replica of inode {ino}")
        self._copies.dropped(ino, tier)
        self._traffic.dropped(ino, tier)
        self._traffic.begin_removal(ino, tier, allocated_bytes)

    # Tiers.

    def _see(self, seen: TierSeen) -> list[Action]:
        ledger = self.ledger(seen.tier)
        ledger.see(seen.capacity_bytes, seen.space, seen.written_bytes, self._reserve_percent)
        self._find_usable()
        return self._shifting.relieve(seen.tier, seen.demote)

    def _load(self, tier: int, files: int, allocated_bytes: int) -> None:
        ledger = self.ledger(tier)
        if not self.quiet(tier):
            raise ValueError(f"copies to tier {tier} are in progress")
        ledger.files = files
        ledger.used_bytes = allocated_bytes

    def _set_lost(self, tier: int, reason: str | None) -> None:
        self.ledger(tier).lost_reason = reason
        self._find_usable()

    def _find_usable(self) -> None:
        self._usable = [item for item in self._ledgers.items() if item[1].usable]
