"""Which replicas there are: the records, the files they stand for, and the books."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

import trio

from monarchfs.cache.durable import Durability
from monarchfs.cache.replicas import OpenReplica
from monarchfs.cache.tiers import Tiers
from monarchfs.index.index import Index
from monarchfs.metrics import Metrics
from monarchfs.placement.events import Action, Dropped, Event
from monarchfs.placement.placement import Placement
from monarchfs.store.tier import Tier
from monarchfs.types import IndexWriteError, Node, Replica, TierSize

log = logging.getLogger(__name__)

REASONS_KEPT = 10_000
"""So many reasons why a file is not resident are remembered for ``user.monarchfs.reason``."""


class Records:
    """The part of the cache that filling and reading share.

    Constant: ``index``, ``tiers`` by their numbers, ``local``. Changing: ``reasons``, the replicas
    that are open by inode, and which of those go at their last release.
    """

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Tier],
        sizes: Sequence[TierSize],
        placement: Placement,
        metrics: Metrics,
        local: trio.CapacityLimiter,
    ) -> None:
        """``local`` limits the threads that read and write tiers, apart from the source's."""
        self.index = index
        self.local = local
        self.reasons: OrderedDict[int, str] = OrderedDict()
        self._tiers = Tiers(tiers, sizes, placement, metrics)
        self.tiers = self._tiers.by_id
        self._durability = Durability(index, self._tiers)
        self._placement = placement
        self._metrics = metrics
        self._open: dict[int, OpenReplica] = {}
        self._doomed: dict[int, str] = {}

    def state(self, ino: int) -> Replica | None:
        return self.index.replica(ino)

    def explain(self, ino: int, reason: str) -> None:
        """Remember why ``ino`` is not resident."""
        self.reasons[ino] = reason
        self.reasons.move_to_end(ino)
        if len(self.reasons) > REASONS_KEPT:
            self.reasons.popitem(last=False)

    def outdated(self, node: Node) -> None:
        """The source was seen to hold another version than the node stands for."""
        try:
            self.index.mark_outdated(node.ino)
        except IndexWriteError as exc:
            log.warning("inode %d is not marked as outdated: %s", node.ino, exc)

    def drop(self, ino: int, reason: str) -> None:
        """Forget and remove the replica of ``ino``; one that is open goes at its last release."""
        if ino in self._open:
            self._doomed[ino] = reason
            return
        record = self.index.replica(ino)
        if record is None or not self._forget(ino, record):
            return
        if record.tier in self.tiers:
            self._handle(Dropped(ino, record.tier, record.allocated_bytes))
        self.explain(ino, reason)
        self._tiers.unlink(record)

    def _forget(self, ino: int, record: Replica) -> bool:
        """Remove a record; False where the index cannot be written: it then stays, and counts."""
        try:
            self.index.drop_replica(ino)
        except IndexWriteError as exc:
            log.warning("the replica of inode %d stays recorded: %s", ino, exc)
            return False
        self._durability.dropped(ino, record.tier)
        return True

    def _handle(self, event: Event) -> list[Action]:
        return self._placement.handle(event)
