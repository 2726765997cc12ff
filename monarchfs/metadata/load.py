"""Loading names and attributes that another node has looked up (``metadata.snapshot``)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence

import trio

from monarchfs.metadata.directories import LISTING_BATCH
from monarchfs.metadata.snapshot import (
    Begin,
    Complete,
    End,
    Entries,
    FoundName,
    MalformedSnapshot,
    Reader,
    Record,
)
from monarchfs.metadata.tree import Tree
from monarchfs.system.threads import run_sync
from monarchfs.types import ROOT_INO, IndexWriteError, Lane, Listing

log = logging.getLogger(__name__)

RECORDS_AT_A_TIME = 64


class LoadedListing:
    """A directory that another node listed at ``taken_ns``; its listing counts as one of
    ``asked_ns``.

    Constant: the directory, and these times. Changing: whether the listing can be complete. Methods
    raise IndexWriteError.
    """

    def __init__(self, tree: Tree, ino: int, taken_ns: int, asked_ns: int) -> None:
        self._tree = tree
        self._ino = ino
        self._taken_ns = taken_ns
        self._asked_ns = asked_ns
        self._whole = True
        self._sequence = 0
        self._times = (0, 0)

    async def begin_directory(self, mtime_ns: int, ctime_ns: int) -> None:
        """The directory had these times then."""
        self._times = (mtime_ns, ctime_ns)
        index, cookie = self._tree.index, 0
        # What was found here since then may be missing in the file.
        while self._whole and (rows := index.listings.entries(self._ino, cookie, LISTING_BATCH)):
            cookie = rows[-1][0].cookie
            self._whole = all(dirent.checked_ns < self._taken_ns for dirent, _node in rows)
            await trio.lowlevel.checkpoint()
        self._sequence = index.listings.begin_listing(self._ino)

    def add(self, found: Sequence[FoundName]) -> None:
        """Some of its entries: a millisecond for a hundred."""
        index, ino = self._tree.index, self._ino
        before = [(one, index.nodes.dirent(ino, one.name)) for one in found]
        older = [
            (one, known)
            for one, known in before
            if known is None or known.checked_ns < self._taken_ns
        ]
        names = [(one.name, one.type, one.ino, 0) for one, _known in older]
        index.listings.add_entries(ino, self._sequence, names, self._asked_ns)
        attributes = [(o.name, o.stat, o.target) for o, _known in older if o.stat is not None]
        index.nodes.record_found_each(ino, attributes, self._asked_ns)
        for one, known in older:
            if known is not None:
                now = index.nodes.dirent(ino, one.name)
                if now is not None and now.ino != known.ino:
                    self._tree.recorder.replaced(ino, one.name, known.ino)

    async def complete(self) -> None:
        """There are no other entries."""
        if self._whole:
            await self._tree.directories.finish_listing(
                self._ino,
                self._sequence,
                Listing(
                    *self._times,
                    self._asked_ns,
                    await self._tree.directories.lists_all(self._ino, Lane.BACKGROUND),
                ),
            )


class Load:
    """One such file on its way into the index. Changing: ``state`` (one of none,
    running, done, failed), and how much of it has been recorded."""

    def __init__(self, tree: Tree) -> None:
        self.state = "none"
        self.entries = 0
        self._tree = tree

    async def run(self, path: str, root_ino: int, *, trusted: bool = False) -> None:
        """Record what the file at ``path`` holds, except what this node has asked the source about
        since it was written. ``root_ino``: the inode number of the source's root. ``trusted``: the
        file is used only if nobody but this user or root can have written it.

        Raises nothing. If something in the file is wrong, what comes before it is kept, and the
        source is asked for all else.
        """
        self.state = "running"
        started = time.monotonic()
        try:
            async with await trio.open_file(path, "rb") as file:
                st = os.fstat(file.wrapped.fileno())
                if trusted and (st.st_uid not in (0, os.geteuid()) or st.st_mode & 0o022):
                    raise MalformedSnapshot("others can have written it")
                reader = await run_sync(Reader, file.wrapped)
                if reader.head.root_ino != root_ino:
                    raise MalformedSnapshot(f"it is of another directory, {reader.head.source!r}")
                await self._take(reader)
        except (OSError, MalformedSnapshot, IndexWriteError) as exc:
            self.state = "failed"
            log.warning("index file %s: %s: the source is asked for the rest", path, exc)
        else:
            self.state = "done"
            log.info(
                "index file %s: %d names in %.1f s", path, self.entries, time.monotonic() - started
            )

    async def _take(self, reader: Reader) -> None:
        # With ``immutable`` nothing has changed since; else the file's age counts.
        freshness, taken_ns = self._tree.freshness, reader.head.taken_ns
        asked_ns = max(freshness.mount_ns, taken_ns) if freshness.trusts_times else taken_ns
        records = iter(reader)
        listing: LoadedListing | None = None
        while True:
            batch = await run_sync(_some, records)
            for record in batch:
                match record:
                    case Begin(names, mtime_ns, ctime_ns):
                        listing, ino = None, self._directory(names, taken_ns)
                        if ino is not None:
                            listing = LoadedListing(self._tree, ino, taken_ns, asked_ns)
                            await listing.begin_directory(mtime_ns, ctime_ns)
                    case Entries(found) if listing is not None:
                        listing.add(found)
                        self.entries += len(found)
                    case Complete() if listing is not None:
                        await listing.complete()
                    case End():
                        return
                await trio.lowlevel.checkpoint()

    def _directory(self, names: tuple[bytes, ...], taken_ns: int) -> int | None:
        """The number of the directory that ``names`` lead to; None where that is not known, or its
        listing is younger than the file."""
        index, ino = self._tree.index, ROOT_INO
        for name in names:
            dirent = index.nodes.dirent(ino, name)
            if dirent is None:
                return None
            ino = dirent.ino
        node, listing = index.nodes.node(ino), index.listings.listing(ino)
        if node is None or not node.stat.is_directory:
            return None
        return ino if listing is None or listing.fetched_ns < taken_ns else None


def _some(records: Iterator[Record]) -> list[Record]:
    """The next few; for a thread."""
    found: list[Record] = []
    for record in records:
        found.append(record)
        if len(found) == RECORDS_AT_A_TIME or isinstance(record, End):
            break
    return found
