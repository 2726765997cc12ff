"""What people ask a mount for over the control socket, beside ``status``.

``control`` documents the messages. Each command works through the paths of its request and tells
how far it has come; a client that goes away ends it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import trio

from monarchfs import control
from monarchfs.cache.cache import Cache
from monarchfs.fs.refresh import Refresh, RefreshResult
from monarchfs.fs.tree import Tree
from monarchfs.types import ROOT_INO, Lane, MonarchError, Node, OperationError

log = logging.getLogger(__name__)

BATCH = 128
"""Names looked at without letting others run: about a millisecond."""


@dataclass(slots=True)
class Counts:
    """``files`` and ``bytes`` of the source that were dealt with, ``kept`` ones that were not."""

    files: int = 0
    bytes: int = 0
    kept: int = 0


class Commands:
    """Constant: its parts."""

    def __init__(self, tree: Tree, cache: Cache, refresh: Refresh) -> None:
        self._tree = tree
        self._cache = cache
        self._refresh = refresh

    def knows(self, command: object) -> bool:
        return command in ("refresh", "pin", "unpin", "evict")

    async def answer(self, request: dict[str, Any], stream: trio.SocketStream) -> None:
        """Carry out a request that ``knows``, and send its reply and what comes before it."""
        so_far: dict[str, Any] = {}

        async def keep_telling() -> None:
            while True:
                await trio.sleep(control.PROGRESS_SECONDS / 2)
                await stream.send_all(control.encode_progress(so_far))

        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_unless_broken, keep_telling, nursery.cancel_scope)
                try:
                    reply = control.encode_result(await self._carry_out(request, so_far))
                except (OSError, MonarchError) as exc:
                    reply = control.encode_error(str(exc))
                nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True), trio.move_on_after(control.PROGRESS_SECONDS):
                await stream.send_all(reply)

    async def _carry_out(self, request: dict[str, Any], so_far: dict[str, Any]) -> dict[str, Any]:
        """The result; ``so_far`` is kept up to date meanwhile. Raises OSError, MonarchError."""
        paths = [_components(path) for path in request["paths"]]
        if request["command"] == "refresh":
            return await self._refresh_all(paths, so_far)
        counts = Counts()
        for path in paths:
            node = await self._find(path)
            match request["command"]:
                case "pin":
                    self._cache.pin(node.ino)
                case "unpin":
                    self._cache.unpin(node.ino)
            async for file in self._files_below(node):
                if request["command"] != "evict" or self._evict(file, counts):
                    counts.files += 1
                    counts.bytes += file.stat.size
                so_far.update(asdict(counts))
        return asdict(counts)

    async def _refresh_all(
        self, paths: Sequence[tuple[bytes, ...]], so_far: dict[str, Any]
    ) -> dict[str, Any]:
        total: dict[str, Any] = asdict(RefreshResult())
        for path in paths:
            done = dict(total)

            def progress(now: RefreshResult, done: dict[str, Any] = done) -> None:
                so_far.update(_sum(done, now))

            total = _sum(done, await self._refresh.run(path, progress))
        return total

    async def _find(self, path: tuple[bytes, ...]) -> Node:
        """Raises OSError, OperationError where there is no such name."""
        node = self._tree.index.node(ROOT_INO)
        for name in path:
            assert node is not None
            node = await self._tree.find(node.ino, name, Lane.DEMAND)
            if node is None:
                missing = os.fsdecode(b"/".join(path))
                raise OperationError(f"{missing}: no such file or directory in the mount")
        assert node is not None
        return node

    async def _files_below(self, node: Node) -> AsyncIterator[Node]:
        """The regular files at or below a node whose attributes are known."""
        if node.stat.is_regular:
            yield node
        directories = [node.ino] if node.stat.is_directory else []
        while directories:
            ino, cookie = directories.pop(), 0
            while entries := self._tree.index.entries(ino, cookie, BATCH):
                cookie = entries[-1][0].cookie
                for _dirent, child in entries:
                    if child is None or child.outdated:
                        continue
                    if child.stat.is_directory:
                        directories.append(child.ino)
                    elif child.stat.is_regular:
                        yield child
                await trio.lowlevel.checkpoint()

    def _evict(self, node: Node, counts: Counts) -> bool:
        if self._cache.state(node.ino) is None:
            return False
        if self._cache.evict(node.ino):
            return True
        counts.kept += 1
        return False


async def _unless_broken(talk: Callable[[], Any], command: trio.CancelScope) -> None:
    """Talk to the client; end the command where that is gone."""
    try:
        await talk()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        command.cancel()


def _components(path: str) -> tuple[bytes, ...]:
    return tuple(name for name in os.fsencode(path).split(b"/") if name not in (b"", b"."))


def _sum(total: dict[str, Any], more: RefreshResult) -> dict[str, Any]:
    both = dict(total)
    for key, value in asdict(more).items():
        both[key] = both[key] or value if isinstance(value, str) else both[key] + value
    return both
