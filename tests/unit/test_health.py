"""Tiers: when one is out of service, probed, and put back; whether it is as the index says; which
replicas of other nodes go first."""

import errno
import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from monarchfs.cache import tier_comparison as comparison
from monarchfs.cache.record_lookup import MOST_NAMES, RecordLookup
from monarchfs.cache.tiers import (
    CALM_SECONDS,
    FIRST_PROBE_SECONDS,
    LAST_PROBE_SECONDS,
    NOT_THE_TIERS,
    Health,
)
from monarchfs.types import Replica, ReplicaState, TierFile, TierTotals


def error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def test_a_failed_write_takes_it_out_but_what_it_holds_is_served() -> None:
    health = Health()
    assert health.failed(5.0, error(errno.ENOSPC), reading=False)
    assert health.reason is not None
    assert "full" in health.reason
    assert health.readable
    assert not health.failed(6.0, error(errno.EIO), reading=False), "it is out already"
    health = Health()
    for code in (errno.ESTALE, errno.EACCES, *NOT_THE_TIERS):
        assert not health.failed(0.0, error(code), reading=True)
    for code in NOT_THE_TIERS:
        assert not health.failed(0.0, error(code), reading=False)
    assert health.reason is None


def test_it_is_probed_less_and_less_often_also_if_it_fails_again_at_once() -> None:
    health = Health()
    health.failed(0.0, error(errno.EDQUOT), reading=False)
    now, waits = 0.0, []
    for _ in range(10):
        start = now
        while not health.probe_due(now):
            now += 0.5
        waits.append(now - start)
        assert not health.probed(now, error(errno.EROFS))
        assert health.reason is not None
        assert "read-only" in health.reason
    assert waits[0] == FIRST_PROBE_SECONDS
    assert waits == sorted(waits)
    assert waits[-1] == LAST_PROBE_SECONDS
    # One that fails again at once.
    health = Health()
    health.failed(0.0, error(errno.EIO), reading=True)
    assert health.probed(1.0, None)
    assert health.readable
    health.failed(1.5, error(errno.EDQUOT), reading=False)
    assert not health.probe_due(1.5 + FIRST_PROBE_SECONDS)
    assert health.probe_due(1.5 + 2 * FIRST_PROBE_SECONDS)
    assert health.probed(5.0, None)
    health.failed(5.0 + CALM_SECONDS, error(errno.EDQUOT), reading=False)
    assert health.probe_due(5.0 + CALM_SECONDS + FIRST_PROBE_SECONDS)


# Few names and values, so that they meet.
names = st.integers(0, 12).map(lambda n: bytes([n]) * 16)
records = st.builds(
    Replica,
    tier=st.just(1),
    state=st.sampled_from(ReplicaState),
    name=st.just(b""),
    size=st.integers(0, 1),
    allocated_bytes=st.sampled_from([0, 4096]),
    durable=st.booleans(),
    created_ns=st.just(0),
    checksum=st.integers(0, 2),
)
rows_of_names = st.dictionaries(names, records).map(
    lambda found: [
        (name, 100 + name[0], one._replace(name=name)) for name, one in sorted(found.items())
    ]
)
files_of_names = st.dictionaries(
    st.tuples(names, st.integers(0, 2)),
    st.tuples(st.integers(0, 1), st.sampled_from([0, 4096]), st.booleans()),
).map(
    lambda found: [
        TierFile(name, checksum, size, allocated, synced)
        for (name, checksum), (size, allocated, synced) in sorted(found.items())
    ]
)


def expected(rows: list[comparison.Row], files: list[TierFile]) -> set[comparison.Finding]:
    """The same by looking up each name, without any order."""
    lying: dict[bytes, list[TierFile]] = defaultdict(list)
    for one in files:
        lying[one.name].append(one)
    found: set[comparison.Finding] = set()
    for name, ino, record in rows:
        here = lying.pop(name, [])
        complete = record.state is not ReplicaState.PARTIAL
        own = [one for one in here if complete and one.checksum == record.checksum]
        found |= {comparison.WrongChecksumName(ino, record, one) for one in here if one not in own}
        if complete and not own:
            found.add(comparison.MissingFile(ino, record))
        for one in own:
            if one.size != record.size:
                found.add(comparison.WrongSize(ino, record, one))
            elif one.allocated_bytes != record.allocated_bytes:
                found.add(comparison.WrongBlocks(ino, record, one.allocated_bytes))
            if record.durable and not one.synced:
                found.add(comparison.NotSynced(ino, record))
    for here in lying.values():
        found |= {
            comparison.Orphan(one) if len(here) == 1 else comparison.Ambiguous(one) for one in here
        }
    return found


@given(rows_of_names, files_of_names)
def test_the_merge_finds_what_lookups_do(rows: list[comparison.Row], files: list[TierFile]) -> None:
    found = comparison.compare(rows, files)
    assert len(found) == len(set(found))
    assert set(found) == expected(rows, files)


# Which replicas of other nodes go first: the search for them, and its bound


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
    return RecordLookup(
        index, set(), set(), unused, lambda name, size: name.startswith(b"o"), lambda ino: False
    )


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
