"""What the threads of the C part have done, for the metrics (_counts.h)."""

from __future__ import annotations

from monarchfs.fuse.session import hooks
from monarchfs.metrics import Histogram, Metrics
from monarchfs.types import Lane


def count_threads(metrics: Metrics) -> list[tuple[Lane, str, int, int, list[int]]]:
    """Bring the metrics up to date. Returns the threads' calls of the source since the last call,
    for ``Source.count_elsewhere``."""
    more, took = hooks.counts_take()
    requests = metrics.requests
    metrics.relayed_bytes += more["answered_bytes"]
    metrics.source_opens += more["untold_opens"]
    metrics.local_opens += more["resident_opens"]
    metrics.local_file_bytes += more["resident_bytes"]
    metrics.passthrough_opens += more["backed_opens"]
    metrics.thread_wait_ns += took["open_source"][0] + took["read_source"][0]
    metrics.source_wait_ns += more["source_ns"]
    metrics.memory_wait_ns += more["memory_ns"]
    metrics.tier_wait_ns += more["tier_ns"]
    metrics.peer_wait_ns += more["peer_ns"]
    metrics.copy_wait_ns += more["copy_ns"]
    _add(requests.lookup_local, *took["lookup"])
    _add(requests.lookup_source, *took["lookup_source"])
    _add(requests.open_local, *took["open_local"])
    _add(requests.read_local, *took["read_local"])
    _add(requests.open_source, *took["open_source"])
    _add(requests.read_source, *took["read_source"])
    bounds = len(requests.read_source.counts)
    return [
        (lane, function, size, took[name][0], took[name][1][:bounds])
        for lane, function, name, size in (
            (Lane.DEMAND, "read", "source", more["source_bytes"]),
            (Lane.BACKGROUND, "read", "ahead", more["ahead_bytes"]),
            (Lane.DEMAND, "stat", "stat", 0),
        )
    ]


def _add(durations: Histogram, total_ns: int, counts: list[int]) -> None:
    durations.total_ns += total_ns
    for bucket in range(len(durations.counts)):
        durations.counts[bucket] += counts[bucket]
