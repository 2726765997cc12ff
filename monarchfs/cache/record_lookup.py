"""What placement looks up about replicas (``ReplicaLookup``), from the index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import islice

from monarchfs.cache.index.index import Index
from monarchfs.cache.readers import Readers
from monarchfs.types import TierTotals

OUTDATED_BATCH = 64
NAMES_BATCH = 64
MOST_NAMES = 1_000
"""So many names are looked at for one search of foreign replicas, which takes about 2 ms."""


@dataclass(eq=False, slots=True)
class _Search:
    """Through the names of a tier, round and round: ``after``, where the last one ended."""

    after: bytes = b""


@dataclass(eq=False, slots=True)
class _Searches:
    """Of one tier: for any replica, and for foreign ones; ``own_in_turn``, how many names in turn
    were no foreign ones'; ``own_alone``: none of them is."""

    any: _Search = field(default_factory=_Search)
    foreign: _Search = field(default_factory=_Search)
    own_in_turn: int = 0
    own_alone: bool = False


class RecordLookup:
    """Constant: its parts, which others change; ``awaited``, which tells whether a file is about to
    be opened; ``owns``. Changing: the searches through each tier."""

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
        self._tiers: defaultdict[int, _Searches] = defaultdict(_Searches)

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
        return (ino for _name, ino in self._names(tier, self._tiers[tier].any))

    def foreign(self, tier: int) -> Iterator[int]:
        """The same, only foreign ones, among so many names."""
        searches = self._tiers[tier]
        if self.owns is None or searches.own_alone:
            return
        for name, ino in islice(self._names(tier, searches.foreign), MOST_NAMES):
            if self.owns(name, 0) or not self.is_foreign(ino):
                searches.own_in_turn += 1
            else:
                searches.own_in_turn = 0
                yield ino
        totals = self._index.replicas.tier_totals().get(tier, TierTotals())
        if searches.own_in_turn >= totals.resident + totals.partial + totals.found:
            searches.own_alone = True

    def is_foreign(self, ino: int) -> bool:
        record = self._index.replicas.replica(ino)
        if record is None or self.owns is None:
            return False
        return not self.owns(record.name, record.size)

    def foreign_stored(self) -> None:
        """There is one more of them."""
        for searches in self._tiers.values():
            searches.own_in_turn, searches.own_alone = 0, False

    def _names(self, tier: int, search: _Search) -> Iterator[tuple[bytes, int]]:
        start = after = search.after
        wrapped = False
        while True:
            rows = self._index.replicas.names(tier, b"", after, NAMES_BATCH)
            for name, ino in rows:
                if wrapped and name > start:
                    return
                search.after = name
                yield name, ino
            if rows:
                after = rows[-1][0]
            elif wrapped or not start:
                return
            else:
                after, wrapped = b"", True
