"""The files that many names stand for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from monarchfs.metadata.find import Finder
from monarchfs.metadata.tree import Tree
from monarchfs.types import IndexWriteError, Lane, Node, OperationError

MOST_DIRECTORIES = 10_000


class NamedFiles:
    """Constant: its parts. Changing: the inode numbers of directories that were used."""

    def __init__(self, tree: Tree, finder: Finder) -> None:
        self._tree = tree
        self._finder = finder
        self._directories: dict[bytes, int] = {}

    async def nodes(self, names: Sequence[bytes]) -> list[Node | None]:
        """What they stand for: paths below the mount, or ``/`` and an inode number. None where that
        is no file that has bytes, or the source does not say."""
        found: dict[bytes, Node | None] = {}
        directories: dict[bytes, list[bytes]] = {}
        for name in names:
            above, _, base = name.rpartition(b"/")
            if name.startswith(b"/"):
                found[name] = self._tree.index.nodes.node(int(base)) if _is_number(base) else None
            elif 0 < len(base) < 256 and base not in (b".", b".."):
                directories.setdefault(above, []).append(base)
        for above, bases in directories.items():
            prefix = above + b"/" if above else b""
            for _try in range(1 + (above in self._directories)):
                with suppress(OSError, OperationError, IndexWriteError):
                    each = await self._tree.names.find_each(
                        await self._directory(above), bases, Lane.BACKGROUND, publish=True
                    )
                    found |= {prefix + base: node for base, node in zip(bases, each, strict=True)}
                    break
                self._directories.pop(above, None)  # another one may be at its place by now
        return [node if is_file(node := found.get(name)) else None for name in names]

    async def _directory(self, path: bytes) -> int:
        known = self._directories.get(path)
        if known is None:
            if len(self._directories) >= MOST_DIRECTORIES:
                self._directories.clear()
            known = self._directories[path] = (await self._finder.find(os.fsdecode(path))).ino
        return known


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) < 20


def is_file(node: Node | None) -> bool:
    """Whether there are bytes to fetch, as far as the index knows."""
    return node is not None and not node.outdated and node.stat.is_regular and node.stat.size > 0
