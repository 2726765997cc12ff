"""The files that are read from the source or copied, by inode number."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable

import trio

from monarchfs.cache.cache import Cache
from monarchfs.metrics import Metrics
from monarchfs.prefetch.arrivals import Arrivals
from monarchfs.prefetch.copy import Copy
from monarchfs.prefetch.fetch import WHOLE_BYTES
from monarchfs.prefetch.fill import Fill
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.remote import RemoteFile
from monarchfs.prefetch.spans import FileSpans, Nodes
from monarchfs.source.source import Source
from monarchfs.types import DirRef, Lane, Node

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 30.0
CHECKPOINT_MIN_BYTES = 64 << 20
"""A crash costs a smaller file's copy all it had; of a larger one, what the last half minute
brought."""


class Fills:
    """Constant: its parts; ``small``, who reads small files as a whole (None: they are read as all
    others); ``nodes``, who share large ones (None: nobody). Changing: ``files`` of the jobs."""

    def __init__(
        self,
        jobs: CopyJobs,
        source: Source,
        cache: Cache,
        metrics: Metrics,
        nursery: trio.Nursery,
        *,
        trusts_times: bool,
    ) -> None:
        """``trusts_times``: the source does not change while it is mounted."""
        self.small: Arrivals | None = None
        self.nodes: Nodes | None = None
        self._jobs = jobs
        self._files = jobs.files
        self._source = source
        self._cache = cache
        self._metrics = metrics
        self._nursery = nursery
        self._trusts_times = trusts_times

    def bind(self, small: Arrivals) -> None:
        """``small`` reads small files from now on; it needs this object to be made."""
        self.small = small

    def get(self, ino: int) -> Fill | None:
        return self._files.get(ino)

    async def open(self, node: Node) -> Fill:
        """The file behind a node that is not resident; its ``handles`` go up by one.

        Asks the source for a descriptor, and so for permission, unless that was done already.
        Raises the source's OSError, or SourceChanged where it holds another version now.
        """
        return await self._opened(node, lambda fill: fill.copy.remote.open(Lane.DEMAND))

    async def open_as_is(self, node: Node) -> Fill:
        """The same for an outdated node: what is read is what the source has now at its place, or
        what those read who have it open already; nothing of it is kept. Raises as ``open``,
        SourceChanged where the directory lies elsewhere."""
        fill = await self._opened(node, Fill.open_as_is)
        fill.copy.outdated()
        return fill

    async def _opened(self, node: Node, opening: Callable[[Fill], Awaitable[object]]) -> Fill:
        fill = self._files.get(node.ino)
        if fill is None:
            fill = self._make(node)
            held_elsewhere = self._cache.readers.exclude(node.ino, excluded=True)
            if not held_elsewhere and self.small is not None:
                self.small.leave(node.ino)
        fill.copy.handles += 1
        try:
            await opening(fill)
        except BaseException:
            fill.copy.release()
            raise
        return fill

    def to_copy(self, node: Node) -> Fill | None:
        """The file; None where somebody else has begun to read all of it for a reader."""
        fill = self._files.get(node.ino)
        if fill is None:
            fill = self._make(node)
            if self._cache.readers.exclude(node.ino, excluded=True):
                fill.copy.settle()
                return None
        return fill

    def _make(self, node: Node) -> Fill:
        copy = Copy(
            node,
            RemoteFile(
                node.stat.version,
                lambda: self._where(node),
                self._source,
                self._spans(node),
                trusts_times=self._trusts_times,
            ),
            self._cache,
            self._metrics,
            self._nursery,
            self._forget,
            self._jobs.stepped,
            trusts_times=self._trusts_times,
        )
        fill = self._files[node.ino] = Fill(copy, self._cache, self._metrics, self._nursery)
        return fill

    def _where(self, node: Node) -> tuple[DirRef, bytes]:
        current = self._cache.index.nodes.node(node.ino) or node
        directory = self._cache.index.nodes.dirref(current.parent)
        if directory is None:
            raise OSError(errno.ESTALE, "its directory is not known any more")
        return directory, current.name

    def _spans(self, node: Node) -> FileSpans | None:
        if self.nodes is None or node.stat.size <= WHOLE_BYTES:
            return None
        try:
            directory, name = self._where(node)
        except OSError:  # who reads it will see
            return None
        path = directory.path + b"/" + name if directory.path else name
        return FileSpans(node.stat.version.replica_name, path, node.stat.size, self.nodes)

    def _forget(self, copy: Copy) -> None:
        ino = copy.node.ino
        fill = self._files.get(ino)
        if fill is not None and fill.copy is copy:
            del self._files[ino]
            self._cache.readers.exclude(ino, excluded=False)
            self._jobs.notify([ino])

    async def checkpoints(self) -> None:
        """Record how far large copies have come, for ever."""
        while True:
            await trio.sleep(CHECKPOINT_SECONDS)
            for ino, fill in list(self._files.items()):
                if fill.copy.size >= CHECKPOINT_MIN_BYTES:
                    try:
                        fill.copy.checkpoint()
                    except OSError as exc:
                        log.warning("inode %d: its progress is not recorded: %s", ino, exc)

    async def suspend(self) -> None:
        """Record what is partly copied, before the end. Nothing may be reading any more."""
        if self.small is not None:
            self.small.suspend()
        for fill in list(self._files.values()):
            await fill.copy.suspend()
