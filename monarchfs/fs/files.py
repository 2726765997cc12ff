"""Open files: from a replica where there is one, else from the source while it is copied."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

from monarchfs.cache.cache import Cache
from monarchfs.cache.readers import NonresidentReads
from monarchfs.cache.replicas import OpenReplica
from monarchfs.fs.freshness import SURELY_SETTLED_NS
from monarchfs.fs.invalidation import Invalidation
from monarchfs.fs.kernel import Kernel, NoKernel
from monarchfs.fs.tree import Entry, Tree
from monarchfs.metrics import Metrics
from monarchfs.types import (
    Data,
    DirectoryChanged,
    IndexWriteError,
    Node,
    ReplicaState,
    SourceChanged,
    SourceStat,
)

__all__ = ["FileHandle", "Files", "NonresidentReads", "OpenReplica", "PartialFile"]

log = logging.getLogger(__name__)

YOUNG_KEPT = 10_000
"""Inodes of which is remembered that they were opened in the tick of their last change."""

MAPS_DIRECT = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 6)
"""Whether files that are opened with direct I/O can be mapped (FUSE_DIRECT_IO_ALLOW_MMAP)."""


class PartialFile(Protocol):
    """A file that is not resident (yet)."""

    @property
    def partial(self) -> bool: ...

    @property
    def arriving(self) -> bool:
        """Whether all of it was fetched, and nothing is left to do but to put it away."""

    @property
    def replica(self) -> OpenReplica | None:
        """What holds all of its bytes by now."""

    @property
    def local_bytes(self) -> int: ...

    def start_filling(self) -> bool: ...

    def allow_direct_reads(self) -> None:
        """If nothing of it is kept, others may read it. No checkpoint."""

    def on_readahead(self, first: int, last: int) -> None:
        """A read that went past Python is of the chunks [first, last). No checkpoint."""

    async def read(self, offset: int, size: int) -> Data: ...

    async def current(self) -> SourceStat:
        """What the source has now under the descriptor that is read. Raises as ``read``."""

    def outdated(self) -> None:
        """The source holds another version: unless all of this one is local, nothing that is may
        be served any more, and reads show the source as it is. No checkpoint."""

    def release(self) -> None: ...


class Copies(Protocol):
    """Who copies files; ``monarchfs.prefetch`` does."""

    @property
    def keeps(self) -> bool: ...

    def opened(self, ino: int) -> None: ...

    def nonresident(self, ino: int) -> PartialFile | None: ...

    def queued(self, ino: int) -> bool: ...

    def queue_position(self, ino: int) -> int | None: ...

    def again_in(self, ino: int) -> float | None: ...

    def copying(self, ino: int) -> bool: ...

    async def open(self, node: Node) -> PartialFile: ...

    async def open_as_is(self, node: Node) -> PartialFile: ...


class FileHandle:
    """One open of one file. Constant: ino; ``keep_cache``, whether what the kernel has of it in its
    page cache may be kept; ``direct``, whether reads are not to go through that at all. Changing:
    where its bytes come from."""

    __slots__ = ("_files", "_nonresident", "_replica", "direct", "ino", "keep_cache")

    def __init__(
        self,
        ino: int,
        files: Files,
        replica: OpenReplica | None,
        nonresident: PartialFile | None,
        keep_cache: bool,
        direct: bool = False,
    ) -> None:
        self.ino = ino
        self.keep_cache = keep_cache
        self.direct = direct
        self._files = files
        self._replica = replica
        self._nonresident = nonresident

    @property
    def local(self) -> bool:
        """Whether its bytes come from a complete replica."""
        return self._replica is not None

    @property
    def replica(self) -> OpenReplica | None:
        """What holds all of its bytes, since it was opened or by now. As long as the handle is not
        released, it may be read until ``Cache.stop_reading`` says no."""
        if self._replica is None and self._nonresident is not None:
            return self._nonresident.replica
        return self._replica

    @property
    def served(self) -> bool:
        """Whether a complete replica of it may be read by others as well."""
        return (replica := self.replica) is not None and not replica.bad

    def known_read(self, offset: int, size: int) -> Data | None:
        """The bytes if they are in this node's memory, else None. Never fewer than asked for,
        but at the file's end."""
        replica = self._replica
        if replica is None:
            return None
        try:
            return replica.read_nowait(offset, size)
        except OSError:
            return None  # ``read`` runs into it again and deals with it

    async def read(self, offset: int, size: int, files: Files) -> Data:
        """The bytes at ``offset``. Raises OSError with the source's errno."""
        if self._replica is None and self._nonresident is None:
            await self._reopen(files)
        replica = self._replica
        if replica is not None:
            try:
                return await files.cache.read(replica, offset, size)
            except OSError as exc:
                await self._leave_replica(replica, exc, files)
        assert self._nonresident is not None
        try:
            return await self._nonresident.read(offset, size)
        except SourceChanged as exc:
            raise OSError(errno.ESTALE, "the file was replaced in the source") from exc

    async def _reopen(self, files: Files) -> None:
        """It was opened by an earlier process, and had no replica when this one began."""
        self._replica = files.resident(self.ino)
        if self._replica is not None:
            return
        nonresident = await files.open_to_copy(self.ino)
        if self._replica is None and self._nonresident is None:
            self._nonresident = nonresident
        else:
            nonresident.release()  # another read of this handle was faster

    async def _leave_replica(self, replica: OpenReplica, exc: OSError, files: Files) -> None:
        """A tier failed under this handle: the source serves it from now on."""
        files.cache.failed_read(replica, exc)
        if self._replica is not replica:
            return  # another read of this handle was faster
        nonresident = await files.open_nonresident(self.ino)
        if self._replica is not replica:
            nonresident.release()
            return
        self._replica, self._nonresident = None, nonresident
        files.cache.release(replica)

    def release(self) -> None:
        if self._replica is not None:
            self._files.cache.release(self._replica)
        if self._nonresident is not None:
            self._nonresident.release()
        self._replica = self._nonresident = None
        self._files.closed(self)


