"""What the index knows of names and attributes, as far as it may be believed now. Never waits."""

from __future__ import annotations

import errno
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from monarchfs.cache.index.index import Index
from monarchfs.metadata.freshness import UNANSWERED_SECONDS, Freshness
from monarchfs.types import DirRef, FreshnessMode, Listing, Node

SURE_NAME_BYTES = 143
"""Every file system takes names of this length (eCryptfs no longer ones, others 255, some more). Of
a longer unknown name only the source can say whether it is missing (ENOENT) or impossible
(ENAMETOOLONG)."""

CONFIRMED_KEPT = 100_000
"""Listings whose confirmation is remembered; others are confirmed again."""

ABSENT_KEPT = 100_000
"""Names of which a look-up said that they do not exist, where listings do not say that: 20 MB."""

UNLISTED_NAMES = frozenset({b".lustre"})
"""Names that listings of no directory have, though they have all others: Lustre's, in its root."""


class Entry(NamedTuple):
    """A node for the kernel, with the seconds that it may keep the name and the attributes."""

    node: Node
    entry_timeout: float
    attr_timeout: float


class Missing(NamedTuple):
    """A name that does not exist, and the seconds for which that may be believed."""

    timeout: float


class KnownMetadata:
    """Methods return None where the source has to be asked first.

    Changing: ``moved_ns``, when a directory was last seen moved (what is older is not believed);
    ``_confirmed``, by directory: ``fetched_ns`` of the listing that was confirmed, and when;
    ``_absent``, by directory and name: when the source said that there is no such name.
    """

    def __init__(self, index: Index, freshness: Freshness) -> None:
        self.index = index
        self.freshness = freshness
        self.moved_ns = 0
        self._confirmed: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._absent: OrderedDict[tuple[int, bytes], int] = OrderedDict()

    def directory_moved(self, moved_ns: int) -> None:
        """Names that were found earlier may lead elsewhere. With ``immutable`` only those of
        directories."""
        self.moved_ns = moved_ns

    def lookup(self, parent: int, name: bytes) -> Entry | Missing | None:
        now = time.time_ns()
        dirent = self.index.nodes.dirent(parent, name)
        if dirent is None:
            if len(name) <= SURE_NAME_BYTES and self.listing_has_all(parent, name):
                asked_ns = self.listing_confirmed_ns(parent, now)
            else:
                asked_ns = self._absent.get((parent, name))
                if asked_ns is not None and not (
                    asked_ns >= self.moved_ns and self.freshness.fresh(asked_ns, now)
                ):
                    asked_ns = None
            return None if asked_ns is None else Missing(self.freshness.timeouts(asked_ns, now)[0])
        return self.entry(dirent.checked_ns, self.index.nodes.node(dirent.ino), now)

    def entry(self, checked_ns: int, node: Node | None, now_ns: int) -> Entry | None:
        """The answer for a name that stands for ``node``, last asked for at ``checked_ns``."""
        if node is None or node.outdated:
            return None
        kept = self.freshness.kept(node, checked_ns, now_ns)
        if kept is None:
            return None
        if checked_ns < self.moved_ns and (
            node.stat.is_directory or self.freshness.mode is not FreshnessMode.IMMUTABLE
        ):
            return None
        return Entry(node, *kept)

    def stale(self, parent: int, name: bytes) -> Entry | Missing | None:
        """What can be answered, for a second, while the source does not; None: nothing."""
        dirent = self.index.nodes.dirent(parent, name)
        if dirent is None:
            absent = self.listing_has_all(parent, name) or (parent, name) in self._absent
            return Missing(UNANSWERED_SECONDS) if absent else None
        node = self.index.nodes.node(dirent.ino)
        return None if node is None or node.outdated else stale_entry(node)

    def fresh_entry(self, node: Node, asked_ns: int) -> Entry:
        """The answer with what the source said when it was asked at ``asked_ns``."""
        return Entry(node, *self.freshness.node_timeouts(node, asked_ns, time.time_ns()))

    def attributes(self, ino: int) -> Entry | None:
        now = time.time_ns()
        node = self.index.nodes.node(ino)
        if node is None:
            return None
        if node.outdated:
            # Only an open file can still be asked about: it keeps what it was opened as.
            return Entry(node, 0.0, 0.0)
        if self.freshness.mode is not FreshnessMode.OPEN:
            kept = self.freshness.kept(node, node.fetched_ns, now)
            return None if kept is None else Entry(node, *kept)
        if not self.freshness.fresh_attributes(node, now):
            return None
        return Entry(node, *self.freshness.node_timeouts(node, node.fetched_ns, now))

    def node(self, ino: int) -> Node | None:
        """The node, if it may be opened without asking the source about it."""
        node = self.index.nodes.node(ino)
        if node is None or node.outdated:
            return None
        return node if self.freshness.fresh_node(node, time.time_ns()) else None

    def target(self, ino: int) -> bytes | None:
        """Of a symbolic link. A link that points elsewhere later is another inode."""
        node = self.index.nodes.node(ino)
        return node.target if node is not None and node.target else None

    def asked_ns(self, ino: int) -> int:
        """When the source was last asked about the inode; 0 for an unknown one."""
        node = self.index.nodes.node(ino)
        return 0 if node is None else node.fetched_ns

    def is_directory(self, ino: int) -> bool:
        node = self.index.nodes.node(ino)
        return node is not None and node.stat.is_directory

    def size(self, ino: int) -> int:
        """Bytes of the version that ``ino`` stands for; 0 for an unknown one."""
        node = self.index.nodes.node(ino)
        return 0 if node is None else node.stat.size

    # -- places and listings

    def directory(self, ino: int) -> DirRef:
        """Where the source has a directory. Raises OSError ESTALE where that is not known."""
        directory = self.index.nodes.dirref(ino)
        if directory is None:
            raise OSError(errno.ESTALE, "the directory is not known any more")
        return directory

    def place(self, ino: int) -> tuple[DirRef, bytes]:
        """Where the source has an inode: a directory and the name in it, which is empty for the
        directory itself. Raises OSError ESTALE where that is not known."""
        node = self.index.nodes.node(ino)
        if node is None:
            raise OSError(errno.ESTALE, "unknown inode")
        if node.stat.is_directory:
            return self.directory(ino), b""
        return self.directory(node.parent), node.name

    def listing_has_all(self, parent: int, name: bytes) -> bool:
        """Whether the directory has a listing (maybe an old one) that would have this name."""
        listing = self.index.listings.listing(parent)
        return listing is not None and listing.lists_all and name not in UNLISTED_NAMES

    def absent(self, parent: int, names: Iterable[bytes], asked_ns: int) -> None:
        """The source said at ``asked_ns`` that it has no such names."""
        for name in names:
            if not self.listing_has_all(parent, name):
                while len(self._absent) >= ABSENT_KEPT:
                    self._absent.popitem(last=False)
                self._absent[parent, name] = asked_ns

    def forget_absent(self) -> Collection[tuple[int, bytes]]:
        """What look-ups said to be absent is asked for again: directory and name of each."""
        forgotten, self._absent = self._absent, OrderedDict()
        return forgotten

    def listing_confirmed_ns(self, ino: int, now_ns: int) -> int | None:
        """When the source last confirmed a directory's listing, if that is recent enough."""
        listing = self.index.listings.listing(ino)
        if listing is None:
            return None
        fetched_ns, confirmed_ns = self._confirmed.get(ino, (0, 0))
        if fetched_ns != listing.fetched_ns:
            confirmed_ns = listing.fetched_ns
        fresh = self.freshness.fresh_listing(listing, confirmed_ns, now_ns)
        return confirmed_ns if fresh else None

    def confirm_listing(self, ino: int, listing: Listing, asked_ns: int) -> None:
        """The source was asked at ``asked_ns``, and the listing still holds."""
        while len(self._confirmed) >= CONFIRMED_KEPT:
            self._confirmed.popitem(last=False)
        self._confirmed[ino] = (listing.fetched_ns, asked_ns)


def stale_entry(node: Node) -> Entry:
    """What is answered where the source does not say in time whether it still holds."""
    return Entry(node, UNANSWERED_SECONDS, UNANSWERED_SECONDS)
