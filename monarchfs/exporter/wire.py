"""A mount's values on their way to the node's exporter, as JSON (docs/CONTROL.md, ``metrics``).

The reader is not the worker's user and trusts nothing: the sender may be a hostile program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from monarchfs.metrics.names import FAMILIES, Durations, Family, MetricType, Sample, Value, Values
from monarchfs.system.escaping import printable

MOST_LINES = 4096
"""Of one mount in the text: with a tier there are about 650."""

MOST_LABEL_CHARACTERS = 4096
_MOST_BOUNDS = 64
_LARGEST = 1 << 63
_WORD = re.compile(r"[A-Za-z0-9_.+=-]{0,64}")
_PATHS = frozenset(("tier", "source", "mountpoint"))

_BY_NAME = {family.name: family for family in FAMILIES}


def encode(values: Values) -> dict[str, Any]:
    """The result of the command ``metrics``."""
    bounds: dict[str, tuple[int, ...]] = {}
    metrics: dict[str, list[list[Any]]] = {}
    for family, samples in values.items():
        rows = metrics[family.name] = []
        for labels, value in samples:
            if isinstance(value, Durations):
                # Within a metric they are all the same.
                bounds[family.name] = value.bounds_ns
                rows.append([labels, [value.total_ns, *value.counts]])
            else:
                rows.append([labels, value])
    return {"bounds_ns": bounds, "metrics": metrics}


def decode(result: Mapping[str, Any]) -> Values:
    """What ``encode`` was given. Leaves out metrics that this version does not have, or has with
    other labels. Raises ValueError for what no version sends."""
    metrics, all_bounds = result.get("metrics"), result.get("bounds_ns")
    if not isinstance(metrics, dict) or not isinstance(all_bounds, dict):
        raise ValueError("there are no metrics")
    values: Values = {}
    lines = 0
    for name, rows in metrics.items():
        family = _BY_NAME.get(name)
        if family is None:
            continue
        bounds = _bounds(all_bounds.get(name, []))
        samples = list(_samples(family, rows, bounds))
        if len({labels for labels, _value in samples}) != len(samples):
            raise ValueError(f"{name} comes twice with the same labels")
        lines += len(samples) * (len(bounds) + 3 if family.kind is MetricType.HISTOGRAM else 1)
        if lines > MOST_LINES:
            raise ValueError("there are too many metrics")
        values[family] = samples
    return values


def _samples(family: Family, rows: object, bounds: tuple[int, ...]) -> Iterator[Sample]:
    if not isinstance(rows, list):
        raise ValueError(f"{family.name} is no list")
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], list):
            raise ValueError(f"{family.name} holds what is no sample")
        labels, value = row
        if len(labels) == len(family.labels):
            checked = map(_label, family.labels, labels)
            yield tuple(checked), _value(family, value, bounds)


def _label(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MOST_LABEL_CHARACTERS:
        raise ValueError(f"the label {name} is no text, or too long")
    if name not in _PATHS and not _WORD.fullmatch(value):
        raise ValueError(f"the label {name} is not one word")
    return printable(value)


def _value(family: Family, value: object, bounds: tuple[int, ...]) -> Value:
    if family.kind is not MetricType.HISTOGRAM:
        return _number(family, value)
    if not isinstance(value, list) or len(value) != len(bounds) + 2:
        raise ValueError(f"{family.name} is no histogram")
    total, *counts = [int(_number(family, number)) for number in value]
    return Durations(bounds, tuple(counts), total)


def _number(family: Family, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{family.name} is no number")
    # Neither NaN nor infinity passes.
    if not 0 <= value < _LARGEST:
        raise ValueError(f"{family.name} is out of range")
    return value


def _bounds(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(bound) is int for bound in value):
        raise ValueError("the bounds are no whole numbers")
    if len(value) > _MOST_BOUNDS or not all(0 < b < _LARGEST for b in value):
        raise ValueError("the bounds are out of range")
    if any(a >= b for a, b in pairwise(value)):
        raise ValueError("the bounds do not rise")
    return tuple(value)
