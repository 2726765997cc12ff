"""Replicas, their files, the journal, reboots, and the totals of the tiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from monarchfs.index import Index
from monarchfs.types import ROOT_INO, Replica, ReplicaState, TierTotals
from tests.index.tools import NOW, name_of, open_index, replica, source_stat, tier_file
from tests.support.indexing import record_found

PARTIAL = ReplicaState.PARTIAL
FOUND = ReplicaState.FOUND


def test_totals_follow_the_replicas(index: Index) -> None:
    partial = replica(22, 1, 65536, PARTIAL)
    index.put_replica(20, replica(20, 0, 4096))
    index.put_replica(21, replica(21, 0, 8192))
    index.put_replica(22, partial)
    index.record_found_files(1, [tier_file(5, allocated=1)])
    assert index.tier_totals() == {0: TierTotals(2, 0, 0, 12288), 1: TierTotals(0, 1, 1, 65537)}
    assert index.replica(22) == partial
    index.put_replica(22, replica(22, 0, 1))
    assert index.tier_totals() == {0: TierTotals(3, 0, 0, 12289), 1: TierTotals(0, 0, 1, 1)}
    index.drop_replica(20)
    index.drop_replica(20)
    assert index.replica(20) is None
    assert index.tier_totals()[0] == TierTotals(2, 0, 0, 8193)
    assert [ino for ino, _ in index.replicas()][:2] == [16, 21]


def test_replicas_may_be_dropped_while_they_are_walked(index: Index) -> None:
    for ino in range(1000):
        index.put_replica(ino, replica(ino))
    walked = []
    for ino, _ in index.replicas():
        walked.append(ino)
        index.drop_replica(ino)
    assert walked == list(range(1000))
    assert index.tier_totals() == {}
    assert len(index.journal()) == 1000


def test_a_partial_replica_without_a_chunk_yet(index: Index) -> None:
    empty = replica(1, state=PARTIAL)._replace(present=b"", digests=b"")
    index.put_replica(20, empty)
    assert index.replica(20) == empty


def test_durable_is_marked_in_batches(index: Index) -> None:
    partial = replica(21, 1, 65536, PARTIAL)
    index.put_replica(20, replica(20))
    index.put_replica(21, partial)
    index.put_replica(22, replica(22))
    index.mark_durable([20, 21, 99])
    assert dict(index.replicas()) == {
        20: replica(20)._replace(durable=True),
        21: partial._replace(durable=True),
        22: replica(22),
    }


# Files and the journal.


def test_a_copy_is_journalled_from_its_begin_to_its_record(index: Index) -> None:
    name = name_of(1)
    index.begin_copy(20, 3, name)
    assert (index.journal(), index.under_way()) == ([(3, name)], [20])
    assert index.owner(3, name) is None
    index.put_replica(20, replica(1, 3, state=PARTIAL), in_flight=True)
    assert (index.journal(), index.owner(3, name)) == ([(3, name)], 20)
    index.put_replica(20, replica(1, 3))
    assert (index.journal(), index.owner(3, name)) == ([], 20)
    assert index.owner(2, name) is None


def test_a_copy_that_was_given_up_ends_with_its_file(index: Index) -> None:
    index.begin_copy(20, 3, name_of(1))
    index.begin_copy(21, 3, name_of(2))
    index.file_gone(3, name_of(1))
    index.file_gone(3, name_of(9))
    assert index.journal() == [(3, name_of(2))]


def test_a_dropped_replica_is_journalled_until_its_file_is_gone(index: Index) -> None:
    index.put_replica(20, replica(1, 3))
    index.drop_replica(20)
    assert (index.journal(), index.owner(3, name_of(1))) == ([(3, name_of(1))], None)
    assert index.under_way() == [], "what goes is no copy that has to be ended"
    index.file_gone(3, name_of(1))
    assert index.journal() == []


def test_the_file_that_a_move_leaves_behind_is_journalled(index: Index) -> None:
    index.put_replica(20, replica(1, 0))
    index.begin_copy(20, 1, name_of(1))
    index.put_replica(20, replica(1, 1))
    assert index.journal() == [(0, name_of(1))]
    assert (index.owner(0, name_of(1)), index.owner(1, name_of(1))) == (None, 20)


def test_two_numbers_of_one_version_never_have_one_file(index: Index) -> None:
    index.put_replica(20, replica(1))
    index.put_replica(21, replica(1))
    assert (index.replica(20), index.replica(21)) == (None, replica(1))
    assert (index.owner(0, name_of(1)), index.journal()) == (21, [])
    assert index.tier_totals() == {0: TierTotals(1, 0, 0, 4096)}
    # The loser's record was already gone: nothing of the winner's goes with it.
    index.drop_replica(20)
    assert index.owner(0, name_of(1)) == 21


def test_names_come_in_order_and_by_prefix(index: Index) -> None:
    inos = {name_of(n): 20 + n for n in range(600)}
    for ino in inos.values():
        index.put_replica(ino, replica(ino - 20, 2))
    index.put_replica(5000, replica(700, 1))
    index.put_replica(5001, replica(701, 3))
    assert index.names(2, b"", b"", 10_000) == sorted(inos.items())
    paged: list[tuple[bytes, int]] = []
    while rows := index.names(2, b"", paged[-1][0] if paged else b"", 7):
        paged += rows
    assert paged == sorted(inos.items())
    for xx in range(256):
        of_prefix = [(n, i) for n, i in sorted(inos.items()) if n[0] == xx]
        assert index.names(2, bytes([xx]), b"", 10_000) == of_prefix
        if of_prefix:
            assert index.names(2, bytes([xx]), of_prefix[0][0], 10_000) == of_prefix[1:]
    assert index.names(2, b"", b"", 0) == []


# Found ones, and those of outdated versions.


def test_found_files_get_numbers_unless_they_are_known(index: Index) -> None:
    index.put_replica(500, replica(1, 2))
    index.begin_copy(501, 2, name_of(2))
    files = [tier_file(1), tier_file(2), tier_file(3), tier_file(4, synced=False)]
    three, four = index.record_found_files(2, files)
    assert index.replica(three) == replica(3, 2)._replace(state=FOUND, durable=True, created_ns=0)
    assert index.replica(four) == replica(4, 2)._replace(state=FOUND, created_ns=0)
    assert index.record_found_files(2, files) == []
    assert index.record_found_files(1, [tier_file(3)]) != []
    assert index.node(three) is None
    node = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    assert node.ino > four
    assert index.outdated_replicas(2, 10) == [three, four]
    assert index.outdated_replicas(2, 1) == [three]
    index.drop_replica(three)
    assert index.outdated_replicas(2, 10) == [four]
    assert set(index.journal()) == {(2, name_of(2)), (2, name_of(3))}


def test_replicas_of_outdated_versions_go_first(index: Index) -> None:
    before = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    other = record_found(index, ROOT_INO, b"b", source_stat(11), b"", NOW)
    index.put_replica(before.ino, replica(1))
    index.put_replica(other.ino, replica(2))
    assert index.outdated_replicas(0, 10) == []
    index.mark_outdated(before.ino)
    assert index.outdated_replicas(0, 10) == [before.ino]
    assert index.outdated_replicas(1, 10) == []
    # The version is back.
    record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    assert index.outdated_replicas(0, 10) == []
    # Recorded after its version was gone.
    index.mark_outdated(other.ino)
    index.put_replica(other.ino, replica(2, 1))
    assert index.outdated_replicas(0, 10) == []
    assert index.outdated_replicas(1, 10) == [other.ino]


def claimed(number: int, tier: int, *, durable: bool) -> Replica:
    return replica(number, tier)._replace(durable=durable, created_ns=0)


def test_a_found_file_is_claimed_once(index: Index) -> None:
    (found,) = index.record_found_files(2, [tier_file(1)])
    assert index.claim(600, name_of(2), 100) is None
    assert index.claim(600, name_of(1), 101) is None
    assert index.claim(600, name_of(1), 100) == claimed(1, 2, durable=True)
    assert index.replica(600) == claimed(1, 2, durable=True)
    assert index.replica(found) is None
    assert index.claim(601, name_of(1), 100) is None
    assert index.tier_totals() == {2: TierTotals(1, 0, 0, 4096)}
    assert (index.outdated_replicas(2, 10), index.journal()) == ([], [])
    assert index.owner(2, name_of(1)) == 600


def test_an_outdated_numbers_replica_is_claimed_and_a_good_ones_not(index: Index) -> None:
    node = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    index.put_replica(node.ino, replica(1))
    assert index.claim(600, name_of(1), 100) is None
    index.mark_outdated(node.ino)
    assert index.claim(node.ino, name_of(1), 100) is None
    assert index.claim(600, name_of(1), 100) == replica(1)
    assert (index.replica(node.ino), index.replica(600)) == (None, replica(1))


def test_nobody_claims_a_part_or_with_a_replica_of_its_own(index: Index) -> None:
    node = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    index.put_replica(node.ino, replica(1, state=PARTIAL))
    index.mark_outdated(node.ino)
    assert index.claim(600, name_of(1), 100) is None
    index.record_found_files(0, [tier_file(2)])
    index.put_replica(601, replica(3))
    assert index.claim(601, name_of(2), 100) is None
    assert index.replica(601) == replica(3)


# Reboots.


def reboot(index: Index, directory: Path, boot_id: bytes) -> Index:
    index.close(clean=False)
    opened = open_index(directory, trust=True)
    assert opened.begin_boot(boot_id) is True
    return opened


def test_after_a_reboot_only_durable_replicas_count(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    index.begin_boot(b"one")
    for ino in range(20, 30):
        index.put_replica(ino, replica(ino))
    index.mark_durable(range(20, 25))
    index.close(clean=False)
    # The process died, the machine did not.
    index = open_index(tmp_path, trust=True)
    assert index.begin_boot(b"one") is False
    assert len(list(index.replicas())) == 10
    assert index.lost_in_reboot(10) == []
    index = reboot(index, tmp_path, b"two")
    index.mark_durable([25])
    kept = list(range(20, 25))
    assert [ino for ino, _ in index.replicas()] == kept
    assert [ino for ino in range(20, 30) if index.replica(ino)] == kept
    assert sorted(ino for _, ino in index.names(0, b"", b"", 100)) == kept
    assert [index.owner(0, name_of(ino)) for ino in range(23, 27)] == [23, 24, None, None]
    assert index.tier_totals() == {0: TierTotals(10, 0, 0, 40960)}
    # Copied again, in this boot.
    index.put_replica(29, replica(29))
    lost = []
    while batch := index.lost_in_reboot(3):
        assert len(batch) <= 3
        lost += batch
        for ino, record in batch:
            assert record == replica(ino)
            index.drop_replica(ino)
    assert [ino for ino, _ in lost] == [25, 26, 27, 28]
    assert index.tier_totals() == {0: TierTotals(6, 0, 0, 24576)}
    assert len(index.journal()) == 4
    index.close()


def test_lost_replicas_are_neither_claimed_nor_evicted_nor_found(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    index.begin_boot(b"one")
    index.record_found_files(0, [tier_file(1, synced=False), tier_file(2)])
    index = reboot(index, tmp_path, b"two")
    assert index.claim(600, name_of(1), 100) is None
    assert len(index.outdated_replicas(0, 1)) == 1
    assert index.claim(600, name_of(2), 100) is not None
    assert index.outdated_replicas(0, 10) == []
    assert index.record_found_files(0, [tier_file(1)]) == []
    index.close()


def test_what_was_lost_is_told_again_unless_it_was_told_to_the_end(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    index.begin_boot(b"one")
    index.put_replica(20, replica(20))
    index = reboot(index, tmp_path, b"two")
    assert [ino for ino, _ in index.lost_in_reboot(10)] == [20]
    index.close(clean=False)
    index = open_index(tmp_path, trust=True)
    assert index.begin_boot(b"two") is False
    assert [ino for ino, _ in index.lost_in_reboot(10)] == [20]
    assert index.lost_in_reboot(10) == []
    index.close(clean=False)
    index = open_index(tmp_path, trust=True)
    assert index.lost_in_reboot(10) == []
    index.close()


def test_several_are_recorded_at_once_or_none(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = [(ino, 0, name_of(ino)) for ino in (20, 21, 22)]
    index.begin_copies(copies)
    assert sorted(index.under_way()) == [20, 21, 22]
    replicas = [(ino, replica(ino)) for ino in (20, 21)]
    with monkeypatch.context() as patch:
        patch.setattr(index, "_note_outdated", _fail_the_second_time())
        with pytest.raises(ZeroDivisionError):
            index.put_replicas(replicas)
    assert dict(index.replicas()) == {}
    assert sorted(index.under_way()) == [20, 21, 22]
    index.put_replicas(replicas)
    assert dict(index.replicas()) == dict(replicas)
    assert index.under_way() == [22]
    assert index.tier_totals()[0].resident == 2


def test_among_several_are_some_in_place_of_others(index: Index) -> None:
    index.put_replica(20, replica(20))
    index.put_replica(21, replica(21))
    index.put_replica(30, replica(22))  # a file that becomes another number's
    several = [
        (20, replica(20)._replace(allocated_bytes=8192, size=5000)),
        (21, replica(41)),
        (22, replica(22)),
        (23, replica(23)),
    ]
    index.put_replicas(several)
    assert dict(index.replicas()) == dict(several)
    assert index.journal() == [(0, name_of(21))]
    assert [index.owner(0, name_of(n)) for n in (20, 41, 22, 23, 21)] == [20, 21, 22, 23, None]
    totals = index.tier_totals()[0]
    assert totals.resident == 4
    assert totals.allocated_bytes == sum(one.allocated_bytes for _, one in several)


def _fail_the_second_time() -> Callable[..., None]:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError

    return count
