"""The answer to ``monarchfs why``: where the bytes of a file or of all below a directory are."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import trio

from monarchfs.cache.cache import Cache
from monarchfs.fs.residency import Residency
from monarchfs.metadata.find import Finder
from monarchfs.metadata.tree import Tree
from monarchfs.metrics import NS, Metrics
from monarchfs.source.source import Source
from monarchfs.types import Node

SOURCE_SECONDS = 3.0
"""The source has this long to answer for the name; then what is known is reported."""

BATCH = 128
"""Names looked at between two checkpoints: about a millisecond."""


class Why:
    """Constant: its parts."""

    def __init__(
        self,
        tree: Tree,
        cache: Cache,
        residency: Residency,
        finder: Finder,
        source: Source,
        metrics: Metrics,
    ) -> None:
        self._tree = tree
        self._cache = cache
        self._residency = residency
        self._finder = finder
        self._source = source
        self._metrics = metrics

    async def report(self, path: str, so_far: dict[str, Any]) -> dict[str, Any]:
        """What is known of ``path``, with the keys of ``why --json``. ``so_far`` gets the counts
        while a directory is gone through. Raises OperationError where nothing is known."""
        stale = self._metrics.stale_answers
        node, answered = await self._finder.find_within(path, SOURCE_SECONDS)
        # A replica that an earlier index left in a tier counts, too.
        self._cache.accounts.claim(node)
        common: dict[str, Any] = {
            "pinned": self._tree.index.pins.pinned(node.ino),
            "freshness": self._tree.freshness.mode.value,
            "checked_seconds_ago": max(0, time.time_ns() - node.fetched_ns) / NS,
            "source_responding": (
                answered and self._source.responding and stale == self._metrics.stale_answers
            ),
            "renumbered_files": self._metrics.renumbered_files,
        }
        if node.stat.is_directory:
            return {"type": "directory", **await self._directory(node, so_far), **common}
        if not node.stat.is_regular:
            return {"type": "other", "state": "remote", "reason": "it is no regular file", **common}
        return {"type": "file", **self._residency.report(node), **common}

    async def _directory(self, top: Node, so_far: dict[str, Any]) -> dict[str, Any]:
        """Sums over all that is known below; asks the source nothing."""
        index = self._tree.index
        counts = dict.fromkeys(
            ("files", "bytes", "resident", "resident_bytes", "partial", "copying", "remote"), 0
        )
        counts |= {"directories": 0, "not_listed": 0, "not_looked_at": 0}
        causes: Counter[str] = Counter()
        directories = [top.ino]
        while directories:
            ino, cookie = directories.pop(), 0
            counts["directories"] += 1
            counts["not_listed"] += index.listings.listing(ino) is None
            while entries := index.listings.entries(ino, cookie, BATCH):
                cookie = entries[-1][0].cookie
                for _dirent, node in entries:
                    if node is None:
                        counts["not_looked_at"] += 1
                    elif node.stat.is_directory and node.ino != ino:
                        directories.append(node.ino)
                    elif node.stat.is_regular and not node.outdated:
                        self._count(node, counts, causes)
                so_far.update(files=counts["files"], resident=counts["resident"])
                await trio.lowlevel.checkpoint()
        return {**counts, "causes": dict(causes.most_common())}

    def _count(self, node: Node, counts: dict[str, int], causes: Counter[str]) -> None:
        found = self._residency.state(node.ino)
        counts["files"] += 1
        counts["bytes"] += node.stat.size
        counts[found] += 1
        if found == "resident":
            counts["resident_bytes"] += node.stat.size
        if (cause := self._residency.cause(node)) is not None:
            causes[cause] += 1
