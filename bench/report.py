"""What the measurements found: rows for people, series for plots, JSON for programs.

A measurement fills a ``Result`` with ``figure`` and ``compare``, adds ``Series`` for the plots, and
names in ``missing`` what it had to leave out, and why. `bench.markdown` and `bench.plots` show it,
docs/BENCHMARKS.md has the JSON's keys.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from bench.numbers import number

SCHEMA = 1
"""Of the JSON file. Another number, where a key went or means something else."""


class Spread(NamedTuple):
    """Of what was measured several times."""

    median: float
    low: float
    high: float
    rounds: int


def spread(values: Sequence[float]) -> Spread:
    """ValueError for none."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


@dataclass(slots=True)
class Row:
    """One figure. ``other`` is the same work done otherwise (``against``), in the same run.

    ``ratio`` is the median of the ratios of neighbouring runs, not the ratio of the medians: the
    machine's speed drifts. ``holds`` says whether the target was reached, ``why`` what is known of
    the reason where it was not. ``arm`` is the way in which the data was reached. A row with a
    ``headline`` stands by that name in the table on top of the report, and in docs/BENCHMARKS.md.
    """

    what: str
    value: float
    unit: str
    other: float | None = None
    ratio: float | None = None
    target: str = ""
    holds: bool | None = None
    values: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    against: str = "direct"
    arm: str = ""
    why: str = ""
    headline: str = ""

    @property
    def ratios(self) -> list[float]:
        """Of each pair."""
        return [v / o for v, o in zip(self.values, self.others, strict=True)] if self.others else []

    @property
    def ratio_spread(self) -> Spread | None:
        """None for what was not compared."""
        return spread(self.ratios) if self.others else None

    @property
    def value_spread(self) -> Spread | None:
        """None for what was measured once."""
        return spread(self.values) if len(self.values) > 1 else None


class Kind(str, Enum):
    """How series are drawn."""

    BARS = "bars"
    """A bar for each point; ``x`` names what it is for: "epoch 1", "rclone"."""
    LINES = "lines"
    """A line through the points, each of which is marked; ``x`` is a number."""
    TIME = "time"
    """A line through many points without marks; ``x`` is in seconds."""


class Point(NamedTuple):
    """``low`` and ``high``: the least and the most of what ``y`` is the median of."""

    x: float | str
    y: float
    low: float | None = None
    high: float | None = None


def point(x: float | str, values: Sequence[float]) -> Point:
    """The median of what was measured there, and the spread."""
    found = spread(values)
    return Point(x, found.median, found.low, found.high)


@dataclass(slots=True)
class Series:
    """One line, or one arm's bars. ``x`` and ``y`` are the axes' labels with their units ("read of
    the source (x data)"). Those of the same ``plot`` are drawn together; its name is the title: the
    subject in a few words ("Epoch times, AlexNet"). Those of the same ``panel`` share axes; panels
    lie below each other. ``log`` names the logarithmic axes: "", "x", "y" or "xy". ``goal``
    is drawn as a line; ``marks`` are where something begins on the axis of time: epochs."""

    name: str
    x: str
    y: str
    points: list[Point]
    kind: Kind = Kind.LINES
    plot: str = ""
    panel: str = ""
    log: str = ""
    goal: float | None = None
    marks: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Missing:
    """What was not measured, and why, with the remedy."""

    what: str
    why: str


@dataclass(slots=True)
class Result:
    """Of one measurement. ``title`` says what was asked, ``notes`` how it was found out."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    series: list[Series] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    freshness: dict[str, str] = field(default_factory=dict)
    """For each arm, how new the data is that a job reads in that way."""

    def figure(
        self,
        what: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        values: Sequence[float] = (),
        arm: str = "",
        why: str = "",
        headline: str = "",
    ) -> None:
        """``values``: what ``value`` is the median (or the worst) of."""
        target, holds = _goal(value, at_most, at_least)
        row = Row(what, value, unit, target=target, holds=holds, values=list(values))
        row.arm, row.why, row.headline = arm, why, headline
        self.rows.append(row)

    def compare(
        self,
        what: str,
        unit: str,
        values: Sequence[float],
        others: Sequence[float],
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        against: str = "direct",
        arm: str = "",
        why: str = "",
        headline: str = "",
    ) -> None:
        """``values`` and ``others`` were measured in turn, in pairs. The goal is the ratio's."""
        ratio = statistics.median(v / o for v, o in zip(values, others, strict=True))
        target, holds = _goal(ratio, at_most, at_least)
        row = Row(what, statistics.median(values), unit, statistics.median(others), ratio)
        row.target, row.holds = target and f"ratio {target}", holds
        row.values, row.others, row.against = list(values), list(others), against
        row.arm, row.why, row.headline = arm, why, headline
        self.rows.append(row)

    def leave_out(self, what: str, why: str) -> None:
        """Say in the report that ``what`` is missing, and why."""
        self.missing.append(Missing(what, why))


