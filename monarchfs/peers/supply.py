"""Copies what peers want of this node: files that it owns, or for whose owner it stands in, and has
not read yet."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import trio

from monarchfs.peers.errors import PeerError
from monarchfs.types import ROOT_INO, IndexWriteError, Lane, MonarchError, Node

MAX_WANTED = 128
ANSWER_SECONDS = 0.5
"""A reader that waits for a file goes to the source a little later: ANSWER_NS in _want.c."""

MOST_SECONDS = 2.0
"""How long others than readers may wait."""

_ROW = struct.Struct("<16sQH")
_DIRECTORIES = 4096


class WantedReplica(NamedTuple):
    """A file that a peer wants: the name of its replica, its size, its path below the source."""

    name: bytes
    size: int
    path: bytes


def decode(data: bytes) -> list[WantedReplica]:
    """What a request asks for.

    Raises PeerError if it is malformed.
    """
    wanted: list[WantedReplica] = []
    at = 0
    while at < len(data):
        if len(data) - at < _ROW.size or len(wanted) == MAX_WANTED:
            raise PeerError("a request for files is cut off, or too long")
        name, size, length = _ROW.unpack_from(data, at)
        at += _ROW.size
        path = data[at : at + length]
        if len(path) < length or not is_path(path):
            raise PeerError("a request for files has a path that is none")
        wanted.append(WantedReplica(name, size, path))
        at += length
    return wanted


def encode(wanted: Sequence[WantedReplica]) -> bytes:
    """What ``decode`` reads."""
    return b"".join([_ROW.pack(name, size, len(path)) + path for name, size, path in wanted])


def is_path(path: bytes) -> bool:
    """Whether ``path`` is a path below the source."""
    return all(part not in (b"", b".", b"..") for part in path.split(b"/")) and b"\0" not in path


class NameLookup(Protocol):
    """Looks up names in the mount, and if needed in the source."""

    async def find(self, parent: int, name: bytes, lane: Lane) -> Node | None: ...

    async def find_each(
        self, parent: int, names: list[bytes], lane: Lane
    ) -> Sequence[Node | None]: ...


class Copying(Protocol):
    """The part of the copier that is used here: to queue a file, and to ask whether there is still
    something to do for it."""

    def opened(self, ino: int) -> None: ...

    def pending(self, ino: int) -> bool: ...


class Supply:
    """Constant: what looks up names, what copies, and what knows which replicas are here or should
    be. Changing: ``_waiting``, what tasks wait for, by inode number; ``_directories``, the numbers
    of the directories used last, by path; ``_under_way``, the replicas that peers wait for."""

    def __init__(
        self,
        names: NameLookup,
        directory_path: Callable[[int], bytes | None],
        copying: Copying,
        hurry: Callable[[Sequence[int]], None],
        has: Callable[[bytes], bool],
        serves: Callable[[bytes], bool],
    ) -> None:
        """``directory_path``: where a directory lies now. ``hurry``: have files copied at once.
        ``serves``: whether this node owns a replica, or stands in for the owner."""
        self._names = names
        self._directory_path = directory_path
        self._copying = copying
        self._hurry = hurry
        self._has = has
        self._serves = serves
        self._waiting: dict[int, trio.Event] = {}
        self._directories: OrderedDict[bytes, int] = OrderedDict()
        self._under_way: Counter[bytes] = Counter()

    async def supply(self, wanted: Sequence[WantedReplica], seconds: float | None = None) -> None:
        """Copy what can be copied in ``seconds``; None: readers wait. Raises nothing but Cancelled.

        Does not copy what other nodes are to serve by this node's list. What it copies is read from
        the source (``copies``): if the nodes' lists differ, it might else ask another node, which
        asks this one.
        """
        by_directory: dict[bytes, list[WantedReplica]] = {}
        for one in wanted:
            if self._serves(one.name) and not self._has(one.name):
                by_directory.setdefault(one.path.rpartition(b"/")[0], []).append(one)
        names = [one.name for together in by_directory.values() for one in together]
        self._under_way.update(names)
        lane = Lane.DEMAND if seconds is None else Lane.BACKGROUND
        try:
            with trio.move_on_after(ANSWER_SECONDS if seconds is None else seconds):
                async with trio.open_nursery() as nursery:
                    for path, together in by_directory.items():
                        nursery.start_soon(self._copy, path, together, lane)
        finally:
            self._under_way -= Counter(names)

    def copies(self, name: bytes) -> bool:
        """Whether peers wait for this replica now: this node reads and keeps it as its own."""
        return name in self._under_way

    def changed(self, inos: Sequence[int]) -> None:
        """The copier calls this when some step of copying these has ended."""
        if self._waiting:
            for ino in inos:
                if (event := self._waiting.pop(ino, None)) is not None:
                    event.set()

    async def node_of(self, path: bytes, name: bytes) -> Node | None:
        """The file at a path, if it has the version whose replica has this name. Raises nothing but
        Cancelled."""
        directory = path.rpartition(b"/")[0]
        found = await self._versions(directory, [WantedReplica(name, 0, path)], Lane.DEMAND)
        return found[0] if found else None

    async def _copy(self, path: bytes, wanted: Sequence[WantedReplica], lane: Lane) -> None:
        """Copy the files of one directory that have the version that is wanted."""
        inos = [node.ino for node in await self._versions(path, wanted, lane)]
        if lane is Lane.DEMAND:
            self._hurry(inos)
        else:
            for ino in inos:
                self._copying.opened(ino)
        for ino in inos:
            while self._copying.pending(ino):
                await self.change(ino)

    async def change(self, ino: int) -> None:
        """Wait for the next ``changed``."""
        await self._waiting.setdefault(ino, trio.Event()).wait()

    async def _versions(
        self, path: bytes, wanted: Sequence[WantedReplica], lane: Lane
    ) -> list[Node]:
        names = [one.path[len(path) :].lstrip(b"/") for one in wanted]
        try:
            nodes = await self._find(path, names, lane)
        except (OSError, IndexWriteError, MonarchError):
            return []  # the peer will meet the same error in the source
        return [
            node
            for node, one in zip(nodes, wanted, strict=True)
            if node is not None and node.stat.version.replica_name == one.name
        ]

    async def _find(self, path: bytes, names: list[bytes], lane: Lane) -> Sequence[Node | None]:
        parent = await self.directory(path, lane)
        if parent is None:
            return [None] * len(names)
        if len(names) == 1:  # this also looks up others in the directory
            return [await self._names.find(parent, names[0], lane)]
        return await self._names.find_each(parent, names, lane)

    async def directory(self, path: bytes, lane: Lane) -> int | None:
        """The number of the directory at a path. Raises what looking up names raises."""
        if not path:
            return ROOT_INO
        ino = self._directories.get(path)
        if ino is not None and self._directory_path(ino) == path:
            self._directories.move_to_end(path)
            return ino
        above, _, name = path.rpartition(b"/")
        parent = await self.directory(above, lane)
        node = None if parent is None else await self._names.find(parent, name, lane)
        if node is None or not node.stat.is_directory:
            return None
        self._directories[path] = node.ino
        if len(self._directories) > _DIRECTORIES:
            self._directories.popitem(last=False)
        return node.ino
