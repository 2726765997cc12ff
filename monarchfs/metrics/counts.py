"""All counts of the worker. ``names`` has the meaning of those that are exported.

Plain integers, changed on the event loop only: counting an open costs no more than an addition,
timing a request one search in a short list. The source layer's own counts are in
``monarchfs.source``.
"""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

NS = 1_000_000_000

DURATION_BOUNDS_NS = (
    *(10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000),
    *(100_000_000, 300_000_000, NS, 3 * NS, 10 * NS, 30 * NS),
)
"""10 microseconds, about what a request out of memory costs, to 30 seconds; two a decade."""

OTHER = "other"

ERRORS = (
    *("EACCES", "EAGAIN", "EBUSY", "EDQUOT", "EINTR", "EINVAL", "EIO", "EMFILE", "ENOENT"),
    *("ENOSPC", "ENOTCONN", "EPERM", "EROFS", "ESTALE", "ETIMEDOUT", OTHER),
)
"""The errors that are counted apart."""

REFUSALS = ("no room", "no inodes", "no tier")
"""Why files are not copied, as ``cache.placement.events.RefusalReason`` calls it."""


class Histogram:
    """Durations in nanoseconds, in buckets. Changing: ``counts`` (one more than there are bounds,
    the last for longer ones) and ``total_ns``."""

    __slots__ = ("bounds_ns", "counts", "total_ns")

    def __init__(self, bounds_ns: Sequence[int] = DURATION_BOUNDS_NS) -> None:
        """``bounds_ns`` rise; each is the longest duration that its bucket takes."""
        self.bounds_ns = bounds_ns
        self.counts = [0] * (len(bounds_ns) + 1)
        self.total_ns = 0

    def observe(self, duration_ns: int) -> None:
        self.counts[bisect_left(self.bounds_ns, duration_ns)] += 1
        self.total_ns += duration_ns


class ErrorCounts:
    """How many errors there were, by their names in ``ERRORS``."""

    __slots__ = ("by_name",)

    def __init__(self) -> None:
        self.by_name = dict.fromkeys(ERRORS, 0)

    def count(self, number: int | None) -> None:
        """``number`` is an errno; None for an error that has none."""
        name = errno.errorcode.get(number or 0, OTHER)
        self.by_name[name if name in self.by_name else OTHER] += 1


@dataclass(slots=True)
class Requests:
    """How long the kernel's requests took, from arrival in the worker to the answer, without those
    that failed. ``*_local``: answered from what is known, or from a complete copy; ``*_source``:
    the others."""

    access: Histogram = field(default_factory=Histogram)
    getattr_local: Histogram = field(default_factory=Histogram)
    getattr_source: Histogram = field(default_factory=Histogram)
    getxattr: Histogram = field(default_factory=Histogram)
    listxattr: Histogram = field(default_factory=Histogram)
    lookup_local: Histogram = field(default_factory=Histogram)
    lookup_source: Histogram = field(default_factory=Histogram)
    open_local: Histogram = field(default_factory=Histogram)
    open_source: Histogram = field(default_factory=Histogram)
    opendir: Histogram = field(default_factory=Histogram)
    read_local: Histogram = field(default_factory=Histogram)
    read_source: Histogram = field(default_factory=Histogram)
    readdir: Histogram = field(default_factory=Histogram)
    readlink: Histogram = field(default_factory=Histogram)
    statfs: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class Metrics:
    """What happened since this worker started."""

    local_opens: int = 0
    source_opens: int = 0
    local_file_bytes: int = 0
    source_file_bytes: int = 0
    peer_opens: int = 0
    peer_file_bytes: int = 0
    relayed_bytes: int = 0
    passthrough_opens: int = 0
    backing_refused: int = 0
    stale_answers: int = 0
    renumbered_files: int = 0
    interrupted_requests: int = 0
    copies_completed: int = 0
    copies_failed: int = 0
    copies_outdated: int = 0
    copies_refused: int = 0
    chunks_dropped: int = 0
    tier_errors: int = 0
    replicas_lost: int = 0
    replicas_corrupt: int = 0
    replicas_adopted: int = 0
    replicas_moved: int = 0
    evictions_outdated: int = 0
    """Or of unknown files."""
    evictions_policy: int = 0
    """For a file in demand."""
    evictions_pressure: int = 0
    """To stay within capacity or reserve."""
    evictions_manual: int = 0
    touches_completed: int = 0
    touches_failed: int = 0
    peer_names: int = 0
    peer_files: int = 0
    peer_bytes: int = 0
    peer_failures: int = 0
    peer_wrong_files: int = 0
    peer_bypassed_files: int = 0
    window_files: int = 0
    window_bytes: int = 0
    window_hits: int = 0
    window_hit_bytes: int = 0
    window_wasted_bytes: int = 0
    orders_learned: int = 0
    orders_given_up: int = 0
    scrubbed_bytes: int = 0
    thread_wait_ns: int = 0
    """Of open_source and read_source, what threads answered; then, by who gave the data."""
    source_wait_ns: int = 0
    memory_wait_ns: int = 0
    tier_wait_ns: int = 0
    """Out of a partial replica."""
    peer_wait_ns: int = 0
    copy_wait_ns: int = 0
    """After waiting for a copy that was under way."""
    requests: Requests = field(default_factory=Requests)
    request_errors: ErrorCounts = field(default_factory=ErrorCounts)
    copy_errors: ErrorCounts = field(default_factory=ErrorCounts)
    copies_refused_by: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REFUSALS, 0))
    tier_errors_by: dict[str, ErrorCounts] = field(default_factory=dict)
    event_loop_delay: Histogram = field(default_factory=Histogram)

    def copy_failed(self, number: int | None) -> None:
        """Count a copy that was given up after the error with that errno."""
        self.copies_failed += 1
        self.copy_errors.count(number)

    def copy_refused(self, reason: str) -> None:
        """Count a file that found no room, for one of ``REFUSALS``."""
        self.copies_refused += 1
        self.copies_refused_by[reason] += 1

    def tier_failed(self, path: str, number: int | None) -> None:
        self.tier_errors += 1
        self.errors_of_tier(path).count(number)

    def errors_of_tier(self, path: str) -> ErrorCounts:
        return self.tier_errors_by.setdefault(path, ErrorCounts())
