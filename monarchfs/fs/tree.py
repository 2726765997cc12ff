"""Names and attributes: answered from the index where that is fresh, else from the source.

Methods whose name begins with ``known`` never wait: they return None where the source has to be
asked. The others wait, and raise OSError with the errno that the caller of the system call gets.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import trio

from monarchfs.fs.freshness import UNANSWERED_SECONDS, Freshness
from monarchfs.index.index import Index
from monarchfs.metrics import Metrics
from monarchfs.source.flights import Flights
from monarchfs.source.source import Source
from monarchfs.types import (
    ROOT_INO,
    Dirent,
    DirRef,
    FileType,
    IndexWriteError,
    Lane,
    Node,
    SourceChanged,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

SELF_COOKIE, PARENT_COOKIE = 1, 2
"""The readdir offsets of ``.`` and ``..``; the index gives out higher ones."""

LISTING_BATCH = 500
"""Names that go into the index in one transaction: a few milliseconds on the event loop."""

STATFS_SECONDS = 30.0


class Entry(NamedTuple):
    """A node for the kernel, with the seconds that it may keep the name and the attributes."""

    node: Node
    entry_timeout: float
    attr_timeout: float


class Missing(NamedTuple):
    """A name that does not exist, and the seconds for which that may be believed."""

    timeout: float


class Tree:
    """The directory tree of one mount.

    Constant: its parts. ``deadline`` is how many seconds a revalidation waits for a source that
    does not answer, where something is known that can be served instead.
    """

    def __init__(
        self,
        index: Index,
        source: Source,
        freshness: Freshness,
        metrics: Metrics,
        nursery: trio.Nursery,
        *,
        deadline: float,
    ) -> None:
        self.index = index
        self._source = source
        self._freshness = freshness
        self._metrics = metrics
        self._deadline = deadline
        self._flights: Flights = Flights(nursery)
        self._statfs: tuple[float, os.statvfs_result] | None = None

    async def load_root(self) -> None:
        """Know the root before the kernel asks. Raises OSError where the source does not say."""
        if self.index.node(ROOT_INO) is None:
            await self._fetch_node(ROOT_INO)
        else:
            await self.attributes(ROOT_INO)

    # -- answers from what is known

    def known_lookup(self, parent: int, name: bytes) -> Entry | Missing | None:
        now = time.time_ns()
        dirent = self.index.dirent(parent, name)
        if dirent is None:
            listing = self.index.listing(parent)
            if listing is not None and self._freshness.fresh(listing.fetched_ns, now):
                return Missing(self._freshness.timeouts(listing.fetched_ns, now)[0])
            return None
        if not self._freshness.fresh(dirent.checked_ns, now):
            return None
        node = self.index.node(dirent.ino)
        if node is None or node.outdated or not self._freshness.fresh(node.fetched_ns, now):
            return None
        return self._entry(node, min(dirent.checked_ns, node.fetched_ns), now)

    def known_attributes(self, ino: int) -> Entry | None:
        now = time.time_ns()
        node = self.index.node(ino)
        if node is None:
            return None
        if node.outdated:
            # Only an open file can still be asked about: it keeps what it was opened as.
            return Entry(node, 0.0, 0.0)
        if not self._freshness.fresh_attributes(node.fetched_ns, now):
            return None
        return self._entry(node, node.fetched_ns, now)

    def known_node(self, ino: int) -> Node | None:
        """The node, if it may be opened without asking the source about it."""
        node = self.index.node(ino)
        if node is None or node.outdated:
            return None
        return node if self._freshness.fresh(node.fetched_ns, time.time_ns()) else None

    def known_target(self, ino: int) -> bytes | None:
        """A symbolic link's; a link that points elsewhere later is another inode."""
        node = self.index.node(ino)
        return node.target if node is not None and node.target else None

    def _entry(self, node: Node, checked_ns: int, now_ns: int) -> Entry:
        return Entry(node, *self._freshness.timeouts(checked_ns, now_ns))

    # -- answers that may need the source

    async def lookup(self, parent: int, name: bytes, lane: Lane = Lane.DEMAND) -> Entry | Missing:
        if (known := self.known_lookup(parent, name)) is not None:
            return known
        fallback: Entry | None = None
        dirent = self.index.dirent(parent, name)
        if dirent is not None:
            node = self.index.node(dirent.ino)
            if node is not None and not node.outdated:
                fallback = Entry(node, UNANSWERED_SECONDS, UNANSWERED_SECONDS)
        return await self._ask(
            ("name", parent, name), lambda: self._fetch_name(parent, name, lane), fallback
        )

    async def find(self, parent: int, name: bytes, lane: Lane) -> Node | None:
        """``lookup`` for those who are not the kernel; None for a name that does not exist."""
        found = await self.lookup(parent, name, lane)
        return None if isinstance(found, Missing) else found.node

    async def find_each(self, parent: int, names: list[bytes], lane: Lane) -> list[Node | None]:
        """``find`` for many names of a directory, with one call of the source for all that are
        not known. Raises OSError if the directory cannot be used; None for a name that fails."""
        found: dict[bytes, Node | None] = {}
        unknown = []
        for name in names:
            known = self.known_lookup(parent, name)
            if known is None:
                unknown.append(name)
            else:
                found[name] = None if isinstance(known, Missing) else known.node
        if unknown:
            directory = self._directory(parent)
            asked_ns = time.time_ns()
            try:
                answers = await self._source.found_each(directory, unknown, lane)
            except SourceChanged as exc:
                self._distrust(parent)
                raise OSError(errno.ESTALE, "its directory was replaced") from exc
            for name, answer in zip(unknown, answers, strict=True):
                if isinstance(answer, OSError):
                    found[name] = None
                else:
                    found[name] = self.index.record_found(parent, name, *answer, asked_ns)
        return [found[name] for name in names]

    async def attributes(self, ino: int) -> Entry:
        if (known := self.known_attributes(ino)) is not None:
            return known
        node = self.index.node(ino)
        if node is None:
            raise OSError(errno.ESTALE, "unknown inode")
        fallback = Entry(node, UNANSWERED_SECONDS, UNANSWERED_SECONDS)
        return await self._ask(("node", ino), lambda: self._fetch_node(ino), fallback)

    async def revalidated(self, ino: int) -> Node:
        """The node as ``open`` needs it: fresh by the mount's promise.

        Raises OSError ESTALE where the source has another version by now: the kernel then looks
        the name up again (fs/namei.c, LOOKUP_REVAL) and finds the new inode.
        """
        node = self.index.node(ino)
        if node is not None and not node.outdated:
            if self._freshness.fresh(node.fetched_ns, time.time_ns()):
                return node
            await self._ask(
                ("node", ino),
                lambda: self._fetch_node(ino),
                Entry(node, UNANSWERED_SECONDS, UNANSWERED_SECONDS),
            )
            node = self.index.node(ino)
        if node is None or node.outdated:
            raise OSError(errno.ESTALE, "the source has another version")
        return node

    async def target(self, ino: int) -> bytes:
        if (known := self.known_target(ino)) is not None:
            return known
        directory, name = self.place(ino)
        return await self._source.readlink(directory, name, Lane.DEMAND)

    async def statfs(self) -> os.statvfs_result:
        if self._statfs is not None and trio.current_time() - self._statfs[0] < STATFS_SECONDS:
            return self._statfs[1]
        fallback = self._statfs[1] if self._statfs is not None else None
        return await self._ask(("statfs",), self._fetch_statfs, fallback, even_open=True)

    async def _fetch_statfs(self) -> os.statvfs_result:
        result = await self._source.statvfs(Lane.DEMAND)
        self._statfs = (trio.current_time(), result)
        return result

    async def _ask(
        self,
        key: tuple[object, ...],
        fetch: Callable[[], Awaitable[T]],
        fallback: T | None,
        *,
        even_open: bool = False,
    ) -> T:
        """Fetch from the source, once for all who want the same; what is known instead where it
        does not answer in time, or the answer cannot be recorded, and the mount's promise allows
        that. Raises OSError."""
        if fallback is None or not (self._freshness.serves_stale or even_open):
            try:
                return await self._flights.fly(key, fetch)
            except IndexWriteError as exc:
                raise OSError(errno.EIO, f"what was found cannot be recorded: {exc}") from exc
        # A source that is known to hang is asked all the same (the answer, when it comes, is for
        # the next one), but nobody waits for it again.
        with trio.move_on_after(self._deadline if self._source.responding else 0.001):
            try:
                return await self._flights.fly(key, fetch)
            except IndexWriteError as exc:
                log.warning("what was found cannot be recorded: %s", exc)
        self._metrics.stale_answers += 1
        return fallback

    async def _fetch_name(self, parent: int, name: bytes, lane: Lane) -> Entry | Missing:
        directory = self._directory(parent)
        asked_ns = time.time_ns()
        try:
            stat, target = await self._source.found(directory, name, lane)
        except (FileNotFoundError, NotADirectoryError):
            self.index.record_missing(parent, name)
            return Missing(self._freshness.timeouts(asked_ns, time.time_ns())[0])
        except SourceChanged as exc:
            self._distrust(parent)
            raise OSError(errno.ESTALE, "its directory was replaced") from exc
        # ``asked_ns``, not the time of the answer: the promise counts from when it was true.
        node = self.index.record_found(parent, name, stat, target, asked_ns)
        return self._entry(node, asked_ns, time.time_ns())

    async def _fetch_node(self, ino: int) -> Entry:
        """Ask about an inode by the place where it was found last."""
        asked_ns = time.time_ns()
        if ino == ROOT_INO:
            stat = await self._source.stat(self._source.root, b"", Lane.DEMAND)
            return self._entry(self.index.record_root(stat, asked_ns), asked_ns, time.time_ns())
        node = self.index.node(ino)
        if node is None:
            raise OSError(errno.ESTALE, "unknown inode")
        # Through the name, so that a file that was replaced is found out.
        found = await self._flights.fly(
            ("name", node.parent, node.name),
            lambda: self._fetch_name(node.parent, node.name, Lane.DEMAND),
        )
        if isinstance(found, Missing) or found.node.ino != ino:
            self.index.mark_outdated(ino)
            return Entry(node, 0.0, 0.0)
        return found

    def _distrust(self, ino: int) -> None:
        """The directory, or one above it, is not where it was: ask about each again."""
        while ino != ROOT_INO:
            self.index.mark_outdated(ino)
            node = self.index.node(ino)
            if node is None:
                return
            ino = node.parent

    def _directory(self, ino: int) -> DirRef:
        directory = self.index.dirref(ino)
        if directory is None:
            raise OSError(errno.ESTALE, "the directory is not known any more")
        return directory

    def place(self, ino: int) -> tuple[DirRef, bytes]:
        """Where the source has an inode. Raises OSError ESTALE where that is not known."""
        node = self.index.node(ino)
        if node is None:
            raise OSError(errno.ESTALE, "unknown inode")
        if node.stat is not None and node.stat.is_directory:
            return self._directory(ino), b""
        return self._directory(node.parent), node.name

    # -- directories

    async def open_directory(self, ino: int, lane: Lane = Lane.DEMAND) -> None:
        """Have the directory's entries in the index, as fresh as the mount promises."""
        listing = self.index.listing(ino)
        if listing is not None and self._freshness.fresh(listing.fetched_ns, time.time_ns()):
            return
        # True stands for "what is in the index will do".
        fallback = True if listing is not None else None
        await self._ask(("list", ino), lambda: self._fetch_listing(ino, lane), fallback)

    async def _fetch_listing(self, ino: int, lane: Lane) -> bool:
        directory = self._directory(ino)
        asked_ns = time.time_ns()
        sequence = self.index.begin_listing(ino)
        try:
            stat = await self._source.stat(directory, b"", lane)
            async with self._source.list(directory, lane, LISTING_BATCH) as batches:
                async for batch in batches:
                    self.index.add_entries(ino, sequence, batch, asked_ns)
        except SourceChanged as exc:
            self._distrust(ino)
            raise OSError(errno.ESTALE, "the directory was replaced") from exc
        for _step in self.index.finish_listing(
            ino, sequence, stat.mtime_ns, stat.ctime_ns, asked_ns
        ):
            await trio.lowlevel.checkpoint()
        return True

    def entries(
        self, ino: int, after_cookie: int, limit: int
    ) -> list[tuple[Dirent, Node | None, float, float]]:
        """Entries of an opened directory by rising cookie, beginning after ``after_cookie``.

        The node is None where its attributes are not known or not fresh: the kernel then asks for
        them one by one if anybody wants them. The two last are the timeouts of name and attributes.
        """
        now = time.time_ns()
        result: list[tuple[Dirent, Node | None, float, float]] = []
        if after_cookie < SELF_COOKIE:
            dot = Dirent(SELF_COOKIE, b".", FileType.DIRECTORY, ino, 0)
            result.append((dot, None, 0.0, 0.0))
        if after_cookie < PARENT_COOKIE:
            node = self.index.node(ino)
            up = node.parent if node is not None and ino != ROOT_INO else ROOT_INO
            dots = Dirent(PARENT_COOKIE, b"..", FileType.DIRECTORY, up, 0)
            result.append((dots, None, 0.0, 0.0))
        fresh = self._freshness.fresh
        for dirent, node in self.index.entries(ino, max(after_cookie, PARENT_COOKIE), limit):
            if (
                node is None
                or node.outdated
                or not fresh(node.fetched_ns, now)
                or not fresh(dirent.checked_ns, now)
            ):
                result.append((dirent, None, 0.0, 0.0))
            else:
                checked_ns = min(dirent.checked_ns, node.fetched_ns)
                result.append((dirent, node, *self._freshness.timeouts(checked_ns, now)))
        return result
