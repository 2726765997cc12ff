"""Copies what peers want of this node: files that it owns, and has not read yet."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import trio

from monarchfs.peers.errors import PeerError
from monarchfs.types import ROOT_INO, IndexWriteError, MonarchError, Node

MAX_WANTED = 128
ANSWER_SECONDS = 0.5
"""Who wants a file goes to the source a little later: ANSWER_NS in _want.c."""

_ROW = struct.Struct("<16sQH")
_DIRECTORIES = 4096


class WantedReplica(NamedTuple):
    """A file that a peer wants: the name of its replica, its size, its path below the source."""

    name: bytes
    size: int
    path: bytes


def decode(data: bytes) -> list[WantedReplica]:
    """What a request asks for.

    Raises PeerError if it is none.
    """
    wanted: list[WantedReplica] = []
    at = 0
    while at < len(data):
        if len(data) - at < _ROW.size or len(wanted) == MAX_WANTED:
            raise PeerError("a request for files is cut off, or too long")
        name, size, length = _ROW.unpack_from(data, at)
        at += _ROW.size
        path = data[at : at + length]
        if len(path) < length or not _is_path(path):
            raise PeerError("a request for files has a path that is none")
        wanted.append(WantedReplica(name, size, path))
        at += length
    return wanted


def _is_path(path: bytes) -> bool:
    return all(part not in (b"", b".", b"..") for part in path.split(b"/")) and b"\0" not in path


class Copying(Protocol):
    """What is asked of the copier: to copy a file before those that nobody has opened, and whether
    it has still something to do for it."""

    def opened(self, ino: int) -> None: ...

    def pending(self, ino: int) -> bool: ...


class Supply:
    """Constant: who finds a name in a directory, who copies, who knows whether a replica is there.
    Changing: ``_waiting``, by inode number: what is waited for; ``_directories``, the numbers of
    those that were asked for last, by their paths."""

    def __init__(
        self,
        find: Callable[[int, bytes], Awaitable[Node | None]],
        directory_path: Callable[[int], bytes | None],
        copying: Copying,
        has: Callable[[bytes], bool],
    ) -> None:
        """``find`` may ask the source, and raise its OSError; ``directory_path``: where a directory
        lies now."""
        self._find = find
        self._directory_path = directory_path
        self._copying = copying
        self._has = has
        self._waiting: dict[int, trio.Event] = {}
        self._directories: OrderedDict[bytes, int] = OrderedDict()

    async def supply(self, wanted: Sequence[WantedReplica]) -> None:
        """Copy what can be copied in time. Raises nothing but Cancelled."""
        with trio.move_on_after(ANSWER_SECONDS):
            inos = [ino for one in wanted if (ino := await self._begin(one)) is not None]
            for ino in inos:
                while self._copying.pending(ino):
                    await self._waiting.setdefault(ino, trio.Event()).wait()

    def changed(self, inos: Sequence[int]) -> None:
        """Something of their copying has ended: an observer of the copier."""
        if self._waiting:
            for ino in inos:
                if (event := self._waiting.pop(ino, None)) is not None:
                    event.set()

    async def _begin(self, wanted: WantedReplica) -> int | None:
        """Have it copied, if it is the version that is wanted; its number."""
        if self._has(wanted.name):
            return None
        try:
            node = await self._node(wanted.path)
        except (OSError, IndexWriteError, MonarchError):
            return None  # the peer meets the same trouble in the source
        if node is None or node.stat.version.replica_name != wanted.name:
            return None
        self._copying.opened(node.ino)
        return node.ino

    async def _node(self, path: bytes) -> Node | None:
        directory, _, name = path.rpartition(b"/")
        parent = await self._directory(directory)
        return None if parent is None else await self._find(parent, name)

    async def _directory(self, path: bytes) -> int | None:
        if not path:
            return ROOT_INO
        ino = self._directories.get(path)
        if ino is not None and self._directory_path(ino) == path:
            self._directories.move_to_end(path)
            return ino
        above, _, name = path.rpartition(b"/")
        parent = await self._directory(above)
        node = None if parent is None else await self._find(parent, name)
        if node is None or not node.stat.is_directory:
            return None
        self._directories[path] = node.ino
        if len(self._directories) > _DIRECTORIES:
            self._directories.popitem(last=False)
        return node.ino
