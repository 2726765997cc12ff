"""Which files go where, by the placement that a mount uses. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from monarchfs.cache.placement.events import (
    Grant,
    Loaded,
    Place,
    RoomWanted,
    Stored,
    TierSeen,
    Wanted,
)
from monarchfs.cache.placement.ledger import BLOCK_BYTES
from monarchfs.cache.placement.placement import Placement
from monarchfs.types import Space

_STEP_BYTES = 64 << 20
_CHUNK_BYTES = 128 << 10
_SMALLEST_CLASS = 4 << 10
_STEP_OF_CLASSES = 16


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier as placement sees it. It has ``held_files`` of this dataset already, with
    ``held_bytes`` in blocks; ``space`` is without these. Of the ``size_bytes`` that it was given,
    ``usable_bytes`` could be added now; ``limited_by`` says why not more."""

    path: str
    capacity_bytes: int
    space: Space
    size_bytes: int
    usable_bytes: int
    limited_by: str
    held_files: int = 0
    held_bytes: int = 0


@dataclass(slots=True)
class Amount:
    files: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.files += 1
        self.bytes += size


def total(*amounts: Amount) -> Amount:
    return Amount(sum(a.files for a in amounts), sum(a.bytes for a in amounts))


@dataclass(slots=True)
class Sizes:
    """How many files have which size, in classes up to 4K, 64K, 1M, 16M, ..."""

    classes: list[Amount] = field(default_factory=list)

    def add(self, size: int) -> None:
        number, most = 0, _SMALLEST_CLASS
        while size > most:
            number, most = number + 1, most * _STEP_OF_CLASSES
        while len(self.classes) <= number:
            self.classes.append(Amount())
        self.classes[number].add(size)

    def to_json(self) -> list[dict[str, int]]:
        return [
            {"up_to_bytes": _SMALLEST_CLASS * _STEP_OF_CLASSES**number, **asdict(amount)}
            for number, amount in enumerate(self.classes)
        ]


@dataclass(slots=True)
class Fitted:
    """``tiers`` has what was placed in each (whole files and parts), ``whole`` the whole files of
    all tiers, ``partial`` the files kept in part, with the bytes that are kept, ``remote`` the
    files without a copy, and the missing bytes of partial ones."""

    tiers: list[Amount]
    whole: Amount = field(default_factory=Amount)
    partial: Amount = field(default_factory=Amount)
    remote: Amount = field(default_factory=Amount)


class NoReplicas:
    """A replica lookup that knows none: in a plan nothing is evicted, and outdated replicas count
    as removed."""

    def allocated_bytes(self, ino: int, tier: int) -> int | None:
        return None

    def evictable(self, ino: int) -> bool:
        return False

    def outdated(self, tier: int) -> Iterable[int]:
        return ()

    def any(self, tier: int) -> Iterable[int]:
        return ()

    def foreign(self, tier: int) -> Iterable[int]:
        return ()

    def is_foreign(self, ino: int) -> bool:
        return False

    def awaited(self, ino: int) -> bool:
        return False


def fit(
    files: Iterable[tuple[int, int]], rooms: Sequence[PlannedTier], reserve_percent: float
) -> Fitted:
    """Places files in this order, like a mount with ``--evict keep``. Each file is given by its
    size, and by what a copy occupies: less if it has holes."""
    placement = Placement(range(len(rooms)), NoReplicas(), reserve_percent=reserve_percent)
    for number, room in enumerate(rooms):
        placement.handle(Loaded(number, room.held_files, room.held_bytes))
        placement.handle(TierSeen(number, room.capacity_bytes, room.space))
    fitted = Fitted([Amount() for _ in rooms])
    for ino, (size, occupied) in enumerate(files):
        (action,) = placement.handle(Wanted(ino, occupied))
        if not isinstance(action, Place):
            fitted.remote.add(size)
        elif action.whole:
            placement.handle(Stored([(ino, blocks(occupied))]))
            fitted.tiers[action.tier].add(size)
            fitted.whole.add(size)
        else:
            granted = _grow(placement, ino, occupied)
            placement.handle(Stored([(ino, blocks(granted))]))
            kept = granted * size // occupied
            fitted.tiers[action.tier].add(kept)
            fitted.partial.add(kept)
            fitted.remote.bytes += size - kept
    return fitted


def blocks(size: int) -> int:
    """What a file of that size occupies."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _grow(placement: Placement, ino: int, size: int) -> int:
    """The number of bytes for which there is room."""
    granted, step = 0, _STEP_BYTES
    while granted < size and step >= _CHUNK_BYTES:
        wanted = min(step, size - granted)
        (action,) = placement.handle(RoomWanted(ino, wanted))
        if isinstance(action, Grant):
            granted += wanted
        else:
            step //= 2
    return granted
