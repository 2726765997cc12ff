"""Finding what people name: a path below the mount, through symbolic links that stay in it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

import trio

from monarchfs.metadata.tree import Tree
from monarchfs.types import ROOT_INO, IndexWriteError, Lane, Node, OperationError

FIND_SECONDS = 30.0
"""A source that says nothing for so long is not waited for."""

_MOST_LINKS = 40
"""As many as the kernel follows (MAXSYMLINKS in linux/namei.h)."""


class Finder:
    """Constant: its parts. ``roots`` are the absolute paths that stand for the mount's root."""

    def __init__(self, tree: Tree, roots: Sequence[bytes]) -> None:
        self._tree = tree
        self._roots = [root.rstrip(b"/") for root in roots]

    async def find(self, path: str) -> Node:
        """What ``path`` (relative to the mount's root) leads to. Raises OperationError where there
        is no such name, where the source fails, or says nothing for FIND_SECONDS."""
        with trio.move_on_after(FIND_SECONDS):
            return await self._walk(path, ask=True)
        raise OperationError(f"{path or '/'}: the source does not answer ({FIND_SECONDS:g} s)")

    async def find_within(self, path: str, seconds: float) -> tuple[Node, bool]:
        """The same where what is known will do if the source says nothing in time, and whether it
        answered."""
        with trio.move_on_after(seconds):
            return await self._walk(path, ask=True), True
        try:
            return await self._walk(path, ask=False), False
        except OperationError:
            raise OperationError(
                f"{path or '/'}: the source does not answer, and nothing is known of it here"
            ) from None

    async def _step(self, parent: int, name: bytes, *, ask: bool) -> Node | None:
        if ask:
            return await self._tree.names.find(parent, name, Lane.DEMAND)
        return self._tree.index.nodes.named(parent, name)

    async def _walk(self, path: str, *, ask: bool) -> Node:
        try:
            return await self._follow(os.fsencode(path).split(b"/"), path or "/", ask=ask)
        except (OSError, IndexWriteError) as exc:
            reason = (exc.strerror or str(exc)) if isinstance(exc, OSError) else str(exc)
            raise OperationError(f"{path or '/'}: {reason}") from exc

    async def _follow(self, names: Sequence[bytes], shown: str, *, ask: bool) -> Node:
        root = self._tree.index.nodes.node(ROOT_INO)
        assert root is not None
        above, todo, links = [root], deque(names), 0
        while todo:
            name = todo.popleft()
            if name in (b"", b"."):
                continue
            if not above[-1].stat.is_directory:
                raise OperationError(f"{shown}: {os.fsdecode(above[-1].name)} is not a directory")
            if name == b"..":
                above.pop()
                if not above:
                    raise OperationError(f"{shown}: a symbolic link leads out of the mount")
                continue
            node = await self._step(above[-1].ino, name, ask=ask)
            if node is None:
                raise OperationError(f"{shown}: no such file or directory in the mount")
            if not node.stat.is_symlink:
                above.append(node)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OperationError(f"{shown}: too many symbolic links")
            if node.target.startswith(b"/"):
                above = [root]
            todo.extendleft(reversed(self._inside(node.target, shown).split(b"/")))
        return above[-1]

    def _inside(self, target: bytes, shown: str) -> bytes:
        """A link's target, relative to the mount's root where it is absolute."""
        if not target.startswith(b"/"):
            return target
        for root in self._roots:
            if target == root or target.startswith(root + b"/"):
                return target[len(root) :].lstrip(b"/")
        raise OperationError(f"{shown}: a symbolic link leads out of the mount")
