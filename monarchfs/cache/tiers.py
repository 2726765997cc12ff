"""The tiers of one mount, as the cache sees them: their room, and what goes wrong with them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from enum import Enum

import trio

from monarchfs.cache.index.index import Index
from monarchfs.cache.placement.events import Action, PlacementEvent, TierBack, TierLost, TierSeen
from monarchfs.cache.placement.placement import Placement
from monarchfs.cache.readers import Readers
from monarchfs.cache.store.tier import Tier
from monarchfs.metrics import Metrics
from monarchfs.system.memory import MemoryHeadroom
from monarchfs.types import Space, TierSize

FIRST_PROBE_SECONDS = 1.0
LAST_PROBE_SECONDS = 60.0

CALM_SECONDS = 60.0
"""A tier that fails again within this time after it came back is probed less and less often."""

NOT_THE_TIERS = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EBUSY),
        *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.EFBIG),
    }
)
"""Errors that concern this process, this node or one file, but not the tier."""

UNREADABLE = frozenset(
    {errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EREMOTEIO}
)
"""Errors of reading that mean the whole disk."""

_MEANINGS = {
    errno.ENOSPC: "its file system is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "its file system is read-only",
    errno.EIO: "its disk fails",
    errno.ENOENT: "its directory is gone",
}


class Health:
    """Out of service from the first failure until a probe succeeds. Pure; times are seconds of a
    monotonic clock.

    Changing: ``reason`` (None: in service), ``readable`` (whether what it holds is still served).
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.readable = True
        self._interval = FIRST_PROBE_SECONDS
        self._next_probe = 0.0
        self._back_at = -CALM_SECONDS

    def failed(self, now: float, error: OSError, *, reading: bool) -> bool:
        """An operation failed; True if that took the tier out of service."""
        if error.errno in NOT_THE_TIERS:
            return False
        if reading and error.errno in UNREADABLE:
            self.readable = False
        elif reading:
            return False
        if self.reason is not None:
            return False
        if now - self._back_at >= CALM_SECONDS:
            self._interval = FIRST_PROBE_SECONDS
        self.reason = _meaning(error)
        self._next_probe = now + self._interval
        return True

    def probe_due(self, now: float) -> bool:
        return self.reason is not None and now >= self._next_probe

    def probed(self, now: float, error: OSError | None) -> bool:
        """True if that put the tier back into service."""
        if self.reason is None:
            return False
        self._interval = min(2 * self._interval, LAST_PROBE_SECONDS)
        if error is not None:
            self.reason = _meaning(error)
            self._next_probe = now + self._interval
            return False
        self.reason = None
        self.readable = True
        self._back_at = now
        return True


def _meaning(error: OSError) -> str:
    text = error.strerror or os.strerror(error.errno or errno.EIO)
    meaning = _MEANINGS.get(error.errno or 0)
    return f"{meaning} ({text})" if meaning else text


log = logging.getLogger(__name__)

SPACE_MAX_AGE_SECONDS = 0.25
"""Others fill the tier's file system too: placement decides on a statvfs no older than this."""


class Outage(Enum):
    """Why a tier takes nothing."""

    SPACE = "space"
    """It does not say how much room it has."""
    HEALTH = "health"
    """Something failed; it is probed."""
    RECONCILIATION = "reconciliation"
    """Its files are being compared with the index."""
    INDEX = "index"
    """The index cannot be written: what is copied could not be recorded."""


