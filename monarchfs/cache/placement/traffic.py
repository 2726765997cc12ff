"""What is in progress: files that are leaving a tier, or moving from one tier to another; copies,
what each has reserved, and what becomes of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from monarchfs.cache.placement.events import Evict, Move, Owner, Resumed
from monarchfs.cache.placement.ledger import Ledger, reservation
from monarchfs.cache.placement.policies import Policy
from monarchfs.cache.placement.victims import Victim

MOST_MOVES = 2
"""How many replicas move between tiers at a time: moves compete with the jobs' reads."""


@dataclass(slots=True)
class Moving:
    """A move under way. ``dropped``: the replica lost its record meanwhile, and is leaving.
    ``then`` is the replica (and its tier) for which the move makes room."""

    tier: int
    to: int
    allocated_bytes: int
    reserved_bytes: int
    then: tuple[int, int] | None
    dropped: bool = False


class Traffic:
    """Keeps the ledgers and the policy in step with what leaves and moves. Changing: the files that
    are leaving, by inode and tier, each file's bytes in the order in which they began; the moves
    under way."""

    def __init__(self, ledgers: dict[int, Ledger], policy: Policy) -> None:
        self._ledgers = ledgers
        self._policy = policy
        self._leaving: dict[tuple[int, int], list[int]] = {}
        self._moves: dict[int, Moving] = {}

    @property
    def free_moves(self) -> int:
        """How many more may start."""
        return MOST_MOVES - len(self._moves)

    def busy(self, ino: int, tier: int) -> bool:
        """Whether something happens already to the replica of ``ino`` in the tier."""
        return ino in self._moves or (ino, tier) in self._leaving

    def awaited(self, ino: int) -> bool:
        """Whether a move makes room for the replica of ``ino``."""
        return any(move.then is not None and move.then[0] == ino for move in self._moves.values())

    def moving(self, ino: int) -> Moving | None:
        """The move of the replica of ``ino``, unless it was dropped meanwhile."""
        move = self._moves.get(ino)
        return None if move is None or move.dropped else move

    def touches(self, tier: int) -> bool:
        """Whether a move from or to the tier is under way."""
        return any(tier in (move.tier, move.to) for move in self._moves.values())

    def resize(self, ino: int, tier: int, more_bytes: int) -> None:
        if self.busy(ino, tier):
            raise ValueError(f"the replica of inode {ino} is leaving tier {tier}, or moves")
        self._ledgers[tier].used_bytes += more_bytes
        self._ledgers[tier].free_bytes -= more_bytes

    # Leaving.

    def evict(self, tier: int, victim: Victim) -> Evict:
        self.begin_removal(victim.ino, tier, victim.allocated_bytes)
        return Evict(victim.ino, tier, victim.allocated_bytes, victim.reason)

    def begin_removal(self, ino: int, tier: int, allocated_bytes: int) -> None:
        self._leaving.setdefault((ino, tier), []).append(allocated_bytes)
        self._ledgers[tier].begin_removal(allocated_bytes)
        self._policy.removed(tier, ino)

    def removed(self, ino: int, tier: int) -> None:
        self._ledgers[tier].removed(self._take_leaving(ino, tier))

    def removal_failed(self, ino: int, tier: int) -> None:
        self._ledgers[tier].removal_failed(self._take_leaving(ino, tier))
        # As the hottest, so that it is not tried again at once.
        self._policy.added(tier, ino)

    def _take_leaving(self, ino: int, tier: int) -> int:
        leaving = self._leaving.get((ino, tier))
        if leaving is None:
            raise ValueError(f"no replica of inode {ino} is leaving tier {tier}")
        allocated_bytes = leaving.pop(0)
        if not leaving:
            del self._leaving[ino, tier]
        return allocated_bytes

    # Moving.

    def move(
        self,
        ino: int,
        tier: int,
        to: int,
        allocated_bytes: int,
        then: tuple[int, int] | None = None,
    ) -> Move:
        reserved_bytes = reservation(allocated_bytes)
        self._moves[ino] = Moving(tier, to, allocated_bytes, reserved_bytes, then)
        self._ledgers[tier].departing_bytes += allocated_bytes
        self._ledgers[to].reserve(reserved_bytes)
        return Move(ino, tier, to, reserved_bytes)

    def moved(self, ino: int, allocated_bytes: int) -> Moving:
        move = self._take_move(ino)
        self._ledgers[move.to].store(move.reserved_bytes, allocated_bytes)
        if move.dropped:
            self._policy.added(move.to, ino)
        else:
            self._ledgers[move.tier].departing_bytes -= move.allocated_bytes
            self._policy.moved(ino, move.tier, move.to)
            self.begin_removal(ino, move.tier, move.allocated_bytes)
        return move

    def move_failed(self, ino: int) -> Moving:
        move = self._take_move(ino)
        self._ledgers[move.to].release(move.reserved_bytes)
        if not move.dropped:
            self._ledgers[move.tier].departing_bytes -= move.allocated_bytes
        return move

    def dropped(self, ino: int, tier: int) -> None:
        """A replica is dropped; it may be moving."""
        move = self.moving(ino)
        if move is not None and move.tier == tier:
            move.dropped = True
            self._ledgers[tier].departing_bytes -= move.allocated_bytes

    def _take_move(self, ino: int) -> Moving:
        try:
            return self._moves.pop(ino)
        except KeyError:
            raise ValueError(f"inode {ino} is not being moved") from None


