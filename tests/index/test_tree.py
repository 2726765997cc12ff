"""Nodes, names, listings and extended attributes: what the model does not walk."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.index import Index
from monarchfs.types import ROOT_INO, DirRef, FileType, IndexUnusable, Listing, Node, SourceStat
from tests.index.tools import (
    DIRECTORY,
    NOW,
    ROOT_SOURCE_INO,
    add_listing,
    finish_listing,
    names_in,
    open_index,
    scratch,
    source_stat,
)
from tests.support.indexing import record_found


def directory_found(index: Index, parent: int, name: bytes, source_ino: int) -> int:
    stat_ = source_stat(source_ino, mode=DIRECTORY)
    return record_found(index, parent, name, stat_, b"", NOW).ino


def test_unknown_numbers_and_names_are_none(index: Index) -> None:
    assert index.tree.node(99) is None
    assert index.tree.dirent(ROOT_INO, b"nothing") is None
    assert index.tree.dirref(99) is None
    assert index.listings.listing(ROOT_INO) is None
    assert index.replicas.replica(99) is None
    assert index.xattrs.xattr(99, b"user.x") is None
    assert index.listings.entries(99, 0, 10) == []


def test_equal_source_numbers_on_two_devices_are_two_files(index: Index) -> None:
    a = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    b = record_found(index, ROOT_INO, b"b", source_stat(10, device=77), b"", NOW)
    assert a.ino != b.ino


@pytest.mark.parametrize("ns", [-(2**80), -1, 0, 2**63 - 1, 2**63, 16_725_225_600 * 10**9, 2**90])
def test_a_link_of_any_century_with_the_longest_target(index: Index, ns: int) -> None:
    far = source_stat(10, mode=stat.S_IFLNK | 0o777)
    far = far._replace(mtime_ns=ns, ctime_ns=ns + 1, atime_ns=-ns)
    target = b"../" + b"t" * 4092
    node = record_found(index, ROOT_INO, b"l", far, target, NOW)
    assert index.tree.node(node.ino) == node
    assert (node.stat, node.target) == (far, target)
    assert record_found(index, ROOT_INO, b"l", far, target, NOW) == node


def test_a_path_of_4095_bytes(index: Index) -> None:
    parts = [bytes([ord("a") + depth % 26]) for depth in range(2048)]
    parent = ROOT_INO
    for depth, name in enumerate(parts):
        parent = directory_found(index, parent, name, 1000 + depth)
    path = b"/".join(parts)
    assert len(path) == 4095
    assert index.tree.dirref(parent) == DirRef(path, 1000 + 2047)


def test_a_broken_or_circular_chain_has_no_path(index: Index) -> None:
    assert index.tree.dirref(directory_found(index, 500, b"o", 40)) is None
    outer = directory_found(index, ROOT_INO, b"o", 41)
    inner = directory_found(index, outer, b"i", 42)
    directory_found(index, inner, b"o", 41)
    assert index.tree.dirref(inner) is None


def test_the_root_found_below_itself_stays_the_root(index: Index) -> None:
    root = source_stat(ROOT_SOURCE_INO, mode=DIRECTORY)
    assert record_found(index, ROOT_INO, b"again", root, b"", NOW) == index.tree.node(ROOT_INO)
    assert index.tree.node(ROOT_INO) == Node(ROOT_INO, root, ROOT_INO, b"", NOW, False, b"")
    assert index.tree.dirref(ROOT_INO) == DirRef(b"", ROOT_SOURCE_INO)


def test_the_root_may_change_but_another_one_is_another_source(index: Index) -> None:
    changed = source_stat(ROOT_SOURCE_INO, mode=DIRECTORY, version=4)
    assert index.tree.record_root(changed, NOW + 1).stat == changed
    assert index.tree.node(ROOT_INO) == index.tree.record_root(changed, NOW + 1)
    with pytest.raises(IndexUnusable, match="another source"):
        index.tree.record_root(source_stat(3, mode=DIRECTORY), NOW)


@settings(max_examples=50)
@given(names=st.sets(st.binary(min_size=1, max_size=255), min_size=1, max_size=20))
def test_names_of_any_bytes(names: set[bytes]) -> None:
    with scratch() as directory:
        index = open_index(directory)
        for i, name in enumerate(sorted(names)):
            record_found(index, ROOT_INO, name, source_stat(10 + i), b"", NOW)
        index.close()
        index = open_index(directory)
        assert names_in(index, ROOT_INO) == sorted(names)
        for name in names:
            dirent = index.tree.dirent(ROOT_INO, name)
            assert dirent is not None
            node = index.tree.node(dirent.ino)
            assert node is not None
            assert node.name == dirent.name == name
        index.close()


def test_xattrs_and_their_errors_are_remembered(index: Index) -> None:
    ino = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW).ino
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


@pytest.mark.parametrize("root", [False, True])
def test_a_directorys_xattrs_are_forgotten_with_its_ctime(index: Index, root: bool) -> None:
    number = ROOT_SOURCE_INO if root else 20
    old, new = (source_stat(number, mode=DIRECTORY, version=v) for v in (0, 1))

    def record(stat_: SourceStat) -> Node:
        if root:
            return index.tree.record_root(stat_, NOW)
        return record_found(index, ROOT_INO, b"d", stat_, b"", NOW)

    d = record(old).ino
    other = directory_found(index, ROOT_INO, b"e", 21)
    for ino in (d, other):
        index.xattrs.put_xattr(ino, b"user.a", b"1")
        index.xattrs.put_xattr(ino, b"user.b", b"2")
    for stat_ in (old, new):
        assert index.xattrs.xattr(d, b"user.b") == b"2"
        record(stat_)
    assert index.xattrs.xattr(d, b"user.a") is None
    assert index.xattrs.xattr(d, b"user.b") is None
    assert index.xattrs.xattr(other, b"user.a") == b"1"


# Listings.


def test_entries_go_on_after_a_cookie(index: Index) -> None:
    add_listing(index, ROOT_INO, *((b"%d" % i, 10 + i) for i in range(10)))
    first = index.listings.entries(ROOT_INO, 2, 4)
    rest = index.listings.entries(ROOT_INO, first[-1][0].cookie, 100)
    assert [d.name for d, _ in first + rest] == [b"%d" % i for i in range(10)]
    assert index.listings.entries(ROOT_INO, rest[-1][0].cookie, 100) == []
    assert index.listings.entries(ROOT_INO, 0, 0) == []


def test_a_name_found_while_a_listing_runs_outlives_it(index: Index) -> None:
    record_found(index, ROOT_INO, b"before", source_stat(10), b"", NOW)
    sequence = index.listings.begin_listing(ROOT_INO)
    record_found(index, ROOT_INO, b"meanwhile", source_stat(11), b"", NOW)
    index.listings.add_entries(ROOT_INO, sequence, [(b"seen", FileType.REGULAR, 12, 0)], NOW)
    finish_listing(index, ROOT_INO, sequence)
    assert names_in(index, ROOT_INO) == [b"meanwhile", b"seen"]


def test_a_name_found_while_a_listing_runs_that_has_it_is_a_listed_one(index: Index) -> None:
    """Where listings lack names that look-ups find, those are not shown."""
    sequence = index.listings.begin_listing(ROOT_INO)
    for name, ino in ((b"a", 10), (b".snapshot", 11)):
        record_found(index, ROOT_INO, name, source_stat(ino), b"", NOW)
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
    record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    index.close(clean=False)
    index = open_index(tmp_path, trust=True)
    record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    index.close()
    index = open_index(tmp_path)
    add_listing(index, ROOT_INO, (b"b", 11))
    assert names_in(index, ROOT_INO) == [b"b"]
    index.close()


# Nodes.


def test_the_same_version_keeps_its_number_and_gets_new_attributes(index: Index) -> None:
    first = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    again = source_stat(10)._replace(atime_ns=NOW + 99, nlink=2)
    second = record_found(index, ROOT_INO, b"a", again, b"", NOW + 1)
    assert second == first._replace(stat=again, fetched_ns=NOW + 1)
    assert index.tree.node(first.ino) == second


def test_a_missing_name_is_gone_and_its_cookie_never_used_again(index: Index) -> None:
    record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    first = index.tree.dirent(ROOT_INO, b"a")
    assert first is not None
    assert index.tree.record_missing(ROOT_INO, [b"none", b"a"]) == [None, first.ino]
    assert index.tree.record_missing(ROOT_INO, [b"a"]) == [None]
    assert index.tree.dirent(ROOT_INO, b"a") is None
    assert names_in(index, ROOT_INO) == []
    node = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    again = index.tree.dirent(ROOT_INO, b"a")
    assert again is not None
    assert (again.ino, node.ino) == (first.ino, first.ino)
    assert again.cookie > first.cookie
