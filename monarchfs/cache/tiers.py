"""The tiers of one mount, as the cache sees them: their room, and what goes wrong with them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from monarchfs.metrics import Metrics
from monarchfs.placement.events import TierBack, TierLost, TierSeen
from monarchfs.placement.placement import Placement
from monarchfs.store.tier import Tier
from monarchfs.types import Replica, ReplicaState, TierSize

log = logging.getLogger(__name__)

SPACE_MAX_AGE_SECONDS = 0.25
"""Others fill the tier's file system too: placement decides on a statvfs no older than this."""


class Tiers:
    """Constant: ``by_id``, the sizes. Changing: ``written``, the bytes that the copies in progress
    have put into each tier; when the tiers were looked at; which of them did not answer then."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        sizes: Sequence[TierSize],
        placement: Placement,
        metrics: Metrics,
    ) -> None:
        self.by_id = {tier.id: tier for tier in tiers}
        self.written = dict.fromkeys(self.by_id, 0)
        self._sizes = {tier.id: size for tier, size in zip(tiers, sizes, strict=True)}
        self._placement = placement
        self._metrics = metrics
        self._seen_at = -SPACE_MAX_AGE_SECONDS
        self._lost: set[int] = set()

    def look(self) -> None:
        """Tell placement how much room there is. A tier that does not say gets nothing more."""
        now = trio.current_time()
        if now - self._seen_at < SPACE_MAX_AGE_SECONDS:
            return
        self._seen_at = now
        for tier in self.by_id.values():
            try:
                space = tier.space()
            except OSError as exc:
                if tier.id not in self._lost:
                    self._lost.add(tier.id)
                    self.trouble(tier, "nothing is placed there, its room is unknown", exc)
                    self._placement.handle(TierLost(tier.id, str(exc)))
                continue
            if tier.id in self._lost:
                self._lost.discard(tier.id)
                self._placement.handle(TierBack(tier.id))
            capacity = self._sizes[tier.id].resolve(space.total_bytes)
            self._placement.handle(TierSeen(tier.id, capacity, space, self.written[tier.id]))

    def unlink(self, record: Replica) -> None:
        """Remove the file of a record that was dropped. One of an unknown tier passes."""
        tier = self.by_id.get(record.tier)
        if tier is None:
            return
        try:
            if record.state is ReplicaState.RESIDENT:
                tier.remove(record.version)
            else:
                tier.remove_part(record.version)
        except OSError as exc:
            self.trouble(tier, "removing", exc)

    def trouble(self, tier: Tier, doing: str, exc: OSError) -> None:
        """Count and log what was routed around."""
        self._metrics.tier_errors += 1
        log.warning("tier %s: %s: %s", tier.path, doing, exc)
