"""Attributes of inodes, targets of links, statfs: answered from what is known, else the source."""

from __future__ import annotations

import errno
import os
import stat as stat_module
import time
from collections.abc import Awaitable, Callable

import trio

from monarchfs.metadata.known import Entry, KnownMetadata, Missing, stale_entry
from monarchfs.metadata.names import Names
from monarchfs.metadata.recorder import Recorder
from monarchfs.metadata.stale_on_timeout import StaleOnTimeout
from monarchfs.source.source import Source
from monarchfs.types import ROOT_INO, Lane, Node, SourceChanged, SourceStat

STATFS_SECONDS = 30.0
"""An answer of statfs(2) is good for this time."""


class Attributes:
    """Constant: its parts. Changing: ``_statfs``, the last answer, and when it came (trio's clock).
    Methods wait, and raise OSError with the errno for the system call."""

    def __init__(
        self,
        source: Source,
        known: KnownMetadata,
        recorder: Recorder,
        asking: StaleOnTimeout,
        names: Names,
    ) -> None:
        self._source = source
        self._known = known
        self._index = known.index
        self._recorder = recorder
        self._asking = asking
        self._names = names
        self._statfs: tuple[float, os.statvfs_result] | None = None

    async def load_root(self) -> None:
        """Know the root before the kernel asks. Raises OSError where the source does not say."""
        if self._index.nodes.node(ROOT_INO) is None:
            await self.refresh_root()
        else:
            await self.get(ROOT_INO)

    async def refresh_root(self) -> Entry:
        """Ask for the root's attributes, whatever is known."""
        asked_ns = time.time_ns()
        source = self._source
        stat = await source.call(Lane.DEMAND, source.posix.stat, source.root, b"")
        return self._known.fresh_entry(self._index.nodes.record_root(stat, asked_ns), asked_ns)

    async def get(self, ino: int) -> Entry:
        if (known := self._known.attributes(ino)) is not None:
            if known.node.outdated and known.node.stat.is_directory:
                return await self._of_open_directory(known)
            return known
        node = self._index.nodes.node(ino)
        if node is None:
            raise OSError(errno.ESTALE, "unknown inode")
        return await self._ask(node)

    async def of_open(self, node: Node, current: Callable[[], Awaitable[SourceStat]]) -> Entry:
        """Of an open file whose place in the source is not known, or whose bytes are read from the
        source as it is: what ``current`` returns. The kernel does not keep it."""

        async def ask() -> Entry:
            return Entry(node._replace(stat=await current()), 0.0, 0.0)

        return await self._asking.ask(("open", node.ino), ask, Entry(node, 0.0, 0.0))

    async def _of_open_directory(self, known: Entry) -> Entry:
        """Of one whose way is asked for again by names, which who is in it does not use."""
        if (directory := self._index.nodes.dirref(known.node.ino)) is None:
            return known

        async def current() -> SourceStat:
            source = self._source
            return await source.call(Lane.DEMAND, source.posix.stat, directory, b"")

        try:
            return await self.of_open(known.node, current)
        except SourceChanged:
            return known

    async def of_successor(self, node: Node) -> Entry:
        """Under the number of an outdated file, the attributes of the file that has its name now.
        The kernel does not keep them. Raises OSError ENOENT where there is none, ESTALE where it
        is of another type."""
        found = await self._names.lookup(node.parent, node.name)
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
        node = self._index.nodes.node(ino)
        if node is not None and not node.outdated:
            if self._known.freshness.fresh_node(node, time.time_ns()):
                return node
            await self._ask(node)
            node = self._index.nodes.node(ino)
        if node is None or node.outdated:
            raise OSError(errno.ESTALE, "the source has another version")
        return node

    async def target(self, ino: int) -> bytes:
        """Of a symbolic link."""
        if (known := self._known.target(ino)) is not None:
            return known
        source, (directory, name) = self._source, self._known.place(ino)
        node = self._index.nodes.node(ino)
        with self._recorder.estale_if_replaced(ino if node is None else node.parent):
            return await source.call(Lane.DEMAND, source.posix.readlink, directory, name)

    async def statfs(self) -> os.statvfs_result:
        if self._statfs is not None and trio.current_time() - self._statfs[0] < STATFS_SECONDS:
            return self._statfs[1]
        fallback = self._statfs[1] if self._statfs is not None else None
        return await self._asking.ask(("statfs",), self._fetch_statfs, fallback, even_open=True)

    async def _fetch_statfs(self) -> os.statvfs_result:
        result = await self._source.call(Lane.DEMAND, self._source.posix.statvfs)
        self._statfs = (trio.current_time(), result)
        return result

    async def _ask(self, node: Node) -> Entry:
        return await self._asking.ask(
            ("node", node.ino), lambda: self._fetch(node.ino), stale_entry(node)
        )

    async def _fetch(self, ino: int) -> Entry:
        """Ask about an inode by the place where it was found last."""
        if ino == ROOT_INO:
            return await self.refresh_root()
        node = self._index.nodes.node(ino)
        if node is None:
            raise OSError(errno.ESTALE, "unknown inode")
        # Through the name, so that a file that was replaced is found out.
        found = await self._names.ask(node.parent, node.name)
        if isinstance(found, Missing) or found.node.ino != ino:
            self._recorder.outdate(ino)
            return Entry(node._replace(outdated=True), 0.0, 0.0)
        return found
