"""The names of the metrics, all of which the documentation has, and what is counted under them."""

from __future__ import annotations

import re
from pathlib import Path

from monarchfs.metrics import DURATION_BOUNDS_NS, ErrorCounts, Histogram, Metrics
from monarchfs.metrics.counts import ERRORS, OTHER, REFUSALS
from monarchfs.metrics.names import FAMILIES, NODE_FAMILIES
from monarchfs.placement.events import RefusalReason
from monarchfs.source.lanes import OPERATIONS, SourceCounters
from monarchfs.source.posix import PosixSource
from monarchfs.types import Lane

DOCUMENT = Path(__file__).parents[2] / "docs" / "METRICS.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|(.*?)\|(.*)\|$", re.MULTILINE)


def test_the_documentation_lists_what_is_exported_and_each_error() -> None:
    rows = {
        name: (kind, re.findall(r"`(\w+)`", labels))
        for name, kind, labels, _meaning in ROW.findall(DOCUMENT.read_text())
    }
    ours = {name: row for name, row in rows.items() if name.startswith("monarchfs_")}
    families = (*FAMILIES, *NODE_FAMILIES)
    assert ours == {f.name: (f.kind.value, list(f.labels)) for f in families}
    assert [name for name in ERRORS if f"`{name}`" not in DOCUMENT.read_text()] == []


def test_a_duration_is_counted_once() -> None:
    histogram = Histogram()
    durations = [0, 1, 10_000, 10_001, 30 * 10**9, 30 * 10**9 + 1, 10**15]
    for duration in durations:
        histogram.observe(duration)
    assert histogram.total_ns == sum(durations)
    assert sum(histogram.counts) == len(durations)
    assert histogram.counts[0] == 3, "a bound belongs to its bucket"
    assert histogram.counts[1] == 1
    assert histogram.counts[-2:] == [1, 2]
    assert list(DURATION_BOUNDS_NS) == sorted(set(DURATION_BOUNDS_NS))


def test_unknown_errors_do_not_make_series() -> None:
    counts = ErrorCounts()
    for number in (5, 5, 28, 133, 100_000, 0, None):
        counts.count(number)
    assert tuple(counts.by_name) == ERRORS
    assert (counts.by_name["EIO"], counts.by_name["ENOSPC"], counts.by_name[OTHER]) == (2, 1, 4)


def test_reasons_are_counted_beside_their_sum() -> None:
    metrics = Metrics()
    for reason in RefusalReason:
        metrics.copy_refused(reason.value)
    assert metrics.copies_refused_by == dict.fromkeys(REFUSALS, 1)
    assert metrics.copies_refused == len(REFUSALS)
    metrics.copy_failed(5)
    metrics.tier_failed("/t", 28)
    assert metrics.copies_failed == metrics.copy_errors.by_name["EIO"] == 1
    assert metrics.tier_errors == metrics.errors_of_tier("/t").by_name["ENOSPC"] == 1


def test_every_call_of_the_source_has_its_kind() -> None:
    counters = SourceCounters()
    # ``list`` only makes what ``next`` asks, and the others ask the source for nothing.
    without_calls = {"shutdown", "forget", "list", "opened_directory", "known_to_list_all"}
    functions = {n for n in dir(PosixSource) if not n.startswith("_")} - without_calls
    assert {n for n in functions if callable(getattr(PosixSource, n))} == set(OPERATIONS) - {"next"}
    for lane in Lane:
        for function in (*OPERATIONS, "something new"):
            counters.of(lane, function).operations += 1
    assert sum(call.operations for call in counters.calls.values()) == 2 * (len(OPERATIONS) + 1)
    assert counters.of(Lane.DEMAND, "something new") is counters.calls["demand", OTHER]
    assert counters.of(Lane.BACKGROUND, "access") is counters.calls["scan", OTHER]
