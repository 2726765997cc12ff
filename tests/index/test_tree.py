"""Nodes and names, and extended attributes."""

from __future__ import annotations

import errno
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.index import Index
from monarchfs.types import ROOT_INO, DirRef, IndexUnusable, Node, SourceStat
from tests.index.tools import (
    DIRECTORY,
    NOW,
    ROOT_SOURCE_INO,
    names_in,
    open_index,
    scratch,
    source_stat,
)
from tests.support.indexing import record_found


def test_the_root_is_number_one_and_the_rest_start_at_sixteen(index: Index) -> None:
    root = index.node(ROOT_INO)
    assert root is not None
    assert (root.parent, root.name) == (ROOT_INO, b"")
    found = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    assert found.ino == 16
    assert index.node(16) == found
    assert index.count_nodes() == 2


def test_unknown_numbers_and_names_are_none(index: Index) -> None:
    assert index.node(99) is None
    assert index.dirent(ROOT_INO, b"nothing") is None
    assert index.dirref(99) is None
    assert index.listing(ROOT_INO) is None
    assert index.replica(99) is None
    assert index.xattr(99, b"user.x") is None
    assert index.entries(99, 0, 10) == []


def test_the_same_version_keeps_its_number_and_gets_new_attributes(index: Index) -> None:
    first = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    again = source_stat(10)._replace(atime_ns=NOW + 99, nlink=2)
    second = record_found(index, ROOT_INO, b"a", again, b"", NOW + 1)
    assert second == first._replace(stat=again, fetched_ns=NOW + 1)
    assert index.node(first.ino) == second


def test_another_version_is_another_number_and_the_old_one_is_outdated(index: Index) -> None:
    old = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    before = index.dirent(ROOT_INO, b"a")
    new = record_found(index, ROOT_INO, b"a", source_stat(10, version=1), b"", NOW + 5)
    assert new.ino > old.ino
    assert index.node(old.ino) == old._replace(outdated=True)
    after = index.dirent(ROOT_INO, b"a")
    assert before is not None
    assert after == before._replace(ino=new.ino, shown_ino=new.ino, checked_ns=NOW + 5)


def test_a_version_that_was_thought_outdated_is_good_when_it_is_found_again(index: Index) -> None:
    node = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    index.mark_outdated(node.ino)
    assert index.node(node.ino) == node._replace(outdated=True)
    assert record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW) == node


def test_marking_an_unknown_number_outdated_changes_nothing(index: Index) -> None:
    index.mark_outdated(99)
    assert index.node(99) is None


def test_hard_links_share_a_number(index: Index) -> None:
    a = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    b = record_found(index, ROOT_INO, b"b", source_stat(10), b"", NOW)
    assert a.ino == b.ino
    cookies = {index.dirent(ROOT_INO, n).cookie for n in (b"a", b"b")}  # type: ignore[union-attr]
    assert len(cookies) == 2


def test_equal_source_numbers_on_two_devices_are_two_files(index: Index) -> None:
    a = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    b = record_found(index, ROOT_INO, b"b", source_stat(10, device=77), b"", NOW)
    assert a.ino != b.ino


def test_a_directory_keeps_its_number_while_its_contents_change(index: Index) -> None:
    d = record_found(index, ROOT_INO, b"d", source_stat(20, mode=DIRECTORY), b"", NOW)
    changed = source_stat(20, mode=DIRECTORY, version=3)
    assert record_found(index, ROOT_INO, b"d", changed, b"", NOW).ino == d.ino
    assert index.node(d.ino) == d._replace(stat=changed)
    other = record_found(index, ROOT_INO, b"d", source_stat(21, mode=DIRECTORY), b"", NOW)
    assert other.ino != d.ino


def test_a_file_that_took_over_a_directorys_source_number_is_another(index: Index) -> None:
    d = record_found(index, ROOT_INO, b"x", source_stat(20, mode=DIRECTORY), b"", NOW)
    f = record_found(index, ROOT_INO, b"x", source_stat(20), b"", NOW)
    assert f.ino != d.ino
    assert index.node(d.ino) == d._replace(outdated=True)


def test_a_symlinks_target_is_kept(index: Index) -> None:
    target = b"../" + b"t" * 4092
    link = record_found(
        index, ROOT_INO, b"l", source_stat(30, mode=stat.S_IFLNK | 0o777), target, NOW
    )
    assert link.target == target
    assert index.node(link.ino) == link


def test_other_attributes_of_the_same_version_are_the_same_number(index: Index) -> None:
    node = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    fresh = source_stat(10)._replace(uid=99)
    again = record_found(index, ROOT_INO, b"a", fresh, b"", NOW + 1)
    assert again == node._replace(stat=fresh, fetched_ns=NOW + 1)
    assert index.node(node.ino) == again


def test_the_roots_attributes_are_its_newest(index: Index) -> None:
    changed = source_stat(ROOT_SOURCE_INO, mode=DIRECTORY, version=1)
    assert index.record_root(changed, NOW + 1).stat == changed
    assert index.node(ROOT_INO) == index.record_root(changed, NOW + 1)


