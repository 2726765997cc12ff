"""The copies in progress: what each has reserved, and what becomes of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from monarchfs.cache.placement.events import Owner, Resumed
from monarchfs.cache.placement.ledger import Ledger
from monarchfs.cache.placement.policies import Policy


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