def _goal(value: float, at_most: float | None, at_least: float | None) -> tuple[str, bool | None]:
    if at_most is not None:
        return f"<= {at_most:g}", value <= at_most
    if at_least is not None:
        return f">= {at_least:g}", value >= at_least
    return "", None


@dataclass(slots=True)
class Report:
    """All that one command found. ``failed``: what was asked for and not measured, and why.
    ``commit`` ends in "+" where the working tree had changes."""

    command: str
    size: str
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    seconds: float = 0.0
    commit: str = field(default_factory=lambda: commit())
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    results: list[Result] = field(default_factory=list)
    failed: list[Missing] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def stem(self) -> str:
        """What its files are called."""
        return "".join(c for c in self.started if c.isdigit() or c == "T").replace("T", "-")


def commit() -> str:
    """Empty outside a repository."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        name = git("rev-parse", "--short=12", "HEAD")
        return name + "+" if name and git("status", "--porcelain", "-uno") else name
    except OSError:
        return ""


def machine() -> dict[str, Any]:
    """What a figure depends on besides the program."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "root": os.geteuid() == 0,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def print_result(result: Result) -> None:
    names = [f"{row.what}, {row.arm}" if row.arm else row.what for row in result.rows]
    width = max(map(len, names), default=0)
    print(f"\n{result.name}: {result.title} ({result.seconds:.0f} s)")
    print(f"  {'':<{width}}  {'measured':>16} {'other':>12} {'ratio':>7}")
    for name, row in zip(names, result.rows, strict=True):
        other = "" if row.other is None else number(row.other)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        verdict = "" if row.holds is None else ("reached" if row.holds else "MISSED")
        line = (
            f"  {name:<{width}}  {number(row.value):>10} {row.unit:<5} {other:>12} {ratio:>7}"
            f"  {row.target} {verdict}"
        )
        print(line.rstrip())
        if row.holds is False and row.why:
            print(f"  {'':<{width}}  why: {row.why}")
    for missing in result.missing:
        print(f"  - not measured: {missing.what}: {missing.why}")
    for note in result.notes:
        print(f"  - {note}")


def save(report: Report, path: Path) -> None:
    """Writes the JSON file, which is there completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def load(path: Path) -> Report:
    """What ``save`` wrote. Raises OSError, or ValueError with one line for any other file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"{path}: schema {document['schema']} instead of {SCHEMA}")
        document["results"] = [_result(result) for result in document["results"]]
        document["failed"] = [Missing(**one) for one in document["failed"]]
        return Report(**document)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a file of results: {error!r}") from None


def merged(reports: Sequence[Report]) -> Report:
    """The measurements of several runs as one report, called as the first; of those made twice the
    later. Commands, sizes and commits that differ all stand in it."""
    first = reports[0]
    found = {result.name: result for report in reports for result in report.results}
    failed = {one.what: one for report in reports for one in report.failed}

    def all_of(texts: Iterable[str], between: str) -> str:
        return between.join(dict.fromkeys(texts))

    return replace(
        first,
        command=all_of((report.command for report in reports), "\n"),
        size=all_of((report.size for report in reports), ", "),
        commit=all_of((report.commit for report in reports), ", "),
        seconds=sum(report.seconds for report in reports),
        results=list(found.values()),
        failed=[one for one in failed.values() if one.what not in found],
    )


def _result(document: dict[str, Any]) -> Result:
    rows = [Row(**row) for row in document.pop("rows")]
    missing = [Missing(**one) for one in document.pop("missing")]
    series = []
    for one in document.pop("series"):
        points = [Point(*point) for point in one.pop("points")]
        series.append(Series(**{**one, "kind": Kind(one["kind"])}, points=points))
    return Result(**document, rows=rows, series=series, missing=missing)
