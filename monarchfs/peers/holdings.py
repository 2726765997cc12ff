"""The small replicas that this node owns and has, from the index."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from monarchfs.index.replicas import Replicas
from monarchfs.peers.catalogue import Row
from monarchfs.peers.nodes import PeerNode
from monarchfs.peers.ownership import Ownership
from monarchfs.types import ReplicaState

_BATCH = 256


class IndexHoldings:
    """Implements ``catalogue.Holdings``. Constant: the numbers of the tiers in the index, in
    the order in which nginx serves them; who owns what."""

    def __init__(
        self, replicas: Replicas, tiers: Iterable[int], ownership: Ownership, own: PeerNode
    ) -> None:
        self._replicas = replicas
        self._tiers = tuple(tiers)
        self._ownership = ownership
        self._own = own

    def owns(self, name: bytes) -> bool:
        """Whether peers look for this replica here."""
        return self._ownership.owner(name) is self._own

    def rows(self, names: Sequence[bytes]) -> list[Row]:
        """One for each name."""
        return [self._row(name) for name in names]

    def names_after(self, after: bytes, limit: int) -> list[bytes]:
        """The next names that this node owns, in order, from all tiers."""
        ordered = heapq.merge(*(self._names_of(tier, after) for tier in self._tiers))
        return list(islice(filter(self.owns, ordered), limit))

    def _names_of(self, tier: int, after: bytes) -> Iterator[bytes]:
        while found := self._replicas.names(tier, b"", after, _BATCH):
            yield from (name for name, _ino in found)
            after = found[-1][0]
            if len(found) < _BATCH:
                return

    def _row(self, name: bytes) -> Row:
        for place, tier in enumerate(self._tiers):
            ino = self._replicas.owner(tier, name)
            replica = None if ino is None else self._replicas.replica(ino)
            if (
                replica is not None
                and replica.segment
                and replica.state is ReplicaState.RESIDENT
                and replica.name == name
            ):
                return Row(
                    name,
                    replica.checksum,
                    replica.size,
                    place,
                    replica.segment,
                    replica.offset,
                )
        return Row(name)
