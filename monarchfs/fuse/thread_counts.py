"""What the threads of the C part have done, for the metrics (_counts.h)."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from monarchfs.metrics import Histogram, Metrics
from monarchfs.system.listeners import Listeners
from monarchfs.types import Lane

_Duration = tuple[int, tuple[int, ...]]
"""Nanoseconds in all, and how many took at most so long as each of the bounds."""


class ThreadNumbers(NamedTuple):
    """In the order of _counts.h, as ``ThreadDurations``."""

    queued: int
    answered_bytes: int
    source_bytes: int
    ahead_bytes: int
    untold_opens: int
    resident_opens: int
    resident_bytes: int
    unlisted_opens: int
    backed_opens: int
    source_ns: int
    memory_ns: int
    tier_ns: int
    peer_ns: int
    copy_ns: int


class ThreadDurations(NamedTuple):
    lookup: _Duration
    open_local: _Duration
    read_local: _Duration
    open_source: _Duration
    read_source: _Duration
    source: _Duration
    ahead: _Duration


class ThreadCounts:
    """Changing: what the metrics know of."""

    def __init__(self, hooks: ModuleType, metrics: Metrics) -> None:
        self.on_source_reads: Listeners[[Lane, int, int, list[int]]] = Listeners()
        """Hear of reads of the source when they are counted: whether somebody waited for them,
        their bytes, the nanoseconds that they took, and how many took at most so long as each of
        DURATION_BOUNDS_NS."""
        self._hooks = hooks
        self._metrics = metrics
        self._numbers, self._durations = hooks.counts()

    def count(self) -> None:
        """Bring the metrics up to date."""
        numbers, durations = self._hooks.counts()
        more = ThreadNumbers(
            *(now - before for now, before in zip(numbers, self._numbers, strict=True))
        )
        took = ThreadDurations(*map(_since, durations, self._durations))
        self._numbers, self._durations = numbers, durations
        metrics, requests = self._metrics, self._metrics.requests
        metrics.relayed_bytes += more.answered_bytes
        metrics.source_opens += more.untold_opens
        metrics.local_opens += more.resident_opens
        metrics.local_file_bytes += more.resident_bytes
        metrics.passthrough_opens += more.backed_opens
        metrics.thread_wait_ns += took.open_source[0] + took.read_source[0]
        metrics.source_wait_ns += more.source_ns
        metrics.memory_wait_ns += more.memory_ns
        metrics.tier_wait_ns += more.tier_ns
        metrics.peer_wait_ns += more.peer_ns
        metrics.copy_wait_ns += more.copy_ns
        _add(requests.lookup_local, took.lookup)
        _add(requests.open_local, took.open_local)
        _add(requests.read_local, took.read_local)
        _add(requests.open_source, took.open_source)
        _add(requests.read_source, took.read_source)
        reads = len(requests.read_source.counts)
        for lane, size, (total_ns, counts) in (
            (Lane.DEMAND, more.source_bytes, took.source),
            (Lane.BACKGROUND, more.ahead_bytes, took.ahead),
        ):
            self.on_source_reads(lane, size, total_ns, list(counts[:reads]))


def _since(now: _Duration, before: _Duration) -> _Duration:
    more = (one - other for one, other in zip(now[1], before[1], strict=True))
    return now[0] - before[0], tuple(more)


def _add(durations: Histogram, more: _Duration) -> None:
    durations.total_ns += more[0]
    for bucket in range(len(durations.counts)):
        durations.counts[bucket] += more[1][bucket]
