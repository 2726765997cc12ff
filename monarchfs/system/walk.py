"""All directories of a tree, breadth first, each in the order of its listing.

Several threads list and stat ahead, because on a parallel file system each answer has to come from
a server.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

THREADS = 16
AHEAD = 64
"""Directories that are listed before their turn."""
BATCH = 500
"""Names for which one thread asks."""

Stats = list[os.stat_result | None]
"""What lstat(2) says of names; None for one that is gone, or may not be asked about."""


class _Listed(NamedTuple):
    path: bytes
    below: list[bytes]
    names: list[bytes]
    stats: Stats


def walk(root: str) -> Iterator[Iterator[Stats] | None]:
    """For ``root`` and each directory below it what is in it, but for directories, in the order of
    its listing; None for one that cannot be listed.

    A directory's batches are to be exhausted before the next directory is taken. Mounts below
    ``root`` are entered. Blocks as long as the source does. Raises OSError if ``root`` itself
    cannot be listed.
    """
    root_bytes = os.fsencode(root)
    os.scandir(root_bytes).close()
    waiting = deque([root_bytes])
    listed: deque[Future[_Listed | None]] = deque()
    pool = ThreadPoolExecutor(THREADS)
    try:
        while waiting or listed:
            while waiting and len(listed) < AHEAD:
                listed.append(pool.submit(_list, waiting.popleft()))
            directory = listed.popleft().result()
            if directory is None:
                yield None
                continue
            waiting.extend(directory.below)
            yield _batches(directory, pool)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _batches(directory: _Listed, pool: ThreadPoolExecutor) -> Iterator[Stats]:
    if directory.stats:
        yield directory.stats
    names = directory.names
    batches: deque[Future[Stats]] = deque()
    for start in range(0, len(names), BATCH):
        batches.append(pool.submit(_stat_each, directory.path, names[start : start + BATCH]))
        if len(batches) > THREADS:
            yield batches.popleft().result()
    while batches:
        yield batches.popleft().result()


def _list(path: bytes) -> _Listed | None:
    below: list[bytes] = []
    names: list[bytes] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.path)
                else:
                    names.append(entry.name)
    except OSError:
        return None
    if len(names) <= BATCH:
        return _Listed(path, below, [], _stat_each(path, names))
    return _Listed(path, below, names, [])


def _stat_each(directory: bytes, names: list[bytes]) -> Stats:
    return [_stat(os.path.join(directory, name)) for name in names]


def _stat(path: bytes) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None
