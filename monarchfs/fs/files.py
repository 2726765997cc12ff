"""Open files: from a replica where there is one, else from the source while it is copied."""

from __future__ import annotations

import errno
import os
import re
import time
from collections import OrderedDict

from monarchfs.cache.cache import Cache
from monarchfs.cache.replicas import OpenReplica
from monarchfs.fs.invalidation import Invalidation
from monarchfs.fs.residency import Residency
from monarchfs.metadata.cached_listings import Kernel
from monarchfs.metadata.freshness import SURELY_SETTLED_NS, Freshness
from monarchfs.metadata.tree import Entry, Tree
from monarchfs.metrics import Metrics
from monarchfs.prefetch.copier import Copier
from monarchfs.prefetch.fill import Fill
from monarchfs.prefetch.remote import NO_FILE
from monarchfs.prefetch.touch import Touch
from monarchfs.system.listeners import Listeners
from monarchfs.types import Data, DirectoryChanged, Node, SourceChanged

RACY_OPENS_KEPT = 10_000
"""Inodes that are remembered."""


class RacyOpens:
    """Whether the kernel may keep its pages of a file whose timestamps are racy.

    The kernel may have read a file in the tick of its last change. Such pages may be older than the
    file, and no version tells.

    Changing: ``_inodes`` that were opened in the tick of their last change, with its time;
    ``_forgotten``, the first and last of the times of those that were too many to remember."""

    def __init__(self, freshness: Freshness) -> None:
        self._freshness = freshness
        self._inodes: OrderedDict[int, int] = OrderedDict()
        self._forgotten: tuple[int, int] | None = None

    def take_over(self, since_ns: int, now_ns: int) -> None:
        """Another process opened files between these times; which ones is not known."""
        self._forgotten = since_ns - SURELY_SETTLED_NS, now_ns

    def keeps_pages(self, node: Node) -> bool:
        """For an open of ``node``: whether what the kernel has read of it before is what it would
        read now. An inode number is one version; but see ``SourceVersion.past_racy_window``."""
        ino, ctime_ns = node.ino, node.stat.ctime_ns
        if self._freshness.past_racy_window(ctime_ns, time.time_ns()):
            return self._inodes.pop(ino, None) is None and not self._may_be_forgotten(ctime_ns)
        self._inodes[ino] = ctime_ns
        if len(self._inodes) > RACY_OPENS_KEPT:
            old_ns = self._inodes.popitem(last=False)[1]
            first, last = self._forgotten or (old_ns, old_ns)
            self._forgotten = min(first, old_ns), max(last, old_ns)
        return False

    def possible(self, node: Node) -> bool:
        """Whether the file may have been opened in the tick of its last change."""
        return node.ino in self._inodes or self._may_be_forgotten(node.stat.ctime_ns)

    def _may_be_forgotten(self, ctime_ns: int) -> bool:
        return self._forgotten is not None and self._forgotten[0] <= ctime_ns <= self._forgotten[1]

    def opens_until(self, node: Node) -> int:
        """The time (time.time_ns) until which others may open a resident file without asking here;
        0: they may not. ``node`` is as the index has it."""
        now_ns = time.time_ns()
        if not node.stat.is_regular or self.possible(node):
            return 0
        if not self._freshness.past_racy_window(node.stat.ctime_ns, now_ns):
            return 0
        return self._freshness.opens_until(node, now_ns)


MAPS_DIRECT = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 6)
"""Whether files that are opened with direct I/O can be mapped (FUSE_DIRECT_IO_ALLOW_MMAP)."""


