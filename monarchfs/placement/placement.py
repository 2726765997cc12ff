"""Which tier a file is copied to: events in, actions out, no clock and no I/O.

The rule: a whole file goes to the fastest tier that has room for it. A large file that fits
nowhere goes, in part, where there is most room. What does not fit is refused without holding up
the next, which may be smaller. Nothing is evicted: inside a job, filling and keeping is the best
there is, because each epoch reads every file once in an order that says nothing of the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from monarchfs.placement.events import (
    Abandoned,
    Action,
    Dropped,
    Event,
    Grant,
    Kept,
    Loaded,
    Place,
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
from monarchfs.placement.ledger import Ledger, reservation

PARTIAL_MIN_BYTES = 64 << 20
"""A smaller file is placed whole or not at all."""

PARTIAL_ROOM_BYTES = 16 << 20
"""A tier with less room takes no partial replica: it would hold next to nothing."""

RESERVE_PERCENT = 10.0


class Eviction(Enum):
    """What is done when a file fits nowhere."""

    KEEP = "keep"
    """Nothing: what is there stays."""


@dataclass(slots=True)
class _Copy:
    """A copy in progress. A resumed one had ``base_bytes``, counted as used, before; every one may
    add ``reserved_bytes``."""

    tier: int
    resumed: bool
    base_bytes: int
    reserved_bytes: int


class Placement:
    """Decides where replicas go, and keeps the tiers' accounts.

    Constant: the tiers, the options. Changing, in ``handle`` only: the ledgers, the copies in
    progress. ``handle`` raises ValueError for an event that contradicts earlier ones (a programming
    error), and changes nothing then.
    """

    def __init__(
        self,
        tiers: Iterable[int],
        *,
        eviction: Eviction = Eviction.KEEP,
        partial_min_bytes: int = PARTIAL_MIN_BYTES,
        reserve_percent: float = RESERVE_PERCENT,
    ) -> None:
        """``tiers`` are their numbers, fastest first. None takes anything before it was seen."""
        self._eviction = eviction
        self._partial_min_bytes = partial_min_bytes
        self._reserve_percent = reserve_percent
        self._ledgers = {tier: Ledger() for tier in tiers}
        self._usable: list[tuple[int, Ledger]] = []
        self._copies: dict[int, _Copy] = {}

    def handle(self, event: Event) -> list[Action]:
        match event:
            case Wanted(ino, size_bytes):
                return self._place(ino, size_bytes)
            case RoomWanted(ino, size_bytes):
                return self._grow(ino, size_bytes)
            case Stored(ino, allocated_bytes) | Kept(ino, allocated_bytes):
                return self._come_to_rest(ino, allocated_bytes)
            case Abandoned(ino):
                return self._abandon(ino)
            case Resumed(ino, tier, allocated_bytes):
                return self._resume(ino, tier, allocated_bytes)
            case Dropped(ino, tier, allocated_bytes):
                return self._drop(ino, tier, allocated_bytes)
            case TierSeen():
                return self._see(event)
            case Loaded(tier, files, allocated_bytes):
                return self._load(tier, files, allocated_bytes)
            case TierLost(tier, reason):
                return self._set_lost(tier, reason)
            case TierBack(tier):
                return self._set_lost(tier, None)

    def usage(self, tier: int) -> tuple[int, int]:
        """The bytes that the tier's replicas occupy, and its capacity (0 until it was seen)."""
        ledger = self._ledger(tier)
        return ledger.used_bytes, ledger.capacity_bytes

    def check_invariants(self) -> None:
        """That the accounts agree with the copies in progress; for tests."""
        for tier, ledger in self._ledgers.items():
            ledger.check_invariants()
            copies = [copy for copy in self._copies.values() if copy.tier == tier]
            assert ledger.reserved_bytes == sum(copy.reserved_bytes for copy in copies)
            assert ledger.copies == sum(not copy.resumed for copy in copies)
            assert ledger.used_bytes >= sum(copy.base_bytes for copy in copies)
            assert ledger.files >= sum(copy.resumed for copy in copies)
        assert all(copy.tier in self._ledgers for copy in self._copies.values())
        usable = [(tier, ledger) for tier, ledger in self._ledgers.items() if ledger.usable]
        assert self._usable == usable

    # Files.

    def _place(self, ino: int, size_bytes: int) -> list[Action]:
        if ino in self._copies:
            raise ValueError(f"inode {ino} is being copied already")
        need = reservation(size_bytes)
        for tier, ledger in self._usable:
            if ledger.room_bytes() >= need and ledger.has_inode():
                self._copies[ino] = _Copy(tier, False, 0, need)
                ledger.reserved_bytes += need
                ledger.copies += 1
                return [Place(ino, tier, need, True)]
        return self._place_part(ino, size_bytes) or self._make_room(ino, need)

    def _place_part(self, ino: int, size_bytes: int) -> list[Action]:
        """Place the file in part where there is most room; nothing if it is no file for that."""
        takers = [(tier, ledger) for tier, ledger in self._usable if ledger.has_inode()]
        if size_bytes < self._partial_min_bytes or not takers:
            return []
        tier, ledger = max(takers, key=lambda taker: taker[1].room_bytes())
        if ledger.room_bytes() < PARTIAL_ROOM_BYTES:
            return []
        self._copies[ino] = _Copy(tier, False, 0, 0)
        ledger.copies += 1
        return [Place(ino, tier, 0, False)]

    def _make_room(self, ino: int, need: int) -> list[Action]:
        """What else can be done for a file that fits nowhere."""
        match self._eviction:
            case Eviction.KEEP:
                return [self._refusal(ino, need)]

    def _refusal(self, ino: int, need: int) -> Refuse:
        if not self._usable:
            return Refuse(ino, RefusalReason.NO_TIER, 0)
        rooms = [ledger.room_bytes() for _, ledger in self._usable if ledger.has_inode()]
        if not rooms:
            return Refuse(ino, RefusalReason.NO_INODES, 0)
        return Refuse(ino, RefusalReason.NO_ROOM, need - max(rooms))

    def _grow(self, ino: int, size_bytes: int) -> list[Action]:
        copy = self._copy(ino)
        ledger = self._ledgers[copy.tier]
        if not ledger.usable:
            return [Refuse(ino, RefusalReason.NO_TIER, 0)]
        need = reservation(size_bytes)
        missing = need - ledger.room_bytes()
        if missing > 0:
            return [Refuse(ino, RefusalReason.NO_ROOM, missing)]
        copy.reserved_bytes += need
        ledger.reserved_bytes += need
        return [Grant(ino, size_bytes)]

    def _resume(self, ino: int, tier: int, allocated_bytes: int) -> list[Action]:
        ledger = self._ledger(tier)
        if ino in self._copies:
            raise ValueError(f"inode {ino} is being copied already")
        resumed = [copy for copy in self._copies.values() if copy.tier == tier and copy.resumed]
        at_rest_bytes = ledger.used_bytes - sum(copy.base_bytes for copy in resumed)
        if allocated_bytes > at_rest_bytes or ledger.files <= len(resumed):
            raise ValueError(f"tier {tier} holds no such replica of inode {ino}")
        self._copies[ino] = _Copy(tier, True, allocated_bytes, 0)
        return []

    def _come_to_rest(self, ino: int, allocated_bytes: int) -> list[Action]:
        copy = self._copy(ino)
        ledger = self._ledgers[copy.tier]
        ledger.reserved_bytes -= copy.reserved_bytes
        added_bytes = allocated_bytes - copy.base_bytes
        ledger.used_bytes += added_bytes
        ledger.free_bytes -= added_bytes
        if not copy.resumed:
            ledger.copies -= 1
            ledger.files += 1
            ledger.free_inodes -= 1
        del self._copies[ino]
        return []

    def _abandon(self, ino: int) -> list[Action]:
        copy = self._copies.pop(ino, None)
        if copy is not None:
            ledger = self._ledgers[copy.tier]
            ledger.reserved_bytes -= copy.reserved_bytes
            ledger.used_bytes -= copy.base_bytes
            if copy.resumed:
                ledger.files -= 1
            else:
                ledger.copies -= 1
        return []

    def _drop(self, ino: int, tier: int, allocated_bytes: int) -> list[Action]:
        ledger = self._ledger(tier)
        if allocated_bytes > ledger.used_bytes or not ledger.files:
            raise ValueError(f"tier {tier} holds no such replica of inode {ino}")
        copy = self._copies.get(ino)
        if copy is not None and copy.resumed and copy.tier == tier:
            # What it was resumed from is gone; what the copy adds is a replica of its own.
            copy.resumed = False
            copy.base_bytes = 0
            ledger.copies += 1
        # free_bytes stays: what was given back counts once it is seen.
        ledger.used_bytes -= allocated_bytes
        ledger.files -= 1
        return []

    def _copy(self, ino: int) -> _Copy:
        try:
            return self._copies[ino]
        except KeyError:
            raise ValueError(f"inode {ino} is not being copied") from None

    # Tiers.

    def _ledger(self, tier: int) -> Ledger:
        try:
            return self._ledgers[tier]
        except KeyError:
            raise ValueError(f"there is no tier {tier}") from None

    def _see(self, seen: TierSeen) -> list[Action]:
        ledger = self._ledger(seen.tier)
        ledger.see(seen.capacity_bytes, seen.space, seen.written_bytes, self._reserve_percent)
        self._find_usable()
        return []

    def _load(self, tier: int, files: int, allocated_bytes: int) -> list[Action]:
        ledger = self._ledger(tier)
        if any(copy.tier == tier for copy in self._copies.values()):
            raise ValueError(f"copies to tier {tier} are in progress")
        ledger.files = files
        ledger.used_bytes = allocated_bytes
        return []

    def _set_lost(self, tier: int, reason: str | None) -> list[Action]:
        self._ledger(tier).lost_reason = reason
        self._find_usable()
        return []

    def _find_usable(self) -> None:
        self._usable = [item for item in self._ledgers.items() if item[1].usable]
