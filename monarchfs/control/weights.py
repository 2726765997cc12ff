"""Weights of files as requests of the command ``weigh``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_BATCH_BYTES = 48 << 10
"""Of paths and weights in one request, which may have 64 KiB (``MOST_REQUEST_BYTES``)."""


def weight_requests(weights: Iterable[tuple[str, float]], *, replace: bool) -> list[dict[str, Any]]:
    """Requests for (path below the mount's root, weight). All at once: what is wrong with the last
    of them is to be known before the first is sent. Raises ValueError for a weight that is none."""
    return list(_requests(weights, replace=replace))


def _requests(weights: Iterable[tuple[str, float]], *, replace: bool) -> Iterator[dict[str, Any]]:
    paths: list[str] = []
    values: list[str] = []
    size = 0
    for path, weight in weights:
        value = repr(checked(weight))
        size += len(json.dumps(path)) + len(value) + 6
        if paths and size > _BATCH_BYTES:
            yield _request(paths, values, replace)
            paths, values, replace = [], [], False
            size = len(json.dumps(path)) + len(value) + 6
        paths.append(path)
        values.append(value)
    if paths or replace:
        yield _request(paths, values, replace)


def weights_of(request: Mapping[str, Any]) -> list[float]:
    """The weights of the request's paths. Raises ValueError."""
    values = request.get("weights")
    if not isinstance(values, list) or len(values) != len(request.get("paths", [])):
        raise ValueError("it has not one weight for each path")
    return [checked(float(value)) for value in values]


def checked(weight: float) -> float:
    """A weight. Raises ValueError where it is none."""
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(f"a weight is a number of at least 0, not {weight}")
    return float(weight)


def _request(paths: list[str], values: list[str], replace: bool) -> dict[str, Any]:
    return {"command": "weigh", "paths": paths, "weights": values, "replace": replace}
