"""All files of a source, in the order in which ``--prefetch all`` would copy them.

Directories are taken breadth first, each in the order of its listing. Several threads list and stat
ahead, because on a parallel file system each answer has to come from a server.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from monarchfs.types import SourceStat

THREADS = 16
AHEAD = 64
"""Directories that are listed before their turn."""
BATCH = 500
"""Names for which one thread asks."""


class File(NamedTuple):
    """A regular file: its size, and the name that a replica of this version has."""

    size: int
    replica_name: bytes


@dataclass(slots=True)
class Counts:
    """What was come across beside files: ``others`` are links and special files, ``unreadable``
    directories that could not be listed, ``hard_links`` further names of files counted already."""

    directories: int = 0
    others: int = 0
    unreadable: int = 0
    hard_links: int = 0


class _Directory(NamedTuple):
    """``stats`` of the names in order where they are few; else ``names`` are left to be asked for.
    None stands for a directory that cannot be listed, and for a name that is gone."""

    path: bytes
    below: list[bytes]
    names: list[bytes]
    stats: list[os.stat_result | None]


def walk(root: str, counts: Counts) -> Iterator[File]:
    """The files below ``root``; ``counts`` is kept up to date. Blocks as long as the source does.
    Raises OSError if ``root`` itself cannot be listed."""
    root_bytes = os.fsencode(root)
    device = os.stat(root_bytes).st_dev
    os.scandir(root_bytes).close()
    linked: set[tuple[int, int]] = set()
    waiting = deque([root_bytes])
    listed: deque[Future[_Directory | None]] = deque()
    pool = ThreadPoolExecutor(THREADS)
    try:
        while waiting or listed:
            while waiting and len(listed) < AHEAD:
                listed.append(pool.submit(_list, waiting.popleft()))
            directory = listed.popleft().result()
            if directory is None:
                counts.unreadable += 1
                continue
            counts.directories += 1
            waiting.extend(directory.below)
            for st in _stats(directory, pool):
                if st is None:
                    continue
                if not stat.S_ISREG(st.st_mode):
                    counts.others += 1
                    continue
                if st.st_nlink > 1:
                    if (st.st_dev, st.st_ino) in linked:
                        counts.hard_links += 1
                        continue
                    linked.add((st.st_dev, st.st_ino))
                version = SourceStat.of(st, device).version
                yield File(st.st_size, version.replica_name)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _stats(directory: _Directory, pool: ThreadPoolExecutor) -> Iterator[os.stat_result | None]:
    yield from directory.stats
    names = directory.names
    batches: deque[Future[list[os.stat_result | None]]] = deque()
    for start in range(0, len(names), BATCH):
        batches.append(pool.submit(_stat_each, directory.path, names[start : start + BATCH]))
        if len(batches) > THREADS:
            yield from batches.popleft().result()
    while batches:
        yield from batches.popleft().result()


def _list(path: bytes) -> _Directory | None:
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
        return _Directory(path, below, [], _stat_each(path, names))
    return _Directory(path, below, names, [])


def _stat_each(directory: bytes, names: list[bytes]) -> list[os.stat_result | None]:
    return [_stat(os.path.join(directory, name)) for name in names]


def _stat(path: bytes) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None
