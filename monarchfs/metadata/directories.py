"""Directories: listing them in the source, and their entries for readers."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress

import trio

from monarchfs.cache.index.listings import FoundName
from monarchfs.metadata.cached_listings import BARE_SECONDS, Kernel
from monarchfs.metadata.freshness import FOREVER_SECONDS, NS, past_racy_window
from monarchfs.metadata.known import KnownMetadata
from monarchfs.metadata.recorder import Recorder
from monarchfs.metadata.shared_names import Entries, SharedNames
from monarchfs.metadata.stale_on_timeout import StaleOnTimeout
from monarchfs.metadata.statahead import Statahead
from monarchfs.source.source import Source
from monarchfs.types import (
    MOST_LISTED,
    ROOT_INO,
    Dirent,
    FileType,
    IndexWriteError,
    Lane,
    Listing,
    Node,
    SourceChanged,
)

SELF_COOKIE, PARENT_COOKIE = 1, 2
"""The readdir offsets of ``.`` and ``..``; the index gives out higher ones."""

CASED = 100
"""Names of which one is looked for that has letters."""

LISTING_BATCH = 500
"""Names that go into the index in one transaction: a few milliseconds on the event loop."""

AHEAD_SECONDS = 10.0
"""A listing ahead that brings nothing for this long is given up."""

REFRESH_SECONDS = 30.0
"""A source that takes longer for one call of a refresh is not waited for."""

Row = tuple[Dirent, Node | None, float, float]
"""An entry with its node, and the timeouts of name and attributes. The node is None where its
attributes are not known or not fresh: the kernel then asks for them if anybody wants them."""


class Differences:
    """What a new listing has otherwise than the one before; the kernel forgets these names.

    Constant: ``scope``, the time limit, put off as long as the source goes on answering. Changing:
    how many names ``appeared``, and are ``gone``."""

    def __init__(self, ino: int, kernel: Kernel) -> None:
        self.scope = trio.CancelScope(deadline=trio.current_time() + REFRESH_SECONDS)
        self.appeared = 0
        self.gone = 0
        self._ino = ino
        self._kernel = kernel

    def note_appeared(self, name: bytes) -> None:
        self.appeared += 1
        self._kernel.invalidate_entry(self._ino, name)

    def note_gone(self, name: bytes) -> None:
        self.gone += 1
        self._kernel.invalidate_entry(self._ino, name)

    async def pause(self) -> None:
        """Called between batches; a checkpoint."""
        self.scope.deadline = math.inf
        await self._kernel.room()
        self.scope.deadline = trio.current_time() + REFRESH_SECONDS


class Directories:
    """Constant: its parts. Changing: ``_ahead``, the directories that are listed ahead. Methods
    that wait raise OSError with the errno for the system call."""

    def __init__(
        self,
        source: Source,
        known: KnownMetadata,
        recorder: Recorder,
        asking: StaleOnTimeout,
        statahead: Statahead,
        shared: SharedNames,
    ) -> None:
        self.index = known.index
        self._source = source
        self._known = known
        self._recorder = recorder
        self._asking = asking
        self._statahead = statahead
        self._shared = shared
        self._ahead: dict[int, trio.CancelScope] = {}

    def known_open(self, ino: int) -> bool | None:
        """For an open of the directory: whether the kernel may list what it has of it; None where
        the source has to be asked first."""
        now = time.time_ns()
        listing = self.index.listings.listing(ino)
        if listing is None or self._known.listing_confirmed_ns(ino, now) is None:
            return None
        if self._due(ino, now) is not None:
            return None
        return self._recorder.cached_listings.note_open(ino, listing.fetched_ns, now)

    async def open(self, ino: int, lane: Lane = Lane.DEMAND, *, again: bool = False) -> None:
        """Have the directory's entries in the index, as fresh as the mount promises. ``again``, as
        for ``Files.open``: one that was removed since the name was looked up lists as empty."""
        if lane is Lane.DEMAND:
            self._renew(ino)
        listing = self.index.listings.listing(ino)
        if self._known.listing_confirmed_ns(ino, time.time_ns()) is not None:
            return
        # True stands for "what is in the index will do".
        fallback = True if listing is not None else None
        key = self._asking.key(lane, "list", ino)
        try:
            await self._asking.ask(key, lambda: self._confirm_or_list(ino, lane), fallback)
        except OSError as exc:
            if exc.errno != errno.ESTALE or not again:
                raise
            # Too old for anybody else to believe.
            with suppress(IndexWriteError):
                sequence = self.index.listings.begin_listing()
                await self.finish_listing(ino, sequence, Listing(0, 0, 0, lists_all=False))

    def _due(self, ino: int, now_ns: int) -> int | None:
        """What was asked for by then is about to be too old, in a directory that somebody goes
        through again; None where nothing is."""
        near_ns = self._known.freshness.near_expiry_ns(now_ns)
        if near_ns is None or not self._statahead.gone_through_before(ino, near_ns):
            return None
        return near_ns

    def _renew(self, ino: int) -> None:
        near_ns = self._due(ino, time.time_ns())
        if near_ns is not None:
            self._statahead.renew(ino, near_ns)

    async def confirm(self, ino: int, lane: Lane) -> bool:
        """Whether the directory's times say that its listing still holds: one stat. Raises OSError.

        A change in the tick in which the directory was last changed before it was listed would not
        show in its times: such a listing is never confirmed.
        """
        listing = self.index.listings.listing(ino)
        if listing is None or not past_racy_window(listing.ctime_ns, listing.fetched_ns):
            return False
        asked_ns = time.time_ns()
        with self._recorder.estale_if_replaced(ino):
            directory = self._known.directory(ino)
            stat = await self._source.call(lane, self._source.posix.stat, directory, b"")
        if (stat.mtime_ns, stat.ctime_ns) != (listing.mtime_ns, listing.ctime_ns):
            return False
        self._known.confirm_listing(ino, listing, asked_ns)
        return True

    async def _confirm_or_list(self, ino: int, lane: Lane) -> bool:
        if not await self.confirm(ino, lane):
            self._stop_ahead(ino)
            if not await self._list_by_peers(ino, lane):
                await self.list_again(ino, lane)
        return True

    async def _list_by_peers(self, ino: int, lane: Lane) -> bool:
        """Whether the directory's owner said what there is. Raises OSError, and IndexWriteError."""
        answer = await self._shared.ask_listing(ino, lane)
        if answer is None:
            return False
        asked_ns, listing = answer
        sequence = self.index.listings.begin_listing()
        for at in range(0, len(listing.entries), LISTING_BATCH):
            batch = [(*entry, 0) for entry in listing.entries[at : at + LISTING_BATCH]]
            self.index.listings.add_entries(ino, sequence, batch, asked_ns)
            await trio.lowlevel.checkpoint()
        times = listing.mtime_ns, listing.ctime_ns
        await self.finish_listing(ino, sequence, Listing(*times, asked_ns, listing.lists_all))
        return True

    async def list_again(
        self,
        ino: int,
        lane: Lane,
        batch_names: int = LISTING_BATCH,
        differences: Differences | None = None,
        *,
        most_names: float = math.inf,
        ahead: trio.CancelScope | None = None,
    ) -> int | None:
        """Ask the source for a whole listing, whatever is known. Returns the number of names, or
        None where there are more than ``most_names``: those that were found until then stay
        recorded. ``ahead``: nobody waits for it, and each batch puts off the scope's deadline.
        Raises OSError, and IndexWriteError."""
        if ahead is None:
            self._stop_ahead(ino)
        directory = self._known.directory(ino)
        count, asked_ns = 0, time.time_ns()
        entries: Entries = []
        sequence = self.index.listings.begin_listing()
        with self._recorder.estale_if_replaced(ino):
            stat = await self._source.call(lane, self._source.posix.stat, directory, b"")
            async with aclosing(self._source.list(directory, lane, batch_names)) as batches:
                async for batch in batches:
                    self._asking.heard("list", ino)
                    if (count := count + len(batch)) > most_names:
                        return None
                    if ahead is not None:
                        ahead.deadline = trio.current_time() + AHEAD_SECONDS
                    self._add(ino, sequence, batch, asked_ns, differences)
                    if count <= MOST_LISTED:
                        entries += [entry[:3] for entry in batch]
                    if differences is not None:
                        await differences.pause()
        listing = Listing(stat.mtime_ns, stat.ctime_ns, asked_ns, await self.lists_all(ino, lane))
        await self.finish_listing(ino, sequence, listing, differences)
        if len(entries) == count:
            self._shared.keep_listing(ino, asked_ns, entries)
        return count

    def announce_ahead(self, ino: int) -> None:
        """``list_ahead`` follows, unless another caller lists the directory first."""
        self._ahead[ino] = trio.CancelScope()

    def _stop_ahead(self, ino: int) -> None:
        """A caller lists it who waits for that."""
        if (scope := self._ahead.get(ino)) is not None:
            scope.cancel()

    async def list_ahead(self, ino: int, most_names: int) -> int | None:
        """``list_again``, or what peers say, after ``announce_ahead``. None as well where the
        source is silent, or another caller lists the directory."""
        scope = self._ahead[ino]
        scope.deadline = trio.current_time() + AHEAD_SECONDS
        try:
            with scope:
                if await self._list_by_peers(ino, Lane.BACKGROUND):
                    return self.index.listings.count_entries(ino, MOST_LISTED)
                return await self.list_again(
                    ino, Lane.BACKGROUND, LISTING_BATCH, most_names=most_names, ahead=scope
                )
        finally:
            del self._ahead[ino]
        return None

    async def finish_listing(
        self,
        ino: int,
        sequence: int,
        listing: Listing,
        differences: Differences | None = None,
    ) -> None:
        """All entries were recorded since ``begin_listing`` gave out ``sequence``: others are not
        there. Raises IndexWriteError."""
        for gone in self.index.listings.finish_listing(ino, sequence, listing):
            for dirent in gone:
                self._recorder.replaced(ino, dirent.name, dirent.ino)
                if differences is not None:
                    differences.note_gone(dirent.name)
            await trio.lowlevel.checkpoint()
            self._asking.heard("list", ino)
            if differences is not None:
                await differences.pause()
        self._recorder.listed(ino)

    async def lists_all(self, ino: int, lane: Lane) -> bool:
        """Whether a name that the directory's listing lacks is not there. Where the source does not
        say, it may be."""
        named = (
            dirent.name for dirent, _node in self.index.listings.entries(ino, PARENT_COOKIE, CASED)
        )
        cased = next((name for name in named if name != name.swapcase()), b"")
        try:
            return await self._source.lists_all(self._known.directory(ino), cased, lane)
        except (OSError, SourceChanged):
            return False

    def _add(
        self,
        ino: int,
        sequence: int,
        batch: Sequence[FoundName],
        asked_ns: int,
        differences: Differences | None,
    ) -> None:
        if differences is not None:
            for name, *_ in batch:
                if self.index.nodes.dirent(ino, name) is None:
                    differences.note_appeared(name)
        self.index.listings.add_entries(ino, sequence, batch, asked_ns)

    def entries(self, ino: int, after_cookie: int, limit: int) -> list[Row]:
        """At most ``limit`` entries of an opened directory (and ``.`` and ``..``) by rising cookie,
        beginning after ``after_cookie``."""
        return self._entries(ino, after_cookie, limit)[0]

    def shown_entries(self, ino: int, after_cookie: int, limit: int) -> list[Row]:
        """``entries`` for the kernel, which may list them from memory as long as
        ``known_open`` says so."""
        found, seconds = self._entries(ino, after_cookie, limit)
        self._recorder.cached_listings.until(ino, time.time_ns() + int(seconds * NS))
        return found

    def _entries(self, ino: int, after_cookie: int, limit: int) -> tuple[list[Row], float]:
        """And for how many seconds they are worth showing from memory."""
        now = time.time_ns()
        result: list[Row] = []
        if after_cookie < SELF_COOKIE:
            dot = Dirent(SELF_COOKIE, b".", FileType.DIRECTORY, ino, 0, ino)
            result.append((dot, None, 0.0, 0.0))
        if after_cookie < PARENT_COOKIE:
            node = self.index.nodes.node(ino)
            up = node.parent if node is not None and ino != ROOT_INO else ROOT_INO
            dots = Dirent(PARENT_COOKIE, b"..", FileType.DIRECTORY, up, 0, up)
            result.append((dots, None, 0.0, 0.0))
        kept, shortest = self._known.freshness.kept, FOREVER_SECONDS
        listing, after_cookie = self.index.listings.listing(ino), max(after_cookie, PARENT_COOKIE)
        only_listed = listing is not None and not listing.lists_all
        for dirent, node in self.index.listings.entries(
            ino, after_cookie, limit, only_listed=only_listed
        ):
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
