"""A placement over imagined tiers, and the look-up of what lies there."""

from collections.abc import Iterable

from monarchfs.cache.placement import events
from monarchfs.cache.placement.events import Action, Evict, Move, Place
from monarchfs.cache.placement.ledger import reservation
from monarchfs.cache.placement.placement import Placement
from monarchfs.types import EvictionPolicy, Space
from tests.support.accounts import check_accounts

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCK = 4 * KIB

ROOMY = Space(1000 * GIB, 1000 * GIB, 1_000_000, 1_000_000)


class FakeLookup:
    """What the index would say."""

    def __init__(self) -> None:
        self.replicas: dict[int, tuple[int, int]] = {}  # ino: tier, allocated
        self.open: set[int] = set()
        self.stale: set[int] = set()
        self.owned_elsewhere: set[int] = set()
        self.awaited_inos: set[int] = set()
        self.asked = 0

    def allocated_bytes(self, ino: int, tier: int) -> int | None:
        self.asked += 1
        at, allocated = self.replicas.get(ino, (None, 0))
        return allocated if at == tier else None

    def evictable(self, ino: int) -> bool:
        return ino not in self.open

    def outdated(self, tier: int) -> Iterable[int]:
        return [ino for ino in self.any(tier) if ino in self.stale]

    def any(self, tier: int) -> Iterable[int]:
        return [ino for ino, (at, _) in self.replicas.items() if at == tier]

    def foreign(self, tier: int) -> Iterable[int]:
        return filter(self.is_foreign, self.any(tier))

    def is_foreign(self, ino: int) -> bool:
        return ino in self.owned_elsewhere

    def awaited(self, ino: int) -> bool:
        return ino in self.awaited_inos


def placement_of(*capacities: int) -> Placement:
    """Tiers 0, 1, ... of these capacities on file systems with plenty of room."""
    placement = Placement(range(len(capacities)), FakeLookup(), reserve_percent=10)
    for tier, capacity in enumerate(capacities):
        placement.handle(events.TierSeen(tier, capacity, ROOMY))
    return placement


def run(placement: Placement, *happened: events.PlacementEvent) -> list[Action]:
    actions = []
    for event in happened:
        actions += placement.handle(event)
        check_accounts(placement)
    return actions


def placed(ino: int, tier: int, size: int) -> Place:
    return Place(ino, tier, reservation(size), True)


class Node:
    """A placement whose actions are carried out at once in the look-up, but for what is leaving or
    moving: that ends when it is told to."""

    def __init__(
        self,
        *capacities: int,
        eviction: EvictionPolicy = EvictionPolicy.KEEP,
        reserve_percent: float = 10.0,
    ) -> None:
        self.lookup = FakeLookup()
        self.capacities = capacities
        self.placement = Placement(
            range(len(capacities)), self.lookup, eviction=eviction, reserve_percent=reserve_percent
        )
        for tier, capacity in enumerate(capacities):
            self.run(events.TierSeen(tier, capacity, ROOMY))

    def run(self, *happened: events.PlacementEvent) -> list[Action]:
        actions = []
        for event in happened:
            stored = event.files if isinstance(event, events.Stored) else ()
            for ino, size in stored:
                self.lookup.replicas[ino] = (self.placement._copies.get(ino).tier, size)
            done = run(self.placement, event)
            for action in done:
                if isinstance(action, Evict):
                    assert self.lookup.replicas.pop(action.ino) == (
                        action.tier,
                        action.allocated_bytes,
                    )
            actions += done
        return actions

    def store(self, ino: int, blocks: int) -> list[Action]:
        """Somebody opens a file, which is copied, and the removals for it are done."""
        actions = self.run(events.Wanted(ino, (blocks - 1) * BLOCK, True))
        if isinstance(actions[-1], Place):
            self.gone(actions)
            self.run(events.Stored([(ino, blocks * BLOCK)]))
        return actions

    def gone(self, actions: list[Action]) -> None:
        evicted = [action for action in actions if isinstance(action, Evict)]
        self.run(*(events.Evicted(action.ino, action.tier) for action in evicted))

    def moved(self, move: Action) -> list[Action]:
        """A move is done, and the old file removed."""
        assert isinstance(move, Move)
        _, allocated = self.lookup.replicas[move.ino]
        self.lookup.replicas[move.ino] = (move.to, allocated)
        actions = self.run(events.Moved(move.ino, allocated))
        self.run(events.Evicted(move.ino, move.tier))
        return actions

    def load(self, tier: int, sizes: dict[int, int]) -> None:
        """Replicas (of so many blocks) that an earlier mount left."""
        for ino, blocks in sizes.items():
            self.lookup.replicas[ino] = (tier, blocks * BLOCK)
        self.run(events.Loaded(tier, len(sizes), sum(sizes.values()) * BLOCK))

    def shrink(self, blocks: int, tier: int = 0, *, demote: bool = False) -> list[Action]:
        return self.run(events.TierSeen(tier, blocks * BLOCK, ROOMY, 0, demote))


def full_node(eviction: EvictionPolicy, *more: int) -> Node:
    """Ten replicas, 20 to 29, of ten blocks each fill the first tier; the others have so many
    blocks. Later files weigh more."""
    node = Node(100 * BLOCK, *(blocks * BLOCK for blocks in more), eviction=eviction)
    node.run(events.Weighed([(ino, float(ino)) for ino in range(20, 60)]))
    for ino in range(20, 30):
        assert node.store(ino, 10) == [placed(ino, 0, 9 * BLOCK)]
    return node


def evicted(actions: list[Action]) -> list[int]:
    return [action.ino for action in actions if isinstance(action, Evict)]
