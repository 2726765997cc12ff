"""Keeping what the C part has read of the source for readers: many files at a time, afterwards."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.reasons import Cause
from monarchfs.engine.misses import Misses, Served
from monarchfs.metrics import Metrics
from monarchfs.prefetch.copier import Copier
from monarchfs.types import Node

log = logging.getLogger(__name__)

MOST_TOGETHER = 64
"""Files of one transaction and one thread's errand."""

SIDE_BY_SIDE = 2
"""Such portions at once."""

PAUSE_SECONDS = 0.005
"""What was served meanwhile is looked at together."""

Arrived = tuple[Node, memoryview]


class Arrivals:
    """Constant: its parts. Changing: ``_waiting``, what is to be stored next; ``_storing``, how
    many tasks do."""

    def __init__(
        self,
        misses: Misses,
        cache: Cache,
        copier: Copier,
        metrics: Metrics,
        nursery: trio.Nursery,
        opened: Callable[[Node, int], None],
    ) -> None:
        """``opened`` is told of each file that was opened, and how often."""
        self._misses = misses
        self._cache = cache
        self._copier = copier
        self._metrics = metrics
        self._nursery = nursery
        self._opened = opened
        self._waiting: deque[Arrived] = deque()
        self._storing = 0

    async def run(self) -> None:
        """For ever."""
        while True:
            await trio.lowlevel.wait_readable(self._misses.events_fd)
            self.look()
            await trio.sleep(PAUSE_SECONDS)

    def look(self) -> None:
        """Take up what was served since the last time. No checkpoint."""
        for served in self._misses.served():
            node = self._cache.index.node(served.ino)
            if node is None:
                continue
            if served.opens:
                self._opened(node, served.opens)
            if self._copier.keeps:
                self._keep(node, served)
        while self._waiting and self._storing < SIDE_BY_SIDE:
            self._storing += 1
            self._nursery.start_soon(self._store_all)

    def _keep(self, node: Node, served: Served) -> None:
        ino = node.ino
        if served.data is None:
            if served.opens:
                self._copier.opened(ino)  # to be read again for that
        elif not node.outdated and self._copier.arriving(ino):
            self._waiting.append((node, served.data))

    async def _store_all(self) -> None:
        try:
            while self._waiting:
                count = min(MOST_TOGETHER, len(self._waiting))
                await self._store([self._waiting.popleft() for _ in range(count)])
        finally:
            self._storing -= 1

    async def _store(self, arrived: list[Arrived]) -> None:
        nodes = [node for node, _data in arrived]
        try:
            places = self._cache.reserve_each(nodes, evicts=True)
            kept = [
                (node, place, data)
                for (node, data), place in zip(arrived, places, strict=True)
                if place is not None
            ]
            if not kept:
                await trio.lowlevel.checkpoint()
                return
            results = await self._cache.write_each([(place, data) for _, place, data in kept])
            for (_node, place, _data), result in zip(kept, results, strict=True):
                if isinstance(result, OSError):
                    self._cache.tier_failed(place, result)
                    self._metrics.copy_failed(result.errno)
                    await self._cache.abandon(
                        place, Cause.FAILED, f"copying failed: {result.strerror}"
                    )
        finally:
            for node in nodes:
                self._copier.arrived(node.ino)