class FileHandle:
    """Constant: ``ino``; ``keep_cache``, whether the kernel may keep its pages
    of the file; ``direct``, whether reads bypass the page cache; ``checked``, whether the source
    was asked about it. Changing: where its bytes come from."""

    __slots__ = ("_files", "_nonresident", "_replica", "checked", "direct", "ino", "keep_cache")

    def __init__(
        self,
        ino: int,
        files: Files,
        replica: OpenReplica | None,
        nonresident: Fill | None,
        keep_cache: bool,
        direct: bool = False,
    ) -> None:
        self.ino = ino
        self.keep_cache = keep_cache
        self.direct = direct
        self.checked = False
        self._files = files
        self._replica = replica
        self._nonresident = nonresident

    @property
    def local(self) -> bool:
        """Whether its bytes come from a complete replica."""
        return self._replica is not None

    @property
    def replica(self) -> OpenReplica | None:
        """The replica that has all of its bytes, since the open or by now."""
        if self._replica is None and self._nonresident is not None:
            return self._nonresident.copy.replica
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

    async def read(self, offset: int, size: int) -> Data:
        """The bytes at ``offset``. Raises OSError with the source's errno."""
        if self._replica is None and self._nonresident is None:
            await self._reopen()
        replica = self._replica
        if replica is not None:
            try:
                return await self._files.cache.read(replica, offset, size)
            except OSError as exc:
                await self._leave_replica(replica, exc)
        assert self._nonresident is not None
        try:
            return await self._nonresident.read(offset, size)
        except SourceChanged as exc:
            raise OSError(errno.ESTALE, "the file was replaced in the source") from exc

    async def _reopen(self) -> None:
        """An earlier process opened it, and it had no replica when this one began."""
        self._replica = self._files.resident(self.ino)
        if self._replica is not None:
            return
        nonresident = await self._files.open_to_copy(self.ino)
        if self._replica is None and self._nonresident is None:
            self._nonresident = nonresident
        else:
            nonresident.copy.release()  # another read of this handle was faster

    async def _leave_replica(self, replica: OpenReplica, exc: OSError) -> None:
        """A tier failed under this handle: the source serves it from now on."""
        self._files.cache.failed_read(replica, exc)
        if self._replica is not replica:
            return  # another read of this handle was faster
        nonresident = await self._files.open_nonresident(self.ino)
        if self._replica is not replica:
            nonresident.copy.release()
            return
        self._replica, self._nonresident = None, nonresident
        self._files.cache.release(replica)

    def release(self) -> None:
        if self._replica is not None:
            self._files.cache.release(self._replica)
        if self._nonresident is not None:
            self._nonresident.copy.release()
        self._replica = self._nonresident = None
        self._files.cache.readers.unuse(self.ino)


