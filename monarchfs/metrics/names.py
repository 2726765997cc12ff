"""Every metric that a mount exports: name, kind, labels, meaning. docs/METRICS.md lists the same.

Names and units follow https://prometheus.io/docs/practices/naming/. No label has a value that
depends on the dataset: the number of series of a mount depends on the number of its tiers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple


class MetricType(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``labels`` are the names of its labels, in the order in which values come."""

    name: str
    kind: MetricType
    help: str
    labels: tuple[str, ...] = ()


class Durations(NamedTuple):
    """A histogram as it was at one moment."""

    bounds_ns: tuple[int, ...]
    counts: tuple[int, ...]
    total_ns: int


Value = int | float | Durations
Sample = tuple[tuple[str, ...], Value]
"""The values of the labels, and the metric's."""

Values = dict[Family, list[Sample]]
"""The values of metrics at one moment."""

FAMILIES: list[Family] = []
NODE_FAMILIES: list[Family] = []
"""What the exporter of the node adds."""
MOUNT_LABELS = ("user", "source", "mount")
"""There, these come first in all metrics of mounts."""


def _add(to: list[Family], kind: MetricType, name: str, meaning: str, *labels: str) -> Family:
    family = Family(f"monarchfs_{name}", kind, meaning, labels)
    to.append(family)
    return family


_counter = partial(_add, FAMILIES, MetricType.COUNTER)
_gauge = partial(_add, FAMILIES, MetricType.GAUGE)
_histogram = partial(_add, FAMILIES, MetricType.HISTOGRAM)
_of_node = partial(_add, NODE_FAMILIES, MetricType.GAUGE)

BUILD_INFO = _gauge("build_info", "Always 1; the labels show the versions", "version", "python")
MOUNT_INFO = _gauge(
    "mount_info",
    "Always 1; the labels show what is mounted where, with which options",
    "source",
    "mountpoint",
    "data_path",
    "freshness",
    "prefetch",
    "evict",
)
WORKER_RESTARTS = _counter(
    "worker_restarts_total", "Workers of this mount that replaced another one"
)
EVENT_LOOP_DELAY = _histogram(
    "event_loop_delay_seconds",
    "How late the event loop of the worker wakes up, measured once a second",
)

OPENS = _counter(
    "opens_total",
    "Files opened, by who gave them: the local copy (local), a peer (peer) or neither (source)",
    "served",
)
OPENED_FILE_BYTES = _counter(
    "opened_file_bytes_total", "Sizes of the files counted by monarchfs_opens_total", "served"
)
RELAYED_BYTES = _counter("relayed_bytes_total", "Bytes passed to the kernel in answers to reads")
PASSTHROUGH_OPENS = _counter(
    "passthrough_opens_total", "Local opens whose copy the kernel reads itself"
)
BACKING_FILES = _gauge("backing_files", "Copies that the kernel keeps open to read them itself")
BACKING_REFUSED = _counter(
    "backing_files_refused_total", "Copies that could not be passed through; the daemon reads them"
)
STALE_ANSWERS = _counter(
    "stale_answers_total",
    "Outdated names and attributes served because the source did not answer in time",
)
REQUEST_DURATION = _histogram(
    "request_duration_seconds",
    "Time from a request's arrival in the worker to its answer, without errors",
    "operation",
    "served",
)
WAIT = _counter(
    "wait_seconds_total",
    "Time that requests waited for their answer, without errors, by what they waited for",
    "cause",
)
REQUEST_ERRORS = _counter(
    "request_errors_total", "Requests answered with an error; a missing name is not one", "error"
)
REQUESTS_INTERRUPTED = _counter(
    "requests_interrupted_total", "Requests dropped because their process was killed"
)
REQUESTS_WAITING = _gauge("requests_waiting", "Requests that wait for the source or for a disk now")

SOURCE_RESPONDING = _gauge("source_responding", "1 while the source answers, 0 while it hangs")
SOURCE_RENUMBERED_FILES = _counter(
    "source_renumbered_files_total",
    "Files and directories that got another inode number, but no other size or times",
)
SOURCE_OPERATIONS = _counter(
    "source_operations_total",
    "Calls into the source, by purpose and operation",
    "purpose",
    "operation",
)
SOURCE_CALL_DURATION = _histogram(
    "source_call_duration_seconds",
    "Duration of calls into the source, without those whose caller gave up",
    "purpose",
    "operation",
)
SOURCE_READ_BYTES = _counter("source_read_bytes_total", "Bytes read from the source", "purpose")
SOURCE_ERRORS = _counter(
    "source_errors_total",
    "Calls into the source that failed; a missing file or permission is not an error",
    "error",
)
SOURCE_CALLS_ACTIVE = _gauge("source_calls_active", "Calls in the source now", "lane")
SOURCE_CALLS_STUCK = _gauge(
    "source_calls_stuck", "Calls that have been in the source for more than a second"
)
SOURCE_CLOSING = _gauge(
    "source_closing", "Files and directories of the source that are being closed"
)
SOURCE_OLDEST_CALL = _gauge(
    "source_oldest_call_seconds",
    "Age of the oldest call that is in the source now, 0 if there is none",
    "lane",
)

