"""Replicas: many, several at once, and what a reboot took. The model walks the rest."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from monarchfs.index import Index, problems
from monarchfs.types import IndexWriteError, Replica, ReplicaState, TierTotals
from tests.index.tools import SEGMENT, name_of, open_index, replica, shared, tier_file

OTHER = 7
PARTIAL = ReplicaState.PARTIAL


def test_replicas_may_be_dropped_while_they_are_walked(index: Index) -> None:
    for ino in range(1000):
        index.replicas.put_replica(ino, replica(ino))
    walked = []
    for ino, _ in index.replicas.all():
        walked.append(ino)
        index.replicas.drop_replica(ino)
    assert walked == list(range(1000))
    assert index.replicas.tier_totals() == {}
    assert len(index.replicas.journal()) == 1000


def test_names_come_in_order_and_by_prefix(index: Index) -> None:
    inos = {name_of(n): 20 + n for n in range(600)}
    index.replicas.put_replicas([(ino, replica(ino - 20, 2)) for ino in inos.values()])
    index.replicas.put_replica(5000, replica(700, 1))
    index.replicas.put_replica(5001, replica(701, 3))
    assert index.replicas.names(2, b"", b"", 10_000) == sorted(inos.items())
    paged: list[tuple[bytes, int]] = []
    while rows := index.replicas.names(2, b"", paged[-1][0] if paged else b"", 7):
        paged += rows
    assert paged == sorted(inos.items())
    for first in range(256):
        of_prefix = [(n, i) for n, i in sorted(inos.items()) if n[0] == first]
        assert index.replicas.names(2, bytes([first]), b"", 10_000) == of_prefix
        if of_prefix:
            assert index.replicas.names(2, bytes([first]), of_prefix[0][0], 10_000) == of_prefix[1:]
    assert index.replicas.names(2, b"", b"", 0) == []


def test_many_segments_and_many_replicas_in_one(index: Index) -> None:
    numbers = [n * 2**50 + 1 for n in range(2000)]
    index.segments.begin_segments(1, numbers)
    assert list(index.segments.segments(1)) == numbers
    index.segments.begin_segments(0, [SEGMENT, OTHER])
    offsets = [n * 4096 for n in range(600)]
    index.replicas.put_replicas([(5000 - n, shared(n, at)) for n, at in enumerate(offsets)])
    index.replicas.put_replica(100, shared(1000, 4096, OTHER))
    assert index.segments.segment_records(0, SEGMENT) == [
        (at, 5000 - n) for n, at in enumerate(offsets)
    ]
    assert index.segments.segment_records(0, OTHER) == [(4096, 100)]
    assert index.segments.segment_replicas() == 601


def test_a_file_has_one_owner_from_its_record_on(index: Index) -> None:
    assert index.replicas.owner(0, name_of(1)) is None
    index.replicas.put_replica(20, replica(1))
    index.replicas.put_replica(21, replica(1))
    assert index.replicas.owner(0, name_of(1)) == 21
    index.replicas.drop_replica(20)  # its record was already gone
    assert index.replicas.owner(0, name_of(1)) == 21
    assert index.replicas.owner(1, name_of(1)) is None
    index.replicas.drop_replica(21)
    assert index.replicas.owner(0, name_of(1)) is None


def test_several_are_recorded_or_none(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.segments.begin_segments(0, [SEGMENT])
    index.replicas.put_replica(20, shared(0, 0))
    index.segments.segment_clean(0, SEGMENT)
    index.replicas.begin_copies([(ino, 0, name_of(ino)) for ino in (30, 31)])
    several = [(30, replica(30)), (20, shared(0, 4096)), (21, shared(1, 8192))]
    with monkeypatch.context() as patch:
        patch.setattr(
            index.replicas, "_note_outdated", Mock(side_effect=[False, ZeroDivisionError])
        )
        with pytest.raises(ZeroDivisionError):
            index.replicas.put_replicas(several)
    assert dict(index.replicas.all()) == {20: shared(0, 0)}
    assert index.segments.segment_records(0, SEGMENT) == [(0, 20)]
    assert index.segments.segments(0) == {SEGMENT: False}
    assert sorted(index.replicas.under_way()) == [30, 31]
    index.replicas.put_replicas(several)
    assert dict(index.replicas.all()) == dict(several)
    assert index.segments.segments(0) == {SEGMENT: True}
    assert index.replicas.under_way() == [31]


def test_a_frozen_index_takes_nothing_but_that_one_is_gone(index: Index) -> None:
    index.segments.begin_segments(0, [SEGMENT, OTHER])
    index.replicas.put_replica(20, shared(1, 0))
    index.environment._frozen = "for the test"
    for call in (
        lambda: index.segments.begin_segments(0, [9]),
        lambda: index.replicas.put_replica(21, shared(2, 4096)),
        lambda: index.replicas.put_replicas([(21, shared(2, 4096))]),
        lambda: index.replicas.drop_replica(20),
        lambda: index.segments.segment_clean(0, SEGMENT),
    ):
        with pytest.raises(IndexWriteError):
            call()
    index.segments.segment_gone(0, OTHER)
    assert index.segments.segments(0) == {SEGMENT: True}
    assert index.segments.segment_records(0, SEGMENT) == [(0, 20)]
    index.environment._frozen = None


def test_only_durable_replicas_outlive_a_reboot_and_the_lost_ones_are_told_to_the_end(
    tmp_path: Path,
) -> None:
    index = open_index(tmp_path)

    def reopened(boot_id: bytes, reboots: bool) -> Index:
        index.close(clean=False)
        opened = open_index(tmp_path, trust=True)
        assert opened.replicas.begin_boot(boot_id) is reboots
        return opened

    index.replicas.begin_boot(b"one")
    index.segments.begin_segments(0, [SEGMENT])
    index.replicas.put_replicas(
        [(ino, replica(ino)) for ino in range(20, 29)] + [(29, shared(29, 4096))]
    )
    index.replicas.mark_durable(range(20, 25))
    # The process died, the machine did not.
    index = reopened(b"one", False)
    assert len(list(index.replicas.all())) == 10
    assert index.replicas.lost_in_reboot(10) == []
    index = reopened(b"two", True)
    index.replicas.mark_durable([25])
    assert [ino for ino, _ in index.replicas.all()] == list(range(20, 25))
    assert [index.replicas.owner(0, name_of(ino)) for ino in range(23, 27)] == [23, 24, None, None]
    assert [ino for ino, _ in index.replicas.lost_in_reboot(3)] == [25, 26, 27]
    # Whoever was told of them died before they were dropped.
    index = reopened(b"two", False)
    while batch := index.replicas.lost_in_reboot(3):
        for ino, _ in batch:
            index.replicas.drop_replica(ino)
    assert len(index.replicas.journal()) == 4
    index = reopened(b"two", False)
    assert index.replicas.lost_in_reboot(10) == []
    index.close()
    assert problems(str(tmp_path)) == []


def test_a_partial_replica_without_a_chunk_yet(index: Index) -> None:
    empty = replica(1, state=PARTIAL)._replace(present=b"", digests=b"")
    index.replicas.put_replica(20, empty)
    assert index.replicas.replica(20) == empty


def test_a_copy_is_journalled_from_its_begin_to_its_record(index: Index) -> None:
    name = name_of(1)
    index.replicas.begin_copy(20, 3, name)
    assert (index.replicas.journal(), index.replicas.under_way()) == ([(3, name)], [20])
    assert index.replicas.owner(3, name) is None
    index.replicas.put_replica(20, replica(1, 3, state=PARTIAL), in_flight=True)
    assert (index.replicas.journal(), index.replicas.owner(3, name)) == ([(3, name)], 20)
    index.replicas.put_replica(20, replica(1, 3))
    assert (index.replicas.journal(), index.replicas.owner(3, name)) == ([], 20)
    assert index.replicas.owner(2, name) is None


def claimed(number: int, tier: int, *, durable: bool) -> Replica:
    return replica(number, tier)._replace(durable=durable, created_ns=0)


def test_a_found_file_is_claimed_once(index: Index) -> None:
    (found,) = index.replicas.record_found_files(2, [tier_file(1)])
    assert index.replicas.claim(600, name_of(2), 100) is None
    assert index.replicas.claim(600, name_of(1), 101) is None
    assert index.replicas.claim(600, name_of(1), 100) == claimed(1, 2, durable=True)
    assert index.replicas.replica(600) == claimed(1, 2, durable=True)
    assert index.replicas.replica(found) is None
    assert index.replicas.claim(601, name_of(1), 100) is None
    assert index.replicas.tier_totals() == {2: TierTotals(1, 0, 0, 4096)}
    assert (index.replicas.outdated_replicas(2, 10), index.replicas.journal()) == ([], [])
    assert index.replicas.owner(2, name_of(1)) == 600


@pytest.mark.parametrize("shares", [True, False])
def test_two_numbers_of_one_version_that_come_together(index: Index, shares: bool) -> None:
    """The later one has the replica, as where they come one after the other."""
    index.segments.begin_segments(0, [SEGMENT])
    several = [(20 + n, shared(1, 4096 * n) if shares else replica(1)) for n in range(2)]
    index.replicas.put_replicas(several)
    assert dict(index.replicas.all()) == dict(several[1:])
    assert index.replicas.tier_totals() == {0: TierTotals(1, 0, 0, 4096)}