class Files:
    """Opens the files of one mount. Constant: its parts; ``opens_known``, whether the kernel says
    what it opens."""

    def __init__(
        self,
        tree: Tree,
        cache: Cache,
        copies: Copier,
        metrics: Metrics,
        kernel: Kernel,
        *,
        opens_known: bool = True,
        touch: Touch | None = None,
    ) -> None:
        self.cache = cache
        self.opens_known = opens_known
        self.racy_opens = RacyOpens(tree.freshness)
        self.residency = Residency(cache, copies)
        self.invalidation = Invalidation(
            tree, kernel, cache, copies, self.residency, opens_known=opens_known
        )
        self.size = tree.known.size
        self._tree = tree
        self._index = tree.index
        self._copies = copies
        self._metrics = metrics
        self._kernel = kernel
        self._touch = touch
        self.on_open: Listeners[[Node, bool]] = Listeners()
        """Hear of each open, and whether a complete replica serves it."""
        tree.recorder.on_outdated.add(self.invalidation.outdated)
        tree.recorder.on_appeared.add(kernel.invalidate_entry)
        cache.accounts.on_outdated.add(self.invalidation.noticed)
        cache.accounts.on_corrupt.add(kernel.invalidate_inode)

    def known_open(self, ino: int) -> FileHandle | None:
        """``open`` where nobody has to be asked: a fresh inode with a complete replica."""
        node = self._tree.known.node(ino)
        replica = None if node is None else self.cache.acquire(node)
        if node is None or replica is None:
            return None
        return self._handle(node, replica, None)

    async def open(self, ino: int, *, again: bool = False) -> FileHandle:
        """Raises OSError with the source's errno; ESTALE for an outdated inode. ``again``: the
        kernel got ESTALE, looked the name up again and found this number. It makes no third try,
        so the file is opened even if its version may be outdated by now."""
        try:
            handle = await self._open(ino)
        except OSError as exc:
            if exc.errno != errno.ESTALE or not again:
                raise
            try:
                handle = await self._open_as_is(ino)
            except OSError as found:
                if found.errno not in NO_FILE:
                    raise
                # To a link or a directory only a walk leads, of which this may be the first.
                raise exc from found
        handle.checked = True
        return handle

    async def _open(self, ino: int) -> FileHandle:
        node = await self._tree.attributes.revalidated(ino)
        if not node.stat.is_regular:
            raise OSError(errno.ENXIO, "not a regular file")
        replica, nonresident = self.cache.acquire(node), None
        if replica is None:
            self.cache.accessed(ino)
            nonresident = await self.open_to_copy(ino)
        return self._handle(node, replica, nonresident)

    async def _open_as_is(self, ino: int) -> FileHandle:
        """An outdated inode: all of its version where that is local, else what the source has now,
        as a plain file would show it. The kernel may have pages of another version of the inode, so
        these reads bypass the page cache."""
        node = self._index.nodes.node(ino)
        if node is None:
            raise OSError(errno.ESTALE, "unknown inode")
        replica = self.cache.acquire(node)
        if replica is not None:
            return self._handle(node, replica, None)
        with self._tree.recorder.estale_if_replaced(node.parent):
            nonresident = await self._copies.files.open(node, as_is=True)
        # The kernel has the size of the version that was found by the name.
        await self._kernel.forget_attributes(ino)
        return self._handle(node, None, nonresident, direct=True)

    def reopened(self, ino: int) -> FileHandle:
        """A handle for a file that an earlier process of this mount has opened. What it reads from
        is there at once if that is a replica, else with the first read."""
        node = self._index.nodes.node(ino)
        if node is not None and node.outdated:
            # The process that found this out may have died before it told the kernel.
            self.invalidation.notify(ino)
        handle = self._unopened(ino)
        if not handle.local and self._copies.jobs.keeps:
            self._copies.jobs.want_opened(ino)
        return handle

    def first_read(self, ino: int) -> FileHandle:
        """A handle for a file that is read without having been opened; counts as an open."""
        handle = self.known_open(ino)
        if handle is not None:
            return handle
        handle = self._unopened(ino)
        if (node := self._index.nodes.node(ino)) is not None:
            self._count(node, resident=handle.local)
        return handle

    def _unopened(self, ino: int) -> FileHandle:
        self.cache.readers.use(ino)
        return FileHandle(ino, self, self.resident(ino), None, keep_cache=True)

    def resident(self, ino: int) -> OpenReplica | None:
        """The complete replica of any inode, opened or not; to be released."""
        node = self._index.nodes.node(ino)
        return None if node is None else self.cache.acquire(node, accessed=False)

    def _handle(
        self,
        node: Node,
        replica: OpenReplica | None,
        nonresident: Fill | None,
        *,
        direct: bool = False,
    ) -> FileHandle:
        self._count(node, resident=replica is not None)
        if self._touch is not None and (nonresident is None or nonresident.copy.partial):
            self._touch.note_open(node.ino)
        self.cache.readers.use(node.ino)
        # If the file is truncated and its attributes come in the same moment, the kernel pads what
        # is missing with zeros (fs/fuse/file.c, fuse_short_read).
        direct = direct or (
            MAPS_DIRECT
            and replica is None
            and self._tree.freshness.may_be_written(node.stat.ctime_ns, time.time_ns())
        )
        keep_cache = self.racy_opens.keeps_pages(node)
        return FileHandle(node.ino, self, replica, nonresident, keep_cache, direct)

    def _count(self, node: Node, *, resident: bool) -> None:
        self.on_open(node, resident)
        if resident:
            self._metrics.local_opens += 1
            self._metrics.local_file_bytes += node.stat.size
        else:
            self._metrics.source_opens += 1
            self._metrics.source_file_bytes += node.stat.size

    # -- what the threads of the C part open and read

    def opened_by_threads(self, ino: int) -> None:
        """They opened a resident file. No checkpoint."""
        self.cache.accessed(ino)
        if self._touch is not None:
            self._touch.note_open(ino)

    def opened_elsewhere(self, node: Node, opens: int, from_peer: bool) -> None:
        """They opened a file that is not resident, ``opens`` times, in the source or, without
        asking it, at a peer. No checkpoint."""
        self.cache.accessed(node.ino)
        self.on_open(node, False)
        if from_peer:
            self._metrics.peer_opens += opens
            self._metrics.peer_file_bytes += opens * node.stat.size
        else:
            self._metrics.source_opens += opens
            self._metrics.source_file_bytes += opens * node.stat.size

    def only_remote(self, node: Node) -> bool:
        """Whether they may read the node from the source and keep it in memory: none of it is here,
        and its timestamps tell it from later versions. No checkpoint."""
        ctime_ns, now_ns = node.stat.ctime_ns, time.time_ns()
        freshness = self._tree.freshness
        if (
            node.outdated
            or self.racy_opens.possible(node)
            or not freshness.past_racy_window(ctime_ns, min(node.fetched_ns, now_ns))
            or freshness.may_be_written(ctime_ns, now_ns)
            or self._copies.files.get(node.ino) is not None
        ):
            return False
        # What is being copied as a whole has no replica.
        return self._copies.jobs.copying(node.ino) or self.cache.accounts.claim(node) is None

    def read_ahead(self, ino: int, first: int, last: int) -> None:
        """They read the chunks [first, last) of a file that is not resident."""
        if (nonresident := self._copies.files.get(ino)) is not None:
            nonresident.on_readahead(first, last)

    # -- files that are not resident

    async def open_to_copy(self, ino: int) -> Fill:
        """``open_nonresident``, and begin to copy it, if this mount does that."""
        keeps = self._copies.jobs.keeps
        nonresident = await self.open_nonresident(ino)
        if keeps and not nonresident.arriving:
            nonresident.copy.start_filling()
            self._copies.jobs.want_opened(ino)
        nonresident.copy.allow_direct_reads()
        return nonresident

    async def open_nonresident(self, ino: int) -> Fill:
        """Raises OSError, ESTALE where the source has another version."""
        node = self._index.nodes.node(ino)
        if node is None:
            if not self.opens_known:
                await self.invalidation.forget_all_names()
            raise OSError(errno.ESTALE, "unknown inode")
        try:
            return await self._copies.files.open(node)
        except SourceChanged as exc:
            self.invalidation.noticed(ino)
            if isinstance(exc, DirectoryChanged):
                # At once, so that the kernel's second try, its last, finds the file.
                self._tree.recorder.invalidate_directory(node.parent)
                if not self.opens_known:
                    self.invalidation.forget_path(ino)
            raise OSError(errno.ESTALE, "the source has another version") from exc

    # -- attributes

    def known_attributes(self, ino: int) -> Entry | None:
        """``attributes`` where nobody has to be asked."""
        known = self._tree.known.attributes(ino)
        return None if known is not None and known.node.outdated else known

    async def attributes(self, ino: int, *, again: bool = False) -> Entry:
        """What fstat(2) shows. Raises OSError with the source's errno; ESTALE where nobody has
        ``ino`` open and it is outdated: the kernel then looks the name up again (fs/stat.c).
        ``again`` as for ``open``."""
        node = self._index.nodes.node(ino)
        try:
            found = await self._tree.attributes.get(ino)
        except OSError as exc:
            # The directory it was found in is not there any more. The file is.
            if exc.errno != errno.ESTALE or node is None or not self.cache.readers.used(ino):
                raise
            found = Entry(node._replace(outdated=True), 0.0, 0.0)
        node = found.node
        if not node.outdated:
            return found
        if self.opens_known and not self.cache.readers.used(ino):
            if node.stat.is_directory:
                return found
            if again:
                return await self._tree.attributes.of_successor(node)
            raise OSError(errno.ESTALE, "the source has another version")
        nonresident = self._copies.files.get(ino)
        if nonresident is None or self.residency.state(ino) == "resident":
            return Entry(node, 0.0, 0.0)
        try:
            return await self._tree.attributes.of_open(node, nonresident.current)
        except SourceChanged:
            return Entry(node, 0.0, 0.0)
