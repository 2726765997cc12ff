"""Tells peers the names and attributes in directories that this node owns."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from monarchfs.peers.names import BACKGROUND_SECONDS, DEMAND_SECONDS, NameOwners, NamesQuestion
from monarchfs.types import (
    Dirent,
    DirRef,
    IndexWriteError,
    Lane,
    MonarchError,
    Node,
    PeerNames,
    SourceStat,
)

log = logging.getLogger(__name__)

MOST_RUNNING = 64
"""Questions for which the source is being asked. Where it hangs, further ones get what is known."""

Row = tuple[bytes, SourceStat, bytes]


class NameIndex(Protocol):
    """What is asked of the index."""

    def dirent(self, parent: int, name: bytes) -> Dirent | None: ...
    def node(self, ino: int) -> Node | None: ...
    def dirref(self, ino: int) -> DirRef | None: ...


class NameSupply:
    """Constant: the index; ``believed``, whether a name that was asked for at a time still stands
    for a node; what asks the source, and no peer; where a directory is; who owns it.
    Changing: ``_running``, how many questions wait for the source."""

    def __init__(
        self,
        index: NameIndex,
        believed: Callable[[int, Node], bool],
        find: Callable[[int, list[bytes], Lane], Awaitable[object]],
        directory: Callable[[bytes, Lane], Awaitable[int | None]],
        owners: NameOwners,
        nursery: trio.Nursery,
    ) -> None:
        self._index = index
        self._believed = believed
        self._find = find
        self._directory = directory
        self._owners = owners
        self._nursery = nursery
        self._running = 0

    async def answer(self, question: NamesQuestion) -> PeerNames:
        """What is known when the time is up. Raises nothing but Cancelled.

        Answers only for what this node owns, or stands in for.
        """
        arrived_ns = time.time_ns()
        lane = Lane.DEMAND if question.demand else Lane.BACKGROUND
        names: list[bytes] = []
        parent: int | None = None
        with trio.move_on_after(DEMAND_SECONDS if question.demand else BACKGROUND_SECONDS):
            try:
                parent = await self._directory(question.path, lane)
            except (OSError, IndexWriteError, MonarchError):
                parent = None  # the peer will meet the same error in the source
            if parent is not None:
                names = self._owned(parent, question)
                since_ns = arrived_ns - question.most_age_ns
                await self._bring(parent, names, since_ns, lane)
        rows: list[Row] = []
        oldest_ns = arrived_ns
        for name in names:
            assert parent is not None
            if (found := self._known(parent, name, arrived_ns - question.most_age_ns)) is not None:
                asked_ns, node = found
                oldest_ns = min(oldest_ns, asked_ns)
                rows.append((name, node.stat, node.target))
        return PeerNames(arrived_ns - oldest_ns, rows)

    def _owned(self, parent: int, question: NamesQuestion) -> list[bytes]:
        node, directory = self._index.node(parent), self._index.dirref(parent)
        if node is None or directory is None or node.stat.device or node.stat.ino != question.ino:
            return []
        return self._owners.served(directory, node.stat.size, question.names)

    async def _bring(self, parent: int, names: Sequence[bytes], since_ns: int, lane: Lane) -> None:
        """Ask the source for what is not known. The answers are recorded, even if they come too
        late for this question."""
        lacking = [name for name in names if self._known(parent, name, since_ns) is None]
        if not lacking or self._running >= MOST_RUNNING:
            return
        done = trio.Event()

        async def run() -> None:
            self._running += 1
            try:
                await self._find(parent, lacking, lane)
            except (OSError, IndexWriteError, MonarchError) as exc:
                log.debug("names that a peer wants are not known: %s", exc)
            finally:
                self._running -= 1
                done.set()

        self._nursery.start_soon(run)
        await done.wait()

    def _known(self, parent: int, name: bytes, since_ns: int) -> tuple[int, Node] | None:
        """What a name stands for, and when the source was asked about it."""
        dirent = self._index.dirent(parent, name)
        node = None if dirent is None else self._index.node(dirent.ino)
        if dirent is None or node is None or node.stat.device:
            return None
        asked_ns = min(dirent.checked_ns, node.fetched_ns)
        if asked_ns < since_ns or not self._believed(dirent.checked_ns, node):
            return None
        return asked_ns, node
