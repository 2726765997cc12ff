"""Tells peers the names and attributes in directories that this node owns."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from monarchfs.metadata.known import KnownMetadata
from monarchfs.peers.names import NameOwners, NamesQuestion, answer_seconds
from monarchfs.types import (
    IndexWriteError,
    Lane,
    MonarchError,
    Node,
    PeerListing,
    PeerNames,
)

log = logging.getLogger(__name__)

MOST_RUNNING = 64
"""Questions for which the source is being asked. Where it hangs, further ones get what is known."""


def _lane(question: NamesQuestion) -> Lane:
    return Lane.DEMAND if question.demand else Lane.BACKGROUND


class NameSupply:
    """Constant: what is known; what asks the source about names, and no peer; the listing that is
    known, and since when; what lists a directory; where a directory is; who owns it. Changing:
    ``_running``, how many questions wait for the source."""

    def __init__(
        self,
        known: KnownMetadata,
        find: Callable[[int, list[bytes], Lane], Awaitable[object]],
        listed: Callable[[int, int], tuple[int, PeerListing] | None],
        list_: Callable[[int, Lane], Awaitable[object]],
        directory: Callable[[bytes, Lane], Awaitable[int | None]],
        owners: NameOwners,
        nursery: trio.Nursery,
    ) -> None:
        self._names = known
        self._index = known.index
        self._find = find
        self._listed = listed
        self._list = list_
        self._directory = directory
        self._owners = owners
        self._nursery = nursery
        self._running = 0

    async def answer(self, question: NamesQuestion) -> PeerNames:
        """What is known when the time is up. Raises nothing but Cancelled.

        Answers only for what this node owns, or stands in for.
        """
        arrived_ns = time.time_ns()
        since_ns, lane = self._since_ns(question, arrived_ns), _lane(question)
        parent, names = 0, list[bytes]()
        with trio.move_on_after(answer_seconds(question)):
            parent, names = await self._served(question, question.names, lane)
            lacking = [name for name in names if self._known(parent, name, since_ns) is None]
            if lacking:
                await self._run(partial(self._find, parent, lacking, lane))
        rows = []
        oldest_ns = arrived_ns
        for name in names:
            if (found := self._known(parent, name, since_ns)) is not None:
                asked_ns, node = found
                oldest_ns = min(oldest_ns, asked_ns)
                rows.append((name, node.stat, node.target))
        return PeerNames(arrived_ns - oldest_ns, rows)

    async def listing(self, question: NamesQuestion) -> PeerListing | None:
        """The directory's entries; None if they are not known when the time is up, or there are
        many. Raises nothing but Cancelled."""
        arrived_ns = time.time_ns()
        since_ns, lane = self._since_ns(question, arrived_ns), _lane(question)
        with trio.move_on_after(answer_seconds(question)):
            parent, served = await self._served(question, [b"."], lane)
            if not served:
                return None
            if self._listed(parent, since_ns) is None:
                await self._run(partial(self._list, parent, lane))
            if (listed := self._listed(parent, since_ns)) is not None:
                asked_ns, listing = listed
                return listing._replace(age_ns=max(0, arrived_ns - asked_ns))
        return None

    def _since_ns(self, question: NamesQuestion, arrived_ns: int) -> int:
        """When the source must have been asked. With ``immutable`` what was known before the mount
        counts as of its time, so its age is not known."""
        since_ns = arrived_ns - question.most_age_ns
        return since_ns if since_ns < 0 else max(since_ns, self._names.mount_ns + 1)

    async def _served(
        self, question: NamesQuestion, names: Sequence[bytes], lane: Lane
    ) -> tuple[int, list[bytes]]:
        """The directory, and those of the names that this node owns, or stands in for."""
        try:
            ino = await self._directory(question.path, lane)
        except (OSError, IndexWriteError, MonarchError):
            return 0, []  # the peer will meet the same error in the source
        node = None if ino is None else self._index.nodes.node(ino)
        directory = None if ino is None else self._index.nodes.dirref(ino)
        if node is None or directory is None or node.stat.device or node.stat.ino != question.ino:
            return 0, []
        size = node.stat.size if question.names else 0
        return node.ino, self._owners.served(directory, size, names)

    async def _run(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Ask the source. Answers are recorded even if they come too late for this question."""
        if self._running >= MOST_RUNNING:
            return
        done = trio.Event()

        async def run() -> None:
            self._running += 1
            try:
                await ask()
            except (OSError, IndexWriteError, MonarchError) as exc:
                log.debug("names that a peer wants are not known: %s", exc)
            finally:
                self._running -= 1
                done.set()

        self._nursery.start_soon(run)
        await done.wait()

    def _known(self, parent: int, name: bytes, since_ns: int) -> tuple[int, Node] | None:
        """What a name stands for, and when the source was asked about it."""
        dirent = self._index.nodes.dirent(parent, name)
        node = None if dirent is None else self._index.nodes.node(dirent.ino)
        if dirent is None or node is None or node.stat.device:
            return None
        asked_ns = min(dirent.checked_ns, node.fetched_ns)
        if (
            asked_ns < since_ns
            or self._names.entry(dirent.checked_ns, node, time.time_ns()) is None
        ):
            return None
        return asked_ns, node
