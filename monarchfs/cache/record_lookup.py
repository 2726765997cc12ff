"""What placement looks up about replicas (``ReplicaLookup``), from the index."""

from __future__ import annotations

from collections.abc import Container, Iterator

from monarchfs.cache.readers import Readers
from monarchfs.index.index import Index

OUTDATED_BATCH = 64
NAMES_BATCH = 64


class RecordLookup:
    """Constant: its parts, which others change. Changing: where the last search for any replica of
    a tier ended."""

    def __init__(
        self, index: Index, opened: Container[int], busy: Container[int], readers: Readers
    ) -> None:
        """``opened`` and ``busy`` are inode numbers whose replicas must stay: readers have them
        open, or they are being copied or moved. ``readers`` have others open."""
        self._index = index
        self._opened = opened
        self._busy = busy
        self._readers = readers
        self._after: dict[int, bytes] = {}

    def allocated_bytes(self, ino: int, tier: int) -> int | None:
        record = None if ino in self._busy else self._index.replica(ino)
        return None if record is None or record.tier != tier else record.allocated_bytes

    def evictable(self, ino: int) -> bool:
        if ino in self._opened or ino in self._busy or self._readers.used(ino):
            return False
        return not self._index.pinned(ino)

    def outdated(self, tier: int) -> Iterator[int]:
        return iter(self._index.outdated_replicas(tier, OUTDATED_BATCH))

    def any(self, tier: int) -> Iterator[int]:
        """Each replica once, from where the last search ended. Names are hashes, so the order is
        random."""
        start = after = self._after.get(tier, b"")
        wrapped = False
        while True:
            rows = self._index.names(tier, b"", after, NAMES_BATCH)
            for name, ino in rows:
                if wrapped and name > start:
                    return
                self._after[tier] = name
                yield ino
            if rows:
                after = rows[-1][0]
            elif wrapped or not start:
                return
            else:
                after, wrapped = b"", True
