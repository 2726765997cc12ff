"""Versions that the source no longer has: copies, handles and the kernel stop using them."""

from __future__ import annotations

import logging

import trio

from monarchfs.cache.cache import Cache
from monarchfs.fs.residency import Residency
from monarchfs.metadata.cached_listings import Kernel
from monarchfs.metadata.tree import Tree
from monarchfs.prefetch.copier import Copier
from monarchfs.types import ROOT_INO, IndexWriteError, MonarchError, Node

log = logging.getLogger(__name__)

NAMES_BATCH = 256


class Invalidation:
    """The kernel's names are invalidated only where it opens files without asking: there no open
    can answer ESTALE, and the kernel would go on with a name that leads to an outdated file. The
    read that finds this out fails; the next open has the new file.

    Constant: its parts. Changing: ``_all_forgotten``, whether all names were."""

    def __init__(
        self,
        tree: Tree,
        kernel: Kernel,
        cache: Cache,
        copies: Copier,
        residency: Residency,
        *,
        opens_known: bool,
    ) -> None:
        self._tree = tree
        self._index = tree.index
        self._kernel = kernel
        self._cache = cache
        self._copies = copies
        self._opens_known = opens_known
        self._residency = residency
        self._all_forgotten = False

    def noticed(self, ino: int) -> None:
        """A reader of the source saw another version than ``ino`` stands for. No checkpoint; raises
        nothing.

        An open whose version is all local keeps it. Other opens read the source as it is from now
        on, so what the kernel has read before must go.
        """
        self._tree.recorder.mark_outdated(ino)
        self.notify(ino)

    def outdated(self, ino: int) -> None:
        """The tree found that out."""
        if (nonresident := self._copies.files.get(ino)) is not None:
            nonresident.copy.outdated()
        self.notify(ino)

    def notify(self, ino: int) -> None:
        """Threads of the C part open the inode no more, and the kernel forgets its attributes, and
        its pages unless they are those of the version."""
        self._cache.readers.expire(ino)
        if not self._opens_known:
            self._forget_name(ino)
        resident = self._residency.state(ino) == "resident"
        self._kernel.invalidate_inode(ino, attributes_only=resident)

    def renumber(self, ino: int) -> None:
        """Give the file another inode number at its next open, though its version is the same: the
        kernel is not to open again what it knows under this one. Raises nothing."""
        try:
            self._index.nodes.renumber(ino)
        except IndexWriteError as exc:
            log.warning("inode %d keeps its number: %s", ino, exc)

    # -- names that the kernel is to forget

    def _forget_name(self, ino: int) -> None:
        node = self._index.nodes.node(ino)
        if node is not None and ino != ROOT_INO:
            self._kernel.invalidate_entry(node.parent, node.name)

    def forget_path(self, ino: int) -> None:
        """A directory above ``ino`` lies elsewhere. A name that is forgotten takes all below it
        along (fs/dcache.c, d_invalidate), so the path's first is enough. No checkpoint."""
        node: Node | None = self._index.nodes.node(ino)
        climbed: set[int] = set()
        while node is not None and node.parent != ROOT_INO and node.ino not in climbed:
            climbed.add(node.ino)  # as in ``NodeTables.dirref``
            node = self._index.nodes.node(node.parent)
        if node is not None:
            self._forget_name(node.ino)

    async def forget_all_names(self) -> None:
        """The kernel knows an inode number that the index does not, so its names are from another
        index. All of them have to be looked up again, once. Raises nothing."""
        if self._all_forgotten:
            return
        self._all_forgotten = True
        log.warning("the index is not the one that the kernel's names are from: they are forgotten")
        try:
            await self._tree.directories.open(ROOT_INO)
        except (OSError, MonarchError) as exc:
            log.warning("names that the kernel remembers may fail until a refresh: %s", exc)
            self._all_forgotten = False
            return
        cookie = 0
        while rows := self._index.listings.entries(ROOT_INO, cookie, NAMES_BATCH):
            cookie = rows[-1][0].cookie
            for dirent, _node in rows:
                self._kernel.invalidate_entry(ROOT_INO, dirent.name)
            # Not ``Kernel.room``: a request waits, and the kernel may wait for its answer.
            await trio.lowlevel.checkpoint()
