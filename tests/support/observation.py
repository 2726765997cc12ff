"""What a mount did between two moments, as numbers that do not depend on time; what a test expects
of them; and the gauges that are at rest when nothing is under way.

A key is a path of words: ``source.open`` is what the source counted, ``served.local_opens`` a value
of ``status --json``, ``requests.read.local`` a metric with the values of its labels. What is 0 is
left out.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from monarchfs.metrics import names
from monarchfs.metrics.names import Durations, Family, MetricType, Values

Observed = dict[str, int]

COUNTED = ("source_io", "served", "prefetch", "evictions", "replicas", "window", "touch")
"""Parts of the status whose values grow; ``NOT_COUNTED`` does not, or is a time."""
NOT_COUNTED = {
    *("source_io.operation_seconds", "source_io.stuck", "source_io.closing"),
    *("source_io.responding", "prefetch.queued", "prefetch.active", "prefetch.left_bytes"),
    *("prefetch.scanning", "prefetch.idle_since_uptime_seconds", "prefetch.share"),
    *("prefetch.held_back", "window.capacity_bytes", "window.used_bytes", "window.orders"),
    *("window.files",),
}
COUNTERS = {
    names.REQUEST_DURATION: "requests",
    names.REQUEST_ERRORS: "request_errors",
    names.SOURCE_OPERATIONS: "calls",
    names.SOURCE_ERRORS: "source_errors",
    names.COPIES_FAILED: "copies_failed",
    names.COPIES_REFUSED: "copies_refused",
    names.TIER_ERRORS: "tier_errors",
    names.CHUNKS_DROPPED: "chunks_dropped",
    names.SCAN_ERRORS: "scan_errors",
}
"""Those that the status does not have."""
RESTING: dict[Family, int | None] = {
    names.BUILD_INFO: 1,
    names.MOUNT_INFO: 1,
    names.SOURCE_RESPONDING: 1,
    names.TIER_IN_SERVICE: 1,
    names.TIER_CAPACITY: None,
    names.TIER_USED: None,
    names.TIER_FILES: None,
    names.BACKING_FILES: None,
    names.COPY_SHARE: None,
    names.SOURCE_SLOWDOWN: None,
    names.INDEX_INODES: None,
    names.INDEX_BYTES: None,
    names.PEERS: None,
}
"""Gauges that are not 0 when nothing is under way; None: whatever they are."""


def counters(counts: Mapping[str, Any], status: Mapping[str, Any], metrics: Values) -> Observed:
    found = {f"source.{operation}": n for operation, n in counts["operations"].items()}
    found["source.read_bytes"] = counts["read_bytes"]
    found["worker.restarts"] = status["worker"]["restarts"]
    found["interrupted"] = status["requests"]["interrupted"]
    for part in COUNTED:
        found |= {f"{part}.{name}": value for name, value in status[part].items()}
    for family, short in COUNTERS.items():
        for labels, value in metrics.get(family, []):
            number = sum(value.counts) if isinstance(value, Durations) else value
            found[".".join((short, *(label for label in labels if "/" not in label)))] = int(number)
    return {key: value for key, value in found.items() if key not in NOT_COUNTED}


def state(status: Mapping[str, Any]) -> Observed:
    found = {f"files.{name}": n for name, n in status["files"].items() if name != "copying"}
    for number, tier in enumerate(status["tiers"], 1):
        for name in ("used_bytes", "files", "unclaimed"):
            found[f"tier{number}.{name}"] = tier[name]
    return found


def under_way(metrics: Values) -> dict[str, float]:
    return {
        ".".join((family.name, *labels)): value
        for family, samples in metrics.items()
        for labels, value in samples
        if family.kind is MetricType.GAUGE and not isinstance(value, Durations)
        if RESTING.get(family, 0) not in (None, value)
    }


@dataclass
class Expected:
    """One line of a scenario: ``KEY 5``, ``KEY 5..9``, ``KEY <=9``, ``KEY >=5`` or ``KEY ?``, and
    why it may differ. A key with ``*`` is about all that match."""

    key: str
    least: float
    most: float
    why: str = ""

    @classmethod
    def parse(cls, line: str) -> Expected:
        words, _, why = line.partition("#")
        key, value = words.split()
        least, most = _bounds(value)
        return cls(key, least, most, why.strip())

    @property
    def exact(self) -> bool:
        return self.least == self.most

    def text(self) -> str:
        value = _text(self.least, self.most)
        return f"{self.key} {value}" + (f"  # {self.why}" if self.why else "")

    def values(self, observed: Observed) -> Observed:
        if "*" not in self.key:
            return {self.key: observed.get(self.key, 0)}
        return {key: observed[key] for key in fnmatch.filter(observed, self.key)}

    def holds(self, value: int) -> bool:
        return self.least <= value <= self.most

    def widened(self, value: int) -> Expected:
        return Expected(self.key, min(self.least, value), max(self.most, value), self.why)


def _bounds(value: str) -> tuple[float, float]:
    if value == "?":
        return -float("inf"), float("inf")
    if found := re.fullmatch(r"(\d+)(?:\.\.(\d+))?", value):
        least, most = found.groups()
        return int(least), int(most or least)
    found = re.fullmatch(r"([<>])=(\d+)", value)
    assert found is not None, f"{value} is no expectation"
    bound = int(found[2])
    return (-float("inf"), bound) if found[1] == "<" else (bound, float("inf"))


def _text(least: float, most: float) -> str:
    lowest, highest = least == -float("inf"), most == float("inf")
    if lowest and highest:
        return "?"
    if least == most:
        return f"{least:.0f}"
    return (
        f"<={most:.0f}" if lowest else f">={least:.0f}" if highest else f"{least:.0f}..{most:.0f}"
    )


def unmet(expected: list[Expected], observed: Observed, *, complete: bool) -> Iterator[str]:
    """What differs; ``complete``: also what is not named."""
    named: set[str] = set()
    for line in expected:
        values = line.values(observed)
        named |= values.keys()
        for key, value in values.items():
            if not line.holds(value):
                yield f"{key} is {value}, not {line.text().partition(' ')[2]}"
    for key in sorted(observed.keys() - named) if complete else ():
        yield f"{key} is {observed[key]}, and not 0"


def recorded(expected: list[Expected], observed: Observed) -> list[Expected]:
    """Lines that hold of what was observed. Those that are not exact stay, with their reasons, and
    are widened where they do not hold."""
    kept = []
    left = dict(observed)
    for line in expected:
        if not line.exact:
            for value in line.values(observed).values():
                line = line.widened(value)
            kept.append(line)
            left = {key: n for key, n in left.items() if key not in line.values(observed)}
    exact = [Expected(key, value, value) for key, value in left.items()]
    return sorted([*exact, *kept], key=lambda line: line.key)
