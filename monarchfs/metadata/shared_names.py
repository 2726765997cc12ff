"""Names and listings from the job's other nodes: the owner of a directory asks the source for all
of them.

What a peer says counts as if this node had asked the source when the peer did. It sends an age, not
a time, because the nodes' clocks may differ.

A question says how old an answer may be: half of the ttl, and no older than the mount or the last
refresh; with ``immutable`` any age. What ``immutable`` believes from before the mount has no
known age, and is told only to those who take any. The source is asked for a name once at a time,
for readers and peers alike. It is asked at once about a name whose known version was outdated,
about names that do not exist, about other file systems (st_dev differs between nodes), and where
peers take more than four times as long for a name. With ``open`` nobody shares names. No circles:
a node answers for what it owns, or stands in for, and asks no peer for it.

The index does not keep what peers need of a listing, the source's inode numbers of names whose
attributes nobody has asked for. So an owner remembers the listings that it has read last.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import trio

from monarchfs.metadata.known import Entry, KnownMetadata, Missing
from monarchfs.metadata.recorder import Recorder
from monarchfs.metrics import Metrics
from monarchfs.types import (
    MOST_LISTED,
    DirRef,
    FileType,
    FreshnessMode,
    IndexWriteError,
    Lane,
    Node,
    PeerListing,
    PeerNames,
)

log = logging.getLogger(__name__)

FACTOR = 4
"""A reader does not wait for a peer that takes more than this many times what the source takes."""

PROBE = 16
"""Then each so many-th question goes to a peer all the same: it may have become faster."""

SHARE = 0.125
"""Of a new duration in a mean."""

JOIN_SECONDS = 1.0
"""So long another task's question to the source is waited for."""

RECENT_NS = 2_000_000_000
"""What was found less long ago is not asked for again: another task has just done so."""

ANY_AGE_NS = 1 << 62

MOST_BYTES = 128 << 10
"""Of a directory whose listing peers are asked for: some thousand names."""

MOST_KEPT = 100_000
"""Entries of all listings that are remembered: 15 MB."""

Entries = list[tuple[bytes, FileType, int]]
"""Name, type and number in the source of each."""


class NamePeers(Protocol):
    """The job's other nodes. Raises nothing but Cancelled."""

    def divide(
        self, directory: DirRef, size: int, names: Sequence[bytes]
    ) -> dict[int, list[bytes]]:
        """The names that other nodes own, by owner. ``size``: the directory's."""

    async def ask(
        self, owner: int, directory: DirRef, names: list[bytes], most_age_ns: int, lane: Lane
    ) -> PeerNames | None:
        """What the owner says about some of these names, or about none of them."""

    async def list(
        self, owner: int, directory: DirRef, most_age_ns: int, lane: Lane
    ) -> PeerListing | None:
        """The directory's entries as the owner has them, if they are few."""


