"""Open files: from a replica where there is one, else from the source while it is copied."""

from __future__ import annotations

import errno
from typing import Protocol

from monarchfs.cache.cache import Cache
from monarchfs.cache.replicas import OpenReplica
from monarchfs.fs.tree import Tree
from monarchfs.metrics import Metrics
from monarchfs.types import Data, Node, ReplicaState, SourceChanged


class Unfinished(Protocol):
    """A file that is not resident (yet)."""

    @property
    def filling(self) -> bool: ...

    @property
    def partial(self) -> bool: ...

    def start_filling(self) -> bool: ...

    async def read(self, offset: int, size: int) -> Data: ...

    def release(self) -> None: ...


class Copies(Protocol):
    """Who copies files; ``monarchfs.prefetch`` does."""

    @property
    def keeps(self) -> bool: ...

    def opened(self, ino: int) -> None: ...

    def unfinished(self, ino: int) -> Unfinished | None: ...

    async def open(self, node: Node) -> Unfinished: ...


class FileHandle:
    """One open of one file. Constant: ino. Changing: where its bytes come from."""

    __slots__ = ("_cache", "_replica", "_unfinished", "ino")

    def __init__(
        self, ino: int, cache: Cache, replica: OpenReplica | None, unfinished: Unfinished | None
    ) -> None:
        self.ino = ino
        self._cache = cache
        self._replica = replica
        self._unfinished = unfinished

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
        replica = self._replica
        if replica is not None:
            try:
                return await self._cache.read(replica, offset, size)
            except OSError as exc:
                await self._leave_replica(replica, exc, files)
        assert self._unfinished is not None
        try:
            return await self._unfinished.read(offset, size)
        except SourceChanged as exc:
            raise OSError(errno.ESTALE, "the file was replaced in the source") from exc

    async def _leave_replica(self, replica: OpenReplica, exc: OSError, files: Files) -> None:
        """A tier failed under this handle: the source serves it from now on."""
        self._cache.failed_read(replica, exc)
        if self._replica is not replica:
            return  # another read of this handle was faster
        unfinished = await files.open_unfinished(self.ino)
        if self._replica is not replica:
            unfinished.release()
            return
        self._replica, self._unfinished = None, unfinished
        self._cache.release(replica)

    def release(self) -> None:
        if self._replica is not None:
            self._cache.release(self._replica)
        if self._unfinished is not None:
            self._unfinished.release()
        self._replica = self._unfinished = None


class Files:
    """Opens files of one mount."""

    def __init__(self, tree: Tree, cache: Cache, copies: Copies, metrics: Metrics) -> None:
        self._tree = tree
        self._cache = cache
        self._copies = copies
        self._metrics = metrics

    def known_open(self, ino: int) -> FileHandle | None:
        """``open`` where nobody has to be asked: a fresh inode with a complete replica."""
        node = self._tree.known_node(ino)
        replica = None if node is None else self._cache.acquire(node)
        if replica is None:
            return None
        self._metrics.local_opens += 1
        self._metrics.local_file_bytes += replica.size
        return FileHandle(ino, self._cache, replica, None)

    async def open(self, ino: int) -> FileHandle:
        """Raises OSError with the source's errno; ESTALE for an outdated inode."""
        node = await self._tree.revalidated(ino)
        assert node.stat is not None
        if not node.stat.is_regular:
            raise OSError(errno.ENXIO, "not a regular file")
        replica = self._cache.acquire(node)
        if replica is not None:
            self._metrics.local_opens += 1
            self._metrics.local_file_bytes += node.stat.size
            return FileHandle(ino, self._cache, replica, None)
        unfinished = await self.open_unfinished(ino)
        self._metrics.source_opens += 1
        self._metrics.source_file_bytes += node.stat.size
        if self._copies.keeps:
            unfinished.start_filling()
            self._copies.opened(ino)
        return FileHandle(ino, self._cache, None, unfinished)

    async def open_unfinished(self, ino: int) -> Unfinished:
        node = self._tree.index.node(ino)
        if node is None:
            raise OSError(errno.ESTALE, "unknown inode")
        try:
            return await self._copies.open(node)
        except SourceChanged as exc:
            self._tree.index.mark_outdated(ino)
            raise OSError(errno.ESTALE, "the source has another version") from exc

    def state(self, ino: int) -> str:
        """One of resident, partial, copying, remote."""
        record = self._cache.state(ino)
        if record is not None and record.state is ReplicaState.RESIDENT:
            return "resident"
        unfinished = self._copies.unfinished(ino)
        if unfinished is not None and unfinished.filling:
            return "copying"
        local = record is not None or (unfinished is not None and unfinished.partial)
        return "partial" if local else "remote"

    def tier(self, ino: int) -> str | None:
        """The path of the tier that has a replica, whole or partial."""
        record = self._cache.state(ino)
        if record is None or record.tier not in self._cache.tiers:
            return None
        return self._cache.tiers[record.tier].path

    def reason(self, ino: int) -> str | None:
        """Why a file is not resident; None where it is."""
        state = self.state(ino)
        if state == "resident":
            return None
        if state == "copying":
            return "it is being copied"
        return self._cache.reasons.get(
            ino, "not opened yet" if self._copies.keeps else "no copying"
        )
