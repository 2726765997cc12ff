"""Copying what somebody asked for: files, and all that is below directories.

A request becomes a ``Warm``, which walks and goes on until each of its files is resident or will
not be, whether anybody waits for that or not. Its files are wanted as hints: before what a scan
finds, after what is opened. Others may have to go for them (by policy), until as much was asked for
as the tiers hold: from then on it would be its own files that go.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.reasons import Cause
from monarchfs.metadata.tree import Tree
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.open_first import MOST_WAITING
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.scan import SELF
from monarchfs.types import IndexWriteError, Lane, Node, OperationError, Replica, ReplicaState

log = logging.getLogger(__name__)

WALKERS = 4
"""Directories at once."""

BATCH = 128
"""Names looked at without letting others run: a millisecond or two."""

PAUSE_SECONDS = 0.0005
"""After each batch, for readers."""

OUTSTANDING_MOST = 50_000
"""The walk waits while so many files wait for their copy: about 200 bytes each."""

VERSIONS = 3
"""A file that changes while it is copied is wanted again, in its new version, so many times."""

WARMS_MOST = 100
"""Requests under way at once."""


class AttributeLists(Protocol):
    """The part of ``monarchfs.fs.xattrs.Xattrs`` that is used here."""

    async def list_each(self, parent: int, names: list[bytes], lane: Lane) -> None: ...


_NOTED = b"warming"
_NOTED_BYTES = 4000
"""What an index keeps under one key is small: requests that name too many files are not noted."""

_REFUSED = (Cause.NO_ROOM, Cause.NO_TIER)


class What(Enum):
    """What is done with each file."""

    COPY = "copy"
    METADATA = "metadata"
    """It is known afterwards, with what ``ls -l`` asks for; nothing is copied."""
    CHECK = "check"
    """It is known afterwards, and it is looked at where its bytes are."""


@dataclass(slots=True)
class WarmCounts:
    """So far. Found at and below the paths: ``files`` of ``bytes``, and ``directories``.

    Of them ``resident``, all of whose bytes are local (``copied``: since it was asked for),
    ``refused`` for want of room, with ``refused_bytes`` that did not fit, ``archived``, which only
    readers bring back, and ``failed``, with the first ``error``; also a directory that cannot be
    listed counts as one that failed. At the end ``short_bytes`` more in the tiers would have been
    enough for all of them. ``partial`` and ``remote`` files are a check's, ``local_bytes`` what is
    on this node. ``walked``: all names are known.
    """

    files: int = 0
    bytes: int = 0
    directories: int = 0
    resident: int = 0
    resident_bytes: int = 0
    copied: int = 0
    copied_bytes: int = 0
    partial: int = 0
    remote: int = 0
    local_bytes: int = 0
    refused: int = 0
    refused_bytes: int = 0
    short_bytes: int = 0
    archived: int = 0
    archived_bytes: int = 0
    failed: int = 0
    error: str = ""
    walked: bool = False


class Warm:
    """One request. Constant: what, and ``done``, set at its end. Changing: ``counts``; the
    directories to be walked; ``outstanding``, the files that wait for their copy, each with how
    many of its versions were tried and how many of its names (hard links) were found; ``_local``,
    the files that were counted as resident, by name; how many others had gone for room before."""

    def __init__(
        self,
        tree: Tree,
        xattrs: AttributeLists,
        cache: Cache,
        jobs: CopyJobs,
        what: What,
    ) -> None:
        self.what = what
        self._xattrs = xattrs
        self.counts = WarmCounts()
        self.done = trio.Event()
        self.outstanding: dict[int, tuple[int, int]] = {}
        self._tree = tree
        self._cache = cache
        self._jobs = jobs
        self._directories: list[int] = []
        self._active = 0
        self._changing = 0
        self._turn = trio.Lock()
        self._refused_need = 0
        self._local = array("Q")
        self._gone = self._gone_for_room
        self._capacity_bytes = sum(room.capacity_bytes for room in cache.usage.room_for(0)[1])
        self._news = trio.lowlevel.ParkingLot()
        self._nursery: trio.Nursery | None = None

    @property
    def moving_bytes(self) -> int:
        """How much is local of those files that are being copied now."""
        return self._jobs.copied_bytes(self.outstanding) if self.outstanding else 0

    @property
    def _gone_for_room(self) -> int:
        metrics = self._cache.accounts.metrics
        return metrics.evictions_policy + metrics.evictions_pressure

    async def run(self, roots: Sequence[Node]) -> None:
        """Do it for these nodes, to the end. Raises nothing."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for node in roots:
                    if node.stat.is_directory:
                        self._directories.append(node.ino)
                    else:
                        await self._room()
                        self._take([node])
                for _ in range(WALKERS):
                    nursery.start_soon(self._walk)
                while self._active or self._directories:
                    await self._news.park()
                self.counts.walked = True
                while self.outstanding or self._changing:
                    await self._news.park()
                if self.what is What.COPY and self._gone_for_room != self._gone:
                    await self._recount()
                if self._refused_need:
                    rooms = [room.room.bytes for room in self._cache.usage.room_for(0)[1]]
                    left = sum(max(0, room) for room in rooms)
                    self.counts.short_bytes = max(0, self._refused_need - left)
        finally:
            self._nursery = None
            self.done.set()

    # -- the walk

    async def _walk(self) -> None:
        while self._directories or self._active:
            if not self._directories:
                await self._news.park()
                continue
            ino = self._directories.pop()
            self._active += 1
            try:
                await self._directory(ino)
            except (OSError, IndexWriteError) as exc:
                self._fail(self._path(ino), exc)
            finally:
                self._active -= 1
                self._news.unpark_all()

    async def _directory(self, ino: int) -> None:
        await self._tree.directories.open(ino, Lane.BACKGROUND)
        self.counts.directories += 1
        cookie = 0
        while True:
            opens_bytes = self._jobs.open_first.most_bytes if self.what is What.COPY else 0
            await self._room(MOST_WAITING if opens_bytes else OUTSTANDING_MOST)
            batch = self._tree.directories.entries(ino, cookie, BATCH)
            if not batch:
                return
            cookie = batch[-1][0].cookie
            # Links, too: whoever opens what they lead to has to read them.
            there = [row for row in batch if row[0].name not in SELF]
            found = await self._tree.names.find_entries(
                ino, there, Lane.BACKGROUND, opens_bytes=opens_bytes
            )
            self._jobs.open_first.note_found(found)
            names = [entry.name for entry, *_ in there]
            if self.what is What.METADATA:
                await self._xattrs.list_each(ino, names, Lane.BACKGROUND)
            nodes = [
                node or await self._ask_again(ino, name)
                for name, node in zip(names, found, strict=True)
            ]
            there_now = [node for node in nodes if node is not None]
            self._directories += [node.ino for node in there_now if node.stat.is_directory]
            self._news.unpark_all()
            self._take([node for node in there_now if node.stat.is_regular])

    async def _ask_again(self, parent: int, name: bytes) -> Node | None:
        """Of a name of which many at once did not say whether it is gone, or why it fails."""
        try:
            return await self._tree.names.find(parent, name, Lane.BACKGROUND)
        except (OSError, IndexWriteError) as exc:
            self._fail(self._path(parent, name), exc)
            return None

    async def _room(self, most: int = OUTSTANDING_MOST) -> None:
        """A pause, and where so many files wait already, until fewer do."""
        async with self._turn:
            # One walker at a time, and half of the time none: readers come before.
            await trio.sleep(PAUSE_SECONDS)
        while len(self.outstanding) >= most:
            await self._news.park()

    # -- its files

    def _take(self, nodes: Sequence[Node]) -> None:
        """Files were found. No checkpoint."""
        counts, copies = self.counts, self.what is What.COPY
        counts.files += len(nodes)
        if self.what is What.METADATA:
            counts.bytes += sum(node.stat.size for node in nodes)
            return
        resident = self._cache.resident_each(nodes)
        for node in nodes:
            ino, size = node.ino, node.stat.size
            counts.bytes += size
            if ino in resident:
                self._resident(ino, size)
                if copies:
                    self._cache.accessed(ino)
            elif copies:
                _versions, names = self.outstanding.get(ino, (1, 0))
                self._want(ino, 1, names + 1)
            else:
                record = self._cache.accounts.state(ino)
                if record is not None and record.state is ReplicaState.PARTIAL:
                    counts.partial += 1
                    counts.local_bytes += self._cache.index.replicas.present_bytes(ino)
                else:
                    counts.remote += 1
        # Where nothing has to be done for it. Each once: there are hard links.
        self.copies_ended(list({node.ino for node in nodes}))

    def _resident(self, ino: int, size: int, names: int = 1) -> None:
        self._local.extend([ino] * names)
        self.counts.resident += names
        self.counts.resident_bytes += names * size
        self.counts.local_bytes += names * size

    async def _recount(self) -> None:
        """Some that were resident had to go since, for others of the request, or of a job: there
        is no room for them."""
        counts = self.counts
        for start in range(0, len(self._local), BATCH):
            inos = self._local[start : start + BATCH]
            records = self._cache.accounts.states(inos)
            for ino, names in Counter(inos).items():
                node, record = self._cache.index.nodes.node(ino), records.get(ino)
                if node is None or node.outdated:
                    continue
                if record is not None and record.state is ReplicaState.RESIDENT:
                    continue
                size = node.stat.size
                counts.resident -= names
                counts.resident_bytes -= names * size
                counts.local_bytes -= names * size
                reason = self._cache.reasons.get(ino)
                if reason is not None and reason.cause is Cause.FOREIGN:
                    continue  # its owner keeps it
                counts.refused += names
                counts.refused_bytes += size
                self._refused_need += self._cache.usage.room_for(size)[0]
            await trio.lowlevel.checkpoint()

    def _want(self, ino: int, versions: int, names: int) -> None:
        self.outstanding[ino] = versions, names
        fits = self.counts.bytes <= self._capacity_bytes
        self._jobs.want(ino, Priority.HINTED if fits else Priority.LISTED)

    def copies_ended(self, inos: Sequence[int]) -> None:
        """The copier has done something for files; perhaps all it will."""
        ended = [ino for ino in inos if ino in self.outstanding and not self._jobs.pending(ino)]
        if ended:
            records = self._cache.accounts.states(ended)
            for ino in ended:
                self._end(ino, records.get(ino), *self.outstanding.pop(ino))
            self._news.unpark_all()

    def _end(self, ino: int, record: Replica | None, versions: int, names: int) -> None:
        counts = self.counts
        if record is not None and record.state is ReplicaState.RESIDENT:
            self._resident(ino, record.size, names)
            counts.copied += names
            counts.copied_bytes += record.size
            return
        node, reason = self._cache.index.nodes.node(ino), self._cache.reasons.get(ino)
        if node is None or node.outdated:
            self._changed(node, versions, names)
        elif (
            reason.cause is Cause.FOREIGN
            if reason
            else record and not self._cache.reservations.keeps_foreign
        ):
            return  # the rest is the owners' to copy
        elif reason is not None and reason.cause in _REFUSED:
            fill = self._jobs.files.get(ino)
            recorded = self._cache.index.replicas.present_bytes(ino) if record else 0
            local = max(recorded, fill.copy.local_bytes if fill else 0)
            missing = max(0, node.stat.size - local)
            counts.refused += names
            counts.refused_bytes += missing
            self._refused_need += self._cache.usage.room_for(missing)[0]
        elif reason is not None and reason.cause is Cause.ARCHIVED:
            counts.archived += names
            counts.archived_bytes += names * node.stat.size
        else:
            text = "it was not copied" if reason is None else reason.text
            self._fail(self._path(node.parent, node.name), OperationError(text), names)

    def _changed(self, node: Node | None, versions: int, names: int) -> None:
        if node is None or versions >= VERSIONS or self._nursery is None:
            path = "a file" if node is None else self._path(node.parent, node.name)
            self._fail(path, OperationError("it changes in the source again and again"), names)
            return
        self._changing += 1
        self._nursery.start_soon(self._next_version, node, versions + 1, names)

    async def _next_version(self, node: Node, versions: int, names: int) -> None:
        self.counts.files -= names
        self.counts.bytes -= names * node.stat.size
        try:
            found = await self._ask_again(node.parent, node.name)
            if found is not None and found.stat.is_regular:
                self.counts.files += names
                self.counts.bytes += names * found.stat.size
                if self._cache.resident(found):
                    self._resident(found.ino, found.stat.size, names)
                else:
                    self._want(found.ino, versions, names)
                    self.copies_ended([found.ino])
        finally:
            self._changing -= 1
            self._news.unpark_all()

    def _path(self, ino: int, name: bytes = b"") -> str:
        """For messages."""
        directory = self._cache.index.nodes.dirref(ino)
        parts = (directory.path if directory is not None else b"...", name)
        return os.fsdecode(b"/".join(part for part in parts if part)) or "/"

    def _fail(self, path: str, exc: Exception, names: int = 1) -> None:
        self.counts.failed += names
        reason = (exc.strerror or str(exc)) if isinstance(exc, OSError) else str(exc)
        if not self.counts.error:  # the copier logs each
            self.counts.error = f"{path}: {reason}"
            log.warning("not warmed: %r: %s", path, reason)