@dataclass(slots=True)
class CopyUnderWay:
    """A copy that may add ``reserved_bytes``. If it was resumed, its ``base_bytes`` count as used.
    ``evicts``, ``owner``: which other replicas may be evicted for it."""

    tier: int
    resumed: bool
    base_bytes: int
    reserved_bytes: int
    evicts: bool
    owner: Owner


class CopiesUnderWay:
    """Keeps the ledgers and the policy in step with what is copied. Changing: the copies, by inode
    number. Raises ValueError for what contradicts them, and changes nothing then."""

    def __init__(self, ledgers: dict[int, Ledger], policy: Policy) -> None:
        self._ledgers = ledgers
        self._policy = policy
        self._copies: dict[int, CopyUnderWay] = {}

    def refuse(self, inos: Iterable[int]) -> None:
        """Raise ValueError if one of these is being copied, or named twice."""
        seen: set[int] = set()
        for ino in inos:
            if ino in self._copies or ino in seen:
                raise ValueError(f"inode {ino} is being copied already, or named twice")
            seen.add(ino)

    def get(self, ino: int) -> CopyUnderWay:
        try:
            return self._copies[ino]
        except KeyError:
            raise ValueError(f"inode {ino} is not being copied") from None

    def in_tier(self, tier: int) -> list[CopyUnderWay]:
        return [copy for copy in self._copies.values() if copy.tier == tier]

    def start(
        self, ino: int, tier: int, reserved_bytes: int, *, evicts: bool, owner: Owner
    ) -> None:
        self._copies[ino] = CopyUnderWay(tier, False, 0, reserved_bytes, evicts, owner)
        self._ledgers[tier].reserve(reserved_bytes)

    def resume(self, event: Resumed) -> None:
        ino, tier, ledger = event.ino, event.tier, self._ledgers[event.tier]
        self.refuse([ino])
        resumed = [copy for copy in self.in_tier(tier) if copy.resumed]
        at_rest_bytes = ledger.used_bytes - sum(copy.base_bytes for copy in resumed)
        if event.allocated_bytes > at_rest_bytes or ledger.files <= len(resumed):
            raise ValueError(f"tier {tier} holds no such replica of inode {ino}")
        self._copies[ino] = CopyUnderWay(
            tier, True, event.allocated_bytes, 0, event.evicts, event.owner
        )
        self._policy.removed(tier, ino)

    def store(self, files: Sequence[tuple[int, int]]) -> None:
        """Each copy (number, allocated bytes) is complete or suspended."""
        copies = {ino: (self.get(ino), allocated_bytes) for ino, allocated_bytes in files}
        if len(copies) < len(files):
            raise ValueError("one of the inodes is named twice")
        for ino, (copy, allocated_bytes) in copies.items():
            ledger = self._ledgers[copy.tier]
            if copy.resumed:
                added_bytes = allocated_bytes - copy.base_bytes
                ledger.reserved_bytes -= copy.reserved_bytes
                ledger.used_bytes += added_bytes
                ledger.free_bytes -= added_bytes
            else:
                ledger.store(copy.reserved_bytes, allocated_bytes)
            del self._copies[ino]
            self._policy.added(copy.tier, ino)

    def abandon(self, ino: int) -> None:
        copy = self._copies.pop(ino, None)
        if copy is None:
            return
        ledger = self._ledgers[copy.tier]
        if copy.resumed:
            # The bytes that this frees count after the next ``TierSeen``.
            ledger.reserved_bytes -= copy.reserved_bytes
            ledger.used_bytes -= copy.base_bytes
            ledger.files -= 1
        else:
            ledger.release(copy.reserved_bytes)

    def dropped(self, ino: int, tier: int) -> None:
        """The replica that a copy was resumed from goes; what the copy adds is one of its own."""
        copy = self._copies.get(ino)
        if copy is not None and copy.resumed and copy.tier == tier:
            copy.resumed = False
            copy.base_bytes = 0
            self._ledgers[tier].copies += 1