class SharedNames:
    """Constant: its parts. Changing: ``_not_before_ns``, before which no answer may be;
    ``_under_way``, the names that the source is being asked for, by directory and name; the mean
    durations, for a name, of peers' answers and of the source's; how many questions were not worth
    while; ``_kept``, the listings read last, with the ``fetched_ns`` that they have in the index,
    and how many entries they have."""

    def __init__(
        self, known: KnownMetadata, recorder: Recorder, metrics: Metrics, peers: NamePeers | None
    ) -> None:
        """``peers``: with whom names are shared, but not with ``open``, where each open asks the
        source; None: with nobody."""
        self._known = known
        self._index = known.index
        self._recorder = recorder
        self._metrics = metrics
        shares = known.freshness.mode is not FreshnessMode.OPEN
        self._peers = peers if shares else None
        self._not_before_ns = 0
        self._under_way: dict[tuple[int, bytes], trio.Event] = {}
        self._peer_seconds = self.source_seconds = 0.0
        self._passed_over = 0
        self._kept: OrderedDict[int, tuple[int, Entries]] = OrderedDict()
        self._kept_entries = 0

    def refreshed(self) -> None:
        """From now on, what the source said before counts no more."""
        self._not_before_ns = time.time_ns()

    def most_age_ns(self, now_ns: int) -> int:
        """The age up to which a peer's answer may be believed. Half of the ttl is left then, so
        that it is worth the question."""
        freshness = self._known.freshness
        not_before_ns = max(self._not_before_ns, self._known.moved_ns)
        if freshness.mode is FreshnessMode.TTL:
            not_before_ns = max(not_before_ns, freshness.mount_ns, now_ns - freshness.ttl_ns // 2)
        return now_ns - not_before_ns if not_before_ns else ANY_AGE_NS

    async def ask(
        self, parent: int, names: Sequence[bytes], lane: Lane, *, peers: bool = True
    ) -> dict[bytes, Node]:
        """What other tasks know of these names, and, with ``peers``, the job's other nodes. The
        caller asks the source for the others and then calls ``asked``. Raises OSError if the
        directory is not known."""
        if self._peers is None:
            return {}
        found: dict[bytes, Node] = {}
        self._add_recent(parent, names, found)
        directory = self._index.nodes.node(parent)
        if peers and directory is not None and not directory.stat.device:
            wanted = [name for name in names if self._may_be_asked(parent, name, found)]
            place = self._known.directory(parent)
            owned = self._peers.divide(place, directory.stat.size, wanted)
            if owned and (lane is Lane.BACKGROUND or self._is_worth()):
                async with trio.open_nursery() as nursery:
                    for owner, some in owned.items():
                        nursery.start_soon(self._ask, owner, parent, place, some, lane, found)
        with trio.move_on_after(JOIN_SECONDS):
            while waiting := [
                event
                for name in names
                if name not in found and (event := self._under_way.get((parent, name))) is not None
            ]:
                for event in waiting:
                    await event.wait()
                self._add_recent(parent, names, found)
        self._add_recent(parent, names, found)
        for name in names:
            if name not in found:
                self._under_way.setdefault((parent, name), trio.Event())
        return found

    def _add_recent(self, parent: int, names: Sequence[bytes], found: dict[bytes, Node]) -> None:
        """Add what was found a moment ago: the caller may have waited since it looked."""
        since_ns = time.time_ns() - RECENT_NS
        for name in names:
            if name not in found and (node := self._index.nodes.named(parent, name)) is not None:
                known = node.fetched_ns > since_ns and self._known.lookup(parent, name)
                if isinstance(known, Entry):
                    found[name] = known.node

    def asked(self, parent: int, names: Sequence[bytes]) -> None:
        """The source was asked for names that ``ask`` did not return."""
        if self._peers is not None:
            for name in names:
                if (event := self._under_way.pop((parent, name), None)) is not None:
                    event.set()

    def source_took(self, seconds: float) -> None:
        """For a name."""
        self.source_seconds = _mean(self.source_seconds, seconds)

    def _may_be_asked(self, parent: int, name: bytes, found: Mapping[bytes, Node]) -> bool:
        """A peer may not have seen yet that the source has another version: it is not asked where
        this node has."""
        if name in found:
            return False
        node = self._index.nodes.named(parent, name)
        return node is None or not node.outdated

    def _knows_newer(self, parent: int, name: bytes, source_ino: int, true_ns: int) -> bool:
        """Whether this node has found since then what a name stands for, or that it is another file
        than ``source_ino``, or none."""
        dirent = self._index.nodes.dirent(parent, name)
        if dirent is None:
            return isinstance(self._known.lookup(parent, name), Missing)
        if (node := self._index.nodes.node(dirent.ino)) is None:
            return False
        other = node.stat.ino != source_ino
        return node.fetched_ns >= true_ns or (other and dirent.checked_ns >= true_ns)

    def _is_worth(self) -> bool:
        """Whether a reader may wait for peers."""
        if not self.source_seconds or self._peer_seconds <= FACTOR * self.source_seconds:
            return True
        self._passed_over += 1
        return self._passed_over % PROBE == 0

    async def _ask(
        self,
        owner: int,
        parent: int,
        directory: DirRef,
        names: list[bytes],
        lane: Lane,
        found: dict[bytes, Node],
    ) -> None:
        """Record what the owner says, and enter it in ``found``. An owner that has not found all in
        time has more the next time."""
        assert self._peers is not None
        while names:
            asked_ns, began = time.time_ns(), time.perf_counter()
            most_age_ns = self.most_age_ns(asked_ns)
            answer = await self._peers.ask(owner, directory, names, most_age_ns, lane)
            # This node may have been refreshed, or found another version, meanwhile.
            if answer is None or answer.age_ns > self.most_age_ns(asked_ns):
                return
            # With ``immutable`` nothing has changed since the peer asked, before this mount or not.
            true_ns = max(asked_ns - answer.age_ns, self._known.freshness.mount_ns)
            rows = [
                row
                for row in answer.found
                if row[0] in names
                and self._may_be_asked(parent, row[0], found)
                and not self._knows_newer(parent, row[0], row[1].ino, true_ns)
            ]
            if not rows:
                return
            seconds = (time.perf_counter() - began) / len(names)
            self._peer_seconds = _mean(self._peer_seconds, seconds)
            try:
                nodes = self._recorder.found_each(parent, rows, true_ns)
            except IndexWriteError as exc:
                log.warning("names that a peer knows cannot be recorded: %s", exc)
                return
            self._metrics.peer_names += len(nodes)
            found.update((row[0], node) for row, node in zip(rows, nodes, strict=True))
            names = [name for name in names if name not in found]

    # -- listings, if they are short

    def serves(self, ino: int) -> bool:
        """Whether peers may ask this node for a directory's listing."""
        directory = self._index.nodes.dirref(ino)
        if self._peers is None or directory is None:
            return False
        return not self._peers.divide(directory, 0, [b"."])

    def keep_listing(self, ino: int, fetched_ns: int, entries: Entries) -> None:
        """The source has listed a directory, completely."""
        self._forget_listing(ino)
        if len(entries) <= MOST_LISTED and self.serves(ino):
            self._kept[ino] = fetched_ns, entries
            self._kept_entries += len(entries)
            while self._kept_entries > MOST_KEPT:
                self._forget_listing(next(iter(self._kept)))

    def _forget_listing(self, ino: int) -> None:
        if (kept := self._kept.pop(ino, None)) is not None:
            self._kept_entries -= len(kept[1])

    def known_listing(self, ino: int, since_ns: int) -> tuple[int, PeerListing] | None:
        """A directory's listing as this node may believe it, and since when (not before
        ``since_ns``); None if it is not known, or has many entries."""
        confirmed_ns = self._known.listing_confirmed_ns(ino, time.time_ns())
        listing, kept = self._index.listings.listing(ino), self._kept.get(ino)
        if listing is None or confirmed_ns is None or confirmed_ns < since_ns:
            return None
        if kept is not None and kept[0] == listing.fetched_ns:
            entries: Entries | None = kept[1]
        else:
            entries = self._entries_in_index(ino)
        if entries is None:
            return None
        times = listing.mtime_ns, listing.ctime_ns
        return confirmed_ns, PeerListing(0, *times, listing.lists_all, entries)

    def _entries_in_index(self, ino: int) -> Entries | None:
        rows = self._index.listings.entries(ino, 0, MOST_LISTED + 1, only_listed=True)
        entries: Entries = []
        for dirent, node in rows:
            if node is None or node.outdated or node.stat.device:
                return None
            entries.append((dirent.name, dirent.type, node.stat.ino))
        return entries if len(rows) <= MOST_LISTED else None

    async def ask_listing(self, ino: int, lane: Lane) -> tuple[int, PeerListing] | None:
        """What the directory's owner says, and when it is to count as read. Raises OSError."""
        asked_ns = time.time_ns()
        listing = await self._ask_owner_to_list(ino, lane, asked_ns)
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

    async def _ask_owner_to_list(self, ino: int, lane: Lane, asked_ns: int) -> PeerListing | None:
        node = self._index.nodes.node(ino)
        if self._peers is None or node is None or node.outdated or node.stat.device:
            return None
        if node.stat.size > MOST_BYTES or not (lane is Lane.BACKGROUND or self._is_worth()):
            return None
        directory = self._known.directory(ino)
        for owner in self._peers.divide(directory, 0, [b"."]):
            most_age_ns = self.most_age_ns(asked_ns)
            listing = await self._peers.list(owner, directory, most_age_ns, lane)
            if listing is not None and listing.age_ns <= self.most_age_ns(asked_ns):
                return listing
        return None


def _mean(mean: float, duration: float) -> float:
    return duration if not mean else mean + SHARE * (duration - mean)
