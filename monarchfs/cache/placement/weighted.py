"""The policy ``weighted``: what is read more often stays, and lies in the faster tier.

A weight says how often each byte of a file will be read, compared with those of other files. It is
not divided by the size: a file that is kept saves its weight times its size, and takes its size.

Opens are counted, and counts fade. A victim goes only for a file that weighs more by two opens
and a quarter of the victim's count: files that are read once an epoch never differ by so much, so
nothing goes for them. Users' weights take the place of counts.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from monarchfs.cache.placement.by_inode import ByInode, InodeHeap

AGEING_OPENS = 2
"""After so many opens for each file, an open counts twice as much as one before."""

MARGIN_OPENS = 2
"""Files that are opened once in each epoch differ by one open at any moment; ageing adds less than
1/2 + 1/4 + ... to that. So their counts never differ by so much, and such jobs evict nothing."""

MARGIN_SHARE = 0.25
"""Of the victim's count, on top: where files are drawn at random, counts differ by chance."""

_RESTORED = 2
"""So many spared replicas come back into the order for each search."""

_LARGE = 2.0**200


class Weighted:
    """By given weights, or by the number of opens, aged, as long as none were given.

    Changing: per tier the replicas by weight; the weights and the opens of all files, also of those
    without a replica; ``_unit``, what an open counts now. It doubles with time, so that no count
    has to be halved. Replicas that were spared have an infinite key until they are opened, or until
    their turn comes: a thousand pinned ones must not hide all others.
    """

    tracks = True
    selective = True

    def __init__(self) -> None:
        self._tiers = defaultdict[int, InodeHeap](InodeHeap)
        self._given: ByInode[float] | None = None
        self._opens = ByInode(array("d", [0.0]))
        self._unit = 1.0
        self._files = 0
        self._period_opens = 0
        self._spared: dict[int, int] = {}

    def added(self, tier: int, ino: int) -> None:
        if ino not in self._tiers[tier]:
            self._put(tier, ino)

    def known(self, tier: int, ino: int) -> None:
        self.added(tier, ino)

    def missed(self, ino: int) -> None:
        if self._given is not None:
            return
        opens = self._opens.get(ino)
        self._files += not opens
        self._opens.put(ino, opens + self._unit)
        self._period_opens += 1
        if self._period_opens >= AGEING_OPENS * self._files:
            self._period_opens = 0
            self._unit *= 2
            if self._unit >= _LARGE:
                self._scale_down()

    def accessed(self, tier: int, ino: int) -> None:
        self.missed(ino)
        if self._given is None or ino in self._spared or ino not in self._tiers[tier]:
            self._put(tier, ino)

    def removed(self, tier: int, ino: int) -> None:
        heap = self._tiers[tier]
        if ino in heap:
            heap.remove(ino)
            self._spared.pop(ino, None)

    def moved(self, ino: int, tier: int, to: int) -> None:
        self.removed(tier, ino)
        self.added(to, ino)

    def spared(self, tier: int, ino: int) -> None:
        heap = self._tiers[tier]
        if ino in heap:
            heap.put(ino, math.inf)
            self._spared[ino] = tier

    def last_access(self, tier: int, ino: int) -> int:
        return 1

    def outranks(self, ino: int, last_access: int, cold: int, tier: int) -> bool:
        return self.displaces(ino, cold)

    def displaces(self, ino: int, victim: int) -> bool:
        if self._given is not None:
            return self._given.get(ino) > self._given.get(victim)
        opens, others = self._opens.get(ino), self._opens.get(victim)
        return opens - others >= MARGIN_OPENS * self._unit + MARGIN_SHARE * others

    def weigh(self, weights: Iterable[tuple[int, float]], *, replace: bool) -> None:
        if self._given is None or replace:
            self._given = ByInode(array("d", [0.0]))
            self._spared.clear()
            for heap in self._tiers.values():
                heap.equalize()
        for ino, weight in weights:
            self._given.put(ino, weight)
            for tier, heap in self._tiers.items():
                if ino in heap:
                    self._put(tier, ino)

    def victims(self, tier: int) -> Iterator[int]:
        for ino, at in list(islice(self._spared.items(), _RESTORED)):
            self._put(at, ino)
        yield from self._tiers[tier].ascending()

    def _weight(self, ino: int) -> float:
        return (self._opens if self._given is None else self._given).get(ino)

    def _put(self, tier: int, ino: int) -> None:
        self._spared.pop(ino, None)
        self._tiers[tier].put(ino, self._weight(ino))

    def _scale_down(self) -> None:
        for heap in self._tiers.values():
            heap.divide(self._unit)
        for number, page in self._opens.pages.items():
            self._opens.pages[number] = array("d", [opens / self._unit for opens in page])
        self._unit = 1.0