def test_a_missing_name_is_gone_and_its_cookie_never_used_again(index: Index) -> None:
    record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    first = index.dirent(ROOT_INO, b"a")
    assert first is not None
    assert index.record_missing(ROOT_INO, [b"none", b"a"]) == [None, first.ino]
    assert index.record_missing(ROOT_INO, [b"a"]) == [None]
    assert index.dirent(ROOT_INO, b"a") is None
    assert names_in(index, ROOT_INO) == []
    node = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    again = index.dirent(ROOT_INO, b"a")
    assert again is not None
    assert (again.ino, node.ino) == (first.ino, first.ino)
    assert again.cookie > first.cookie


@pytest.mark.parametrize("ns", [-(2**80), -1, 0, 2**63 - 1, 2**63, 16_725_225_600 * 10**9, 2**90])
def test_times_of_any_century(index: Index, ns: int) -> None:
    far = source_stat(10)._replace(mtime_ns=ns, ctime_ns=ns + 1, atime_ns=-ns)
    link = far._replace(mode=stat.S_IFLNK | 0o777)
    node = record_found(index, ROOT_INO, b"l", link, b"target", NOW)
    assert index.node(node.ino) == node
    assert node.stat == link
    assert record_found(index, ROOT_INO, b"l", link, b"target", NOW) == node


def test_a_path_of_4095_bytes(index: Index) -> None:
    parent, parts = ROOT_INO, []
    for depth in range(2048):
        name = bytes([ord("a") + depth % 26])
        parts.append(name)
        node = record_found(
            index, parent, name, source_stat(1000 + depth, mode=DIRECTORY), b"", NOW
        )
        parent = node.ino
    path = b"/".join(parts)
    assert len(path) == 4095
    assert index.dirref(parent) == DirRef(path, 1000 + 2047)
    assert index.dirref(ROOT_INO) == DirRef(b"", ROOT_SOURCE_INO)


def test_a_broken_or_circular_chain_has_no_path(index: Index) -> None:
    orphan = record_found(index, 500, b"o", source_stat(40, mode=DIRECTORY), b"", NOW)
    assert index.dirref(orphan.ino) is None
    outer = record_found(index, ROOT_INO, b"o", source_stat(41, mode=DIRECTORY), b"", NOW)
    inner = record_found(index, outer.ino, b"i", source_stat(42, mode=DIRECTORY), b"", NOW)
    record_found(index, inner.ino, b"o", source_stat(41, mode=DIRECTORY), b"", NOW)
    assert index.dirref(inner.ino) is None


def test_the_root_found_below_itself_stays_the_root(index: Index) -> None:
    root = source_stat(ROOT_SOURCE_INO, mode=DIRECTORY)
    assert record_found(index, ROOT_INO, b"again", root, b"", NOW) == index.node(ROOT_INO)
    assert index.node(ROOT_INO) == Node(ROOT_INO, root, ROOT_INO, b"", NOW, False, b"")
    assert index.dirref(ROOT_INO) == DirRef(b"", ROOT_SOURCE_INO)


def test_another_root_is_another_source(index: Index) -> None:
    index.record_root(source_stat(ROOT_SOURCE_INO, mode=DIRECTORY, version=4), NOW)
    with pytest.raises(IndexUnusable, match="another source"):
        index.record_root(source_stat(3, mode=DIRECTORY), NOW)


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
            dirent = index.dirent(ROOT_INO, name)
            assert dirent is not None
            node = index.node(dirent.ino)
            assert node is not None
            assert node.name == dirent.name == name
        index.close()


def test_xattrs_and_their_errors_are_remembered(index: Index) -> None:
    node = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    index.put_xattr(node.ino, b"user." + b"x" * 250, b"")
    index.put_xattr(node.ino, b"user.big", bytes(65536))
    index.put_xattr(node.ino, b"security.selinux", errno.ENODATA)
    index.put_xattr(node.ino, b"", b"user.big\0")
    assert index.xattr(node.ino, b"user." + b"x" * 250) == b""
    assert index.xattr(node.ino, b"user.big") == bytes(65536)
    assert index.xattr(node.ino, b"security.selinux") == errno.ENODATA
    assert index.xattr(node.ino, b"") == b"user.big\0"
    assert index.xattr(node.ino, b"user.other") is None


@pytest.mark.parametrize("root", [False, True])
def test_a_directorys_xattrs_are_forgotten_with_its_ctime(index: Index, root: bool) -> None:
    number = ROOT_SOURCE_INO if root else 20
    old, new = (source_stat(number, mode=DIRECTORY, version=v) for v in (0, 1))

    def record(stat_: SourceStat) -> Node:
        if root:
            return index.record_root(stat_, NOW)
        return record_found(index, ROOT_INO, b"d", stat_, b"", NOW)

    d = record(old)
    other = record_found(index, ROOT_INO, b"e", source_stat(21, mode=DIRECTORY), b"", NOW)
    for ino in (d.ino, other.ino):
        index.put_xattr(ino, b"user.a", b"1")
        index.put_xattr(ino, b"user.b", b"2")
    for stat_ in (old, new):
        assert index.xattr(d.ino, b"user.b") == b"2"
        record(stat_)
    assert index.xattr(d.ino, b"user.a") is None
    assert index.xattr(d.ino, b"user.b") is None
    assert index.xattr(other.ino, b"user.a") == b"1"
