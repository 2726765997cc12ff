"""The values of metrics at one moment."""

from __future__ import annotations

from typing import NamedTuple

from monarchfs.metrics.names import Family


class Durations(NamedTuple):
    """A histogram as it was at one moment."""

    bounds_ns: tuple[int, ...]
    counts: tuple[int, ...]
    total_ns: int


Value = int | float | Durations
Sample = tuple[tuple[str, ...], Value]
"""The values of the labels, and the metric's."""

Values = dict[Family, list[Sample]]
