"""The asynchronous facade: each blocking function of the source, in a thread of its lane."""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio

from monarchfs.core.units import Unit
from monarchfs.source.calls import SourceCalls
from monarchfs.source.direct import DirectDescriptor
from monarchfs.source.layout import Layout
from monarchfs.source.posix import (
    AttributeNames,
    AttributeNamesEach,
    Batch,
    Batches,
    Found,
    FoundEach,
)
from monarchfs.source.releases import Release
from monarchfs.types import DirRef, Lane, SourceStat, SourceVersion

ReadResult = tuple[bytes, SourceVersion]


class Source(SourceCalls):
    """The source, for one trio run. It has a method for each function of PosixSource, hence more
    than twenty; their contracts are described there."""

    async def stat(self, directory: DirRef, name: bytes, lane: Lane) -> SourceStat:
        return await self._call(lane, self._posix.stat, (directory, name))

    async def readlink(self, directory: DirRef, name: bytes, lane: Lane) -> bytes:
        return await self._call(lane, self._posix.readlink, (directory, name))

    async def found(self, directory: DirRef, name: bytes, lane: Lane) -> Found:
        return await self._call(lane, self._posix.found, (directory, name))

    async def found_each(
        self,
        directory: DirRef,
        names: Sequence[bytes],
        lane: Lane,
        seconds: float = math.inf,
    ) -> FoundEach:
        """Counts as one operation per name. Some dozens of names at a time: it holds one slot."""
        found = await self._call(lane, self._posix.found_each, (directory, names, seconds))
        self.count_others(lane, "found_each", len(found))
        return found

    async def open_directory(self, directory: DirRef, lane: Lane) -> None:
        await self._call(lane, self._posix.open_directory, (directory,))

    async def open(self, directory: DirRef, name: bytes, lane: Lane) -> tuple[int, SourceStat]:
        return await self._call(lane, self._posix.open, (directory, name), _close_opened)

    async def fstat(self, fd: int, lane: Lane) -> SourceStat:
        return await self._call(lane, self._posix.fstat, (fd,))

    async def close(self, fd: int, lane: Lane) -> None:
        """Close ``fd``; if cancelled, it is closed all the same."""
        await self._call(lane, self._posix.close, (fd,), None, partial(self._posix.close, fd))

    def close_soon(self, fd: int) -> None:
        """Close ``fd`` without waiting, for clean-up: no slot. Does not block; raises nothing."""
        self.releases.soon(partial(self._posix.close, fd))

    def list(self, directory: DirRef, lane: Lane, batch: int = 1000) -> SourceListing:
        """``async with source.list(...) as batches: async for entries in batches: ...``"""
        batches = self._posix.list(directory, batch)
        return SourceListing(partial(self._next_batch, lane), batches, batch, self.releases.soon)

    async def lists_all(self, directory: DirRef, name: bytes, lane: Lane) -> bool:
        if (known := self._posix.known_to_list_all(directory)) is not None:
            return known
        return await self._call(lane, self._posix.lists_all, (directory, name))

    async def read(self, fd: int, offset: int, size: int, lane: Lane) -> ReadResult:
        """As PosixSource.read_for_reader. After a cancelled read ``fd`` may be closed at once: the
        thread may then read something else under that number, but nobody sees it.
        """
        return await self._counted_read(lane, self._posix.read_for_reader, (fd, offset, size))

    async def read_once(self, fd: int, offset: int, size: int, lane: Lane) -> ReadResult:
        """As PosixSource.read_once, and as ``read`` when it is cancelled."""
        return await self._counted_read(lane, self._posix.read_once, (fd, offset, size))

    async def read_unit(self, fd: int, direct: DirectDescriptor, unit: Unit, lane: Lane) -> None:
        """As PosixSource.read_unit. Both descriptors may be closed after a cancelled one, too, if
        the unit was stopped."""
        dispose = partial(self.count_late_bytes, lane)
        try:
            await self._call(lane, self._posix.read_unit, (fd, direct, unit), dispose)
        except trio.Cancelled:
            raise
        except BaseException:
            self.count_bytes(lane, unit.read_bytes)
            raise
        finally:
            opens = direct.take_opens()
            self.counters.operations += opens
            self.counters.of(lane, "open").operations += opens
        self.count_bytes(lane, unit.read_bytes)

    async def touch(self, directory: DirRef, name: bytes, lane: Lane) -> None:
        await self._call(lane, self._posix.touch, (directory, name))

    async def getxattr(self, directory: DirRef, name: bytes, attribute: bytes, lane: Lane) -> bytes:
        return await self._call(lane, self._posix.getxattr, (directory, name, attribute))

    async def listxattr(self, directory: DirRef, name: bytes, lane: Lane) -> AttributeNames:
        self.count_others(lane, "listxattr", 2)
        return await self._call(lane, self._posix.listxattr, (directory, name))

    async def listxattr_each(
        self,
        directory: DirRef,
        names: Sequence[bytes],
        lane: Lane,
        seconds: float = math.inf,
    ) -> AttributeNamesEach:
        """As ``found_each``, but two operations a name: the list, and whether there is an ACL."""
        found = await self._call(lane, self._posix.listxattr_each, (directory, names, seconds))
        self.count_others(lane, "listxattr_each", 2 * len(found))
        return found

    async def access(self, directory: DirRef, name: bytes, mask: int, lane: Lane) -> bool:
        return await self._call(lane, self._posix.access, (directory, name, mask))

    @property
    def on_local_disk(self) -> bool:
        """Whether it lies on a block device of this node. Network file systems have none."""
        return os.major(self._posix.device) != 0

    @property
    def has_layouts(self) -> bool:
        """Whether it is worth to ask for the ``layout`` of a file."""
        return self._posix.has_layouts

    async def layout(self, fd: int, lane: Lane) -> Layout | None:
        return await self._call(lane, self._posix.layout, (fd,))

    async def statvfs(self, lane: Lane) -> os.statvfs_result:
        return await self._call(lane, self._posix.statvfs, ())

    async def _next_batch(self, lane: Lane, batches: Batches) -> Batch:
        """The next batch, empty at the end; closes ``batches`` if cancelled."""

        def close(_: object = None) -> None:
            batches.close()

        return await self._call(lane, next, (batches, []), close, close)

    async def _counted_read(
        self, lane: Lane, fn: Callable[..., ReadResult], args: tuple[Any, ...]
    ) -> ReadResult:
        def count_late(result: ReadResult) -> None:
            self.count_late_bytes(lane, len(result[0]))

        result = await self._call(lane, fn, args, count_late)
        self.count_bytes(lane, len(result[0]))
        return result


class SourceListing:
    """A directory being listed: ``async with`` closes it, ``async for`` gives its batches.

    ``_batches`` is the iterator while this object has to close it; None once it is exhausted or a
    thread that may still be using it will.
    """

    def __init__(
        self,
        fetch: Callable[[Batches], Awaitable[Batch]],
        batches: Batches,
        size: int,
        release: Callable[[Release], None],
    ) -> None:
        self._fetch = fetch
        self._size = size
        self._release = release
        self._batches: Batches | None = batches

    async def __aenter__(self) -> SourceListing:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Closing a directory may tell a server, and there may be no time to wait for that.
        if self._batches is not None:
            self._release(self._batches.close)
            self._batches = None

    def __aiter__(self) -> SourceListing:
        return self

    async def __anext__(self) -> Batch:
        batches = self._batches
        if batches is None:
            raise StopAsyncIteration
        # Until the batch is here, the iterator is the thread's.
        self._batches = None
        batch = await self._fetch(batches)
        if not batch:
            raise StopAsyncIteration
        if len(batch) == self._size:
            self._batches = batches
        return batch


def _close_opened(opened: tuple[int, SourceStat]) -> None:
    os.close(opened[0])
