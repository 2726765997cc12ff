"""Which node owns a file, and which one stands in for the owner: every node computes it from the
same list, without asking anybody.

Files are put into buckets by the first bits of their replica's name, a hash of the version. Buckets
are given to nodes by weighted rendezvous hashing (``_owners.c``).
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from monarchfs.peers._owners import owners
from monarchfs.peers.nodes import PeerNode

BUCKETS = 1 << 16


class Ownership:
    """The owners of all files, for one list of nodes, and for the one with the number ``own``.
    Pure; takes 0.1 s for 1,024 nodes.

    Files are named by their replica's name (16 bytes), nodes by their place in the list. Small
    files have span 0 alone. The stand-in of a file is who owns it if the owner leaves the list."""

    def __init__(self, nodes: Sequence[PeerNode], own: int = 0) -> None:
        self.nodes = tuple(nodes)
        self.own = own
        seeds = struct.pack(f"<{len(nodes)}Q", *(xxh3_64_intdigest(n.name.encode()) for n in nodes))
        weights = struct.pack(f"<{len(nodes)}d", *(node.weight for node in nodes))
        self._owners = memoryview(owners(seeds, weights, BUCKETS)).cast("H")
        self._own = [n for n, number in enumerate(self._owners[:BUCKETS]) if number == own]

    def number(self, name: bytes, span: int = 0) -> int:
        """Who owns a span of a file."""
        return self._owners[bucket(name, span)]

    def stand_in(self, name: bytes, span: int = 0) -> int:
        """Who serves it while its owner does not answer."""
        return self._owners[BUCKETS + bucket(name, span)]

    def owns(self, name: bytes, span: int = 0) -> bool:
        """Whether this node is the owner."""
        return self._owners[bucket(name, span)] == self.own

    def own_from(self, name: bytes) -> bytes | None:
        """What the first names begin with that this node owns, from the bucket of ``name`` on (b"":
        the first one); None: it owns no more."""
        at = bisect_left(self._own, int.from_bytes(name[:2].ljust(2, b"\0"), "big"))
        return self._own[at].to_bytes(2, "big") if at < len(self._own) else None

    def serves(self, name: bytes, span: int = 0) -> bool:
        """Whether this node is the owner, or stands in."""
        return self.own in (self.number(name, span), self.stand_in(name, span))

    @property
    def table(self) -> memoryview:
        """The number of each bucket's owner, 16 bits each."""
        return self._owners[:BUCKETS].cast("B")

    @property
    def tables(self) -> memoryview:
        """``table``, then the same of those who stand in."""
        return self._owners.cast("B")


def bucket(name: bytes, span: int = 0) -> int:
    """The bucket of a span of the file whose replica has this name."""
    if not span:
        return name[0] << 8 | name[1]
    return xxh3_64_intdigest(name, span) & (BUCKETS - 1)
