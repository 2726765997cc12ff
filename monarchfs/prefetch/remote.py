"""A file of the source, opened when that is first needed."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from monarchfs.cache.cache import Cache
from monarchfs.core.units import Unit
from monarchfs.prefetch.fetch import WHOLE_BYTES
from monarchfs.prefetch.spans import FileSpans, Nodes
from monarchfs.source.direct import DirectDescriptor
from monarchfs.source.layout import Layout
from monarchfs.source.source import Source
from monarchfs.types import DirRef, Lane, Node, SourceChanged, SourceStat, SourceVersion

NO_FILE = {errno.EISDIR, errno.ELOOP, errno.ENXIO}
"""What PosixSource answers where something else than a regular file lies."""

_NOT_THERE = {errno.ENOENT, *NO_FILE}


@contextmanager
def _what_lies_there() -> Iterator[None]:
    """Of a file that is known: it may lie elsewhere by now, and another one where it is asked for.
    Whoever looks the name up again will see."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _NOT_THERE:
            raise SourceChanged("it is not there any more") from exc
        raise


class RemoteFile:
    """One version of a file, by the place where it was found.

    Constant: ``version``; ``spans``, what other nodes have of it, if they share it. Changing:
    ``fd``, the descriptor (-1 before ``open``); ``_direct``, a second one; ``layout``, where its
    bytes are, as soon as that is known; ``_as_is``, whether the descriptor was of another version
    when opened.
    """

    def __init__(
        self,
        node: Node,
        source: Source,
        cache: Cache,
        nodes: Nodes | None,
        *,
        trusts_times: bool,
    ) -> None:
        """``nodes`` share it if it is large. ``trusts_times``: the source does not change. It need
        not be asked for the version of what another node has, and a file that has just been written
        may be copied."""
        self.version = node.stat.version
        self.layout: Layout | None = None
        self.fd = -1
        self._node = node
        self._source = source
        self._cache = cache
        self.trusts_times = trusts_times
        self._direct = DirectDescriptor()
        self._as_is = False
        self._lock: trio.Lock | None = None
        is_large = node.stat.size > WHOLE_BYTES
        self.spans = self._spans(nodes) if nodes is not None and is_large else None

    def _place(self) -> tuple[DirRef, bytes]:
        """Its directory, and its name there. Raises OSError where that is not known any more."""
        current = self._cache.index.nodes.node(self._node.ino) or self._node
        directory = self._cache.index.nodes.dirref(current.parent)
        if directory is None:
            raise OSError(errno.ESTALE, "its directory is not known any more")
        return directory, current.name

    def _spans(self, nodes: Nodes) -> FileSpans | None:
        try:
            directory, name = self._place()
        except OSError:  # who reads it will see
            return None
        path = directory.path + b"/" + name if directory.path else name
        return FileSpans(self.version.replica_name, path, self.version.size, nodes)

    @property
    def _opening(self) -> trio.Lock:
        """Held by who opens it."""
        if self._lock is None:
            self._lock = trio.Lock()
        return self._lock

    async def open(self, lane: Lane) -> int:
        """The descriptor. Raises the source's OSError, or SourceChanged for another version."""
        if self.fd < 0:
            async with self._opening:
                if self.fd < 0:
                    with _what_lies_there():
                        fd, stat = await self._source.open(*self._place(), lane)
                    if stat.version != self.version:
                        self._source.close_soon(fd)
                        raise SourceChanged("another version is at its place")
                    self.fd = fd
        if self._as_is:
            raise SourceChanged("another version is read")
        return self.fd

    async def open_as_is(self, lane: Lane) -> SourceVersion:
        """Open what the source has now at this place, whatever version that is, unless a descriptor
        is there already; the version that is read. Raises the source's OSError, SourceChanged where
        the directory lies elsewhere."""
        async with self._opening:
            if self.fd < 0:
                fd, stat = await self._source.open(*self._place(), lane)
                self.fd, self._as_is = fd, stat.version != self.version
                return stat.version
        return (await self.current(lane)).version

    async def _descriptor(self, lane: Lane) -> int:
        return self.fd if self.fd >= 0 else await self.open(lane)

    async def read(self, start: int, end: int, lane: Lane) -> tuple[bytes, SourceVersion]:
        """The bytes [start, end), fewer at the end of the file, and the version that was read,
        unless another was there before. Raises as ``open``."""
        fd = await self._descriptor(lane)
        return await self._source.read(fd, start, end - start, lane)

    async def current(self, lane: Lane) -> SourceStat:
        """What the file behind the descriptor is now. Raises as ``open``."""
        fd = await self._descriptor(lane)
        return await self._source.call(lane, self._source.posix.fstat, fd)

    async def fetch_whole(self, lane: Lane) -> bytes:
        """All bytes of this version. Raises the source's OSError, SourceChanged, and, where nobody
        waits for it, Archived."""
        size = self.version.size
        fd = await self._to_fetch(lane)
        data, version = await self._source.read(fd, 0, size, lane, once=True)
        if version != self.version or len(data) != size:
            raise SourceChanged("it changed while it was read")
        return data

    async def _to_fetch(self, lane: Lane) -> int:
        """The descriptor. Raises as ``open``, and Archived."""
        # What is mounted below the source may be a Lustre where the source is none.
        may_have = self._source.has_layouts or self.version.device
        if lane is Lane.BACKGROUND and self.layout is None and may_have:
            fd = await self.open(lane)
            self.layout = await self._source.call(lane, self._source.posix.layout, fd)
        return await self.open(lane)

    async def read_unit(
        self, unit: Unit, lane: Lane, *, ahead: bool = False, waited: bool = True
    ) -> bool:
        """Have a unit read its bytes; whether the source gave all of them, and none lie in a hole.
        ``ahead``: it may wait a little for another node; ``waited``: a reader may wait for it.
        Raises as ``fetch_whole``."""
        if self.spans is not None:
            if not self.trusts_times:
                await self.open(lane)
            await self.spans.read(unit, ahead=ahead, waited=waited)
            if unit.elsewhere_bytes == unit.end - unit.start:
                return False
        fd = await self._to_fetch(lane)
        began = trio.current_time()
        await self._source.read_unit(fd, self._direct, unit, lane)
        if self.spans is not None and unit.read_bytes:
            self.spans.source_took(trio.current_time() - began, unit.read_bytes)
        return not (unit.elsewhere_bytes or unit.hole_bytes)

    @property
    def device(self) -> int:
        """Of the source's root."""
        return self._source.device

    def close_soon(self) -> None:
        """Close the descriptor, if there is one; nobody may be reading."""
        fd, self.fd, self._as_is, self.layout = self.fd, -1, False, None
        direct, self._direct = self._direct.close(), DirectDescriptor()
        for descriptor in (direct, fd):
            if descriptor >= 0:
                self._source.close_soon(descriptor)