class Files:
    """Opens files of one mount, and has descriptors show what they may when files change.

    Constant: its parts. Changing: how often each inode is open; ``_young``, the inodes that were
    opened in the tick of their last change, with that time (what the kernel has read of them may be
    older than the file, and no version tells); ``_young_ns``, the times of those that were too many
    to remember.
    """

    def __init__(
        self,
        tree: Tree,
        cache: Cache,
        copies: Copies,
        metrics: Metrics,
        kernel: Kernel | None = None,
    ) -> None:
        self.cache = cache
        self.opened_locally: Callable[[int], None] | None = None
        """Told of each open that may be served without reading the source."""
        self.counted: Callable[[Node, bool], None] | None = None
        """Told of each open that is counted here, and whether a complete replica serves it."""
        self.opened_elsewhere: Callable[[], Collection[int]] = tuple
        """Says which inodes are open of which no handle is here."""
        self.opens_are_known = True
        """False where the kernel does not say what it opens."""
        self._tree = tree
        self._copies = copies
        self._metrics = metrics
        self._kernel: Kernel = NoKernel() if kernel is None else kernel
        self._astray = Invalidation(tree, self._kernel)
        self._opens: dict[int, int] = {}
        self._young: OrderedDict[int, int] = OrderedDict()
        self._young_ns: tuple[int, int] | None = None
        tree.on_outdated = self._outdated
        tree.on_appeared = self._kernel.invalidate_entry

    def known_open(self, ino: int) -> FileHandle | None:
        """``open`` where nobody has to be asked: a fresh inode with a complete replica."""
        node = self._tree.known_node(ino)
        replica = None if node is None else self.cache.acquire(node)
        if node is None or replica is None:
            return None
        return self._handle(node, replica, None)

    async def open(self, ino: int, *, again: bool = False) -> FileHandle:
        """Raises OSError with the source's errno; ESTALE for an outdated inode. ``again``: the
        caller was told ESTALE, and the number is what its name was found to stand for since; the
        kernel asks no third time, so what may be outdated by now is opened all the same."""
        try:
            return await self._open(ino)
        except OSError as exc:
            if exc.errno != errno.ESTALE or not again:
                raise
        return await self._open_as_is(ino)

    async def _open(self, ino: int) -> FileHandle:
        node = await self._tree.revalidated(ino)
        if not node.stat.is_regular:
            raise OSError(errno.ENXIO, "not a regular file")
        replica = self.cache.acquire(node)
        if replica is not None:
            return self._handle(node, replica, None)
        return self._handle(node, None, await self.open_to_copy(ino))

    async def _open_as_is(self, ino: int) -> FileHandle:
        """An outdated inode: all of its version where that is local, else what the source has now,
        as a plain file would show it. Others may have pages of the inode, of another time, so these
        reads pass by them."""
        node = self._tree.index.node(ino)
        if node is None:
            raise OSError(errno.ESTALE, "unknown inode")
        replica = self.cache.acquire(node)
        if replica is not None:
            return self._handle(node, replica, None)
        try:
            nonresident = await self._copies.open_as_is(node)
        except SourceChanged as exc:
            self._tree.invalidate_directory(node.parent)
            raise OSError(errno.ESTALE, "its directory was replaced") from exc
        # The kernel has the size of the version that was found by the name.
        await self._kernel.forget_attributes(ino)
        return self._handle(node, None, nonresident, direct=True)

    def reopened(self, ino: int) -> FileHandle:
        """A handle for a file that an earlier process of this mount has opened. What it reads from
        is there at once if that is a replica, else with the first read."""
        node = self._tree.index.node(ino)
        if node is not None and node.outdated:
            # Who found that out may not have come to telling the kernel.
            self._tell_outdated(ino)
        self._opens[ino] = self._opens.get(ino, 0) + 1
        replica = self.resident(ino)
        if replica is None and self._copies.keeps:
            self._copies.opened(ino)
        return FileHandle(ino, self, replica, None, True)

    def take_over(self, since_ns: int, now_ns: int) -> None:
        """Another process served the mount from then until now; of which inodes the kernel has read
        too early is not known."""
        self._young_ns = since_ns - SURELY_SETTLED_NS, now_ns

    def first_read(self, ino: int) -> FileHandle:
        """A handle for a file that is read without having been opened; counts as an open."""
        handle = self.known_open(ino)
        if handle is not None:
            return handle
        replica = self.resident(ino)
        if (node := self._tree.index.node(ino)) is not None:
            self._count(node, replica)
        self._opens[ino] = self._opens.get(ino, 0) + 1
        return FileHandle(ino, self, replica, None, True)

    def resident(self, ino: int) -> OpenReplica | None:
        """Its complete replica, to be released, whoever opened the file before."""
        node = self._tree.index.node(ino)
        return None if node is None else self.cache.acquire(node, accessed=False)

    def size(self, ino: int) -> int:
        """Of the version that ``ino`` stands for; 0 where it is not known."""
        node = self._tree.index.node(ino)
        return 0 if node is None else node.stat.size

    def _handle(
        self,
        node: Node,
        replica: OpenReplica | None,
        nonresident: PartialFile | None,
        *,
        direct: bool = False,
    ) -> FileHandle:
        self._count(node, replica)
        if self.opened_locally is not None and (nonresident is None or nonresident.partial):
            self.opened_locally(node.ino)
        self._opens[node.ino] = self._opens.get(node.ino, 0) + 1
        # The kernel fills up with zeros what a file that is cut short meanwhile does not have, if
        # its attributes come in the same moment (fs/fuse/file.c, fuse_short_read).
        direct = direct or (
            MAPS_DIRECT
            and replica is None
            and self._tree.freshness.may_be_written(node.stat.ctime_ns, time.time_ns())
        )
        return FileHandle(node.ino, self, replica, nonresident, self._keeps_pages(node), direct)

    def opened_by_others(self, node: Node, opens: int) -> None:
        """Others have opened it, to be read from the source, so often."""
        if self.counted is not None:
            self.counted(node, False)
        self._metrics.source_opens += opens
        self._metrics.source_file_bytes += opens * node.stat.size

    def only_remote(self, node: Node) -> bool:
        """Whether all of the node is to be had from the source, and nowhere else; and who reads it
        can tell it from later versions, and keep it in memory. No checkpoint."""
        ctime_ns, now_ns = node.stat.ctime_ns, time.time_ns()
        freshness = self._tree.freshness
        if (
            node.outdated
            or node.ino in self._young
            or self._forgotten(ctime_ns)
            or not freshness.past_racy_window(ctime_ns, min(node.fetched_ns, now_ns))
            or freshness.may_be_written(ctime_ns, now_ns)
            or self._copies.nonresident(node.ino) is not None
        ):
            return False
        return self.cache.claim(node) is None

    def _count(self, node: Node, replica: OpenReplica | None) -> None:
        if self.counted is not None:
            self.counted(node, replica is not None)
        if replica is not None:
            self._metrics.local_opens += 1
            self._metrics.local_file_bytes += node.stat.size
        else:
            self._metrics.source_opens += 1
            self._metrics.source_file_bytes += node.stat.size

    def _keeps_pages(self, node: Node) -> bool:
        """Whether what the kernel has read of this inode before is as good as what it would read
        now. An inode number is one version; but see ``SourceVersion.past_racy_window``."""
        freshness, ctime_ns = self._tree.freshness, node.stat.ctime_ns
        if freshness.past_racy_window(ctime_ns, time.time_ns()):
            return self._young.pop(node.ino, None) is None and not self._forgotten(ctime_ns)
        self._young[node.ino] = ctime_ns
        if len(self._young) > YOUNG_KEPT:
            old_ns = self._young.popitem(last=False)[1]
            first, last = self._young_ns or (old_ns, old_ns)
            self._young_ns = min(first, old_ns), max(last, old_ns)
        return False

    def _forgotten(self, ctime_ns: int) -> bool:
        """Whether it may be among those that were too many to remember."""
        return self._young_ns is not None and self._young_ns[0] <= ctime_ns <= self._young_ns[1]

    def opens_until(self, node: Node) -> int:
        """Until when (time.time_ns) opens of a resident file need not come here, ``open_elsewhere``
        them: 0 where each has to. ``node`` is as the index has it."""
        now_ns = time.time_ns()
        if not node.stat.is_regular or node.ino in self._young:
            return 0
        freshness, ctime_ns = self._tree.freshness, node.stat.ctime_ns
        if not freshness.past_racy_window(ctime_ns, now_ns) or self._forgotten(ctime_ns):
            return 0
        return freshness.opens_until(node, now_ns)

    def open_now(self) -> Collection[int]:
        """The inodes that are open."""
        return {*self._opens, *self.opened_elsewhere()}

    def is_open(self, ino: int) -> bool:
        """As far as that is known: see ``opens_are_known``."""
        return ino in self._opens or self.cache.readers.used(ino)

    def read_ahead(self, ino: int, first: int, last: int) -> None:
        """A file that is not resident was read elsewhere, of its chunks [first, last)."""
        if (nonresident := self._copies.nonresident(ino)) is not None:
            nonresident.on_readahead(first, last)

    def read_elsewhere(self, ino: int) -> bool:
        """Whether others have read it, not being resident, since this was asked the last time."""
        return self.cache.readers.nonresident.used(ino)

    def closed(self, handle: FileHandle) -> None:
        """For handles: one is released."""
        left = self._opens[handle.ino] - 1
        if left:
            self._opens[handle.ino] = left
        else:
            del self._opens[handle.ino]

    async def open_to_copy(self, ino: int) -> PartialFile:
        """``open_nonresident``, and begin to copy it, if this mount does that."""
        keeps = self._copies.keeps
        nonresident = await self.open_nonresident(ino)
        if keeps and not nonresident.arriving:
            nonresident.start_filling()
            self._copies.opened(ino)
        nonresident.allow_direct_reads()
        return nonresident

    async def open_nonresident(self, ino: int) -> PartialFile:
        node = self._tree.index.node(ino)
        if node is None:
            if not self.opens_are_known:
                await self._astray.unknown()
            raise OSError(errno.ESTALE, "unknown inode")
        try:
            return await self._copies.open(node)
        except SourceChanged as exc:
            self.noticed(ino)
            if isinstance(exc, DirectoryChanged):
                # Known by now, so that the kernel's second try, its last, finds the way.
                self._tree.invalidate_directory(node.parent)
                if not self.opens_are_known:
                    self._astray.way(ino)
            raise OSError(errno.ESTALE, "the source has another version") from exc

    def renumber(self, ino: int) -> None:
        """Who opens this file next gets another number, though its version is the same: what the
        kernel knows under this one is not to be opened again. Raises nothing."""
        try:
            self._tree.index.renumber(ino)
        except IndexWriteError as exc:
            log.warning("inode %d keeps its number: %s", ino, exc)

    # -- changes in the source

    def noticed(self, ino: int) -> None:
        """The source was seen to hold another version than ``ino`` stands for, by whoever reads it.
        No checkpoint; raises nothing.

        An open whose version is all local keeps it. What others get from now on is read from the
        source as it is, so what the kernel has read of it before must go.
        """
        self._tree.mark_outdated(ino)
        self._tell_outdated(ino)

    def _outdated(self, ino: int) -> None:
        """The tree found that out."""
        if (nonresident := self._copies.nonresident(ino)) is not None:
            nonresident.outdated()
        self._tell_outdated(ino)

    def _tell_outdated(self, ino: int) -> None:
        """Whoever opens files on his own is not to open this one, and the kernel is to forget what
        it has read of it, unless that is what the version had."""
        self.cache.readers.outdated(ino)
        if not self.opens_are_known:
            self._astray.name(ino)
        self._kernel.invalidate_inode(ino, attributes_only=self.state(ino) == "resident")

    def known_attributes(self, ino: int) -> Entry | None:
        """As the tree's, but of what is outdated."""
        known = self._tree.known_attributes(ino)
        return None if known is not None and known.node.outdated else known

    async def attributes(self, ino: int, *, again: bool = False) -> Entry:
        """What fstat(2) shows. Raises OSError with the source's errno; ESTALE where nobody has
        ``ino`` open and it is outdated: the kernel then looks the name up again (fs/stat.c).
        ``again`` as for ``open``."""
        node = self._tree.index.node(ino)
        try:
            found = await self._tree.attributes(ino)
        except OSError as exc:
            # The directory it was found in is not there any more. The file is.
            if exc.errno != errno.ESTALE or node is None or not self.is_open(ino):
                raise
            found = Entry(node._replace(outdated=True), 0.0, 0.0)
        node = found.node
        if not node.outdated:
            return found
        if self.opens_are_known and not self.is_open(ino):
            if node.stat.is_directory:
                return found
            if again:
                return await self._tree.attributes_of_place(node)
            raise OSError(errno.ESTALE, "the source has another version")
        nonresident = self._copies.nonresident(ino)
        if nonresident is None or self.state(ino) == "resident":
            return Entry(node, 0.0, 0.0)
        try:
            return await self._tree.attributes_of_open(node, nonresident.current)
        except SourceChanged:
            return Entry(node, 0.0, 0.0)

    def state(self, ino: int) -> str:
        """One of resident, partial, copying, remote."""
        record = self.cache.state(ino)
        if record is not None and record.state is ReplicaState.RESIDENT:
            return "resident"
        if self._copies.copying(ino):
            return "copying"
        nonresident = self._copies.nonresident(ino)
        local = record is not None or (nonresident is not None and nonresident.partial)
        return "partial" if local else "remote"

    def tier(self, ino: int) -> str | None:
        """The path of the tier that has a replica, whole or partial."""
        record = self.cache.state(ino)
        if record is None or record.tier not in self.cache.tiers:
            return None
        return self.cache.tiers[record.tier].path