class Tiers:
    """Constant: ``by_id``, the sizes. Changing: ``written``, the bytes that the copies in progress
    have put into each tier; when the tiers were looked at; why which of them take nothing."""

    def __init__(
        self,
        tiers: Sequence[tuple[Tier, TierSize]],
        index: Index,
        placement: Placement,
        handle: Callable[[PlacementEvent], list[Action]],
        metrics: Metrics,
        headroom: Callable[[], MemoryHeadroom],
        reserve_percent: float,
        readers: Readers,
    ) -> None:
        """``handle`` passes events to placement and carries out its actions; ``headroom`` says how
        much memory is left for tiers in memory."""
        self.by_id = {tier.id: tier for tier, _size in tiers}
        self.quiet = placement.quiet
        self.written = dict.fromkeys(self.by_id, 0)
        self._sizes = {tier.id: size for tier, size in tiers}
        self._index = index
        self._placement = placement
        self._handle = handle
        self._metrics = metrics
        self._headroom = headroom
        self._reserve_percent = reserve_percent
        self._readers = readers
        self._seen_at = -SPACE_MAX_AGE_SECONDS
        self._health = {tier_id: Health() for tier_id in self.by_id}
        self._outages: dict[int, dict[Outage, str]] = {tier_id: {} for tier_id in self.by_id}

    # -- room

    def measure(self) -> None:
        """Tell placement how much room there is. A tier that does not say gets nothing more."""
        now = trio.current_time()
        if now - self._seen_at < SPACE_MAX_AGE_SECONDS:
            return
        self._seen_at = now
        frozen = self._index.environment.frozen
        for tier in self.by_id.values():
            if frozen is not None:
                self.begin_outage(tier.id, Outage.INDEX, frozen)
            try:
                space = tier.space()
            except OSError as exc:
                if Outage.SPACE not in self._outages[tier.id]:
                    self.failed(tier, "asking for its room", exc)
                    self.begin_outage(tier.id, Outage.SPACE, f"its room is unknown: {exc.strerror}")
                continue
            self.end_outage(tier.id, Outage.SPACE)
            self._see(tier, space)

    def _see(self, tier: Tier, space: Space) -> None:
        capacity = self._sizes[tier.id].resolve(space.total_bytes)
        capacity = max(0, capacity - tier.overhead_bytes)
        written = self.written[tier.id]
        pressed = False
        if tier.memory_backed:
            # What is free is free for this tier too, but for what shall stay free for others.
            headroom = self._headroom()
            spare = headroom.available_bytes - headroom.limit_bytes * self._reserve_percent / 100
            allowed = max(0, int(self._placement.ledger(tier.id).usage[0] + written + spare))
            pressed = allowed < capacity
            capacity = min(capacity, allowed)
        self._handle(TierSeen(tier.id, capacity, space, written, demote=pressed))

    # -- health

    def failed(self, tier: Tier, doing: str, exc: OSError, *, reading: bool = False) -> None:
        """Count and log what was routed around; most errors take the tier out of service."""
        self._metrics.tier_failed(tier.path, exc.errno)
        log.warning("tier %s: %s: %s", tier.path, doing, exc)
        health = self._health[tier.id]
        if health.failed(trio.current_time(), exc, reading=reading):
            assert health.reason is not None
            log.warning("tier %s is out of service: %s", tier.path, health.reason)
            self.begin_outage(tier.id, Outage.HEALTH, health.reason)
        if not health.readable:
            self.serve(tier)

    def readable(self, tier_id: int) -> bool:
        """Whether what the tier holds is served: nothing is lost while it is not."""
        return self._health[tier_id].readable

    def serve(self, tier: Tier) -> None:
        """Let the threads of the C part read what the tier holds, if that may be. They do not look
        whether it is there, as ``Tier.open_complete`` does: so not before the records are right."""
        right = Outage.RECONCILIATION not in self._outages[tier.id]
        served = right and self.readable(tier.id)
        self._readers.serve(tier.id, tier.dir_fd if served else None)

    def due(self) -> list[Tier]:
        """The tiers out of service that are to be tried now."""
        now = trio.current_time()
        return [tier for tier in self.by_id.values() if self._health[tier.id].probe_due(now)]

    def probed(self, tier: Tier, error: OSError | None) -> bool:
        """It was tried; True if it is back."""
        health = self._health[tier.id]
        if health.probed(trio.current_time(), error):
            log.info("tier %s is back in service", tier.path)
            self._seen_at = -SPACE_MAX_AGE_SECONDS
            self.end_outage(tier.id, Outage.HEALTH)
            self.serve(tier)
            self.measure()
            return True
        if health.reason is not None:
            self.begin_outage(tier.id, Outage.HEALTH, health.reason)
        return False

    # -- whether it takes anything

    def begin_outage(self, tier_id: int, kind: Outage, reason: str) -> None:
        """Nothing is placed in the tier until all of its outages have ended."""
        outages = self._outages[tier_id]
        known = outages.get(kind)
        outages[kind] = reason
        if known != reason:
            self._handle(TierLost(tier_id, reason))
        if kind is Outage.RECONCILIATION:
            self.serve(self.by_id[tier_id])

    def end_outage(self, tier_id: int, kind: Outage) -> None:
        outages = self._outages[tier_id]
        if outages.pop(kind, None) is not None and not outages:
            self._handle(TierBack(tier_id))
        if kind is Outage.RECONCILIATION:
            self.serve(self.by_id[tier_id])

    def out_of_service(self, tier_id: int) -> str | None:
        """Why the tier takes nothing, for people; None where it does."""
        return "; ".join(self._outages[tier_id].values()) or None
