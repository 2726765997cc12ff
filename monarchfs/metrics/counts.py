"""All counts of the worker, with unit and meaning.

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


def _count(unit: str, meaning: str) -> int:
    value: int = field(default=0, metadata={"unit": unit, "help": meaning})
    return value


@dataclass(slots=True)
class Metrics:
    """What happened since this worker started."""

    local_opens: int = _count("opens", "Files opened whose replica was complete")
    source_opens: int = _count("opens", "Files opened that had to ask the source")
    local_file_bytes: int = _count("bytes", "Sizes of the files counted by local_opens")
    source_file_bytes: int = _count("bytes", "Sizes of the files counted by source_opens")
    peer_opens: int = _count("opens", "Files opened that peers gave, without asking the source")
    peer_file_bytes: int = _count("bytes", "Sizes of the files counted by peer_opens")
    relayed_bytes: int = _count("bytes", "Bytes handed to the kernel in answers to READ")
    passthrough_opens: int = _count("opens", "Files opened that the kernel reads itself")
    backing_refused: int = _count("files", "Files the kernel was to read itself, but does not")
    stale_answers: int = _count(
        "answers", "Answers from known metadata because the source did not answer in time"
    )
    renumbered_files: int = _count(
        "files", "Files and directories that got another inode number, but no other size or times"
    )
    interrupted_requests: int = _count("requests", "Requests given up because their process died")
    copies_completed: int = _count("files", "Replicas that became complete")
    copies_failed: int = _count("files", "Copies given up after an error")
    copies_outdated: int = _count("files", "Copies thrown away because the source changed")
    copies_refused: int = _count("files", "Files not copied for want of room")
    chunks_dropped: int = _count(
        "chunks", "Fetched chunks that were not kept because the tiers were too far behind"
    )
    tier_errors: int = _count("errors", "Errors of tiers that were routed around")
    replicas_lost: int = _count("files", "Replicas found missing or damaged, and dropped")
    replicas_corrupt: int = _count("files", "Replicas whose bytes were found to be wrong")
    replicas_adopted: int = _count("files", "Replicas that an earlier index had left in a tier")
    replicas_moved: int = _count("files", "Replicas promoted or demoted")
    evictions_outdated: int = _count("files", "Replicas evicted as outdated or of unknown files")
    evictions_policy: int = _count("files", "Replicas evicted by the policy for a file in demand")
    evictions_pressure: int = _count("files", "Replicas evicted to stay within capacity or reserve")
    evictions_manual: int = _count("files", "Replicas that somebody asked to evict")
    touches_completed: int = _count("files", "Files of which a byte was read for --touch-source")
    touches_failed: int = _count("files", "Files that could not be touched in the source")
    peer_names: int = _count("names", "Names whose attributes came from peers")
    peer_files: int = _count("files", "Small files that were read from peers")
    peer_bytes: int = _count("bytes", "Bytes that were read from peers")
    peer_failures: int = _count("requests", "Requests that peers did not answer, or not in time")
    peer_wrong_files: int = _count("files", "Files that were not what the peer had said")
    peer_bypassed_files: int = _count(
        "files", "Files read from the source because their owners would have taken much longer"
    )
    window_files: int = _count("files", "Files that were read into the window")
    window_bytes: int = _count("bytes", "Sizes of the files counted by window_files")
    window_hits: int = _count("files", "Files that were opened while they were in the window")
    window_hit_bytes: int = _count("bytes", "Sizes of the files counted by window_hits")
    window_wasted_bytes: int = _count("bytes", "What the window gave up, and nobody had opened")
    orders_learned: int = _count("orders", "Orders in which files were read before")
    orders_given_up: int = _count("orders", "Orders in which files were not read")
    scrubbed_bytes: int = _count("bytes", "Bytes of replicas that were compared with a checksum")
    thread_wait_ns: int = _count("ns", "Of open_source and read_source, what threads answered")
    source_wait_ns: int = _count("ns", "Of thread_wait_ns, what the source answered")
    memory_wait_ns: int = _count("ns", "The same, out of memory")
    tier_wait_ns: int = _count("ns", "The same, out of a partial replica")
    peer_wait_ns: int = _count("ns", "The same, from a peer")
    copy_wait_ns: int = _count("ns", "The same, after waiting for a copy that was under way")
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
        """Count an error of the tier at ``path``."""
        self.tier_errors += 1
        self.errors_of_tier(path).count(number)

    def errors_of_tier(self, path: str) -> ErrorCounts:
        """By errno, of the tier at ``path``."""
        return self.tier_errors_by.setdefault(path, ErrorCounts())
