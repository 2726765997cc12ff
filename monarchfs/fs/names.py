"""Names and attributes: answered from the index where that is fresh, else from the source."""

from __future__ import annotations

import errno
import logging
import math
import os
import stat as stat_module
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import trio

from monarchfs.fs.cached_listings import CachedListings
from monarchfs.fs.freshness import UNANSWERED_SECONDS, Freshness, past_racy_window
from monarchfs.fs.sibling_names import SiblingNames
from monarchfs.fs.stale_on_timeout import StaleOnTimeout
from monarchfs.fs.statahead import Statahead
from monarchfs.fs.unlisted import Unlisted
from monarchfs.index.index import Index
from monarchfs.metrics import Metrics
from monarchfs.source.source import Source
from monarchfs.types import (
    ROOT_INO,
    Dirent,
    DirRef,
    FreshnessMode,
    IndexWriteError,
    Lane,
    Node,
    SourceChanged,
    SourceStat,
)

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Names that one call of the source asks for, one after the other, and one transaction records."""

SURE_NAME_BYTES = 143
"""Any file system takes names of so many bytes (eCryptfs no longer ones, others 255, some more). Of
a longer one that is not known the source says whether there is none (ENOENT), or cannot be
(ENAMETOOLONG)."""

ERRAND_SECONDS = 0.1
"""What a thread has found by then, others need not wait for."""

CONFIRMED_KEPT = 100_000
"""Listings of which is remembered that they were confirmed; more are confirmed again."""

DENIED_KEPT = 100
"""Missing names of a directory of which is remembered that the kernel may know them."""


class Entry(NamedTuple):
    """A node for the kernel, with the seconds that it may keep the name and the attributes."""

    node: Node
    entry_timeout: float
    attr_timeout: float


class Missing(NamedTuple):
    """A name that does not exist, and the seconds for which that may be believed."""

    timeout: float


class Names(ABC):
    """What the names of one mount stand for, and the attributes of that.

    Constant: its parts. ``on_outdated`` is told of every inode number that was found to stand for
    what the source does not hold any more, ``on_appeared`` of each name (directory, name) that is
    there by now, and which the kernel may remember as missing. ``_denied`` are names that it may so
    remember and no listing tells of, by directory; None stands for more than ``DENIED_KEPT``.
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
        on_brought: Callable[[int, bytes, Entry], None] = lambda parent, name, entry: None,
        on_moved: Callable[[int], None] = lambda now_ns: None,
    ) -> None:
        """``deadline`` is how many seconds a revalidation waits for a source that does not answer,
        where something is known that can be served instead. ``on_brought`` is told of each name
        that somebody may look up soon, and what it stands for now; ``on_moved`` when a directory
        was seen moved (nanoseconds since 1970)."""
        self.index = index
        self.freshness = freshness
        self.on_outdated: Callable[[int], None] = lambda ino: None
        self.on_appeared: Callable[[int, bytes], None] = lambda parent, name: None
        self._on_brought = on_brought
        self._denied: dict[int, set[bytes] | None] = {}
        self.shown = CachedListings()
        self._source = source
        self._asking = StaleOnTimeout(source, freshness, metrics, nursery, deadline)
        self._statahead = Statahead(
            nursery, index.entries, index.count_entries, self._lacks, self._ask_ahead
        )
        self._unlisted = Unlisted(nursery, self._directory_bytes, self._list_ahead)
        self.beside = SiblingNames(index.count_nodes, index.entries, self._tell_of)
        self._on_moved = on_moved
        self._all_denied = False
        self._confirmed: dict[int, tuple[int, int]] = {}
        self._moved_ns = 0

    def take_over(self, moved_ns: int) -> None:
        """Another process served the mount before; it told ``on_moved`` of ``moved_ns`` (0: of
        nothing), and the kernel may remember missing names from it."""
        self._moved_ns = moved_ns
        self._all_denied = True
        self.shown.take_over(time.time_ns())

    def may_be_denied(self, ino: int) -> bool:
        """Whether the kernel may remember missing names there, with or without a listing."""
        return self._all_denied or ino in self._denied

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
            if len(name) > SURE_NAME_BYTES:
                return None
            confirmed_ns = self._listed(parent, now)
            if confirmed_ns is None:
                return None
            return Missing(self.freshness.timeouts(confirmed_ns, now)[0])
        return self._answer(dirent.checked_ns, self.index.node(dirent.ino), now)

    def _answer(self, checked_ns: int, node: Node | None, now_ns: int) -> Entry | None:
        """What a look-up of a name last asked for at ``checked_ns`` is answered with; None where
        the source has to be asked."""
        if node is None or node.outdated:
            return None
        kept = self.freshness.kept(node, checked_ns, now_ns)
        if kept is None:
            return None
        if checked_ns < self._moved_ns and (
            node.stat.is_directory or self.freshness.mode is not FreshnessMode.IMMUTABLE
        ):
            return None
        return Entry(node, *kept)

    def _tell_of(self, parent: int, dirent: Dirent, node: Node | None, now_ns: int) -> None:
        if (entry := self._answer(dirent.checked_ns, node, now_ns)) is not None:
            self._on_brought(parent, dirent.name, entry)

    def _tell_of_name(self, parent: int, name: bytes) -> None:
        if isinstance(known := self.known_lookup(parent, name), Entry):
            self._on_brought(parent, name, known)

    def known_attributes(self, ino: int) -> Entry | None:
        now = time.time_ns()
        node = self.index.node(ino)
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
        return self._entry(node, node.fetched_ns, now)

    def known_node(self, ino: int) -> Node | None:
        """The node, if it may be opened without asking the source about it."""
        node = self.index.node(ino)
        if node is None or node.outdated:
            return None
        return node if self.freshness.fresh_node(node, time.time_ns()) else None

    def asked_ns(self, ino: int) -> int:
        """When the source was asked about it last; 0 for what is not known."""
        node = self.index.node(ino)
        return 0 if node is None else node.fetched_ns

    def known_target(self, ino: int) -> bytes | None:
        """A symbolic link's; a link that points elsewhere later is another inode."""
        node = self.index.node(ino)
        return node.target if node is not None and node.target else None

    def _entry(self, node: Node, checked_ns: int, now_ns: int) -> Entry:
        return Entry(node, *self.freshness.node_timeouts(node, checked_ns, now_ns))

    # -- answers that may need the source

    async def lookup(self, parent: int, name: bytes, lane: Lane = Lane.DEMAND) -> Entry | Missing:
        if (known := self.known_lookup(parent, name)) is not None:
            return known
        fallback: Entry | Missing | None = None
        dirent = self.index.dirent(parent, name)
        if dirent is None:
            if self.index.listing(parent) is not None:
                fallback = Missing(UNANSWERED_SECONDS)
        else:
            node = self.index.node(dirent.ino)
            if node is not None and not node.outdated:
                fallback = Entry(node, UNANSWERED_SECONDS, UNANSWERED_SECONDS)
        fetch = self._fetch_listed
        if isinstance(fallback, Missing) and len(name) <= SURE_NAME_BYTES:
            fetch = self._fetch_absent
        elif dirent is not None and fallback is None:
            # Who waits for a batch that others started needs no task of his own for it.
            if (known := await self._from_batch(parent, name, lane)) is not None:
                return known
            fetch = self._fetch_name
        return await self._asking.ask(
            ("name", parent, name), lambda: fetch(parent, name, lane), fallback
        )

    async def find(self, parent: int, name: bytes, lane: Lane) -> Node | None:
        """``lookup`` for those who are not the kernel; None for a name that does not exist."""
        found = await self.lookup(parent, name, lane)
        return None if isinstance(found, Missing) else found.node

    async def find_each(
        self, parent: int, names: list[bytes], lane: Lane, *, tells: bool = False
    ) -> list[Node | None]:
        """``find`` for many names of a directory, with one call of the source for all that are
        not known. Raises OSError if the directory cannot be used; None for a name that fails.
        ``tells``: readers will want them soon."""
        found: dict[bytes, Node | None] = {}
        unknown = []
        for name in names:
            known = self.known_lookup(parent, name)
            if known is None:
                unknown.append(name)
            else:
                found[name] = None if isinstance(known, Missing) else known.node
        if unknown:
            answers = await self.ask_each(parent, unknown, lane)
            if tells and self.beside.fits:
                self._tell_of_each(parent, unknown, answers)
            for name, answer in zip(unknown, answers, strict=True):
                found[name] = None if isinstance(answer, OSError) else answer
        return [found[name] for name in names]

    async def ask_each(
        self, parent: int, names: list[bytes], lane: Lane
    ) -> list[Node | OSError | None]:
        """Ask the source about each name, whatever is known, with few calls for all, and record the
        answers: None for a name that is not there. Raises OSError if the directory cannot be
        used, and IndexWriteError."""
        parts = [names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE)]
        answers: list[list[Node | OSError | None]] = [[] for _ in parts]
        errors: list[OSError | IndexWriteError] = []

        async def ask(part: int) -> None:
            try:
                answers[part] = await self._ask_some(parent, parts[part], lane)
            except (OSError, IndexWriteError) as exc:
                errors.append(exc)

        # Side by side: each name is a round trip to the metadata server.
        async with trio.open_nursery() as nursery:
            for part in range(len(parts)):
                nursery.start_soon(ask, part)
        if errors:
            raise errors[0]
        return [answer for part in answers for answer in part]

    async def _ask_some(
        self, parent: int, names: list[bytes], lane: Lane, seconds: float = math.inf
    ) -> list[Node | OSError | None]:
        """About the first of them, as many as ``seconds`` are enough for, and one at least."""
        directory = self._directory(parent)
        asked_ns = time.time_ns()
        try:
            answers = await self._source.found_each(directory, names, lane, seconds)
        except SourceChanged as exc:
            self.invalidate_directory(parent)
            raise OSError(errno.ESTALE, "its directory was replaced") from exc
        names = names[: len(answers)]
        there: list[tuple[bytes, SourceStat, bytes]] = []
        missing: list[bytes] = []
        for name, answer in zip(names, answers, strict=True):
            if not isinstance(answer, OSError):
                there.append((name, *answer))
            elif isinstance(answer, (FileNotFoundError, NotADirectoryError)):
                missing.append(name)
        nodes = iter(self._found_each(parent, there, asked_ns))
        self._missing(parent, missing)
        return [
            None
            if isinstance(answer, (FileNotFoundError, NotADirectoryError))
            else answer
            if isinstance(answer, OSError)
            else next(nodes)
            for answer in answers
        ]

    async def refresh_root(self) -> None:
        """Ask for the root's attributes, whatever is known."""
        await self._fetch_node(ROOT_INO)

    async def attributes(self, ino: int) -> Entry:
        if (known := self.known_attributes(ino)) is not None:
            return known
        node = self.index.node(ino)
        if node is None:
            raise OSError(errno.ESTALE, "unknown inode")
        fallback = Entry(node, UNANSWERED_SECONDS, UNANSWERED_SECONDS)
        return await self._asking.ask(("node", ino), lambda: self._fetch_node(ino), fallback)

    async def attributes_of_open(
        self, node: Node, current: Callable[[], Awaitable[SourceStat]]
    ) -> Entry:
        """Those of a file that is open and has no place in the source that is known, or whose
        bytes are read from the source as it is: what ``current`` tells of it. Never kept."""

        async def ask() -> Entry:
            return Entry(node._replace(stat=await current()), 0.0, 0.0)

        return await self._asking.ask(("open", node.ino), ask, Entry(node, 0.0, 0.0))

    async def attributes_of_place(self, node: Node) -> Entry:
        """Under the number of an outdated file, those of the one that has its name now. Never kept.
        Raises OSError ENOENT where there is none, ESTALE where it is no file of the same type."""
        found = await self.lookup(node.parent, node.name)
        if isinstance(found, Missing):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        stat = found.node.stat
        if stat_module.S_IFMT(stat.mode) != stat_module.S_IFMT(node.stat.mode):
            raise OSError(errno.ESTALE, "something else has its name")
        return Entry(node._replace(stat=stat, outdated=True), 0.0, 0.0)

    async def revalidated(self, ino: int) -> Node:
        """The node as ``open`` needs it: fresh by the mount's promise.

        Raises OSError ESTALE where the source has another version by now: the kernel then looks
        the name up again (fs/namei.c, LOOKUP_REVAL) and finds the new inode.
        """
        node = self.index.node(ino)
        if node is not None and not node.outdated:
            if self.freshness.fresh_node(node, time.time_ns()):
                return node
            await self._asking.ask(
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

    async def _fetch_name(self, parent: int, name: bytes, lane: Lane) -> Entry | Missing:
        directory = self._directory(parent)
        asked_ns = time.time_ns()
        try:
            stat, target = await self._source.found(directory, name, lane)
        except (FileNotFoundError, NotADirectoryError):
            self._missing(parent, [name])
            if self.freshness.trusts_times and self.index.listing(parent) is None:
                self._deny(parent, name)
            return Missing(self.freshness.timeouts(asked_ns, time.time_ns())[0])
        except SourceChanged as exc:
            self.invalidate_directory(parent)
            raise OSError(errno.ESTALE, "its directory was replaced") from exc
        # ``asked_ns``, not the time of the answer: the promise counts from when it was true.
        node = self._found(parent, name, stat, target, asked_ns)
        self._tell_of_name(parent, name)
        return self._entry(node, asked_ns, time.time_ns())

    def _lacks(self, dirent: Dirent, node: Node | None) -> bool:
        """Whether a look-up of it would ask the source."""
        return self._answer(dirent.checked_ns, node, time.time_ns()) is None

    async def _ask_ahead(self, parent: int, names: list[bytes]) -> tuple[int, int]:
        answers = await self._ask_some(parent, names, Lane.DEMAND, ERRAND_SECONDS)
        self._tell_of_each(parent, names, answers)
        return len(answers), sum(isinstance(answer, Node) for answer in answers)

    def _tell_of_each(
        self, parent: int, names: list[bytes], answers: Sequence[Node | OSError | None]
    ) -> None:
        """They were just asked for."""
        now_ns = time.time_ns()
        for name, node in zip(names, answers, strict=False):
            if isinstance(node, Node):
                entry = self._answer(node.fetched_ns, node, now_ns)
                if entry is not None:
                    self._on_brought(parent, name, entry)

    async def _fetch_listed(self, parent: int, name: bytes, lane: Lane) -> Entry | Missing:
        known = await self._from_batch(parent, name, lane)
        return known or await self._fetch_name(parent, name, lane)

    async def _from_batch(self, parent: int, name: bytes, lane: Lane) -> Entry | Missing | None:
        """An answer that a batch brings together with others, if there is one for the name.
        Others there may be asked for next: those that have a record are brought, too."""
        if lane is not Lane.DEMAND or not self.freshness.serves_stale:
            return None
        # It may be known by now.
        known, dirent = self.known_lookup(parent, name), self.index.dirent(parent, name)
        if known is not None:
            return known
        if dirent is not None:
            await self._statahead.bring(parent, dirent)
            return self.known_lookup(parent, name)
        if self.index.listing(parent) is None:
            self._missed_unlisted(parent)
        return None

    def _missed_unlisted(self, parent: int) -> None:
        times = self._statahead.missed(parent)
        # What the listing has the kernel may go on taking for missing, and refresh not notice.
        unsure = self._all_denied or self._denied.get(parent, ()) is None
        if not (unsure and self.freshness.trusts_times):
            self._unlisted.missed(parent, times)

    def _directory_bytes(self, ino: int) -> int:
        node = self.index.node(ino)
        return 0 if node is None else node.stat.size

    @abstractmethod
    async def _list_ahead(self, ino: int, most_names: int, tell: Callable[[], None]) -> int | None:
        """See ``Unlisted``."""

    def _deny(self, parent: int, name: bytes) -> None:
        """The kernel may remember that there is no such name; no listing tells of that."""
        names = self._denied.setdefault(parent, set())
        if names is not None:
            names.add(name)
            if len(names) > DENIED_KEPT:
                self._denied[parent] = None

    def _denied_before(self, ino: int) -> None:
        """The directory was listed: the kernel may take for missing what there is now."""
        for name in self._denied.pop(ino, None) or ():
            if self.index.dirent(ino, name) is not None:
                self.on_appeared(ino, name)

    async def _fetch_absent(self, parent: int, name: bytes, lane: Lane) -> Entry | Missing:
        """A name that an old listing does not have: where the directory's times are what they were,
        that answers for all such names at once."""
        if self.freshness.serves_stale and await self._asking.run_once(
            ("confirm", parent), lambda: self._confirm_listing(parent, lane)
        ):
            known = self.known_lookup(parent, name)
            if known is not None:
                return known
        return await self._fetch_name(parent, name, lane)

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
        found = await self._asking.run_once(
            ("name", node.parent, node.name),
            lambda: self._fetch_listed(node.parent, node.name, Lane.DEMAND),
        )
        if isinstance(found, Missing) or found.node.ino != ino:
            self.outdate(ino)
            return Entry(node._replace(outdated=True), 0.0, 0.0)
        return found

    # -- recording what the source said

    def _found(
        self, parent: int, name: bytes, stat: SourceStat, target: bytes, asked_ns: int
    ) -> Node:
        """Record an answer; the version that the name stood for is outdated by another one."""
        before = self.index.dirent(parent, name)
        node = self.index.record_found(parent, name, stat, target, asked_ns)
        if before is None or before.ino != node.ino:
            self._differs(parent, name, None if before is None else before.ino)
        return node

    def _found_each(
        self, parent: int, found: list[tuple[bytes, SourceStat, bytes]], asked_ns: int
    ) -> list[Node]:
        """``_found`` for several names, with one transaction."""
        recorded = self.index.record_found_each(parent, found, asked_ns) if found else []
        for (name, *_), (node, before) in zip(found, recorded, strict=True):
            if before != node.ino:
                self._differs(parent, name, before)
        return [node for node, _before in recorded]

    def _differs(self, parent: int, name: bytes, before: int | None) -> None:
        if before is None:
            self.shown.changed(parent)
        else:
            self.replaced(parent, name, before)

    def _missing(self, parent: int, names: list[bytes]) -> None:
        befores = self.index.record_missing(parent, names) if names else []
        for name, before in zip(names, befores, strict=True):
            if before is not None:
                self.replaced(parent, name, before)

    def replaced(self, parent: int, name: bytes, before: int) -> None:
        """``name`` stands for something else now, or for nothing: what it stood for is outdated,
        unless that is a directory, or was found at another place since."""
        self.shown.changed(parent)
        node = self.index.node(before)
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
        """``outdate`` by one who tells those who have to know. Raises nothing."""
        try:
            self.index.mark_outdated(ino)
        except IndexWriteError as exc:
            log.warning("inode %d is not marked as outdated: %s", ino, exc)

    def invalidate_directory(self, ino: int) -> None:
        """The directory, or one above it, is not where it was: ask about each again, and about all
        names: whoever came here by another way is to find his at the next try, the only one that
        the kernel makes (fs/namei.c). Where the dataset was said not to change, about those of
        directories alone."""
        self._moved_ns = time.time_ns()
        self._on_moved(self._moved_ns)
        while ino != ROOT_INO:
            self.index.mark_outdated(ino)
            node = self.index.node(ino)
            if node is None:
                return
            ino = node.parent

    # -- places and listings

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
        if node.stat.is_directory:
            return self._directory(ino), b""
        return self._directory(node.parent), node.name

    def _listed(self, ino: int, now_ns: int) -> int | None:
        """When the listing was last seen to hold, if that need not be asked now."""
        listing = self.index.listing(ino)
        if listing is None:
            return None
        of_ns, confirmed_ns = self._confirmed.get(ino, (0, 0))
        if of_ns != listing.fetched_ns:
            confirmed_ns = listing.fetched_ns
        fresh = self.freshness.fresh_listing(listing, confirmed_ns, now_ns)
        return confirmed_ns if fresh else None

    async def _confirm_listing(self, ino: int, lane: Lane) -> bool:
        """Whether the directory's times say that its listing still holds: one stat. Raises OSError.

        A change in the tick in which the directory was last changed before it was listed would not
        show in its times: such a listing is confirmed by nothing.
        """
        listing = self.index.listing(ino)
        if listing is None or not past_racy_window(listing.ctime_ns, listing.fetched_ns):
            return False
        asked_ns = time.time_ns()
        try:
            stat = await self._source.stat(self._directory(ino), b"", lane)
        except SourceChanged as exc:
            self.invalidate_directory(ino)
            raise OSError(errno.ESTALE, "the directory was replaced") from exc
        if (stat.mtime_ns, stat.ctime_ns) != (listing.mtime_ns, listing.ctime_ns):
            return False
        while len(self._confirmed) >= CONFIRMED_KEPT:
            del self._confirmed[next(iter(self._confirmed))]
        self._confirmed[ino] = (listing.fetched_ns, asked_ns)
        return True