TIER_CAPACITY = _gauge(
    "tier_capacity_bytes",
    "What a tier may hold now; less than configured while memory is short",
    "tier",
)
TIER_USED = _gauge(
    "tier_used_bytes", "Allocated bytes in a tier, also of copies being made or removed", "tier"
)
TIER_FILES = _gauge(
    "tier_files",
    "Copies in a tier: complete, partial, or unclaimed (of no known file)",
    "tier",
    "state",
)
TIER_IN_SERVICE = _gauge(
    "tier_in_service", "1 while a tier takes new copies, 0 while it does not", "tier"
)
TIER_ERRORS = _counter(
    "tier_errors_total", "Errors of a tier, which readers do not see", "tier", "error"
)
TIER_BACKLOG = _gauge("tier_backlog_bytes", "Bytes from the source that wait in memory for a tier")
REMOVALS_PENDING = _gauge("removals_pending", "Evicted copies whose files are being removed")

COPIES_QUEUED = _gauge("copies_queued", "Files that wait to be copied")
COPIES_ACTIVE = _gauge("copies_active", "Files that are being copied now")
COPIES_COMPLETED = _counter("copies_completed_total", "Copies that became complete")
COPIES_FAILED = _counter(
    "copies_failed_total", "Copies given up after an error of the source or a tier", "error"
)
COPIES_OUTDATED = _counter(
    "copies_outdated_total", "Copies thrown away because the file changed meanwhile"
)
COPIES_REFUSED = _counter(
    "copies_refused_total", "Files that found no room in any tier, counted at each try", "reason"
)
CHUNKS_DROPPED = _counter(
    "chunks_dropped_total", "Pieces that were read but not kept because the tiers are too slow"
)
COPY_SHARE = _gauge(
    "copy_share", "How many of the copy_workers may copy what nobody has open, 0 to 1"
)
SOURCE_SLOWDOWN = _gauge(
    "source_slowdown", "How many times slower than usual copies find the source, or a target of it"
)
SCAN_RUNNING = _gauge("scan_running", "1 while a scan looks for files to copy, else 0")
SCAN_ERRORS = _counter("scan_errors_total", "Names that a scan could not look up")

EVICTIONS = _counter("evictions_total", "Evicted copies, by reason", "reason")
REPLICAS_LOST = _counter("replicas_lost_total", "Copies found missing or incomplete, and dropped")
REPLICAS_CORRUPT = _counter(
    "replicas_corrupt_total", "Copies found to have wrong bytes, and dropped"
)
REPLICAS_ADOPTED = _counter("replicas_adopted_total", "Copies taken over from an earlier index")
REPLICAS_MOVED = _counter("replicas_moved_total", "Copies moved between tiers")
SCRUBBED_BYTES = _counter(
    "scrubbed_bytes_total", "Bytes verified against their checksum by --scrub"
)
SOURCE_TOUCHES = _counter(
    "source_touches_total", "Files touched in the source (--touch-source), by result", "result"
)

PEERS = _gauge("peers", "Nodes that this mount shares with, by whether they answer", "state")
PEER_NAMES = _counter("peer_names_total", "Names whose attributes came from peers")
PEER_FILES = _counter("peer_read_files_total", "Small files read from peers")
PEER_BYTES = _counter("peer_read_bytes_total", "Bytes read from peers")
PEER_FAILURES = _counter(
    "peer_failures_total", "Requests that a peer did not answer, or not in time"
)
PEER_BYPASSED = _counter(
    "peer_bypassed_files_total",
    "Files read from the source because their owners would have taken much longer",
)
PEER_WRONG = _counter("peer_wrong_files_total", "Files that were not what a peer had said")

WINDOW_USED = _gauge("window_used_bytes", "What the window takes of memory now")
WINDOW_FILES = _counter("window_files_total", "Files read into the window, ahead of readers")
WINDOW_BYTES = _counter("window_read_bytes_total", "Bytes read into the window")
WINDOW_HITS = _counter("window_hits_total", "Files opened while they were in the window")
WINDOW_WASTED = _counter("window_wasted_bytes_total", "Bytes of the window that nobody wanted")
ORDERS = _gauge("orders", "Announced orders of files that are followed now")
ORDERS_LEARNED = _counter("orders_learned_total", "Orders that were followed, and nobody announced")
ORDERS_GIVEN_UP = _counter(
    "orders_given_up_total", "Orders that were dropped because files were read otherwise"
)

INDEX_INODES = _gauge("index_inodes", "Known inode numbers")
INDEX_BYTES = _gauge("index_bytes", "Size of the index's data")
INDEX_FROZEN = _gauge("index_frozen", "1 while nothing new can be recorded on disk, else 0")

MOUNT_UP = _of_node("mount_up", "1 if the mount answered this scrape, else 0", *MOUNT_LABELS)
MOUNT_STARTED = _of_node(
    "mount_start_time_seconds", "Time of mounting, in seconds since 1970", *MOUNT_LABELS
)
MOUNT_JOB = _of_node(
    "mount_job_info",
    "Always 1; the labels show which job uses which mount",
    *MOUNT_LABELS,
    "job_id",
)
LEFT_OFF = _of_node(
    "exporter_mounts_left_off", "Mounts that were not asked because there are too many"
)
