"""Looking names up: answered from what is known, else from the source."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from monarchfs.metadata.batches import BatchLookups
from monarchfs.metadata.directories import Directories, Row
from monarchfs.metadata.known import SURE_NAME_BYTES, Entry, KnownMetadata, Missing
from monarchfs.metadata.recorder import Recorder
from monarchfs.metadata.sibling_names import SiblingNames
from monarchfs.metadata.stale_on_timeout import StaleOnTimeout
from monarchfs.metadata.statahead import Statahead
from monarchfs.metadata.unlisted import Unlisted
from monarchfs.source.source import Source
from monarchfs.types import FileType, Lane, Node


class Names:
    """Constant: its parts. Methods wait, and raise OSError with the errno for the system call."""

    def __init__(
        self,
        source: Source,
        known: KnownMetadata,
        recorder: Recorder,
        asking: StaleOnTimeout,
        batches: BatchLookups,
        statahead: Statahead,
        directories: Directories,
        unlisted: Unlisted,
        siblings: SiblingNames,
    ) -> None:
        self._source = source
        self._known = known
        self._index = known.index
        self._recorder = recorder
        self._asking = asking
        self._batches = batches
        self._statahead = statahead
        self._directories = directories
        self._unlisted = unlisted
        self._siblings = siblings

    async def lookup(self, parent: int, name: bytes, lane: Lane = Lane.DEMAND) -> Entry | Missing:
        if (known := self._known.lookup(parent, name)) is not None:
            return known
        fallback = self._known.stale(parent, name)
        fetch = self._fetch_or_join
        if (
            isinstance(fallback, Missing)
            and len(name) <= SURE_NAME_BYTES
            and self._known.listing_has_all(parent, name)
        ):
            fetch = self._fetch_absent
        elif fallback is None and self._index.nodes.dirent(parent, name) is not None:
            # A caller that waits for a batch of others needs no task of its own.
            if (known := await self._from_batch(parent, name, lane)) is not None:
                return known
            fetch = self._fetch
        return await self._asking.ask(
            self._asking.key(lane, "name", parent, name),
            lambda: fetch(parent, name, lane),
            fallback,
        )

    async def ask(self, parent: int, name: bytes) -> Entry | Missing:
        """Ask the source, or share the answer of a call that is under way."""
        return await self._asking.run_once(
            ("name", parent, name), lambda: self._fetch_or_join(parent, name, Lane.DEMAND)
        )

    async def find(self, parent: int, name: bytes, lane: Lane) -> Node | None:
        """``lookup`` for callers other than the kernel; None for a name that does not exist."""
        found = await self.lookup(parent, name, lane)
        return None if isinstance(found, Missing) else found.node

    async def find_each(
        self, parent: int, names: list[bytes], lane: Lane, *, publish: bool = False
    ) -> list[Node | None]:
        """``find`` for many names of a directory, with few calls of the source for all that are
        not known. Raises OSError if the directory cannot be used; None for a name that fails.
        ``publish``: readers will want those that were not known soon."""
        known = {name: self._known.lookup(parent, name) for name in names}
        found = await self._find_rest(parent, known, lane, publish=publish)
        return [found[name] for name in names]

    async def find_entries(
        self,
        parent: int,
        entries: Sequence[Row],
        lane: Lane,
        *,
        publish: bool = False,
        scanned: bool = False,
        opens_bytes: int = 0,
    ) -> list[Node | None]:
        """``find_each`` for entries as ``Directories`` has just given them. ``scanned``: readers
        may want all at any time; ``opens_bytes``: files up to this size are read next, so that they
        are opened once for both (PosixSource.opened_each)."""
        now, entry = time.time_ns(), self._known.entry
        known = {
            dirent.name: None if node is None else entry(dirent.checked_ns, node, now)
            for dirent, node, *_ in entries
        }
        found: dict[bytes, Node | None] = {}
        if opens_bytes:
            # What has a copy is not read again, unless it has changed.
            held = self._index.replicas.replicas_of([dirent.ino for dirent, *_ in entries])
            files = {
                dirent.name
                for dirent, *_ in entries
                if dirent.type is FileType.REGULAR and dirent.ino not in held
            }
            of_files = {name: known.pop(name) for name in files}
            found = await self._find_rest(
                parent, of_files, lane, publish=publish, scanned=scanned, opens_bytes=opens_bytes
            )
        found |= await self._find_rest(parent, known, lane, publish=publish, scanned=scanned)
        return [found[dirent.name] for dirent, *_ in entries]

    async def _find_rest(
        self,
        parent: int,
        known: Mapping[bytes, Entry | Missing | None],
        lane: Lane,
        *,
        publish: bool,
        scanned: bool = False,
        opens_bytes: int = 0,
    ) -> dict[bytes, Node | None]:
        """What each name stands for; the source is asked about those that are not ``known``."""
        scanned = scanned and self._siblings.fits
        found: dict[bytes, Node | None] = {}
        unknown = []
        for name, answer in known.items():
            if answer is None:
                unknown.append(name)
            elif isinstance(answer, Missing):
                found[name] = None
            else:
                found[name] = answer.node
                if scanned:
                    self._siblings.scanned(parent, name, answer)
        if unknown:
            asked = await self._batches.find_each(parent, unknown, lane, opens_bytes=opens_bytes)
            if publish and self._siblings.fits:
                self._batches.publish(parent, asked)
            now = time.time_ns()
            for name, node in asked.items():
                found[name] = node = None if isinstance(node, OSError) else node
                if scanned and node is not None:
                    entry = self._known.entry(node.fetched_ns, node, now)
                    self._siblings.scanned(parent, name, entry)
        return found

    async def _fetch(self, parent: int, name: bytes, lane: Lane) -> Entry | Missing:
        shared = self._batches.shared
        # A reader's first name in a directory opens that in the source: its files are then opened
        # without Python.
        peers = lane is Lane.BACKGROUND
        if (node := (await shared.ask(parent, [name], lane, peers=peers)).get(name)) is not None:
            self._siblings.publish(parent, name, node, node.fetched_ns)
            return self._known.fresh_entry(node, node.fetched_ns)
        try:
            return await self._ask_source(parent, name, lane)
        finally:
            shared.asked(parent, [name])

    async def _ask_source(self, parent: int, name: bytes, lane: Lane) -> Entry | Missing:
        directory = self._known.directory(parent)
        asked_ns = time.time_ns()
        try:
            with self._recorder.estale_if_replaced(parent):
                stat, target = await self._source.call(
                    lane, self._source.posix.found, directory, name
                )
        except (FileNotFoundError, NotADirectoryError):
            self._recorder.missing(parent, [name], asked_ns)
            freshness = self._known.freshness
            if freshness.trusts_times and self._index.listings.listing(parent) is None:
                self._recorder.negative.add(parent, name)
            return Missing(freshness.timeouts(asked_ns, time.time_ns())[0])
        # ``asked_ns``, not the time of the answer: the promise counts from when it was true.
        (node,) = self._recorder.found_each(parent, [(name, stat, target)], asked_ns)
        self._siblings.publish(parent, name, node, asked_ns)
        return self._known.fresh_entry(node, asked_ns)

    async def _fetch_or_join(self, parent: int, name: bytes, lane: Lane) -> Entry | Missing:
        known = await self._from_batch(parent, name, lane)
        return known or await self._fetch(parent, name, lane)

    async def _from_batch(self, parent: int, name: bytes, lane: Lane) -> Entry | Missing | None:
        """The answer of a batch (``statahead``), if there is one for the name. It asks for other
        names that may be looked up next."""
        if lane is not Lane.DEMAND or not self._known.freshness.serves_stale:
            return None
        # It may be known by now.
        known, dirent = self._known.lookup(parent, name), self._index.nodes.dirent(parent, name)
        if known is not None:
            return known
        if dirent is not None:
            if self._asking.hanging:
                return None  # a batch may have a name that hangs
            await self._statahead.bring(parent, dirent)
            return self._known.lookup(parent, name)
        if self._index.listings.listing(parent) is None:
            self._unlisted.missed(parent, self._statahead.missed(parent))
        return None

    async def _fetch_absent(self, parent: int, name: bytes, lane: Lane) -> Entry | Missing:
        """Of a name that an old listing does not have: if the directory's times are unchanged,
        that answers for all such names at once."""
        if self._known.freshness.serves_stale and await self._asking.run_once(
            self._asking.key(lane, "confirm", parent),
            lambda: self._directories.confirm(parent, lane),
        ):
            known = self._known.lookup(parent, name)
            if known is not None:
                return known
        return await self._fetch(parent, name, lane)
