"""Telling the mount which files will be read more often than others.

hints.weigh({path: score, ...})
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from monarchfs.control.weights import weight_requests
from monarchfs.hints.client import JobMount, find_mount, quietly

Path = str | os.PathLike[str]


def weigh(
    weights: Mapping[Any, float] | Iterable[tuple[Path, float]], *, replace: bool = False
) -> bool:
    """Files with a larger weight stay, and lie in the faster tier: a weight is how often the file
    will be read, compared with others. For a mount with ``--evict weighted``. What was said of
    other files stays; with ``replace`` they weigh nothing. Returns when all is said, which takes
    seconds for a million files; False if there is no mount, or it does not want weights."""
    pairs = iter(weights.items() if isinstance(weights, Mapping) else weights)
    first = next(pairs, None)
    if first is None:
        return False
    found: list[JobMount] = []

    def send() -> None:
        mount = find_mount(first[0])
        if mount is None:
            return
        for request in weight_requests(_below(mount, chain([first], pairs)), replace=replace):
            with mount.connect() as connection:
                connection.long_request(request, lambda so_far: None)
        found.append(mount)

    return quietly("weights", send) and bool(found)


def _below(mount: JobMount, weights: Iterable[tuple[Path, float]]) -> Iterator[tuple[str, float]]:
    """Of those that lie in the mount."""
    for path, weight in weights:
        if (name := mount.below(path)) is not None:
            yield name, weight
