"""Asks the owners of files to copy them, many in one request, before this node reads them there.

The owners copy them in turn and answer after 2 s at the latest. What they are still copying is
asked for again later; what they refuse is read from the source. The nodes of a job start at about
the same time, so one that has not answered yet is waited for in a mount's first 10 s. No reader
waits here.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import trio

from monarchfs.cache.index.nodes import NodeTables
from monarchfs.peers import _replicas
from monarchfs.peers.copy_service import MOST_SECONDS
from monarchfs.peers.following import Following, ask
from monarchfs.peers.messages import (
    MAX_WANTED,
    PeerError,
    WantedReplica,
    decode_page,
    encode_wanted,
)
from monarchfs.peers.node_share import NodeShare
from monarchfs.types import Node

log = logging.getLogger(__name__)

MARGIN_SECONDS = 2.0
"""For the way to the owner and back."""

MAX_ANSWER_BYTES = 64 << 10
THREADS = 16

Wanted = tuple[Node, WantedReplica]


class Owners:
    """Constant: who owns what, the other nodes, and where directories lie (``nodes``)."""

    def __init__(self, share: NodeShare, following: Following, nodes: NodeTables) -> None:
        self._share = share
        self._ownership = share.ownership
        self._following = following
        self._nodes = nodes
        self._threads = trio.CapacityLimiter(THREADS)

    def elsewhere(self, node: Node) -> bool:
        """Whether the file, which must be a small one, is to come from another node."""
        name = node.stat.version.replica_name
        return not self._ownership.owns(name) and not self._share.copies(name)

    async def ask(self, nodes: Sequence[Node]) -> list[Node]:
        """Wait until the owners of these have copied them, or who stands in where an owner fails,
        as far as they do. Returns those that they still copy. Raises nothing but Cancelled."""
        late: list[Node] = []
        left = self._wanted(nodes)
        for choice in (self._ownership.number, self._ownership.stand_in):
            wanted: defaultdict[int, list[Wanted]] = defaultdict(list)
            for one in left:
                wanted[choice(one[1].name)].append(one)
            wanted.pop(self._ownership.own, None)
            left = []
            async with trio.open_nursery() as nursery:
                for number, rows in wanted.items():
                    for at in range(0, len(rows), MAX_WANTED):
                        portion = rows[at : at + MAX_WANTED]
                        nursery.start_soon(self._ask, number, portion, late, left)
        return late

    def _wanted(self, nodes: Sequence[Node]) -> list[Wanted]:
        wanted = []
        for node in nodes:
            name = node.stat.version.replica_name
            directory = self._nodes.dirref(node.parent)
            if directory is not None and not _replicas.available(name):
                path = directory.path + b"/" + node.name if directory.path else node.name
                wanted.append((node, WantedReplica(name, node.stat.size, path)))
        return wanted

    async def _ask(
        self, owner: int, wanted: list[Wanted], late: list[Node], failed: list[Wanted]
    ) -> None:
        await self._following.until_started(owner)
        began = trio.current_time()
        try:
            page = await ask(
                owner,
                f"/ask/want?seconds={MOST_SECONDS:g}",
                encode_wanted([row for _, row in wanted]),
                MOST_SECONDS + MARGIN_SECONDS,
                MAX_ANSWER_BYTES,
                decode_page,
                self._threads,
            )
        except (OSError, PeerError) as exc:
            log.debug("peer %d copies nothing for this node: %s", owner, exc)
            failed += wanted
            return
        _replicas.put(owner, page.rows)
        if trio.current_time() - began >= MOST_SECONDS:
            there = {row.name for row in page.rows if row.segment}
            late += [node for node, row in wanted if row.name not in there]
