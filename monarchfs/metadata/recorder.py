"""Records what the source said, and notifies those who know something else."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from monarchfs.metadata.cached_listings import CachedListings, NegativeDentries
from monarchfs.metadata.known import KnownMetadata
from monarchfs.metrics import Metrics
from monarchfs.system.listeners import Listeners
from monarchfs.types import ROOT_INO, IndexWriteError, Node, SourceChanged, SourceStat

log = logging.getLogger(__name__)

RENUMBERED_KEPT = 10_000
"""Directories whose former numbers are remembered, to compare what is in them."""


class Recorder:
    """Constant: its parts; ``cached_listings`` and ``negative`` say what the kernel may have.
    Changing: ``_renumbered``, former numbers of directories that got another one in the source.
    Methods raise IndexWriteError unless they say otherwise."""

    def __init__(self, known: KnownMetadata, metrics: Metrics) -> None:
        self._metrics = metrics
        self._renumbered: dict[int, int] = {}
        self.cached_listings = CachedListings()
        self.negative = NegativeDentries()
        self._known = known
        self._index = known.index
        self.on_moved: Listeners[[int]] = Listeners()
        """Hear of each time (ns since 1970) when a directory is seen moved."""
        self.on_outdated: Listeners[[int]] = Listeners()
        """Hear of each inode number whose version the source no longer holds."""
        self.on_appeared: Listeners[[int, bytes]] = Listeners()
        """Hear of each name (directory, name) that exists by now and that the kernel may remember
        as missing."""

    def take_over(self, moved_ns: int) -> None:
        """Another process served the mount; it passed ``moved_ns`` to ``on_moved`` (0: nothing)."""
        self._known.directory_moved(moved_ns)
        self.negative.take_over()
        self.cached_listings.take_over(time.time_ns())

    def found_each(
        self, parent: int, found: list[tuple[bytes, SourceStat, bytes]], asked_ns: int
    ) -> list[Node]:
        """Record names of a directory, with attributes and targets of links, in one transaction.
        Another version than before outdates the one that the name stood for."""
        recorded = self._index.nodes.record_found_each(parent, found, asked_ns) if found else []
        for (name, *_), (node, before) in zip(found, recorded, strict=True):
            if before is None:
                self.cached_listings.changed(parent)
                if self._renumbered:
                    self._count_renumbered(parent, node, None)
            elif before != node.ino:
                self._count_renumbered(parent, node, before)
                self.replaced(parent, name, before)
        return [node for node, _before in recorded]

    def _count_renumbered(self, parent: int, node: Node, before: int | None) -> None:
        """Count what is as it was under the same name before (``before``; in a directory that was
        renumbered itself: under its former number), but for its number."""
        if before is None:
            former = self._renumbered.get(parent)
            dirent = None if former is None else self._index.nodes.dirent(former, node.name)
            before = dirent.ino if dirent is not None else 0
        old = self._index.nodes.node(before)
        if (
            old is None
            or old.stat.mode != node.stat.mode
            or old.stat.ino == node.stat.ino
            or old.stat.version._replace(ino=node.stat.ino) != node.stat.version
        ):
            return
        if not self._metrics.renumbered_files:
            log.warning(
                "%r has another inode number in the source than before (%d, %d), and is otherwise"
                " the same. Such files are copied again: use a file system, or options of it, that"
                " keep inode numbers (docs/TROUBLESHOOTING.md, Speed)",
                os.fsdecode(node.name),
                old.stat.ino,
                node.stat.ino,
            )
        self._metrics.renumbered_files += 1
        if node.stat.is_directory and len(self._renumbered) < RENUMBERED_KEPT:
            self._renumbered[node.ino] = old.ino

    def missing(self, parent: int, names: list[bytes], asked_ns: int) -> None:
        self._known.absent(parent, names, asked_ns)
        befores = self._index.nodes.record_missing(parent, names) if names else []
        for name, before in zip(names, befores, strict=True):
            if before is not None:
                self.replaced(parent, name, before)

    def listed(self, ino: int) -> None:
        """A whole listing was recorded: some of its names the kernel may remember as missing."""
        for name in self.negative.pop(ino):
            if self._index.nodes.dirent(ino, name) is not None:
                self.on_appeared(ino, name)

    def replaced(self, parent: int, name: bytes, before: int) -> None:
        """``name`` no longer stands for ``before`` (0: it was only listed), which is outdated by
        that unless it is a directory, or was found at another place since. Raises nothing."""
        self.cached_listings.changed(parent)
        node = self._index.nodes.node(before)
        if node is None or node.stat.is_directory:
            return
        if node.outdated:
            self.on_outdated(node.ino)
        elif (node.parent, node.name) == (parent, name):
            self.outdate(node.ino)

    def outdate(self, ino: int) -> None:
        """The source no longer holds what ``ino`` stands for. Raises nothing."""
        self.mark_outdated(ino)
        self.on_outdated(ino)

    def mark_outdated(self, ino: int) -> None:
        """``outdate`` without the notification. Raises nothing."""
        try:
            self._index.nodes.mark_outdated(ino)
        except IndexWriteError as exc:
            log.warning("inode %d is not marked as outdated: %s", ino, exc)

    @contextmanager
    def estale_if_replaced(self, ino: int) -> Iterator[None]:
        """For calls of the source in the directory ``ino``: OSError ESTALE in place of
        SourceChanged, after ``invalidate_directory``."""
        try:
            yield
        except SourceChanged as exc:
            self.invalidate_directory(ino)
            raise OSError(errno.ESTALE, "its directory was replaced") from exc

    def invalidate_directory(self, ino: int) -> None:
        """The directory, or one above it, is not where it was: the source is asked about each of
        them again, and about all names, because the kernel makes only one more try by whatever
        name (fs/namei.c). With ``immutable``, only names of directories are asked for."""
        moved_ns = time.time_ns()
        self._known.directory_moved(moved_ns)
        self.on_moved(moved_ns)
        climbed: set[int] = set()
        while ino != ROOT_INO and ino not in climbed:  # as in ``NodeTables.dirref``
            climbed.add(ino)
            self._index.nodes.mark_outdated(ino)
            node = self._index.nodes.node(ino)
            if node is None:
                return
            ino = node.parent