class Warming:
    """The requests under way, each in the worker's nursery: they outlive who asked, and, noted in
    the index, also this process, for the next one of the same mount."""

    def __init__(
        self,
        tree: Tree,
        xattrs: AttributeLists,
        cache: Cache,
        jobs: CopyJobs,
        nursery: trio.Nursery,
    ) -> None:
        self._tree = tree
        self._xattrs = xattrs
        self._cache = cache
        self._jobs = jobs
        self._nursery = nursery
        self._under_way: dict[Warm, list[int]] = {}
        jobs.on_step.add(self._copies_ended)

    def _copies_ended(self, inos: Sequence[int]) -> None:
        for warm in self._under_way:
            if not warm.done.is_set():
                warm.copies_ended(inos)

    def forget(self) -> None:
        """What an earlier mount was asked for does not count."""
        self._note()

    def resume(self) -> None:
        """Begin again with what an earlier process of this mount was asked for."""
        noted = json.loads(self._cache.index.meta.get(_NOTED) or b"[]")
        for what, inos in noted:
            nodes = [
                node for ino in inos if (node := self._cache.index.nodes.node(ino)) is not None
            ]
            self.start(What(what), nodes)

    def request(self, what: What) -> Warm:
        """One to be run by the caller."""
        return Warm(self._tree, self._xattrs, self._cache, self._jobs, what)

    def start(self, what: What, roots: Sequence[Node]) -> Warm:
        """Begin, and go on whatever becomes of the caller. Raises OperationError where too many
        are under way."""
        if len(self._under_way) >= WARMS_MOST:
            raise OperationError(
                f"{WARMS_MOST} warm requests are under way in this mount: try again later"
            )
        warm = self.request(what)
        self._nursery.start_soon(self._run, warm, roots)
        self._under_way[warm] = [node.ino for node in roots]
        self._note()
        return warm

    async def _run(self, warm: Warm, roots: Sequence[Node]) -> None:
        await warm.run(roots)
        del self._under_way[warm]
        self._note()
        log.info("warmed (%s): %s", warm.what.value, warm.counts)

    def _note(self) -> None:
        noted: list[tuple[str, list[int]]] = []
        for warm, inos in self._under_way.items():
            if len(json.dumps([*noted, (warm.what.value, inos)])) <= _NOTED_BYTES:
                noted.append((warm.what.value, inos))
        try:
            self._cache.index.meta.put(_NOTED, json.dumps(noted).encode())
        except IndexWriteError as exc:
            log.warning("a request to warm would be forgotten with this process: %s", exc)
