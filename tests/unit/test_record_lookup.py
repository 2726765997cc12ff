"""Which replicas of other nodes go first: the search for them, and its bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from monarchfs.cache.record_lookup import MOST_NAMES, RecordLookup
from monarchfs.types import TierTotals


class Held(NamedTuple):
    name: bytes
    size: int


class FakeReplicas:
    """One tier; replicas by inode number. Counts the names that were asked for."""

    def __init__(self, names: list[bytes]) -> None:
        self.held = {ino: Held(name, 10) for ino, name in enumerate(sorted(names), start=1)}
        self.asked = 0

    def replica(self, ino: int) -> Held | None:
        return self.held.get(ino)

    def names(self, tier: int, prefix: bytes, after: bytes, limit: int) -> list[tuple[bytes, int]]:
        rows = [(held.name, ino) for ino, held in self.held.items() if held.name > after][:limit]
        self.asked += len(rows)
        return rows

    def tier_totals(self) -> dict[int, TierTotals]:
        return {0: TierTotals(resident=len(self.held))}


def lookup_of(replicas: FakeReplicas) -> RecordLookup:
    """This node owns the names that begin with an o."""
    index: Any = SimpleNamespace(replicas=replicas)
    unused: Any = None
    return RecordLookup(index, set(), set(), unused, lambda name, size: name.startswith(b"o"))


def names_of(first: bytes, count: int) -> list[bytes]:
    return [first + b"%06d" % number for number in range(count)]


def test_each_foreign_replica_is_found_once_wherever_the_last_search_ended() -> None:
    replicas = FakeReplicas(names_of(b"o", 300) + names_of(b"a", 20) + names_of(b"z", 20))
    lookup = lookup_of(replicas)
    foreign = {ino for ino in replicas.held if lookup.is_foreign(ino)}
    assert len(foreign) == 40
    first = [ino for ino, _ in zip(lookup.foreign(0), range(7), strict=False)]
    again = list(lookup.foreign(0))
    assert len(set(first)) == 7
    assert set(again) == foreign
    assert len(again) == 40


def test_a_search_in_vain_is_short_and_not_repeated_before_one_is_stored() -> None:
    replicas = FakeReplicas(names_of(b"o", 3 * MOST_NAMES))
    lookup = lookup_of(replicas)
    for _ in range(5):
        before = replicas.asked
        assert list(lookup.foreign(0)) == []
        assert replicas.asked - before < 1.2 * MOST_NAMES
    asked = replicas.asked
    assert list(lookup.foreign(0)) == []
    assert replicas.asked == asked
    replicas.held[10**6] = Held(b"z", 10)
    lookup.foreign_stored()
    assert any(list(lookup.foreign(0)) for _ in range(5))
