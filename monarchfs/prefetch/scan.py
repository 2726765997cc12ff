"""Finding files to copy ahead of the job: the whole tree, or a list of paths."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import deque
from collections.abc import Iterable, Sequence
from random import Random

import trio

from monarchfs.metadata.tree import Tree
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.open_first import MOST_WAITING
from monarchfs.prefetch.queue import Priority
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
        # Of nodes that share, each begins with what it owns, and finds the rest at its owners.
        own, others = deque([ROOT_INO]), deque[int]()
        while directories := own or others:
            if self._jitter_seconds:
                directories.rotate(-self._random.randrange(len(directories)))
            ino = directories.popleft()
            try:
                await self._tree.directories.open(ino, Lane.BACKGROUND)
            except (OSError, IndexWriteError) as exc:
                self._skip(f"directory inode {ino}", exc)
                continue
            for found in await self._scan_directory(ino):
                (own if self._tree.shared.serves(found) else others).append(found)
        self.running = False
        self.on_end()

    async def listed(self, paths: Iterable[bytes]) -> None:
        """Want these files in this order; paths are relative to the mount's root."""
        self.running = True
        before = self.failed
        for path in paths:
            await self._jobs.queue_below(QUEUE_LIMIT)
            try:
                node = await self._walk(path)
            except (OSError, IndexWriteError) as exc:
                self._skip_listed(path, exc, before)
                continue
            if node is None or node.stat is None or not node.stat.is_regular:
                self._skip_listed(path, OSError(errno.ENOENT, "no such file"), before)
                continue
            self._jobs.want(node.ino, Priority.LISTED)
        if self.failed > before:
            log.warning("%d paths of the list were not prefetched", self.failed - before)
        self.running = False
        self.on_end()

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

    async def _scan_directory(self, ino: int) -> list[int]:
        directories: list[int] = []
        cookie = 0
        while True:
            opens_bytes = self._jobs.open_first.most_bytes
            await self._jobs.queue_below(MOST_WAITING if opens_bytes else QUEUE_LIMIT)
            batch = self._tree.directories.entries(ino, cookie, BATCH)
            if not batch:
                break
            cookie = batch[-1][0].cookie
            wanted = [row for row in batch if row[0].type in WANTED and row[0].name not in SELF]
            try:
                nodes = await self._tree.names.find_entries(
                    ino, wanted, Lane.BACKGROUND, scanned=True, opens_bytes=opens_bytes
                )
            except (OSError, IndexWriteError) as exc:
                self._skip(f"directory inode {ino}", exc)
                break
            self._jobs.open_first.note_found(nodes)
            if self._jitter_seconds:
                self._random.shuffle(nodes)
            for node in nodes:
                if node is None or node.stat is None:
                    continue
                if node.stat.is_directory:
                    directories.append(node.ino)
                elif node.stat.is_regular:
                    self._jobs.want(node.ino, Priority.SCANNED)
        return directories

    def _skip_listed(self, path: bytes, exc: Exception, before: int) -> None:
        """The first few are named, all are counted: a list may be of another dataset altogether."""
        if self.failed - before < _MOST_NAMED:
            self._skip(repr(path), exc)
        else:
            self.failed += 1

    def _skip(self, what: str, exc: Exception) -> None:
        self.failed += 1
        log.warning("not prefetched: %s: %s", what, exc)


SELF = (b".", b"..")
WANTED = (FileType.DIRECTORY, FileType.REGULAR, FileType.UNKNOWN)
