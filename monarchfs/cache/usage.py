"""How full the tiers are, for people and for those who plan copies."""

from __future__ import annotations

from typing import NamedTuple

from monarchfs.cache.index.index import Index
from monarchfs.cache.placement.ledger import Room, reservation
from monarchfs.cache.placement.placement import Placement
from monarchfs.cache.removals import Removals
from monarchfs.cache.store.tier import Tier
from monarchfs.cache.tiers import Tiers
from monarchfs.types import TierTotals


class TierRoom(NamedTuple):
    """What a tier has left, for people; ``out_of_service`` is why it takes nothing."""

    path: str
    capacity_bytes: int
    room: Room
    out_of_service: str | None

    def takes(self, need_bytes: int) -> bool:
        return (
            self.out_of_service is None and self.room.bytes >= need_bytes and self.room.inodes > 0
        )


class TierUsage:
    """Constant: its parts. Changing: by tier, the most bytes that were used so far."""

    def __init__(
        self, index: Index, tiers: Tiers, placement: Placement, removals: Removals
    ) -> None:
        self.out_of_service = tiers.out_of_service
        self._index = index
        self._tiers = tiers
        self._placement = placement
        self._removals = removals
        self._peaks: dict[int, int] = {}

    @property
    def removals_pending(self) -> int:
        """How many replicas' files are being removed."""
        return self._removals.count

    def room_for(self, size: int) -> tuple[int, list[TierRoom]]:
        """What a file of ``size`` bytes may come to need, and what each tier has left."""
        self._tiers.measure()
        rooms = []
        for tier in self._tiers.by_id.values():
            _used, capacity = self.of(tier)
            room = self._placement.ledger(tier.id).room
            reason = self._tiers.out_of_service(tier.id)
            rooms.append(TierRoom(tier.path, capacity, room, reason))
        return reservation(size), rooms

    def of(self, tier: Tier) -> tuple[int, int]:
        """Bytes used and capacity: placement knows nothing of what is no replica, and of copies in
        progress only what they may come to need."""
        used, capacity = self._placement.ledger(tier.id).usage
        overhead = tier.overhead_bytes
        return used + self._tiers.written[tier.id] + overhead, capacity + overhead

    def out_of_reach(self, tier_id: int) -> str | None:
        """Why what the tier holds is not served either; None where it is."""
        if self._tiers.readable(tier_id):
            return None
        return self._tiers.out_of_service(tier_id)

    def report(self) -> list[dict[str, object]]:
        """One dict a tier, with the keys of ``status --json``."""
        self._tiers.measure()
        totals = self._index.replicas.tier_totals()
        result: list[dict[str, object]] = []
        for tier in self._tiers.by_id.values():
            used, capacity = self.of(tier)
            held = totals.get(tier.id, TierTotals())
            self._peaks[tier.id] = max(used, self._peaks.get(tier.id, 0))
            result.append(
                {
                    "path": tier.path,
                    "capacity_bytes": capacity,
                    "used_bytes": used,
                    "peak_used_bytes": self._peaks[tier.id],
                    "files": held.resident + held.partial + held.found,
                    "unclaimed": held.found,
                    "out_of_service": self._tiers.out_of_service(tier.id),
                }
            )
        return result
