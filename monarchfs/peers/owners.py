"""Asks the owners of files to copy them, many in one request, before this node reads them there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from monarchfs.peers import _replicas
from monarchfs.peers.catalogue import decode
from monarchfs.peers.errors import PeerError
from monarchfs.peers.ownership import bucket
from monarchfs.peers.supply import MAX_WANTED, MOST_SECONDS, WantedReplica, encode
from monarchfs.system.threads import run_sync
from monarchfs.types import DirRef, Node

log = logging.getLogger(__name__)

MARGIN_SECONDS = 2.0
"""For the way to the owner and back."""

START_SECONDS = 10.0
"""How long to wait for each node: the nodes of a job start at about the same time."""

MAX_ANSWER_BYTES = 64 << 10
THREADS = 16


class Owners:
    """Constant: who owns what, this node's number, and where directories lie."""

    def __init__(
        self,
        table: memoryview,
        own: int,
        directory: Callable[[int], DirRef | None],
        answered: Sequence[trio.Event],
    ) -> None:
        """``table``: see ``Ownership.table``. ``answered``: of each node, see ``Following``."""
        self._table = table.cast("H")
        self._own = own
        self._directory = directory
        self._answered = answered
        self._starts_until = trio.current_time() + START_SECONDS
        self._threads = trio.CapacityLimiter(THREADS)

    def elsewhere(self, node: Node) -> bool:
        """Whether another node owns the file, which must be a small one."""
        return self._owner(node.stat.version.replica_name) != self._own

    async def ask(self, nodes: Sequence[Node]) -> list[Node]:
        """Wait until the owners of these have copied them, as far as they do. Returns those that
        they still copy. Raises nothing but Cancelled."""
        wanted: dict[int, list[tuple[Node, WantedReplica]]] = {}
        late: list[Node] = []
        for node in nodes:
            name = node.stat.version.replica_name
            directory = self._directory(node.parent)
            if directory is not None and not _replicas.has(name):
                path = directory.path + b"/" + node.name if directory.path else node.name
                row = WantedReplica(name, node.stat.size, path)
                wanted.setdefault(self._owner(name), []).append((node, row))
        wanted.pop(self._own, None)
        async with trio.open_nursery() as nursery:
            for owner, rows in wanted.items():
                for at in range(0, len(rows), MAX_WANTED):
                    nursery.start_soon(self._ask, owner, rows[at : at + MAX_WANTED], late)
        return late

    async def _ask(
        self, owner: int, wanted: Sequence[tuple[Node, WantedReplica]], late: list[Node]
    ) -> None:
        with trio.move_on_at(self._starts_until):
            await self._answered[owner].wait()
        began = trio.current_time()
        try:
            status, data = await run_sync(
                _replicas.ask,
                *(owner, f"/ask/want?seconds={MOST_SECONDS:g}", encode([row for _, row in wanted])),
                *(MOST_SECONDS + MARGIN_SECONDS, MAX_ANSWER_BYTES),
                limiter=self._threads,
            )
            if status != 200:
                raise PeerError(f"status {status}")
            rows = decode(data).rows
        except (OSError, PeerError) as exc:
            log.debug("peer %d copies nothing for this node: %s", owner, exc)
            return
        _replicas.put(owner, rows)
        if trio.current_time() - began >= MOST_SECONDS:
            there = {row.name for row in rows if row.segment}
            late += [node for node, row in wanted if row.name not in there]

    def _owner(self, name: bytes) -> int:
        return self._table[bucket(name)]
