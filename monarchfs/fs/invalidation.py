"""Names that the kernel believes although they lead to what is not there any more, on a mount where
it opens files without asking: no open can answer that the name has to be looked up again.

So it is told to forget them, when a read has found that out. (That read fails, as the file that was
opened is not there; the next open has the new one.)
"""

from __future__ import annotations

import logging

import trio

from monarchfs.fs.kernel import Kernel
from monarchfs.fs.tree import Tree
from monarchfs.types import ROOT_INO, MonarchError, Node

log = logging.getLogger(__name__)

NAMES_BATCH = 256


class Invalidation:
    """Constant: its parts. Changing: ``_lost``, whether all names were forgotten already."""

    def __init__(self, tree: Tree, kernel: Kernel) -> None:
        self._tree = tree
        self._kernel = kernel
        self._lost = False

    def name(self, ino: int) -> None:
        """The name of ``ino`` stands for something else. No checkpoint."""
        node = self._tree.index.node(ino)
        if node is not None and ino != ROOT_INO:
            self._kernel.invalidate_entry(node.parent, node.name)

    def way(self, ino: int) -> None:
        """A directory above ``ino`` lies elsewhere. A name that is forgotten takes all below it
        along (fs/dcache.c, d_invalidate), so the first of the way is enough. No checkpoint."""
        node: Node | None = self._tree.index.node(ino)
        while node is not None and node.parent != ROOT_INO:
            node = self._tree.index.node(node.parent)
        if node is not None:
            self.name(node.ino)

    async def unknown(self) -> None:
        """The kernel knows an inode number that the index does not: that is another one than it
        was then. All names have to be looked up again, once. Raises nothing."""
        if self._lost:
            return
        self._lost = True
        log.warning("the index is not the one that the kernel's names are from: they are forgotten")
        try:
            await self._tree.open_directory(ROOT_INO)
        except (OSError, MonarchError) as exc:
            log.warning("names that the kernel remembers may fail until a refresh: %s", exc)
            self._lost = False
            return
        cookie = 0
        while rows := self._tree.index.entries(ROOT_INO, cookie, NAMES_BATCH):
            cookie = rows[-1][0].cookie
            for dirent, _node in rows:
                self._kernel.invalidate_entry(ROOT_INO, dirent.name)
            # Not ``Kernel.room``: a request waits, and the kernel may wait for its answer.
            await trio.lowlevel.checkpoint()
