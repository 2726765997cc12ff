"""What the model does not walk: nodes, names, listings, attributes, pins, replicas."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from monarchfs.cache.index import Index
from monarchfs.types import (
    ROOT_INO,
    DirRef,
    FileType,
    IndexUnusable,
    Listing,
    Node,
    ReplicaState,
    TierTotals,
)
from tests.index.tools import (
    DIRECTORY,
    NOW,
    ROOT_SOURCE_INO,
    SEGMENT,
    add_listing,
    finish_listing,
    found,
    name_of,
    names_in,
    open_index,
    replica,
    shared,
    source_stat,
    tier_file,
)
from tests.support.indexing import record_found


def directory_found(index: Index, parent: int, name: bytes, source_ino: int) -> int:
    stat_ = source_stat(source_ino, mode=DIRECTORY)
    return record_found(index, parent, name, stat_, b"", NOW).ino


def test_equal_source_numbers_on_two_devices_are_two_files(index: Index) -> None:
    a = found(index, b"a", 10)
    b = record_found(index, ROOT_INO, b"b", source_stat(10, device=77), b"", NOW)
    assert a.ino != b.ino


def test_a_link_of_any_century_with_the_longest_target(index: Index) -> None:
    link, target = source_stat(10, mode=stat.S_IFLNK | 0o777), b"../" + b"t" * 4092
    for ns in (-(2**80), -1, 0, 2**63 - 1, 2**63, 16_725_225_600 * 10**9, 2**90):
        far = link._replace(mtime_ns=ns, ctime_ns=ns + 1, atime_ns=-ns)
        node = record_found(index, ROOT_INO, b"l", far, target, NOW)
        assert index.nodes.node(node.ino) == node
        assert (node.stat, node.target) == (far, target)
        assert record_found(index, ROOT_INO, b"l", far, target, NOW) == node


def test_a_broken_or_circular_chain_has_no_path_and_an_end(index: Index) -> None:
    assert index.nodes.dirref(directory_found(index, 500, b"o", 40)) is None
    outer = directory_found(index, ROOT_INO, b"o", 41)
    inner = directory_found(index, outer, b"i", 42)
    directory_found(index, inner, b"o", 41)
    assert index.nodes.dirref(inner) is None
    pinned = found(index, b"pinned", 10).ino
    index.pins.pin(pinned)
    assert not index.pins.pinned(inner)
    index.pins.unpin(inner)
    assert index.pins.pins() == [pinned]


def test_the_root_found_below_itself_stays_the_root(index: Index) -> None:
    root = source_stat(ROOT_SOURCE_INO, mode=DIRECTORY)
    assert record_found(index, ROOT_INO, b"again", root, b"", NOW) == index.nodes.node(ROOT_INO)
    assert index.nodes.node(ROOT_INO) == Node(ROOT_INO, root, ROOT_INO, b"", NOW, False, b"")
    assert index.nodes.dirref(ROOT_INO) == DirRef(b"", ROOT_SOURCE_INO)


def test_the_root_may_change_but_another_one_is_another_source(index: Index) -> None:
    changed = source_stat(ROOT_SOURCE_INO, mode=DIRECTORY, version=4)
    assert index.nodes.record_root(changed, NOW + 1).stat == changed
    assert index.nodes.node(ROOT_INO) == index.nodes.record_root(changed, NOW + 1)
    with pytest.raises(IndexUnusable, match="another source"):
        index.nodes.record_root(source_stat(3, mode=DIRECTORY), NOW)


def test_xattrs_and_their_errors_are_remembered(index: Index) -> None:
    ino = found(index, b"a", 10).ino
    known: dict[bytes, bytes | int] = {
        b"user." + b"x" * 250: b"",
        b"user.big": bytes(65536),
        b"security.selinux": errno.ENODATA,
        b"": b"user.big\0",
    }
    for name, value in known.items():
        index.xattrs.put_xattr(ino, name, value)
    for name, value in known.items():
        assert index.xattrs.xattr(ino, name) == value
    assert index.xattrs.xattr(ino, b"user.other") is None


# Listings.


def test_a_name_found_while_a_listing_runs_outlives_it(index: Index) -> None:
    found(index, b"before", 10)
    sequence = index.listings.begin_listing(ROOT_INO)
    found(index, b"meanwhile", 11)
    index.listings.add_entries(ROOT_INO, sequence, [(b"seen", FileType.REGULAR, 12, 0)], NOW)
    finish_listing(index, ROOT_INO, sequence)
    assert names_in(index, ROOT_INO) == [b"meanwhile", b"seen"]


def test_a_name_found_while_a_listing_runs_that_has_it_is_a_listed_one(index: Index) -> None:
    """Where listings lack names that look-ups find, those are not shown."""
    sequence = index.listings.begin_listing(ROOT_INO)
    for name, ino in ((b"a", 10), (b".snapshot", 11)):
        found(index, name, ino)
    index.listings.add_entries(ROOT_INO, sequence, [(b"a", FileType.REGULAR, 10, 0)], NOW)
    finish_listing(index, ROOT_INO, sequence, lists_all=False)
    shown = index.listings.entries(ROOT_INO, 2, 10, only_listed=True)
    assert [dirent.name for dirent, _node in shown] == [b"a"]


def test_two_listings_at_once_remove_only_what_neither_saw(index: Index) -> None:
    add_listing(index, ROOT_INO, (b"a", 10), (b"gone", 11))
    first, second = index.listings.begin_listing(ROOT_INO), index.listings.begin_listing(ROOT_INO)
    a = [(b"a", FileType.REGULAR, 10, 0)]
    index.listings.add_entries(ROOT_INO, second, a, NOW)
    index.listings.add_entries(ROOT_INO, first, a, NOW)
    for sequence in (second, first):
        finish_listing(index, ROOT_INO, sequence)
    assert names_in(index, ROOT_INO) == [b"a"]


def test_finishing_a_long_listing_goes_in_steps_and_may_be_left_off(index: Index) -> None:
    add_listing(index, ROOT_INO, *((b"%d" % i, 100 + i) for i in range(2000)))
    sequence = index.listings.begin_listing(ROOT_INO)
    steps = index.listings.finish_listing(ROOT_INO, sequence, Listing(*3 * (NOW + 1,), True))
    next(steps)
    assert 0 < len(index.listings.entries(ROOT_INO, 2, 3000)) < 2000
    assert index.listings.listing(ROOT_INO) == Listing(NOW, NOW, NOW, True)
    assert len(list(steps)) >= 2
    assert index.listings.entries(ROOT_INO, 2, 10) == []
    assert index.listings.listing(ROOT_INO) == Listing(*3 * (NOW + 1,), True)


def test_a_directory_of_unknown_types_keeps_the_types_that_are_known(index: Index) -> None:
    record_found(index, ROOT_INO, b"d", source_stat(20, mode=DIRECTORY), b"", NOW)
    sequence = index.listings.begin_listing(ROOT_INO)
    rows = [(b"d", FileType.UNKNOWN, 20, 0), (b"e", FileType.UNKNOWN, 21, 0)]
    index.listings.add_entries(ROOT_INO, sequence, rows, NOW)
    types = {d.name: d.type for d, _ in index.listings.entries(ROOT_INO, 2, 10)}
    assert types == {b"d": FileType.DIRECTORY, b"e": FileType.UNKNOWN}


def test_a_name_seen_after_a_crash_is_removed_by_a_later_listing(tmp_path: Path) -> None:
    """Numbers leap after a crash, and names are dated by them: the leap is recorded with it."""
    index = open_index(tmp_path)
    add_listing(index, ROOT_INO, (b"a", 10), (b"b", 11))
    found(index, b"a", 10)
    index.close(clean=False)
    index = open_index(tmp_path, trust=True)
    found(index, b"a", 10)
    index.close()
    index = open_index(tmp_path)
    add_listing(index, ROOT_INO, (b"b", 11))
    assert names_in(index, ROOT_INO) == [b"b"]
    index.close()


# Pins, and the end of outdated nodes.


def test_a_pin_holds_all_below_a_directory(index: Index) -> None:
    outer = directory_found(index, ROOT_INO, b"o", 20)
    inner = directory_found(index, outer, b"i", 21)
    file, beside = found(index, b"f", 10, parent=inner).ino, found(index, b"g", 11).ino
    every = (outer, inner, file, beside)
    assert not index.pins.pinned(file)
    index.pins.pin(outer)
    index.pins.pin(outer)
    assert [index.pins.pinned(ino) for ino in every] == [True, True, True, False]
    assert index.pins.pins() == [outer]
    index.pins.pin(file)
    index.pins.unpin(file)
    assert (index.pins.pins(), index.pins.pinned(file)) == ([outer], True)
    index.pins.pin(file)
    index.pins.pin(beside)
    index.pins.unpin(outer)
    assert [index.pins.pinned(ino) for ino in every] == [False] * 3 + [True]
    index.pins.pin(ROOT_INO)
    assert index.pins.pinned(beside)


def test_a_pin_goes_with_the_file_and_with_the_name(index: Index) -> None:
    index.pins.pin(found(index, b"a", 10).ino)
    newer = found(index, b"a", 10, version=1)
    assert index.pins.pins() == [newer.ino]
    # Also where the change was noticed under the file's other name.
    newest = found(index, b"b", 10, version=2)
    assert index.pins.pins() == [newest.ino]
    add_listing(index, ROOT_INO, (b"b", 11))
    assert index.pins.pins() == [newest.ino]
    other = found(index, b"b", 11)
    assert index.pins.pins() == [other.ino]


@pytest.mark.parametrize("listed", [None, FileType.REGULAR, FileType.UNKNOWN])
def test_a_purged_number_never_stands_for_anything_again(
    index: Index, listed: FileType | None
) -> None:
    old = found(index, b"a", 10)
    index.xattrs.put_xattr(old.ino, b"user.a", b"1")
    index.nodes.mark_outdated(old.ino, NOW)
    assert index.nodes.purge_outdated(NOW + 1, 10) == 1
    assert index.xattrs.xattr(old.ino, b"user.a") is None
    if listed is not None:
        sequence = index.listings.begin_listing(ROOT_INO)
        index.listings.add_entries(ROOT_INO, sequence, [(b"a", listed, 10, 0)], NOW)
        dirent = index.nodes.dirent(ROOT_INO, b"a")
        assert dirent is not None
        assert dirent.ino == 0
        assert dirent.shown_ino != old.ino
    assert found(index, b"a", 10).ino != old.ino
    assert index.nodes.node(old.ino) is None


def test_a_purged_directory_takes_its_names_along_in_steps(index: Index) -> None:
    directory = directory_found(index, ROOT_INO, b"d", 20)
    add_listing(index, directory, *((b"%d" % i, 100 + i) for i in range(50)))
    index.nodes.mark_outdated(directory, NOW)
    assert index.nodes.purge_outdated(NOW + 1, 20) == 0
    assert len(names_in(index, directory)) == 30
    assert sum(index.nodes.purge_outdated(NOW + 1, 20) for _ in range(4)) == 1
    assert index.listings.entries(directory, 0, 100) == []
    assert index.listings.listing(directory) is None


def test_purging_gets_to_the_end_past_those_that_stay(index: Index) -> None:
    nodes = [found(index, b"%d" % i, 10 + i) for i in range(200)]
    for i, node in enumerate(nodes):
        index.nodes.mark_outdated(node.ino, NOW + (0 if i >= 180 else 10))
    purged = [index.nodes.purge_outdated(NOW + 5, 3) for _ in range(40)]
    assert max(purged) == 3
    assert sum(purged) == 20
    assert index.nodes.count_nodes() == 181


# Replicas.


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
        after = of_prefix[0][0] if of_prefix else b""
        assert index.replicas.names(2, bytes([first]), after, 10_000) == of_prefix[1:]


def test_what_a_reboot_took_is_told_until_it_was_dropped(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    index.replicas.begin_boot(b"one")
    index.replicas.put_replicas([(ino, replica(ino)) for ino in range(20, 29)])
    index.replicas.mark_durable(range(20, 25))
    # Whoever was told of them died before they were dropped.
    for boot_id, told, drops in ((b"one", 0, 0), (b"two", 2, 0), (b"two", 4, 4), (b"two", 0, 0)):
        index.close(clean=False)
        index = open_index(tmp_path, trust=True)
        assert index.replicas.begin_boot(boot_id) is (told == 2)
        index.replicas.mark_durable([25] if told else [])
        left = range(20, 29) if boot_id == b"one" else range(20, 25)
        assert [ino for ino, _ in index.replicas.all()] == list(left)
        lost = [ino for ino, _ in index.replicas.lost_in_reboot(told or 9)]
        assert lost == list(range(25, 25 + told))
        index.replicas.drop_replicas(lost[:drops])
        assert not drops or index.replicas.lost_in_reboot(9) == []
    assert len(index.replicas.journal()) == 4
    index.close()


def test_a_found_file_is_claimed_once(index: Index) -> None:
    (unused,) = index.replicas.record_found_files(2, [tier_file(1)])
    claimed = replica(1, 2)._replace(durable=True, created_ns=0)
    for ino, number, size in ((600, 2, 100), (600, 1, 101), (600, 1, 100), (601, 1, 100)):
        expected = claimed if (ino, number, size) == (600, 1, 100) else None
        assert index.replicas.claim(ino, name_of(number), size) == expected
    assert dict(index.replicas.all()) == {600: claimed}
    assert (index.replicas.owner(2, name_of(1)), index.replicas.replica(unused)) == (600, None)


def test_a_partial_replica_without_a_chunk_yet(index: Index) -> None:
    empty = replica(1, state=ReplicaState.PARTIAL)._replace(present=b"", digests=b"")
    index.replicas.put_replica(20, empty)
    assert index.replicas.replica(20) == empty


@pytest.mark.parametrize("shares", [True, False])
def test_two_numbers_of_one_version_that_come_together(index: Index, shares: bool) -> None:
    """The later one has the replica, as where they come one after the other."""
    index.segments.begin_segments(0, [SEGMENT])
    several = [(20 + n, shared(1, 4096 * n) if shares else replica(1)) for n in range(2)]
    index.replicas.put_replicas(several)
    assert dict(index.replicas.all()) == dict(several[1:])
    assert index.replicas.tier_totals() == {0: TierTotals(1, 0, 0, 4096)}
