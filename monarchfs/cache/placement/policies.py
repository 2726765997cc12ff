"""Which replica is the next to go: eviction policies behind one interface, pure and in memory.

A tracked replica costs ``Sieve`` about 24 bytes and ``Lru`` about 32 where inode numbers lie close
together, as those of one dataset do; up to 400 more where only one number in 64 has a replica.
``Weighted`` takes about 24, and 10 more for each file that was opened or weighed.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

from monarchfs.cache.placement.by_inode import ByInode
from monarchfs.cache.placement.weighted import Weighted
from monarchfs.types import EvictionPolicy

VISITED_STEPS = 10_000
"""So many visited replicas are passed over to find a victim: a millisecond's work. Where all that
many were visited, the mark says nothing, and the next one is taken as it is."""


class Policy(Protocol):
    """Orders the replicas of each tier by how cold they are.

    If ``tracks``, it hears of every replica that it may name. It may name replicas that are gone:
    the caller checks. No method raises for a replica that is unknown, or known already. What is
    here names nobody, and to it all files are the same but for when they are used.
    """

    tracks: bool = True
    """Whether it has to hear of replicas and opens."""

    selective: bool = False
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
            return Keep()
        case EvictionPolicy.LRU:
            return Lru()
        case EvictionPolicy.SIEVE:
            return Sieve()
        case EvictionPolicy.WEIGHTED:
            return Weighted()


class Keep(Policy):
    """Names nobody."""

    tracks = False


class _Queued(Policy):
    """Has a queue of the replicas for each tier, with a number for each, 0 for one that is left
    from an earlier mount."""

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
