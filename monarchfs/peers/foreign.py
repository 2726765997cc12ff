"""With ``--share partition``: replicas that other nodes are to keep go.

They are left of a mount that kept what it could (``--share auto``), or were copied for an owner
that did not answer.
"""

from __future__ import annotations

from itertools import islice

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.reasons import Cause
from monarchfs.core.misses import MOST_BYTES
from monarchfs.peers import _replicas
from monarchfs.peers.following import Following, avoided
from monarchfs.peers.ownership import Ownership

BATCH = 128
"""The most that are dropped without a pause."""

PAUSE_SECONDS = 0.05
INTERVAL_SECONDS = 1.0
"""The pause after a look at some names that found nothing to drop."""


class ForeignReplicas:
    """Constant: its parts."""

    def __init__(self, cache: Cache, ownership: Ownership, following: Following) -> None:
        self._cache = cache
        self._ownership = ownership
        self._following = following

    async def run(self) -> None:
        """Drop them for ever, some at a time."""
        while True:
            dropped = sum(map(self._drop_some, self._cache.tiers))
            await trio.sleep(PAUSE_SECONDS if dropped else INTERVAL_SECONDS)

    def _drop_some(self, tier: int) -> int:
        inos = list(islice(self._cache.lookup.foreign(tier), BATCH))
        return sum(map(self._drop, inos))

    def _drop(self, ino: int) -> bool:
        """Unless it is open or pinned, or its owner would have to read it from the source."""
        record = self._cache.index.replicas.replica(ino)
        if record is None or not self._is_kept_elsewhere(record.name, record.size):
            return False
        if not self._cache.lookup.evictable(ino) or not self._cache.readers.try_remove(ino):
            return False
        return self._cache.accounts.drop(ino, "the node that owns it keeps it", Cause.FOREIGN)

    def _is_kept_elsewhere(self, name: bytes, size: int) -> bool:
        """Of a large file nobody knows: then its owner must answer."""
        if size <= MOST_BYTES:
            return _replicas.available(name)
        owner = self._ownership.number(name)
        return self._following.answered[owner].is_set() and not avoided(owner)
