"""How long what is known of the source may be believed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from monarchfs.types import FreshnessMode

NS = 1_000_000_000

FOREVER_SECONDS = 365 * 86_400.0
"""What the kernel is told where nothing changes while mounted."""

UNANSWERED_SECONDS = 1.0
"""The kernel asks again after this long where the source did not answer in time."""

OPEN_ATTRIBUTES_SECONDS = 1.0
"""With ``open``, attributes may be this old for fstat(2): every path walk and open asks anyway."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """The mount's promise. ``mount_ns`` is when it was mounted: what an earlier mount knew must be
    confirmed once, whatever the mode."""

    mode: FreshnessMode
    ttl_ns: int
    mount_ns: int

    @property
    def serves_stale(self) -> bool:
        """Whether known metadata are served when the source does not answer."""
        return self.mode is not FreshnessMode.OPEN

    def fresh(self, checked_ns: int, now_ns: int) -> bool:
        """Whether a name or attributes last asked for at ``checked_ns`` need no asking now."""
        if checked_ns < self.mount_ns:
            return False
        match self.mode:
            case FreshnessMode.IMMUTABLE:
                return True
            case FreshnessMode.TTL:
                return 0 <= now_ns - checked_ns < self.ttl_ns
            case FreshnessMode.OPEN:
                return False

    def fresh_attributes(self, checked_ns: int, now_ns: int) -> bool:
        """The same for getattr of an inode that a path walk has found already."""
        if self.mode is FreshnessMode.OPEN:
            return 0 <= now_ns - checked_ns < OPEN_ATTRIBUTES_SECONDS * NS
        return self.fresh(checked_ns, now_ns)

    def timeouts(self, checked_ns: int, now_ns: int) -> tuple[float, float]:
        """Seconds for which the kernel may keep (the name, the attributes)."""
        match self.mode:
            case FreshnessMode.IMMUTABLE:
                return FOREVER_SECONDS, FOREVER_SECONDS
            case FreshnessMode.TTL:
                left = (checked_ns + self.ttl_ns - now_ns) / NS
                left = min(max(left, 0.0), self.ttl_ns / NS)
                return left, left
            case FreshnessMode.OPEN:
                return 0.0, OPEN_ATTRIBUTES_SECONDS
