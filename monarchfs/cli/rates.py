"""From successive reports to what a person watches: rates, shares, what is left to do. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monarchfs.cli.status_text import Report

_SMOOTH_SECONDS = 30.0
"""What time is left is told from the pace of this long."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two reports, per second; shares are from 0 to 1, None of nothing."""

    seconds: float
    local_share: float | None
    local_bytes_share: float | None
    demand_bytes: float
    prefetch_bytes: float
    operations: float
    latency_seconds: float | None
    served_bytes: float
    copied_files: float
    evicted_files: float

    @property
    def source_bytes(self) -> float:
        return self.demand_bytes + self.prefetch_bytes


@dataclass(frozen=True, slots=True)
class MountView:
    """One mount at one moment. ``report`` is the newest; ``details`` is the newest with an answer,
    ``old_seconds`` old. ``left_seconds`` is None if unknown."""

    report: Report
    details: Report
    old_seconds: float
    rates: Rates | None
    left_seconds: float | None


def number(report: Report, *keys: str) -> float:
    """The number under the nested keys; 0 if there is none: a daemon may be of another version."""
    value: Any = report
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, (int, float)) else 0.0


class History:
    """The reports of one mount as they come. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Report]] = deque()

    def add(self, at: float, report: Report) -> MountView:
        """What there is to see once ``report`` came at the time ``at``."""
        rates = None
        if "files" in report:
            rates = self._take(at - number(report, "age_seconds"), report)
        when, details = self._samples[-1] if self._samples else (at, report)
        return MountView(report, details, max(0.0, at - when), rates, self._left())

    def _take(self, at: float, report: Report) -> Rates | None:
        samples = self._samples
        if samples and at <= samples[-1][0] + 1e-3:
            return None  # the same one again: nothing newer came
        if samples and not _same_worker(samples[-1][1], report):
            samples.clear()
        samples.append((at, report))
        while len(samples) > 2 and samples[1][0] <= at - _SMOOTH_SECONDS:
            samples.popleft()
        return rates_between(*samples[-2], *samples[-1]) if len(samples) > 1 else None

    def _left(self) -> float | None:
        """When nothing waits to be copied any more, at the recent pace."""
        if len(self._samples) < 2:
            return None
        (began, before), (ended, now) = self._samples[0], self._samples[-1]
        waiting = number(now, "prefetch", "queued") + number(now, "prefetch", "active")
        if not waiting or number(now, "prefetch", "scanning"):
            return None
        seconds = ended - began
        if not number(now, "prefetch", "queued"):
            pace = _grown(before, now, "source_io", "read_bytes") / seconds
            return number(now, "prefetch", "left_bytes") / pace if pace else None
        pace = sum(_grown(before, now, "prefetch", key) for key in _ENDS) / seconds
        return waiting / pace if pace else None


_PLACES = ("local", "peer", "source")
_ENDS = ("completed", "failed", "refused", "outdated")


def rates_between(began: float, before: Report, ended: float, now: Report) -> Rates:
    """The rates between two reports of one worker, the second of which came later."""
    seconds = ended - began

    def grown(*keys: str) -> float:
        return _grown(before, now, *keys)

    def local_share(kind: str) -> float | None:
        local, *others = (grown("served", f"{place}_{kind}") for place in _PLACES)
        total = local + sum(others)
        return local / total if total else None

    operations = grown("source_io", "operations")
    evictions = now.get("evictions")
    return Rates(
        seconds,
        local_share("opens"),
        local_share("file_bytes"),
        grown("source_io", "demand_read_bytes") / seconds,
        grown("source_io", "prefetch_read_bytes") / seconds,
        operations / seconds,
        grown("source_io", "operation_seconds") / operations if operations else None,
        grown("served", "relayed_bytes") / seconds,
        grown("prefetch", "completed") / seconds,
        sum(grown("evictions", key) for key in evictions) / seconds
        if isinstance(evictions, Mapping)
        else 0.0,
    )


def _grown(before: Report, now: Report, *keys: str) -> float:
    return max(0.0, number(now, *keys) - number(before, *keys))


def _same_worker(before: Report, now: Report) -> bool:
    """Its counts begin at 0 with each worker."""
    same = number(before, "worker", "pid") == number(now, "worker", "pid")
    # Another mount in the same place may have a worker of the same number, in a container.
    return same and all(
        number(now, *keys) >= number(before, *keys)
        for keys in (("source_io", "operations"), ("uptime_seconds",))
    )
