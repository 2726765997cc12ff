"""What placement looks up about replicas (``ReplicaLookup``), from the index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from itertools import islice

from monarchfs.cache.index.index import Index
from monarchfs.cache.readers import Readers
from monarchfs.types import TierTotals

OUTDATED_BATCH = 64
NAMES_BATCH = 64
MOST_NAMES = 1_000
"""So many names are looked at for one search of foreign replicas, which takes about 2 ms."""


class RecordLookup:
    """Constant: its parts, which others change; ``awaited``, which tells whether a file is about to
    be opened; ``owns``. Changing, of the searches through the names of each tier, round and
    round: ``_after``, where the last one ended, by tier and whether it was for foreign replicas;
    ``_own_in_turn``, how many names in turn were no foreign ones'; ``_own_alone``, the tiers where
    none of them is."""

    def __init__(
        self,
        index: Index,
        opened: Container[int],
        busy: Container[int],
        readers: Readers,
        owns: Callable[[bytes, int], bool] | None,
        awaited: Callable[[int], bool],
    ) -> None:
        """``opened`` and ``busy`` are inode numbers whose replicas must stay: readers have them
        open, or they are being copied or moved. ``readers`` have others open. ``owns``: whether
        this node owns some of a replica, by its name and size; None: nodes do not share, or each
        keeps what it can."""
        self._index = index
        self._opened = opened
        self._busy = busy
        self._readers = readers
        self.owns = owns
        self.awaited = awaited
        self._after: dict[tuple[int, bool], bytes] = {}
        self._own_in_turn: Counter[int] = Counter()
        self._own_alone: set[int] = set()

    def allocated_bytes(self, ino: int, tier: int) -> int | None:
        record = None if ino in self._busy else self._index.replicas.replica(ino)
        return None if record is None or record.tier != tier else record.allocated_bytes

    def evictable(self, ino: int) -> bool:
        if ino in self._opened or ino in self._busy or self._readers.used(ino):
            return False
        return not self._index.pins.pinned(ino)

    def outdated(self, tier: int) -> Iterator[int]:
        return iter(self._index.replicas.outdated_replicas(tier, OUTDATED_BATCH))

    def any(self, tier: int) -> Iterator[int]:
        """Each replica once, from where the last search ended. Names are hashes, so the order is
        random."""
        return (ino for _name, ino in self._names(tier, foreign=False))

    def foreign(self, tier: int) -> Iterator[int]:
        """The same, only foreign ones, among so many names."""
        if self.owns is None or tier in self._own_alone:
            return
        for name, ino in islice(self._names(tier, foreign=True), MOST_NAMES):
            if self.owns(name, 0) or not self.is_foreign(ino):
                self._own_in_turn[tier] += 1
            else:
                self._own_in_turn[tier] = 0
                yield ino
        totals = self._index.replicas.tier_totals().get(tier, TierTotals())
        if self._own_in_turn[tier] >= totals.resident + totals.partial + totals.found:
            self._own_alone.add(tier)

    def is_foreign(self, ino: int) -> bool:
        record = self._index.replicas.replica(ino)
        if record is None or self.owns is None:
            return False
        return not self.owns(record.name, record.size)

    def foreign_stored(self) -> None:
        """There is one more of them."""
        self._own_in_turn.clear()
        self._own_alone.clear()

    def _names(self, tier: int, *, foreign: bool) -> Iterator[tuple[bytes, int]]:
        start = after = self._after.get((tier, foreign), b"")
        wrapped = False
        while True:
            rows = self._index.replicas.names(tier, b"", after, NAMES_BATCH)
            for name, ino in rows:
                if wrapped and name > start:
                    return
                self._after[tier, foreign] = name
                yield name, ino
            if rows:
                after = rows[-1][0]
            elif wrapped or not start:
                return
            else:
                after, wrapped = b"", True
