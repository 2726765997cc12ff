"""Finding files to copy ahead of the job: the whole tree, or a list of paths. And, for reports of
jobs, since when nothing is left to copy."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Iterable, Sequence
from random import Random

import trio

from monarchfs.metadata.directories import Row
from monarchfs.metadata.tree import Tree
from monarchfs.metrics import NS
from monarchfs.prefetch.jobs import RETRY_SECONDS, CopyJobs
from monarchfs.prefetch.open_first import MOST_WAITING
from monarchfs.prefetch.queue import Priority
from monarchfs.source.source import TRANSIENT
from monarchfs.system.listeners import Listeners
from monarchfs.types import ROOT_INO, FileType, IndexWriteError, Lane, Node

log = logging.getLogger(__name__)

QUEUE_LIMIT = 50_000
"""The scan waits while so many files wait to be copied: the queue must not hold the whole tree."""

BATCH = 256
_MOST_NAMED = 10

_LONGEST_PATH = 4096  # PATH_MAX of limits.h
_LONGEST_LINE = 2 * _LONGEST_PATH  # with that of the root before it


def read_list(path: str, roots: Sequence[bytes]) -> list[bytes]:
    """The paths of a prefetch list, one a line: relative to the mount, or absolute below one of
    ``roots``. Lines longer than any path are left out. Raises OSError."""
    paths = []
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", path)
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n") and len(line) == _LONGEST_LINE:
                while line and not line.endswith(b"\n"):
                    line = file.readline(_LONGEST_LINE)
                continue
            listed = line.rstrip(b"\n")
            for root in roots:
                if listed.startswith(root.rstrip(b"/") + b"/"):
                    listed = listed[len(root.rstrip(b"/")) + 1 :]
                    break
            if 0 < len(listed) <= _LONGEST_PATH:
                paths.append(listed)
    return paths


class Scan:
    """Walks the mirror in the background. Changing: ``running``; ``failed``, how many names it
    could not look at."""

    KEPT = ("failed",)

    def __init__(
        self,
        tree: Tree,
        jobs: CopyJobs,
        *,
        jitter_seconds: float = 0.0,
        random: Random | None = None,
    ) -> None:
        """``jitter_seconds``: other nodes scan the same tree. Each begins at another time within
        that, and takes another way."""
        self._jitter_seconds = jitter_seconds
        self._random = random or Random()
        self._tree = tree
        self._jobs = jobs
        self.running = False
        self.on_end: Listeners[[]] = Listeners()
        """Called when a walk has ended."""
        self.failed = 0

    async def everything(self) -> None:
        """Want every regular file, directory by directory in the order of their listings, or in
        none."""
        self.running = True
        if self._jitter_seconds:
            await trio.sleep(self._random.uniform(0, self._jitter_seconds))
        before = self.failed
        # Directories, each with where to go on in it, and how often that has failed. Of nodes that
        # share, each begins with what it owns, and finds the rest at its owners.
        own, others = deque([(ROOT_INO, 0, 0)]), deque[tuple[int, int, int]]()
        again = deque[tuple[int, int, int]]()
        while directories := own or others or again:
            if directories is again:
                await trio.sleep(RETRY_SECONDS[again[0][2] - 1])
                own, again = again, own
            if self._jitter_seconds:
                directories.rotate(-self._random.randrange(len(directories)))
            ino, cookie, failures = directories.popleft()
            try:
                await self._tree.directories.open(ino, Lane.BACKGROUND)
                while batch := await self._next_entries(ino, cookie):
                    last_try = failures == len(RETRY_SECONDS)
                    for found in await self._scan_batch(ino, batch, before, last_try=last_try):
                        (own if self._tree.shared.serves(found) else others).append((found, 0, 0))
                    cookie, failures = batch[-1][0].cookie, 0
            except (OSError, IndexWriteError) as exc:
                if _may_pass(exc) and failures < len(RETRY_SECONDS):
                    again.append((ino, cookie, failures + 1))
                else:
                    self._skip(f"directory inode {ino}", exc, before)
        self._end(before)

    async def listed(self, paths: Iterable[bytes]) -> None:
        """Want these files in this order; paths are relative to the mount's root."""
        self.running = True
        before = self.failed
        for seconds in (*RETRY_SECONDS, None):
            again = []
            for path in paths:
                await self._jobs.queue_below(QUEUE_LIMIT)
                try:
                    node = await self._walk(path)
                    if node is None or node.stat is None or not node.stat.is_regular:
                        raise FileNotFoundError(errno.ENOENT, "no such file")
                except (OSError, IndexWriteError) as exc:
                    if _may_pass(exc) and seconds is not None:
                        again.append(path)
                    else:
                        self._skip(repr(path), exc, before)
                else:
                    if not self._jobs.resident([node]):
                        self._jobs.want(node.ino, Priority.LISTED)
            if seconds is None or not again:
                break
            await trio.sleep(seconds)
            paths = again
        self._end(before)

    async def _walk(self, path: bytes) -> Node | None:
        ino, node = ROOT_INO, None
        for name in path.split(b"/"):
            if name in (b"", b"."):
                continue
            node = await self._tree.names.find(ino, name, Lane.BACKGROUND)
            if node is None:
                return None
            ino = node.ino
        return node

    async def _next_entries(self, ino: int, cookie: int) -> list[Row]:
        opens_bytes = self._jobs.open_first.most_bytes
        await self._jobs.queue_below(MOST_WAITING if opens_bytes else QUEUE_LIMIT)
        return self._tree.directories.entries(ino, cookie, BATCH)

    async def _scan_batch(
        self, ino: int, batch: Sequence[Row], before: int, *, last_try: bool
    ) -> list[int]:
        """Want the files among these entries; the directories. Raises OSError, IndexWriteError: of
        errors of single names those that may pass, and not on the ``last_try``."""
        wanted = [row for row in batch if row[0].type in WANTED and row[0].name not in SELF]
        nodes = await self._tree.names.find_entries(
            ino,
            wanted,
            Lane.BACKGROUND,
            scanned=True,
            opens_bytes=self._jobs.open_first.most_bytes,
        )
        self._jobs.open_first.note_found(nodes)
        for at, (entry, *_) in enumerate(wanted):
            if nodes[at] is None:  # it is gone, or failed
                try:
                    nodes[at] = await self._tree.names.find(ino, entry.name, Lane.BACKGROUND)
                except (OSError, IndexWriteError) as exc:
                    if _may_pass(exc) and not last_try:
                        raise
                    self._skip(f"{entry.name!r} in directory inode {ino}", exc, before)
        if self._jitter_seconds:
            self._random.shuffle(nodes)
        directories: list[int] = []
        there = [node for node in nodes if node is not None and node.stat is not None]
        # In a later mount, or after another worker, that may be all of them.
        resident = self._jobs.resident(there)
        for node in there:
            if node.stat.is_directory:
                directories.append(node.ino)
            elif node.stat.is_regular and node.ino not in resident:
                self._jobs.want(node.ino, Priority.SCANNED)
        return directories

    def _skip(self, what: str, exc: Exception, before: int) -> None:
        """The first few are named, all are counted: a list may be of another dataset altogether."""
        self.failed += 1
        if self.failed - before <= _MOST_NAMED:
            log.warning("not prefetched: %s: %s", what, exc)

    def _end(self, before: int) -> None:
        if self.failed > before:
            log.warning("%d names were not prefetched", self.failed - before)
        self.running = False
        self.on_end()


