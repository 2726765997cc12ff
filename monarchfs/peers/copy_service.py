"""Copies what peers want of this node: files that it owns, or for whose owner it stands in, and has
not read yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import trio

from monarchfs.metadata.tree import Tree
from monarchfs.peers.catalogue import Catalogue
from monarchfs.peers.messages import WantedReplica
from monarchfs.peers.node_share import NodeShare
from monarchfs.prefetch.copier import Copier
from monarchfs.types import ROOT_INO, IndexWriteError, Lane, MonarchError, Node

ANSWER_SECONDS = 0.5
"""A reader that waits for a file goes to the source a little later: ANSWER_NS in _want.c."""

MOST_SECONDS = 2.0
"""How long others than readers may wait."""

_DIRECTORIES = 4096


class CopyService:
    """Constant: what looks up names, what copies, and what knows which replicas are here or should
    be. Changing: ``_waiting``, what tasks wait for, by inode number; ``_directories``, the numbers
    of the directories used last, by path."""

    def __init__(self, tree: Tree, copier: Copier, catalogue: Catalogue, share: NodeShare) -> None:
        self._tree = tree
        self._copier = copier
        self._catalogue = catalogue
        self._share = share
        self._waiting: dict[int, trio.Event] = {}
        self._directories: OrderedDict[bytes, int] = OrderedDict()

    async def copy_wanted(
        self, wanted: Sequence[WantedReplica], seconds: float | None = None
    ) -> None:
        """Copy what can be copied in ``seconds``; None: readers wait. Raises nothing but Cancelled.

        Does not copy what other nodes are to serve by this node's list. What it copies is read from
        the source (``NodeShare.copies``): if the nodes' lists differ, it might else ask another
        node, which asks this one.
        """
        by_directory: dict[bytes, list[WantedReplica]] = {}
        for one in wanted:
            if self._share.ownership.serves(one.name) and not self._catalogue.row(one.name).segment:
                by_directory.setdefault(one.path.rpartition(b"/")[0], []).append(one)
        names = [one.name for together in by_directory.values() for one in together]
        self._share.begin_copies(names)
        lane = Lane.DEMAND if seconds is None else Lane.BACKGROUND
        try:
            with trio.move_on_after(ANSWER_SECONDS if seconds is None else seconds):
                async with trio.open_nursery() as nursery:
                    for path, together in by_directory.items():
                        nursery.start_soon(self._copy, path, together, lane)
        finally:
            self._share.end_copies(names)

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
            self._copier.hurry(inos)
        else:
            for ino in inos:
                self._copier.jobs.want_opened(ino)
        for ino in inos:
            while self._copier.jobs.pending(ino):
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
            return [await self._tree.names.find(parent, names[0], lane)]
        return await self._tree.names.find_each(parent, names, lane)

    async def directory(self, path: bytes, lane: Lane) -> int | None:
        """The number of the directory at a path. Raises what looking up names raises."""
        if not path:
            return ROOT_INO
        ino = self._directories.get(path)
        place = None if ino is None else self._tree.index.nodes.dirref(ino)
        if place is not None and place.path == path:
            self._directories.move_to_end(path)
            return ino
        above, _, name = path.rpartition(b"/")
        parent = await self.directory(above, lane)
        node = None if parent is None else await self._tree.names.find(parent, name, lane)
        if node is None or not node.stat.is_directory:
            return None
        self._directories[path] = node.ino
        if len(self._directories) > _DIRECTORIES:
            self._directories.popitem(last=False)
        return node.ino
