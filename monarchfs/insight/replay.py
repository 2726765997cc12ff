"""What other tiers, policies and prefetch modes would have kept: the files of a recording, put once
more through the placement that mounts and ``monarchfs plan`` use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from monarchfs.cache.placement.events import (
    Accessed,
    Evict,
    Evicted,
    Grant,
    Move,
    Moved,
    Place,
    PlacementEvent,
    RoomWanted,
    Stored,
    TierSeen,
    Wanted,
    Weighed,
)
from monarchfs.cache.placement.placement import Placement
from monarchfs.insight.estimates import COPY_FILES_PER_SECOND
from monarchfs.insight.fitting import NoReplicas, blocks
from monarchfs.insight.recording import File
from monarchfs.insight.results import Epoch, Outcome
from monarchfs.insight.visits import LookUps, Visit, Visits
from monarchfs.types import EvictionPolicy, Space

_ROOMY = Space(1 << 62, 1 << 62, 1 << 40, 1 << 40)
_STEP_BYTES = 64 << 20
PEER_SECONDS = 0.0005
PEER_BYTES_PER_SECOND = 1e9
"""How much longer a file of another node takes than a local one."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a mount: the capacities of its tiers, fastest first; whether its files are
    ``immutable``; how many ``nodes`` with such tiers share what they have; whether it ``copies``
    what is opened."""

    capacities: tuple[int, ...]
    policy: EvictionPolicy
    scans: bool
    immutable: bool
    nodes: int = 1
    copies: bool = True

    def with_more(self, more_bytes: int) -> Setup:
        """With a larger last tier."""
        *first, last = self.capacities
        return replace(self, capacities=(*first, last + more_bytes))


class SimulatedNode(NoReplicas):
    """Tiers and what lies there; of nodes that share, the tiers of all. Copies take no time, and
    what leaves is gone at once. Changing: that; ``stored``, how many files were copied."""

    def __init__(self, setup: Setup, one_of: int = 1) -> None:
        self._at: dict[int, tuple[int, int]] = {}
        self.stored = 0
        self._copies = setup.copies
        tiers = range(len(setup.capacities))
        self._placement = Placement(tiers, self, eviction=setup.policy, reserve_percent=0)
        for tier, capacity in enumerate(setup.capacities):
            self._handle(TierSeen(tier, capacity * setup.nodes // one_of, _ROOMY))

    def weigh(self, weights: list[tuple[int, float]]) -> None:
        self._handle(Weighed(weights))

    def allocated_bytes(self, ino: int, tier: int) -> int | None:
        at, allocated = self._at.get(ino, (None, 0))
        return allocated if at == tier else None

    def evictable(self, ino: int) -> bool:
        return ino in self._at

    def any(self, tier: int) -> Iterable[int]:
        return (ino for ino, (at, _) in self._at.items() if at == tier)

    def open(self, ino: int, size: int) -> float:
        """The share of the file that is local; a copy is made of what is not, if it fits, and if
        the mount copies what is opened."""
        if ino in self._at:
            tier, allocated = self._at[ino]
            self._handle(Accessed(ino, tier))
            return min(1.0, allocated / max(size, 1))
        self._handle(Accessed(ino, None))
        if self._copies:
            self.copy(ino, size, evicts=True)
        return 0.0

    def copy(self, ino: int, size: int, *, evicts: bool) -> None:
        if ino in self._at:
            return
        place = self._handle(Wanted(ino, size, evicts))
        if not isinstance(place, Place):
            return
        occupied = blocks(size if place.whole else self._grow(ino, size))
        self._handle(Stored([(ino, occupied)]))
        self.stored += 1
        self._at[ino] = place.tier, occupied

    def _grow(self, ino: int, size: int) -> int:
        granted = 0
        while granted < size:
            wanted = min(_STEP_BYTES, size - granted)
            if self._handle(RoomWanted(ino, wanted)) is None:
                break
            granted += wanted
        return granted

    def _handle(self, event: PlacementEvent) -> Place | Grant | None:
        """Carries out what placement decides; what it granted."""
        answer = None
        for action in self._placement.handle(event):
            match action:
                case Place() | Grant():
                    answer = action
                case Evict(ino, tier):
                    del self._at[ino]
                    self._handle(Evicted(ino, tier))
                case Move(ino, tier, to):
                    allocated = self._at[ino][1]
                    self._at[ino] = to, allocated
                    self._handle(Moved(ino, allocated))
                    self._handle(Evicted(ino, tier))
                case _:
                    pass
        return answer


@dataclass(slots=True)
class _Replayed:
    bytes: float = 0.0
    local_bytes: float = 0.0
    seconds: float = 0.0


class Replay:
    """Replays visits with one setup after the other."""

    def __init__(
        self,
        found: Visits,
        sampled: int,
        files: Mapping[int, File],
        bytes_per_second: float,
        present: Setup,
    ) -> None:
        """One of so many files was recorded, with the ``present`` settings. ``--prefetch all``
        copies in the order of the ``files``' paths, as fast as the source gave what readers waited
        for."""
        self._found, visits = found, found.all
        self._one_of = found.one_of * sampled
        sizes = {visit.ino: visit.size for visit in visits}
        nameless = File("", 0)
        self._sizes = {
            ino: sizes[ino] for ino in sorted(sizes, key=lambda ino: files.get(ino, nameless).path)
        }
        first: dict[int, Visit] = {}
        for visit in visits:
            first.setdefault(visit.ino, visit)
        self._there_before = [v.ino for v in first.values() if v.remote_bytes == 0]
        self._bytes_per_second = bytes_per_second
        self._setup, self._present = present, self._play(present)

    @property
    def bytes_needed(self) -> int:
        """The room that all files take, with what the last one reserves."""
        return (sum(map(blocks, self._sizes.values())) + 2 * blocks(1)) * self._one_of

    def run(self, change: str, setup: Setup, epoch: Epoch, first: Epoch) -> Outcome:
        """What ``epoch`` and the ``first`` would take."""
        found = self._present if setup == self._setup else self._play(setup)
        later = found.get(epoch.number, _Replayed())
        return Outcome(
            change,
            later.local_bytes / (later.bytes or 1),
            self._estimate(epoch, later, setup.immutable),
            self._estimate(first, found.get(first.number, _Replayed()), setup.immutable),
        )

    def _play(self, setup: Setup) -> dict[int, _Replayed]:
        node, found = SimulatedNode(setup, self._one_of), dict[int, _Replayed]()
        for ino in self._there_before:
            node.copy(ino, self._sizes[ino], evicts=False)
        ahead = self._copied_ahead() if setup.scans else iter(())
        coming = next(ahead, None)
        elsewhere = 1 - 1 / setup.nodes
        for visit in self._found.all:
            while coming is not None and coming[0] <= visit.begin:
                node.copy(coming[1], self._sizes[coming[1]], evicts=False)
                coming = next(ahead, None)
            local = node.open(visit.ino, visit.size)
            one = found.setdefault(visit.epoch, _Replayed())
            one.bytes += visit.bytes
            one.local_bytes += visit.bytes * local
            seconds = visit.local - visit.checks * setup.immutable
            seconds += elsewhere * (PEER_SECONDS + visit.bytes / PEER_BYTES_PER_SECOND)
            one.seconds += seconds * local + visit.remote * (1 - local)
        return found

    def _estimate(self, epoch: Epoch, replayed: _Replayed, immutable: bool) -> float:
        """The epoch's time, if what its readers waited for changes in proportion: from what the
        replay says of the present setup, so that what it cannot know does not count."""
        look_ups = self._found.look_ups.get(epoch.number, LookUps())
        present = self._present.get(epoch.number, _Replayed()).seconds * self._found.one_of
        expected = replayed.seconds * self._found.one_of - look_ups.again * immutable
        now = present + look_ups.seconds
        change = (present - expected) / now if now else 0.0
        around = look_ups.around / max(1.0, epoch.readers) if immutable else 0.0
        return max(0.0, epoch.seconds - epoch.span.waited * change - around)

    def _copied_ahead(self) -> Iterator[tuple[float, int]]:
        """(when, which file)."""
        moment = min((visit.begin for visit in self._found.all), default=0.0)
        for ino, size in self._sizes.items():
            seconds = max(size / (self._bytes_per_second or 1), 1 / COPY_FILES_PER_SECOND)
            moment += seconds * self._one_of
            yield moment, ino
