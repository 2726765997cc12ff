"""The directory tree of one mount: names, attributes and listings.

Methods whose name begins with ``known`` never wait: they return None where the source has to be
asked. The others wait, and raise OSError with the errno that the caller of the system call gets.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from monarchfs.fs.cached_listings import BARE_SECONDS
from monarchfs.fs.freshness import FOREVER_SECONDS, NS
from monarchfs.fs.names import Entry, Missing, Names
from monarchfs.types import ROOT_INO, Dirent, FileType, Lane, Node, SourceChanged

__all__ = ["STATFS_SECONDS", "Differences", "Entry", "Missing", "Tree"]

SELF_COOKIE, PARENT_COOKIE = 1, 2
"""The readdir offsets of ``.`` and ``..``; the index gives out higher ones."""

LISTING_BATCH = 500
"""Names that go into the index in one transaction: a few milliseconds on the event loop."""

STATFS_SECONDS = 30.0

FoundName = tuple[bytes, FileType, int, int]
"""A name as readdir gives it: name, type, source ino, device."""


class Differences(Protocol):
    """Who wants to know what a new listing has otherwise."""

    def name(self, name: bytes, before: Dirent | None) -> None:
        """It stands for something else than before, or (its record is as before, but on its way
        out) is gone; or it was not known (None)."""

    async def pause(self) -> None:
        """Called between batches; a checkpoint."""


class Tree(Names):
    """See ``Names`` for its parts."""

    _statfs: tuple[float, os.statvfs_result] | None = None

    async def statfs(self) -> os.statvfs_result:
        if self._statfs is not None and trio.current_time() - self._statfs[0] < STATFS_SECONDS:
            return self._statfs[1]
        fallback = self._statfs[1] if self._statfs is not None else None
        return await self._asking.ask(("statfs",), self._fetch_statfs, fallback, even_open=True)

    async def _fetch_statfs(self) -> os.statvfs_result:
        result = await self._source.statvfs(Lane.DEMAND)
        self._statfs = (trio.current_time(), result)
        return result

    # -- directories

    def known_directory(self, ino: int) -> bool | None:
        """For an open of the directory: whether the kernel may list what it has of it; None where
        the source has to be asked first."""
        now = time.time_ns()
        listing = self.index.listing(ino)
        if listing is None or self._listed(ino, now) is None or self._due(ino, now) is not None:
            return None
        return self.shown.opened(ino, listing.fetched_ns, now)

    async def open_directory(self, ino: int, lane: Lane = Lane.DEMAND) -> None:
        """Have the directory's entries in the index, as fresh as the mount promises."""
        if lane is Lane.DEMAND:
            self._renew(ino)
        listing = self.index.listing(ino)
        if listing is not None and self._listed(ino, time.time_ns()) is not None:
            return
        # True stands for "what is in the index will do".
        fallback = True if listing is not None else None
        await self._asking.ask(("list", ino), lambda: self._confirm_or_list(ino, lane), fallback)

    def _due(self, ino: int, now_ns: int) -> int | None:
        """What of a directory that somebody goes through again was asked for then or earlier is
        about to be too old, if much of it is."""
        near_ns = self.freshness.near_expiry_ns(now_ns)
        if near_ns is None or not self._statahead.gone_through_before(ino, near_ns):
            return None
        return near_ns

    def _renew(self, ino: int) -> None:
        near_ns = self._due(ino, time.time_ns())
        if near_ns is not None:
            self._statahead.renew(
                ino,
                lambda dirent, node: (
                    node is not None and min(dirent.checked_ns, node.fetched_ns) <= near_ns
                ),
            )

    async def _confirm_or_list(self, ino: int, lane: Lane) -> bool:
        if await self._confirm_listing(ino, lane):
            return True
        await self.list_again(ino, lane)
        return True

    async def list_again(
        self,
        ino: int,
        lane: Lane,
        batch_names: int = LISTING_BATCH,
        differences: Differences | None = None,
    ) -> None:
        """Ask the source for a whole listing, whatever is known. Raises OSError, and
        IndexWriteError."""
        self._unlisted.stop(ino)
        await self._list(ino, lane, batch_names, differences)

    async def _list_ahead(self, ino: int, most_names: int, tell: Callable[[], None]) -> int | None:
        return await self._list(ino, Lane.BACKGROUND, LISTING_BATCH, None, most_names, tell)

    async def _list(
        self,
        ino: int,
        lane: Lane,
        batch_names: int,
        differences: Differences | None,
        most_names: float = math.inf,
        tell: Callable[[], None] | None = None,
    ) -> int | None:
        """``list_again``; how many names there are. None: more than ``most_names``; those that were
        found by then stay."""
        directory = self._directory(ino)
        compares = differences is not None or self.index.listing(ino) is not None
        count, asked_ns = 0, time.time_ns()
        sequence = self.index.begin_listing(ino)
        try:
            stat = await self._source.stat(directory, b"", lane)
            async with self._source.list(directory, lane, batch_names) as batches:
                async for batch in batches:
                    if (count := count + len(batch)) > most_names:
                        return None
                    if tell is not None:
                        tell()
                    known = [self.index.dirent(ino, e[0]) for e in batch] if compares else []
                    self.index.add_entries(ino, sequence, batch, asked_ns)
                    if compares:
                        self._compare(ino, known, batch, differences)
                    if differences is not None:
                        await differences.pause()
        except SourceChanged as exc:
            self.invalidate_directory(ino)
            raise OSError(errno.ESTALE, "the directory was replaced") from exc
        if compares:
            await self._outdate_gone(ino, asked_ns, batch_names, differences)
        await self._record_listed(ino, sequence, stat.mtime_ns, stat.ctime_ns, asked_ns)
        return count

    async def finish_listing(
        self, ino: int, sequence: int, mtime_ns: int, ctime_ns: int, asked_ns: int
    ) -> None:
        """All entries were recorded since ``begin_listing`` gave out ``sequence``: others are not
        there. Raises IndexWriteError."""
        await self._outdate_gone(ino, asked_ns, LISTING_BATCH, None)
        await self._record_listed(ino, sequence, mtime_ns, ctime_ns, asked_ns)

    async def _record_listed(
        self, ino: int, sequence: int, mtime_ns: int, ctime_ns: int, asked_ns: int
    ) -> None:
        for _step in self.index.finish_listing(ino, sequence, mtime_ns, ctime_ns, asked_ns):
            await trio.lowlevel.checkpoint()
        self._denied_before(ino)

    def _compare(
        self,
        ino: int,
        before: list[Dirent | None],
        batch: Sequence[FoundName],
        differences: Differences | None,
    ) -> None:
        for known, (name, _type, _source_ino, _device) in zip(before, batch, strict=True):
            if known is not None:
                now = self.index.dirent(ino, name)
                if now is None or now.ino == known.ino:
                    continue
                self.replaced(ino, name, known.ino)
            if differences is not None:
                differences.name(name, known)

    async def _outdate_gone(
        self,
        ino: int,
        asked_ns: int,
        batch_names: int,
        differences: Differences | None,
    ) -> None:
        """What a listing did not see is gone, unless somebody found it since."""
        cookie = PARENT_COOKIE
        while rows := self.index.entries(ino, cookie, batch_names):
            cookie = rows[-1][0].cookie
            for dirent, _node in rows:
                if dirent.checked_ns < asked_ns:
                    self.replaced(ino, dirent.name, dirent.ino)
                    if differences is not None:
                        differences.name(dirent.name, dirent)
            await trio.lowlevel.checkpoint()
            if differences is not None:
                await differences.pause()

    def entries(
        self, ino: int, after_cookie: int, limit: int
    ) -> list[tuple[Dirent, Node | None, float, float]]:
        """Entries of an opened directory by rising cookie, beginning after ``after_cookie``.

        The node is None where its attributes are not known or not fresh: the kernel then asks for
        them one by one if anybody wants them. The two last are the timeouts of name and attributes.
        """
        return self._entries(ino, after_cookie, limit)[0]

    def shown_entries(
        self, ino: int, after_cookie: int, limit: int
    ) -> list[tuple[Dirent, Node | None, float, float]]:
        """``entries`` for the kernel, which may list them from memory as long as
        ``known_directory`` says so."""
        found, seconds = self._entries(ino, after_cookie, limit)
        self.shown.until(ino, time.time_ns() + int(seconds * NS))
        return found

    def _entries(
        self, ino: int, after_cookie: int, limit: int
    ) -> tuple[list[tuple[Dirent, Node | None, float, float]], float]:
        """And for how many seconds they are worth showing from memory."""
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
        kept, shortest = self.freshness.kept, FOREVER_SECONDS
        for dirent, node in self.index.entries(ino, max(after_cookie, PARENT_COOKIE), limit):
            if (
                node is None
                or node.outdated
                or (timeouts := kept(node, dirent.checked_ns, now)) is None
            ):
                result.append((dirent, None, 0.0, 0.0))
                shortest = min(shortest, BARE_SECONDS)
            else:
                result.append((dirent, node, *timeouts))
                if timeouts[1] < shortest:
                    shortest = timeouts[1]
        return result, shortest
