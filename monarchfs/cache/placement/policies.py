"""Which replica is the next to go: eviction policies behind one interface, pure and in memory.

A tracked replica costs ``Sieve`` about 24 bytes and ``Lru`` about 32 where inode numbers lie close
together, as those of one dataset do; up to 400 more where only one number in 64 has a replica.
``Weighted`` takes about 24, and 10 more for each file that was opened or weighed.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from monarchfs.cache.placement.by_inode import ByInode, InodeHeap
from monarchfs.types import EvictionPolicy

VISITED_STEPS = 10_000
"""So many visited replicas are passed over to find a victim: a millisecond's work. Where all that
many were visited, the mark says nothing, and the next one is taken as it is."""


class Policy:
    """Orders the replicas of each tier by how cold they are.

    If ``tracks``, it hears of every replica that it may name. It may name replicas that are gone:
    the caller checks. No method raises for a replica that is unknown, or known already. This one,
    ``keep``, names nobody, and to it all files are the same but for when they are used.
    """

    tracks = False
    """Whether it has to hear of replicas and opens."""

    selective = False
    """Whether a file may push out only those that it ``displaces``."""

    def added(self, tier: int, ino: int) -> None:
        """A replica was stored: the hottest from now on, unless it is known."""
        return

    def known(self, tier: int, ino: int) -> None:
        """A replica is left from an earlier mount: the coldest from now on, unless it is known."""
        return

    def accessed(self, tier: int, ino: int) -> None:
        """It was opened. One that is not known is added."""
        return

    def removed(self, tier: int, ino: int) -> None:
        """It is gone, or about to go."""
        return

    def moved(self, ino: int, tier: int, to: int) -> None:
        """It is in the tier ``to`` now."""
        return

    def missed(self, ino: int) -> None:
        """A file without a complete replica was opened."""
        return

    def weigh(self, weights: Iterable[tuple[int, float]], *, replace: bool) -> None:
        """Users gave these files (number, weight) weights; ``replace``: others have none now."""
        return

    def last_access(self, tier: int, ino: int) -> int:
        """A number that rises with the time of the last access (or arrival); 0 if the replica may
        not change places with one in a faster tier."""
        return 0

    def outranks(self, ino: int, last_access: int, cold: int, tier: int) -> bool:
        """Whether a replica that was just opened, and before that at ``last_access``, may take the
        place of the coldest one, ``cold``, of the faster ``tier``."""
        return self.last_access(tier, cold) < last_access

    def displaces(self, ino: int, victim: int) -> bool:
        """Whether the victim may go for the file ``ino``: asked of a policy that is
        ``selective``."""
        return True

    def victims(self, tier: int) -> Iterator[int]:
        """The tier's replicas, coldest first, each once.

        The consumer may stop at any time. A replica that was not ``removed`` before the next one is
        asked for stays tracked: if it was ``spared``, or the policy goes by time, behind those that
        were not yielded yet. No other method may be called in between.
        """
        return iter(())

    def spared(self, tier: int, ino: int) -> None:
        """It was named, and may not go now: it is open or pinned."""
        return


def make_policy(eviction: EvictionPolicy) -> Policy:
    match eviction:
        case EvictionPolicy.KEEP:
            return Policy()
        case EvictionPolicy.LRU:
            return Lru()
        case EvictionPolicy.SIEVE:
            return Sieve()
        case EvictionPolicy.WEIGHTED:
            return Weighted()


class _Queued(Policy):
    """Has a queue of the replicas for each tier, with a number for each, 0 for one that is left
    from an earlier mount."""

    tracks = True

    def __init__(self, numbers: array[int] | bytearray) -> None:
        self._tiers = defaultdict[int, _Queue](lambda: _Queue(numbers[:]))

    def known(self, tier: int, ino: int) -> None:
        queue = self._tiers[tier]
        if not queue.find(ino):
            queue.push_oldest(ino)

    def removed(self, tier: int, ino: int) -> None:
        queue = self._tiers[tier]
        slot = queue.find(ino)
        if slot:
            queue.remove(slot)


class Lru(_Queued):
    """Least recently used first. Changing: a clock that ticks with each access, and per tier a
    queue and the time of each replica's last access.

    The queue is in the order of the last accesses, except for replicas that were spared or moved:
    these are the hottest in the queue, and keep their time.
    """

    def __init__(self) -> None:
        super().__init__(array("q", [0]))
        self._clock = 0

    def added(self, tier: int, ino: int) -> None:
        queue = self._tiers[tier]
        if not queue.find(ino):
            self._clock += 1
            queue.numbers[queue.push_newest(ino)] = self._clock

    def accessed(self, tier: int, ino: int) -> None:
        queue = self._tiers[tier]
        slot = queue.find(ino)
        if slot:
            queue.to_newest(slot)
        else:
            slot = queue.push_newest(ino)
        self._clock += 1
        queue.numbers[slot] = self._clock

    def moved(self, ino: int, tier: int, to: int) -> None:
        accessed_at = self.last_access(tier, ino)
        self.removed(tier, ino)
        queue = self._tiers[to]
        if not queue.find(ino):
            queue.numbers[queue.push_newest(ino)] = accessed_at

    def last_access(self, tier: int, ino: int) -> int:
        queue = self._tiers[tier]
        slot = queue.find(ino)
        return queue.numbers[slot] if slot else 0

    def victims(self, tier: int) -> Iterator[int]:
        queue = self._tiers[tier]
        for _ in range(len(queue)):
            slot = queue.oldest
            if not slot:
                return
            ino = queue.inos[slot]
            yield ino
            if queue.find(ino) == slot:
                queue.to_newest(slot)


class Sieve(_Queued):
    """SIEVE. Changing, per tier: a queue in order of arrival, a mark on the replicas that were
    accessed since, and a hand, which moves from the oldest to the newest and stays where it
    stopped.

    The hand removes the mark of each replica that it passes. The first one without a mark goes.
    """

    def __init__(self) -> None:
        super().__init__(bytearray(1))

    def added(self, tier: int, ino: int) -> None:
        queue = self._tiers[tier]
        if not queue.find(ino):
            queue.push_newest(ino)

    def accessed(self, tier: int, ino: int) -> None:
        queue = self._tiers[tier]
        slot = queue.find(ino)
        if slot:
            queue.numbers[slot] = 1
        else:
            queue.push_newest(ino)

    def moved(self, ino: int, tier: int, to: int) -> None:
        self.removed(tier, ino)
        self.added(to, ino)

    def victims(self, tier: int) -> Iterator[int]:
        queue = self._tiers[tier]
        steps = VISITED_STEPS
        for _ in range(len(queue)):
            slot = queue.hand or queue.oldest
            while queue.numbers[slot] and steps:
                steps -= 1
                queue.numbers[slot] = 0
                slot = queue.newer[slot] or queue.oldest
            if not slot:
                return
            queue.hand = slot
            yield queue.inos[slot]
            if queue.hand == slot:
                # Spared because it is in use: that counts as an access.
                queue.numbers[slot] = 1
                queue.hand = queue.newer[slot]


class _Queue:
    """A queue of inode numbers, each found in constant time.

    A doubly linked list in arrays; objects would take ten times the memory. Slot 0 is the end on
    both sides: ``newer[0]`` is the oldest, ``older[0]`` the newest. Unused slots are chained by
    ``newer``. ``numbers`` has a number for each slot, ``hand`` is a slot, for the policy.
    """

    def __init__(self, numbers: array[int] | bytearray) -> None:
        """``numbers``: one 0."""
        self.numbers = numbers
        self.hand = 0
        self.inos = array("q", [0])
        self.newer = array("i", [0])
        self.older = array("i", [0])
        self._slots = ByInode(array("i", [0]))
        self._unused = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def oldest(self) -> int:
        return self.newer[0]

    def find(self, ino: int) -> int:
        """Its slot, 0 if it is not here."""
        return self._slots.get(ino)

    def push_newest(self, ino: int) -> int:
        """Its new slot; it must not be here."""
        slot = self._new_slot(ino)
        self._link(slot, self.older[0], 0)
        return slot

    def push_oldest(self, ino: int) -> int:
        """The same at the other end."""
        slot = self._new_slot(ino)
        self._link(slot, 0, self.newer[0])
        return slot

    def to_newest(self, slot: int) -> None:
        self._unlink(slot)
        self._link(slot, self.older[0], 0)

    def remove(self, slot: int) -> None:
        if self.hand == slot:
            self.hand = self.newer[slot]
        self._unlink(slot)
        self._slots.put(self.inos[slot], 0)
        self.newer[slot] = self._unused
        self._unused = slot
        self._length -= 1

    def _link(self, slot: int, older: int, newer: int) -> None:
        self.older[slot] = older
        self.newer[slot] = newer
        self.newer[older] = slot
        self.older[newer] = slot

    def _unlink(self, slot: int) -> None:
        older, newer = self.older[slot], self.newer[slot]
        self.newer[older] = newer
        self.older[newer] = older

    def _new_slot(self, ino: int) -> int:
        slot = self._unused
        if slot:
            self._unused = self.newer[slot]
            self.inos[slot] = ino
            self.numbers[slot] = 0
        else:
            slot = len(self.inos)
            self.inos.append(ino)
            self.newer.append(0)
            self.older.append(0)
            self.numbers.append(0)
        self._slots.put(ino, slot)
        self._length += 1
        return slot


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


class Weighted(Policy):
    """What is read more often stays, and lies in the faster tier: by given weights, or by the
    number of opens, aged, as long as none were given.

    A weight says how often each byte of a file will be read, compared with those of other files. It
    is not divided by the size: a file that is kept saves its weight times its size, and takes its
    size.

    Opens are counted, and counts fade. A victim goes only for a file that weighs more by two opens
    and a quarter of the victim's count: files that are read once an epoch never differ by so much,
    so nothing goes for them. Users' weights take the place of counts.

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
