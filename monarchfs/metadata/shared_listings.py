"""Listings from the job's other nodes, as names (``shared_names``), if they are short.

The index does not keep what peers need of a listing, the source's inode numbers of names whose
attributes nobody has asked for. So an owner remembers the listings that it has read last.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

import trio

from monarchfs.metadata.known import KnownMetadata
from monarchfs.metadata.shared_names import SharedNames
from monarchfs.types import MOST_LISTED, FileType, Lane, PeerListing

MOST_BYTES = 128 << 10
"""Of a directory whose listing peers are asked for: some thousand names."""

MOST_KEPT = 100_000
"""Entries of all listings that are remembered: 15 MB."""

Entries = list[tuple[bytes, FileType, int]]


class Kept(NamedTuple):
    """``fetched_ns`` tells for which listing of the index this is."""

    fetched_ns: int
    entries: Entries


class SharedListings:
    """Constant: its parts. Changing: the listings read last, and how many entries they have."""

    def __init__(self, known: KnownMetadata, names: SharedNames) -> None:
        self._known = known
        self._index = known.index
        self._names = names
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._entries = 0

    def keep(self, ino: int, fetched_ns: int, entries: Entries) -> None:
        """The source has listed a directory, completely."""
        self._forget(ino)
        if len(entries) <= MOST_LISTED and self._names.serves(ino):
            self._kept[ino] = Kept(fetched_ns, entries)
            self._entries += len(entries)
            while self._entries > MOST_KEPT:
                self._forget(next(iter(self._kept)))

    def _forget(self, ino: int) -> None:
        if (kept := self._kept.pop(ino, None)) is not None:
            self._entries -= len(kept.entries)

    def known(self, ino: int, since_ns: int) -> tuple[int, PeerListing] | None:
        """A directory's listing as this node may believe it, and since when (not before
        ``since_ns``); None if it is not known, or has many entries."""
        confirmed_ns = self._known.listing_confirmed_ns(ino, time.time_ns())
        listing, kept = self._index.listings.listing(ino), self._kept.get(ino)
        if listing is None or confirmed_ns is None or confirmed_ns < since_ns:
            return None
        if kept is not None and kept.fetched_ns == listing.fetched_ns:
            entries: Entries | None = kept.entries
        else:
            entries = self._from_index(ino)
        if entries is None:
            return None
        times = listing.mtime_ns, listing.ctime_ns
        return confirmed_ns, PeerListing(0, *times, listing.lists_all, entries)

    def _from_index(self, ino: int) -> Entries | None:
        rows = self._index.listings.entries(ino, 0, MOST_LISTED + 1, only_listed=True)
        entries: Entries = []
        for dirent, node in rows:
            if node is None or node.outdated or node.stat.device:
                return None
            entries.append((dirent.name, dirent.type, node.stat.ino))
        return entries if len(rows) <= MOST_LISTED else None

    async def ask(self, ino: int, lane: Lane) -> tuple[int, PeerListing] | None:
        """What the directory's owner says, and when it is to count as read. Raises OSError."""
        asked_ns = time.time_ns()
        listing = await self._names.ask_listing(ino, lane, asked_ns, MOST_BYTES)
        if listing is None:
            return None
        true_ns = asked_ns - listing.age_ns
        listed = {name: source_ino for name, _type, source_ino in listing.entries}
        cookie = 0
        # It may lack, or have another file for, what was found here since then.
        while rows := self._index.listings.entries(ino, cookie, 500):
            cookie = rows[-1][0].cookie
            for dirent, node in rows:
                if dirent.checked_ns >= true_ns and (
                    dirent.name not in listed
                    or (node is not None and node.stat.ino != listed[dirent.name])
                ):
                    return None
            await trio.lowlevel.checkpoint()
        return max(true_ns, self._known.freshness.mount_ns), listing
