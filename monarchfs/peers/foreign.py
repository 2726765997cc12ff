"""With ``--share partition``: replicas that other nodes are to keep go.

They are left of a mount that kept what it could (``--share auto``), or were copied for an owner
that did not answer.
"""

from __future__ import annotations

from itertools import islice
from typing import NoReturn

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


async def drop_foreign(cache: Cache, ownership: Ownership, following: Following) -> NoReturn:
    """Drop them for ever, some at a time."""

    def kept_elsewhere(name: bytes, size: int) -> bool:
        """Of a large file nobody knows: then its owner must answer."""
        if size <= MOST_BYTES:
            return _replicas.available(name)
        owner = ownership.number(name)
        return following.answered[owner].is_set() and not avoided(owner)

    def drop(ino: int) -> bool:
        """Unless it is open or pinned, or its owner would have to read it from the source."""
        record = cache.index.replicas.replica(ino)
        if record is None or not kept_elsewhere(record.name, record.size):
            return False
        if not cache.lookup.evictable(ino) or not cache.readers.try_remove(ino):
            return False
        return cache.accounts.drop(ino, "the node that owns it keeps it", Cause.FOREIGN)

    while True:
        dropped = 0
        for tier in cache.tiers:
            inos = list(islice(cache.lookup.foreign(tier), BATCH))
            dropped += sum(map(drop, inos))
        await trio.sleep(PAUSE_SECONDS if dropped else INTERVAL_SECONDS)
