"""Replicas that share files: which files those are, what lies where, and what may be a gap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from monarchfs.index import Index, problems, records
from monarchfs.types import IndexWriteError, Replica, ReplicaState, TierTotals
from tests.index.tools import name_of, open_index, replica, tier_file

SEGMENT, OTHER = 0x8000_0000_0000_0001, 7


def shared(number: int, offset: int, segment: int = SEGMENT, tier: int = 0) -> Replica:
    return replica(number, tier)._replace(segment=segment, offset=offset)


def test_segments_are_known_from_their_begin_to_their_end(index: Index) -> None:
    index.begin_segments(3, [SEGMENT, OTHER])
    index.begin_segments(2, [SEGMENT])
    assert index.segments(3) == {SEGMENT: True, OTHER: True}
    assert (index.segments(2), index.segments(1)) == ({SEGMENT: True}, {})
    index.segment_clean(3, OTHER)
    assert index.segments(3) == {SEGMENT: True, OTHER: False}
    index.segment_gone(3, OTHER)
    index.segment_gone(3, OTHER)
    index.segment_clean(3, OTHER)
    assert index.segments(3) == {SEGMENT: True}, "one that is gone is not clean"
    assert index.segments(2) == {SEGMENT: True}


def test_many_segments(index: Index) -> None:
    numbers = [n * 2**50 + 1 for n in range(2000)]
    index.begin_segments(1, numbers)
    assert list(index.segments(1)) == numbers


def test_what_lies_in_a_segment_by_its_offset(index: Index) -> None:
    index.begin_segments(0, [SEGMENT, OTHER])
    index.begin_segments(1, [SEGMENT])
    offsets = [n * 4096 for n in range(600)]
    index.put_replicas([(5000 - n, shared(n, at)) for n, at in enumerate(offsets)])
    index.put_replica(100, shared(1000, 4096, OTHER))
    index.put_replica(101, shared(1001, 0, tier=1))
    index.put_replica(102, replica(1002))
    assert index.segment_records(0, SEGMENT) == [(at, 5000 - n) for n, at in enumerate(offsets)]
    assert index.segment_records(0, OTHER) == [(4096, 100)]
    assert index.segment_records(1, SEGMENT) == [(0, 101)]
    assert index.segment_records(1, OTHER) == []
    assert index.segment_replicas() == 602
    assert index.replica(4990) == shared(10, 40960)


def test_nothing_of_it_is_journalled(index: Index) -> None:
    index.begin_segments(0, [SEGMENT])
    index.put_replica(20, shared(1, 0))
    index.put_replicas([(21, shared(2, 4096)), (22, shared(3, 8192))])
    index.drop_replica(20)
    assert (index.journal(), index.under_way()) == ([], [])
    assert index.tier_totals() == {0: TierTotals(2, 0, 0, 8192)}


def test_what_goes_leaves_its_segment_marked(index: Index) -> None:
    index.begin_segments(0, [SEGMENT, OTHER])
    index.put_replicas([(20, shared(1, 0)), (21, shared(2, 4096))])
    index.segment_clean(0, SEGMENT)
    index.segment_clean(0, OTHER)
    index.drop_replica(99)
    assert index.segments(0) == {SEGMENT: False, OTHER: False}
    index.drop_replica(20)
    assert index.segments(0) == {SEGMENT: True, OTHER: False}
    assert index.segment_records(0, SEGMENT) == [(4096, 21)]
    assert index.owner(0, name_of(1)) is None


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(
    ("new", "marked", "journalled"),
    [
        pytest.param(shared(1, 4096, OTHER), True, [], id="another segment"),
        pytest.param(shared(1, 4096), True, [], id="another place in it"),
        pytest.param(replica(1), True, [], id="a file of its own"),
        pytest.param(shared(1, 0, OTHER, tier=1), True, [], id="another tier"),
        pytest.param(replica(1, 1), True, [], id="a file of its own in another tier"),
    ],
)
def test_one_is_put_in_place_of_one_that_shared(
    index: Index, new: Replica, marked: bool, journalled: list[object], several: bool
) -> None:
    for tier in (0, 1):
        index.begin_segments(tier, [SEGMENT, OTHER])
    index.put_replica(20, shared(1, 0))
    index.segment_clean(0, SEGMENT)
    if several:
        index.put_replicas([(20, new)])
    else:
        index.put_replica(20, new)
    assert index.replica(20) == new
    assert index.segments(0)[SEGMENT] == marked
    assert index.journal() == journalled
    assert index.segment_records(0, SEGMENT) == (
        [(new.offset, 20)] if (new.tier, new.segment) == (0, SEGMENT) else []
    )
    assert index.segment_replicas() == bool(new.segment)
    assert index.owner(new.tier, new.name) == 20


def test_what_had_a_file_of_its_own_is_journalled_when_it_shares_one(index: Index) -> None:
    """Its name is the same, its file is not."""
    index.begin_segments(0, [SEGMENT])
    index.put_replica(20, replica(1))
    index.put_replica(20, shared(1, 0))
    assert index.journal() == [(0, name_of(1))]
    index.file_gone(0, name_of(1))
    assert index.replica(20) == shared(1, 0)
    index.put_replica(21, replica(2))
    index.put_replicas([(22, shared(2, 4096))])
    assert (index.replica(21), index.replica(22)) == (None, shared(2, 4096))
    assert index.journal() == [(0, name_of(2))]
    assert index.segment_records(0, SEGMENT) == [(0, 20), (4096, 22)]


def test_found_ones_are_claimed_where_they_lie(index: Index) -> None:
    index.begin_segments(0, [SEGMENT])
    rows = [
        tier_file(number)._replace(segment=SEGMENT, offset=number * 4096) for number in range(4)
    ]
    index.put_replica(900, replica(2))
    numbers = index.record_found_files(0, rows)
    assert len(numbers) == 3, "one of them is known"
    assert index.record_found_files(0, rows) == []
    assert [at for at, _ in index.segment_records(0, SEGMENT)] == [0, 4096, 12288]
    claimed = index.claim(901, name_of(3), 100)
    assert claimed is not None
    assert (claimed.state, claimed.segment, claimed.offset) == (
        ReplicaState.RESIDENT,
        SEGMENT,
        12288,
    )
    assert index.segment_records(0, SEGMENT) == [(0, numbers[0]), (4096, numbers[1]), (12288, 901)]
    assert index.tier_totals()[0] == TierTotals(2, 0, 2, 16384)


def test_several_are_recorded_or_none(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.begin_segments(0, [SEGMENT])
    index.put_replica(20, shared(0, 0))
    index.segment_clean(0, SEGMENT)
    several = [(20 + n, shared(n, 4096 * (n + 1))) for n in range(3)]

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(index, "_count", fail)
        with pytest.raises(ZeroDivisionError):
            index.put_replicas(several)
    assert dict(index.replicas()) == {20: shared(0, 0)}
    assert index.segment_records(0, SEGMENT) == [(0, 20)]
    assert index.segments(0) == {SEGMENT: False}
    index.put_replicas(several)
    assert dict(index.replicas()) == dict(several)
    assert index.segments(0) == {SEGMENT: True}


@pytest.mark.parametrize("shares", [True, False])
def test_two_numbers_of_one_version_that_come_together(index: Index, shares: bool) -> None:
    """The later one has the replica, as where they come one after the other."""
    index.begin_segments(0, [SEGMENT])
    several = [(20 + n, shared(1, 4096 * n) if shares else replica(1)) for n in range(2)]
    index.put_replicas(several)
    assert dict(index.replicas()) == dict(several[1:])
    assert index.tier_totals() == {0: TierTotals(1, 0, 0, 4096)}


def test_a_frozen_index_takes_nothing_but_that_one_is_gone(index: Index) -> None:
    index.begin_segments(0, [SEGMENT, OTHER])
    index.put_replica(20, shared(1, 0))
    index._frozen = "for the test"
    calls: list[Callable[[], object]] = [
        lambda: index.begin_segments(0, [9]),
        lambda: index.put_replica(21, shared(2, 4096)),
        lambda: index.put_replicas([(21, shared(2, 4096))]),
        lambda: index.drop_replica(20),
        lambda: index.segment_clean(0, SEGMENT),
    ]
    for call in calls:
        with pytest.raises(IndexWriteError):
            call()
    index.segment_gone(0, OTHER)
    assert index.segments(0) == {SEGMENT: True}
    assert index.segment_records(0, SEGMENT) == [(0, 20)]
    index._frozen = None


def test_what_a_reboot_took_stays_in_its_place_until_it_is_dropped(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    index.begin_boot(b"one")
    index.begin_segments(0, [SEGMENT])
    index.put_replicas([(20, shared(1, 0)), (21, shared(2, 4096))])
    index.mark_durable([20])
    index.segment_clean(0, SEGMENT)
    index.close(clean=False)
    index = open_index(tmp_path, trust=True)
    index.begin_boot(b"two")
    assert index.replica(20) == shared(1, 0)._replace(durable=True)
    assert index.replica(21) is None
    assert index.segment_records(0, SEGMENT) == [(0, 20), (4096, 21)]
    assert index.segment_replicas() == 2
    ((ino, lost),) = index.lost_in_reboot(10)
    assert (ino, lost) == (21, shared(2, 4096))
    index.drop_replica(ino)
    assert index.segments(0) == {SEGMENT: True}
    assert index.segment_records(0, SEGMENT) == [(0, 20)]
    assert index.journal() == []
    index.close()
    assert problems(str(tmp_path)) == []


# What a check finds.

Damage = Callable[[lmdb.Transaction, dict[bytes, Any]], object]
FIRST = records.RECORD_KEY.pack(0, SEGMENT, 0)
SECOND = records.RECORD_KEY.pack(0, SEGMENT, 4096)
WHERE = f"offset 4096 of segment {SEGMENT:016x} of tier 0"
DAMAGES: list[tuple[Damage, list[str]]] = [
    (
        lambda txn, db: txn.delete(SECOND, db=db[b"records"]),
        ["the record of the replica of inode 21 is not its own"],
    ),
    (
        lambda txn, db: txn.put(SECOND, records.ID.pack(77), db=db[b"records"]),
        [
            f"{WHERE} belongs to a replica that is not recorded",
            "the record of the replica of inode 21 is not its own",
        ],
    ),
    (
        lambda txn, db: txn.put(SECOND, records.ID.pack(20), db=db[b"records"]),
        [
            f"{WHERE} belongs to a replica that is not recorded",
            "the record of the replica of inode 21 is not its own",
        ],
    ),
    (
        lambda txn, db: txn.delete(FIRST[: records.SEGMENT_KEY.size], db=db[b"segments"]),
        [
            f"offset {at} of segment {SEGMENT:016x} of tier 0 has a replica, but no such segment"
            " is known"
            for at in (0, 4096)
        ],
    ),
    (
        lambda txn, db: txn.put(
            records.ID.pack(20),
            records.pack_replica(shared(1, 0)._replace(allocated_bytes=4097), 0),
            db=db[b"replicas"],
        ),
        [
            "the totals of the tiers are not the sums of their replicas",
            f"{WHERE} belongs to two replicas",
        ],
    ),
]


@pytest.mark.parametrize(("damage", "lines"), DAMAGES)
def test_what_contradicts_is_told(tmp_path: Path, damage: Damage, lines: list[str]) -> None:
    index = open_index(tmp_path)
    index.begin_segments(0, [SEGMENT])
    index.put_replicas([(20, shared(1, 0)), (21, shared(2, 4096))])
    index.close()
    assert problems(str(tmp_path)) == []
    env = lmdb.open(str(tmp_path / "index"), max_dbs=64, lock=False)
    tables = {
        name: env.open_db(name, create=False) for name in (b"records", b"segments", b"replicas")
    }
    with env.begin(write=True) as txn:
        damage(txn, tables)
    env.close()
    assert problems(str(tmp_path)) == lines
