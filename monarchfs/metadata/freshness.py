"""How long known names, attributes and listings may be believed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from monarchfs.types import FreshnessMode, Listing, Node, SourceVersion

NS = 1_000_000_000

FOREVER_NS = (1 << 63) - 1

FOREVER_SECONDS = 365 * 86_400.0
"""For how long the kernel may keep what does not change while mounted."""

UNANSWERED_SECONDS = 1.0
"""The kernel asks again after this long where the source did not answer in time."""

OPEN_ATTRIBUTES_SECONDS = 1.0
"""With ``open``, fstat(2) may show attributes of this age: every path walk and open asks anyway."""

UNSETTLED_SECONDS = 0.05
"""The kernel asks again after this long where a change since would not show in the timestamps."""

KERNEL_LATE_NS = 20_000_000
"""By so much longer the kernel may keep an answer: two ticks, of 10 ms where they are longest. It
rounds the seconds up to a tick, and counts them from the end of the current one (``fs/fuse/dir.c``,
``time_to_jiffies``)."""

NEAR_EXPIRY = 0.75
"""After this share of the ttl, a directory that is used is asked for ahead."""

WRITTEN_NS = NS
"""A file that was changed more recently is taken to be still being written."""

SURELY_SETTLED_NS = 2 * NS
"""Longer than any tick of ``SourceVersion.past_racy_window``."""


def past_racy_window(ctime_ns: int, now_ns: int) -> bool:
    """``SourceVersion.past_racy_window``, quicker for most."""
    if 0 <= ctime_ns < now_ns - SURELY_SETTLED_NS:
        return True
    return SourceVersion(0, 0, 0, 0, ctime_ns).past_racy_window(now_ns)


@dataclass(frozen=True, slots=True)
class Freshness:
    """The mount's promise. ``mount_ns`` is the time of the mount: what an earlier mount knew must
    be confirmed once, whatever the mode."""

    mode: FreshnessMode
    ttl_ns: int
    mount_ns: int

    @property
    def serves_stale(self) -> bool:
        """Whether known metadata are served when the source does not answer."""
        return self.mode is not FreshnessMode.OPEN

    @property
    def trusts_times(self) -> bool:
        """Whether a version is believed even if it was seen in the tick of its last change."""
        return self.mode is FreshnessMode.IMMUTABLE

    def fresh(self, checked_ns: int, now_ns: int) -> bool:
        """Whether a name or attributes last asked for at ``checked_ns`` may be believed now."""
        if checked_ns < self.mount_ns:
            return False
        if self.mode is FreshnessMode.TTL:
            return 0 <= now_ns - checked_ns < self.ttl_ns
        return self.mode is FreshnessMode.IMMUTABLE

    def near_expiry_ns(self, now_ns: int) -> int | None:
        """What was asked for at this time or earlier will soon be too old; None: nothing will."""
        if self.mode is not FreshnessMode.TTL:
            return None
        return now_ns - int(self.ttl_ns * NEAR_EXPIRY)

    def fresh_node(self, node: Node, now_ns: int) -> bool:
        """``fresh`` of a node's attributes, outdated or not."""
        return self.fresh(node.fetched_ns, now_ns) and self._holds(
            node.stat.ctime_ns, node.fetched_ns, now_ns
        )

    def kept(self, node: Node, checked_ns: int, now_ns: int) -> tuple[float, float] | None:
        """Seconds for which the kernel may keep (a name, the attributes) where the name was last
        asked for at ``checked_ns`` and stands for ``node``; None if either has to be asked for."""
        if self.mode is FreshnessMode.IMMUTABLE:
            if checked_ns < self.mount_ns or node.fetched_ns < self.mount_ns:
                return None
            return FOREVER_SECONDS, FOREVER_SECONDS
        if not (self.fresh(checked_ns, now_ns) and self.fresh_node(node, now_ns)):
            return None
        return self.node_timeouts(node, min(checked_ns, node.fetched_ns), now_ns)

    def opens_until(self, node: Node, now_ns: int) -> int:
        """The time (time.time_ns()) until which the node may be opened without asking again. With
        ``open`` it is over at once. FOREVER_NS: until it is found outdated. 0: nobody but the event
        loop may open it, also after asking."""
        if node.outdated or not self.past_racy_window(node.stat.ctime_ns, node.fetched_ns):
            return 0
        if self.mode is FreshnessMode.OPEN:
            return node.fetched_ns
        if not self.fresh(node.fetched_ns, now_ns):
            return 0
        if self.mode is FreshnessMode.IMMUTABLE:
            return FOREVER_NS
        return node.fetched_ns + self.ttl_ns

    def fresh_attributes(self, node: Node, now_ns: int) -> bool:
        """``fresh_node`` for getattr of an inode that a path walk has just found."""
        if self.mode is FreshnessMode.OPEN:
            age_ns = now_ns - node.fetched_ns
            return 0 <= age_ns < OPEN_ATTRIBUTES_SECONDS * NS and self._holds(
                node.stat.ctime_ns, node.fetched_ns, now_ns
            )
        return self.fresh_node(node, now_ns)

    def fresh_listing(self, listing: Listing, confirmed_ns: int, now_ns: int) -> bool:
        """``fresh`` of a listing that the directory's times confirmed at ``confirmed_ns``."""
        return self.fresh(confirmed_ns, now_ns) and self._holds(
            listing.ctime_ns, listing.fetched_ns, now_ns
        )

    def past_racy_window(self, ctime_ns: int, now_ns: int) -> bool:
        """Whether timestamps distinguish what was read by ``now_ns`` from later versions, or are
        trusted anyway."""
        return self.mode is FreshnessMode.IMMUTABLE or past_racy_window(ctime_ns, now_ns)

    def may_be_written(self, ctime_ns: int, now_ns: int) -> bool:
        """Whether a file, of a mount in which changes count, may be being written just now."""
        return not self.trusts_times and abs(now_ns - ctime_ns) < WRITTEN_NS

    def _holds(self, ctime_ns: int, seen_ns: int, now_ns: int) -> bool:
        """What was seen in the tick of its last change is believed during that tick only."""
        return self.past_racy_window(ctime_ns, seen_ns) or not self.past_racy_window(
            ctime_ns, now_ns
        )

    def timeouts(self, checked_ns: int, now_ns: int) -> tuple[float, float]:
        """Seconds for which the kernel may keep (the name, the attributes)."""
        if self.mode is FreshnessMode.TTL:
            left_ns = min(checked_ns + self.ttl_ns - now_ns, self.ttl_ns) - KERNEL_LATE_NS
            return max(left_ns, 0) / NS, max(left_ns, 0) / NS
        if self.mode is FreshnessMode.IMMUTABLE:
            return FOREVER_SECONDS, FOREVER_SECONDS
        return 0.0, OPEN_ATTRIBUTES_SECONDS

    def node_timeouts(self, node: Node, checked_ns: int, now_ns: int) -> tuple[float, float]:
        """The same for a node, which may have been changed just before it was asked about."""
        name, attributes = self.timeouts(checked_ns, now_ns)
        if not self.past_racy_window(node.stat.ctime_ns, node.fetched_ns):
            return min(name, UNSETTLED_SECONDS), min(attributes, UNSETTLED_SECONDS)
        return name, attributes
