"""What a measurement found: rows for people, JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Row:
    """One figure. ``other`` is the same work done without the mount, in the same run.

    ``ratio`` is the median of the ratios of neighbouring runs, not the ratio of the medians: the
    machine's speed drifts. ``holds`` says whether the target was reached.
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


@dataclass(slots=True)
class Result:
    """Of one measurement. ``notes`` say how it was made."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def figure(
        self,
        what: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
    ) -> None:
        target = "" if at_most is None else f"<= {at_most:g}"
        holds = None if at_most is None else value <= at_most
        self.rows.append(Row(what, value, unit, target=target, holds=holds))

    def compare(
        self,
        what: str,
        unit: str,
        values: Sequence[float],
        others: Sequence[float],
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """``values`` and ``others`` were measured in turn, pair by pair."""
        ratio = statistics.median(v / o for v, o in zip(values, others, strict=True))
        target, holds = "", None
        if at_most is not None:
            target, holds = f"ratio <= {at_most:g}", ratio <= at_most
        elif at_least is not None:
            target, holds = f"ratio >= {at_least:g}", ratio >= at_least
        self.rows.append(
            Row(
                *(what, statistics.median(values), unit, statistics.median(others), ratio),
                *(target, holds, list(values), list(others)),
            )
        )


def print_result(result: Result) -> None:
    width = max(len(row.what) for row in result.rows)
    print(f"\n{result.name}: {result.title} ({result.seconds:.0f} s)")
    print(f"  {'':<{width}}  {'measured':>16} {'direct':>12} {'ratio':>7}")
    for row in result.rows:
        other = "" if row.other is None else f"{row.other:,.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        verdict = "" if row.holds is None else ("reached" if row.holds else "MISSED")
        line = (
            f"  {row.what:<{width}}  {row.value:>10,.5g} {row.unit:<5} {other:>12} {ratio:>7}"
            f"  {row.target} {verdict}"
        )
        print(line.rstrip())
    for note in result.notes:
        print(f"  - {note}")


def save(results: Sequence[Result], folder: Path) -> Path:
    """Writes one JSON file and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / time.strftime("%Y%m%d-%H%M%S.json", time.gmtime())
    document: dict[str, Any] = {
        "machine": {
            "kernel": platform.release(),
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            "root": os.geteuid() == 0,
        },
        "results": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
