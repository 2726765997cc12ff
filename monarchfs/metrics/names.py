"""Every metric that a mount exports: name, kind, labels, meaning. docs/METRICS.md has the same.

Names and units follow https://prometheus.io/docs/practices/naming/. No label has a value that
depends on the dataset: the number of series of a mount depends on the number of its tiers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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


FAMILIES: list[Family] = []


def _add(kind: MetricType, name: str, meaning: str, labels: tuple[str, ...]) -> Family:
    family = Family(f"monarchfs_{name}", kind, meaning, labels)
    FAMILIES.append(family)
    return family


def _counter(name: str, meaning: str, *labels: str) -> Family:
    return _add(MetricType.COUNTER, name, meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> Family:
    return _add(MetricType.GAUGE, name, meaning, labels)


def _histogram(name: str, meaning: str, *labels: str) -> Family:
    return _add(MetricType.HISTOGRAM, name, meaning, labels)


BUILD_INFO = _gauge("build_info", "1; the labels say what runs", "version", "python")
MOUNT_INFO = _gauge(
    "mount_info",
    "1; the labels say what is mounted and how",
    *("source", "mountpoint", "data_path", "freshness", "prefetch", "evict"),
)
WORKER_RESTARTS = _counter(
    "worker_restarts_total", "Workers that took the place of another one, in this mount"
)
EVENT_LOOP_DELAY = _histogram(
    "event_loop_delay_seconds",
    "How much later than asked for the worker's event loop woke up, tried once a second",
)

OPENS = _counter("opens_total", "Files opened, by where their bytes come from", "served")
OPENED_FILE_BYTES = _counter(
    "opened_file_bytes_total", "Sizes of the files counted by monarchfs_opens_total", "served"
)
RELAYED_BYTES = _counter("relayed_bytes_total", "Bytes handed to the kernel in answers to READ")
PASSTHROUGH_OPENS = _counter(
    "passthrough_opens_total", "Files opened that the kernel reads from the copy itself"
)
BACKING_FILES = _gauge("backing_files", "Copies that the kernel keeps open to read them itself")
BACKING_REFUSED = _counter(
    "backing_files_refused_total", "Copies that the kernel was to read itself, but does not"
)
STALE_ANSWERS = _counter(
    "stale_answers_total",
    "Answers from known metadata because the source did not answer in time",
)
REQUEST_DURATION = _histogram(
    "request_duration_seconds",
    "Time from a request's arrival in the worker to its answer, errors left out",
    *("operation", "served"),
)
REQUEST_ERRORS = _counter("request_errors_total", "Requests answered with an error", "error")
REQUESTS_INTERRUPTED = _counter(
    "requests_interrupted_total", "Requests given up because their process was killed"
)
REQUESTS_WAITING = _gauge("requests_waiting", "Requests that wait for the source or a disk now")

SOURCE_RESPONDING = _gauge("source_responding", "1 while the source answers, 0 while it hangs")
SOURCE_OPERATIONS = _counter(
    "source_operations_total", "Calls into the source, by what for", "purpose", "operation"
)
SOURCE_CALL_DURATION = _histogram(
    "source_call_duration_seconds",
    "Duration of calls into the source that somebody waited for to the end",
    *("purpose", "operation"),
)
SOURCE_READ_BYTES = _counter("source_read_bytes_total", "Bytes read from the source", "purpose")
SOURCE_ERRORS = _counter(
    "source_errors_total", "Calls that failed in a way that means trouble with the source", "error"
)
SOURCE_CALLS_ACTIVE = _gauge("source_calls_active", "Calls that are in the source now", "lane")
SOURCE_CALLS_STUCK = _gauge(
    "source_calls_stuck", "Calls that have been in the source for more than a second"
)
SOURCE_CLOSING = _gauge("source_closing", "Files and directories of the source being closed")
SOURCE_OLDEST_CALL = _gauge(
    "source_oldest_call_seconds",
    "How long the call has been in the source that is there longest, 0 for none",
    "lane",
)

TIER_CAPACITY = _gauge("tier_capacity_bytes", "What a tier may hold now", "tier")
TIER_USED = _gauge("tier_used_bytes", "Allocated bytes of what a tier holds", "tier")
TIER_FILES = _gauge("tier_files", "Files in a tier, by how much of them is there", "tier", "state")
TIER_IN_SERVICE = _gauge("tier_in_service", "1 while a tier takes new files, else 0", "tier")
TIER_ERRORS = _counter(
    "tier_errors_total", "Errors of a tier that were routed around", "tier", "error"
)
TIER_BACKLOG = _gauge("tier_backlog_bytes", "Bytes of the source in memory, on their way to a tier")
REMOVALS_PENDING = _gauge("removals_pending", "Replicas whose files are being removed")

COPIES_QUEUED = _gauge("copies_queued", "Files that wait to be copied")
COPIES_ACTIVE = _gauge("copies_active", "Files that are being copied in the background")
COPIES_COMPLETED = _counter("copies_completed_total", "Replicas that became complete")
COPIES_FAILED = _counter("copies_failed_total", "Copies given up after an error", "error")
COPIES_OUTDATED = _counter("copies_outdated_total", "Copies thrown away because the source changed")
COPIES_REFUSED = _counter("copies_refused_total", "Files that found no room", "reason")
CHUNKS_DROPPED = _counter(
    "chunks_dropped_total",
    "Fetched chunks that were not kept because the tiers were too far behind",
)
SCAN_RUNNING = _gauge("scan_running", "1 while the scan looks for files to copy, else 0")
SCAN_ERRORS = _counter("scan_errors_total", "Names that the scan could not look at")

EVICTIONS = _counter("evictions_total", "Replicas evicted", "reason")
REPLICAS_LOST = _counter("replicas_lost_total", "Replicas found missing or damaged, and dropped")
REPLICAS_CORRUPT = _counter(
    "replicas_corrupt_total", "Replicas whose bytes were found to be wrong, and dropped"
)
REPLICAS_ADOPTED = _counter(
    "replicas_adopted_total", "Replicas taken over that an earlier index had left in a tier"
)
REPLICAS_MOVED = _counter("replicas_moved_total", "Replicas moved between tiers")
SCRUBBED_BYTES = _counter("scrubbed_bytes_total", "Bytes compared with their checksum by the scrub")
SOURCE_TOUCHES = _counter(
    "source_touches_total", "Files touched in the source, by what came of it", "result"
)

INDEX_INODES = _gauge("index_inodes", "Inode numbers that the index knows")
INDEX_BYTES = _gauge("index_bytes", "Size of the index's data")
INDEX_FROZEN = _gauge("index_frozen", "1 while nothing new can be recorded on disk, else 0")

NODE_FAMILIES = (
    Family(
        "monarchfs_mount_up",
        MetricType.GAUGE,
        "1 if the mount answered when it was asked for this scrape, else 0",
        ("user", "source", "mount"),
    ),
    Family(
        "monarchfs_mount_start_time_seconds",
        MetricType.GAUGE,
        "When the mount was made, in seconds since 1970",
        ("user", "source", "mount"),
    ),
    Family(
        "monarchfs_mount_job_info",
        MetricType.GAUGE,
        "1; the labels say which job uses which mount",
        ("user", "source", "mount", "job_id"),
    ),
    Family(
        "monarchfs_exporter_mounts_left_off",
        MetricType.GAUGE,
        "Mounts that were not asked because their user has too many",
    ),
)
"""What the exporter of the node adds; the others get the same three labels there first."""

MOUNT_UP, MOUNT_STARTED, MOUNT_JOB, LEFT_OFF = NODE_FAMILIES
