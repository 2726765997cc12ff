"""Files that are leaving a tier, or moving from one tier to another."""

from __future__ import annotations

from dataclasses import dataclass

from monarchfs.cache.placement.events import Evict, Move
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
    are leaving, by inode, in the order in which they began; the moves under way."""

    def __init__(self, ledgers: dict[int, Ledger], policy: Policy) -> None:
        self._ledgers = ledgers
        self._policy = policy
        self._leaving: dict[int, list[tuple[int, int]]] = {}
        self._moves: dict[int, Moving] = {}

    @property
    def free_moves(self) -> int:
        """How many more may start."""
        return MOST_MOVES - len(self._moves)

    def busy(self, ino: int, tier: int) -> bool:
        """Whether something happens already to the replica of ``ino`` in the tier."""
        return ino in self._moves or any(at == tier for at, _ in self._leaving.get(ino, ()))

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
        self._leaving.setdefault(ino, []).append((tier, allocated_bytes))
        self._ledgers[tier].begin_removal(allocated_bytes)
        self._policy.removed(tier, ino)

    def removed(self, ino: int, tier: int | None) -> None:
        at, allocated_bytes = self._take_leaving(ino, tier)
        self._ledgers[at].removed(allocated_bytes)

    def removal_failed(self, ino: int, tier: int | None) -> None:
        at, allocated_bytes = self._take_leaving(ino, tier)
        self._ledgers[at].removal_failed(allocated_bytes)
        # As the hottest, so that it is not tried again at once.
        self._policy.added(at, ino)

    def _take_leaving(self, ino: int, tier: int | None) -> tuple[int, int]:
        leaving = self._leaving.get(ino, [])
        for index, item in enumerate(leaving):
            if tier is None or item[0] == tier:
                del leaving[index]
                if not leaving:
                    del self._leaving[ino]
                return item
        raise ValueError(f"no replica of inode {ino} is leaving")

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
