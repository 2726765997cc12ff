"""The answer to ``monarchfs why``: where the bytes of a file or of all below a directory are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import trio

from monarchfs.cache.cache import Cache
from monarchfs.fs.reasons import NS, Reasons
from monarchfs.metadata.find import Finder
from monarchfs.metadata.tree import Tree
from monarchfs.metrics import Metrics
from monarchfs.types import Node

SOURCE_SECONDS = 3.0
"""The source has this long to answer for the name; then what is known is reported."""

BATCH = 128
"""Names looked at between two checkpoints: about a millisecond."""


class Why:
    """Constant: its parts; ``responding`` says whether the source seems to answer at all."""

    def __init__(
        self,
        tree: Tree,
        cache: Cache,
        reasons: Reasons,
        finder: Finder,
        responding: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        self._tree = tree
        self._cache = cache
        self._reasons = reasons
        self._finder = finder
        self._responding = responding
        self._metrics = metrics

    async def report(self, path: str, so_far: dict[str, Any]) -> dict[str, Any]:
        """What is known of ``path``, with the keys of ``why --json``. ``so_far`` gets the counts
        while a directory is gone through. Raises OperationError where nothing is known."""
        stale = self._metrics.stale_answers
        node, answered = await self._finder.find_within(path, SOURCE_SECONDS)
        # A replica that an earlier index left in a tier counts, too.
        self._cache.accounts.claim(node)
        now_ns = time.time_ns()
        common: dict[str, Any] = {
            "pinned": self._tree.index.pins.pinned(node.ino),
            "freshness": self._tree.freshness.mode.value,
            "checked_seconds_ago": max(0, now_ns - node.fetched_ns) / NS,
            "source_responding": (
                answered and self._responding() and stale == self._metrics.stale_answers
            ),
            "renumbered_files": self._metrics.renumbered_files,
        }
        if node.stat.is_directory:
            return {"type": "directory", **await self._directory(node, so_far), **common}
        if not node.stat.is_regular:
            return {"type": "other", "state": "remote", "reason": "it is no regular file", **common}
        return {"type": "file", **self._file(node, now_ns), **common}

    def _file(self, node: Node, now_ns: int) -> dict[str, Any]:
        found = self._reasons.of(node, exact=True)
        since = None if found.since_ns is None else max(0, now_ns - found.since_ns) / NS
        return {
            "state": found.state,
            "cause": found.cause,
            "reason": found.sentence,
            "tier": found.tier,
            "since_unix_seconds": None if found.since_ns is None else found.since_ns / NS,
            "since_seconds_ago": since,
            "size_bytes": node.stat.size,
            "local_bytes": found.local_bytes,
            "allocated_bytes": found.allocated_bytes,
            "mtime_unix_seconds": node.stat.mtime_ns / NS,
        }

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
        found = self._reasons.state(node)
        counts["files"] += 1
        counts["bytes"] += node.stat.size
        counts[found] += 1
        if found == "resident":
            counts["resident_bytes"] += node.stat.size
        if (cause := self._reasons.cause(node)) is not None:
            causes[cause] += 1
