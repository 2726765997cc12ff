"""Which replicas go: looking for those that may, in the order in which they should."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, takewhile
from typing import NamedTuple, Protocol

from monarchfs.cache.placement.events import EvictionReason, Owner
from monarchfs.cache.placement.ledger import Ledger
from monarchfs.cache.placement.policies import Policy

MOST_EXAMINED = 1_000
"""So many replicas are looked at for one event, which keeps the event loop for about 2 ms."""


class ReplicaLookup(Protocol):
    """The replicas at rest, which placement looks up instead of remembering them.

    It has to answer from memory, or from a memory map: every method is called on the event loop, up
    to 1,000 times for one event.

    It may still show replicas that placement has just decided to evict: placement knows those.
    """

    def allocated_bytes(self, ino: int, tier: int) -> int | None:
        """The size of the replica of ``ino`` at rest in ``tier``. None if there is none, if it is
        being filled, or if it lies in another tier."""

    def evictable(self, ino: int) -> bool:
        """Whether the replica may go now: at rest, not open and not pinned."""

    def awaited(self, ino: int) -> bool:
        """Whether it is about to be opened: it does not go for another file."""

    def outdated(self, tier: int) -> Iterable[int]:
        """The replicas of the tier that nobody will open again: of versions that the source no
        longer has, and found ones. Must be cheap if there are none, because it is called for each
        file that does not fit."""

    def any(self, tier: int) -> Iterable[int]:
        """The replicas of the tier, in any order, consumed lazily. It should start at another place
        each time: else the same 1,000 that may not go could hide all others."""

    def foreign(self, tier: int) -> Iterable[int]:
        """As ``any``, replicas of files that other nodes own alone; cheap if there are none."""

    def is_foreign(self, ino: int) -> bool:
        """Whether the replica is one of those."""


class Budget:
    """How many more replicas may be examined for the event."""

    __slots__ = ("left",)

    def __init__(self, left: int = MOST_EXAMINED) -> None:
        self.left = left


class Victim(NamedTuple):
    ino: int
    allocated_bytes: int
    reason: EvictionReason


class Victims:
    """Finds victims, and evicts none. Only the policy's order changes, see there."""

    def __init__(
        self, lookup: ReplicaLookup, policy: Policy, busy: Callable[[int, int], bool]
    ) -> None:
        """``busy`` tells whether a replica (inode, tier) is leaving or moving already."""
        self.allocated_bytes = lookup.allocated_bytes
        self._lookup = lookup
        self._policy = policy
        self._busy = busy

    def enough(
        self,
        tier: int,
        ledger: Ledger,
        need_bytes: int,
        files: int,
        live_for: int | None,
        owner: Owner,
        budget: Budget,
    ) -> list[Victim] | None:
        """The victims that make room for ``need_bytes`` in ``files`` new files of this ``owner``;
        None if there are not enough. ``live_for``: for this file also replicas that may be opened
        again go, in the policy's order."""
        bytes_short = need_bytes - ledger.room_bytes()
        files_short = files - ledger.room_inodes() if files else 0
        if bytes_short > ledger.used_bytes - ledger.departing_bytes or files_short > ledger.files:
            return None
        found: list[Victim] = []
        for victim in self._candidates(tier, self._sources(tier, live_for, owner), budget):
            if files_short <= 0 and not victim.allocated_bytes:
                continue
            found.append(victim)
            bytes_short -= victim.allocated_bytes
            files_short -= 1
            if bytes_short <= 0 and files_short <= 0:
                return found
        return None

    def _sources(
        self, tier: int, live_for: int | None, owner: Owner
    ) -> Iterator[tuple[EvictionReason, Iterable[int]]]:
        yield EvictionReason.OUTDATED, self._lookup.outdated(tier)
        if owner is Owner.THIS_NODE:
            yield EvictionReason.POLICY, self._lookup.foreign(tier)
        if live_for is not None and self._policy.tracks:
            inos: Iterable[int] = islice(self._policy.victims(tier), MOST_EXAMINED)
            if self._policy.selective:
                inos = takewhile(partial(self._policy.displaces, live_for), inos)
            if owner is Owner.OTHER_NODE:
                inos = filter(self._lookup.is_foreign, inos)
            yield EvictionReason.POLICY, inos

    def for_pressure(self, tier: int, budget: Budget) -> Iterator[Victim]:
        """All that may go if the tier has to shrink, whatever the policy."""
        # The sources are opened one after the other: a caller who stops early asks for no more.
        names = chain(self._policy.victims(tier), _later(lambda: self._lookup.any(tier)))
        sources: list[tuple[EvictionReason, Iterable[int]]] = [
            (EvictionReason.OUTDATED, self._lookup.outdated(tier)),
            (EvictionReason.PRESSURE, names),
        ]
        return self._candidates(tier, sources, budget)

    def outdated(self, tier: int, budget: Budget) -> Iterator[Victim]:
        """The outdated replicas that may go."""
        sources = [(EvictionReason.OUTDATED, self._lookup.outdated(tier))]
        return self._candidates(tier, sources, budget)

    def coldest(self, tier: int, budget: Budget) -> Victim | None:
        """The coldest replica that may go, by the policy."""
        sources = [(EvictionReason.POLICY, self._policy.victims(tier))]
        return next(self._candidates(tier, sources, budget), None)

    def may_go(self, ino: int, tier: int) -> int | None:
        """The bytes of a replica that may go; None if it may not, or is not there."""
        allocated_bytes = self._lookup.allocated_bytes(ino, tier)
        if allocated_bytes is None:
            # The policy heard of it too late, or too early.
            self._policy.removed(tier, ino)
            return None
        if self._busy(ino, tier) or not self._lookup.evictable(ino):
            self._policy.spared(tier, ino)
            return None
        return allocated_bytes

    def _candidates(
        self,
        tier: int,
        sources: Iterable[tuple[EvictionReason, Iterable[int]]],
        budget: Budget,
    ) -> Iterator[Victim]:
        seen: set[int] = set()
        for reason, inos in sources:
            for ino in inos:
                if not budget.left:
                    return
                budget.left -= 1
                if ino in seen:
                    continue
                seen.add(ino)
                if reason is EvictionReason.POLICY and self._lookup.awaited(ino):
                    self._policy.spared(tier, ino)
                    continue
                allocated_bytes = self.may_go(ino, tier)
                if allocated_bytes is not None:
                    yield Victim(ino, allocated_bytes, reason)


def _later(iterable: Callable[[], Iterable[int]]) -> Iterator[int]:
    yield from iterable()