def _may_pass(exc: Exception) -> bool:
    return isinstance(exc, OSError) and exc.errno in TRANSIENT


SELF = (b".", b"..")
WANTED = (FileType.DIRECTORY, FileType.REGULAR, FileType.UNKNOWN)


class CopyIdle:
    """Constant: what it watches, when the mount was made. Changing: ``since``, the last time at
    which copying ran dry (None before the first); whether anything was copied after that."""

    KEPT = ("since",)

    def __init__(self, jobs: CopyJobs, scan: Scan, mount_ns: int) -> None:
        self._jobs = jobs
        self._scan = scan
        self._mount_ns = mount_ns
        self.since: float | None = None
        self._copied = False
        jobs.on_step.add(self._copy_ended)
        scan.on_end.add(self._check)

    @property
    def since_uptime_seconds(self) -> float | None:
        """Seconds from the mount until nothing was left to copy; None while something is, and where
        nothing ever was."""
        return None if self._busy else self.since

    @property
    def _busy(self) -> bool:
        return bool(self._jobs.active or len(self._jobs.queue) or self._scan.running)

    def _copy_ended(self, _inos: Sequence[int]) -> None:
        self._copied = True
        self._check()

    def _check(self) -> None:
        # A scan that finds all of it local, as that of a later worker, puts nothing off.
        if not self._busy and (self._copied or self.since is None):
            self.since = round((time.time_ns() - self._mount_ns) / NS, 3)
            self._copied = False
