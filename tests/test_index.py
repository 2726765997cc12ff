"""The index against a model, across reopening, growth, damage, and the death of its writer."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from monarchfs.index import Index, LastClose, check_in_child, last_close, records, set_aside
from monarchfs.types import (
    ROOT_INO,
    DirRef,
    FileType,
    IndexUnusable,
    IndexWriteError,
    Listing,
    Node,
    Replica,
    ReplicaState,
    SourceStat,
    SourceVersion,
)

NOW = 1_700_000_000_000_000_000
ROOT_SOURCE_INO = 2
FILE = stat.S_IFREG | 0o640
DIRECTORY = stat.S_IFDIR | 0o755


def source_stat(ino: int, *, mode: int = FILE, version: int = 0, device: int = 0) -> SourceStat:
    return SourceStat(
        device, ino, 1000 + version, NOW + version, NOW + version, NOW, mode, 1, 7, 8, 0, 2, 4096
    )


def replica(
    tier: int = 0, allocated: int = 4096, state: ReplicaState = ReplicaState.RESIDENT
) -> Replica:
    version = SourceVersion(0, 5, 100, NOW, NOW)
    if state is ReplicaState.RESIDENT:
        return Replica(tier, state, version, allocated, False, NOW)
    return Replica(tier, state, version, allocated, False, NOW, 65536, b"\1\0\1" * 40)


def open_index(directory: Path, map_bytes: int = 1 << 30) -> Index:
    return Index.open(str(directory), source_id="lustre:/data", map_bytes=map_bytes)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = open_index(tmp_path)
    opened.record_root(source_stat(ROOT_SOURCE_INO, mode=DIRECTORY), NOW)
    yield opened
    opened.close()
    assert check_in_child(str(tmp_path))


def add_listing(index: Index, parent: int, *names: tuple[bytes, int]) -> None:
    sequence = index.begin_listing(parent)
    index.add_entries(parent, sequence, [(n, FileType.REGULAR, i, 0) for n, i in names], NOW)
    for _ in index.finish_listing(parent, sequence, NOW, NOW, NOW):
        pass


def names_in(index: Index, parent: int) -> list[bytes]:
    return [dirent.name for dirent, _ in index.entries(parent, 2, 1000)]


# Nodes and names.


def test_the_root_is_number_one_and_the_rest_start_at_sixteen(index: Index) -> None:
    root = index.node(ROOT_INO)
    assert root is not None
    assert (root.parent, root.name) == (ROOT_INO, b"")
    found = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
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
    first = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    again = source_stat(10)._replace(atime_ns=NOW + 99, nlink=2)
    second = index.record_found(ROOT_INO, b"a", again, b"", NOW + 1)
    assert second == first._replace(stat=again, fetched_ns=NOW + 1)
    assert index.node(first.ino) == second


def test_another_version_is_another_number_and_the_old_one_is_outdated(index: Index) -> None:
    old = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    before = index.dirent(ROOT_INO, b"a")
    new = index.record_found(ROOT_INO, b"a", source_stat(10, version=1), b"", NOW + 5)
    assert new.ino > old.ino
    assert index.node(old.ino) == old._replace(outdated=True)
    after = index.dirent(ROOT_INO, b"a")
    assert before is not None
    assert after == before._replace(ino=new.ino, checked_ns=NOW + 5)


def test_a_version_that_was_thought_outdated_is_good_when_it_is_found_again(index: Index) -> None:
    node = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    index.mark_outdated(node.ino)
    assert index.node(node.ino) == node._replace(outdated=True)
    assert index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW) == node


def test_marking_an_unknown_number_outdated_changes_nothing(index: Index) -> None:
    index.mark_outdated(99)
    assert index.node(99) is None


def test_hard_links_share_a_number(index: Index) -> None:
    a = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    b = index.record_found(ROOT_INO, b"b", source_stat(10), b"", NOW)
    assert a.ino == b.ino
    cookies = {index.dirent(ROOT_INO, n).cookie for n in (b"a", b"b")}  # type: ignore[union-attr]
    assert len(cookies) == 2


def test_equal_source_numbers_on_two_devices_are_two_files(index: Index) -> None:
    a = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    b = index.record_found(ROOT_INO, b"b", source_stat(10, device=77), b"", NOW)
    assert a.ino != b.ino


def test_a_directory_keeps_its_number_while_its_contents_change(index: Index) -> None:
    d = index.record_found(ROOT_INO, b"d", source_stat(20, mode=DIRECTORY), b"", NOW)
    changed = source_stat(20, mode=DIRECTORY, version=3)
    assert index.record_found(ROOT_INO, b"d", changed, b"", NOW).ino == d.ino
    assert index.record_attributes(d.ino, changed, NOW) == d._replace(stat=changed)
    other = index.record_found(ROOT_INO, b"d", source_stat(21, mode=DIRECTORY), b"", NOW)
    assert other.ino != d.ino


def test_a_file_that_took_over_a_directorys_source_number_is_another(index: Index) -> None:
    d = index.record_found(ROOT_INO, b"x", source_stat(20, mode=DIRECTORY), b"", NOW)
    f = index.record_found(ROOT_INO, b"x", source_stat(20), b"", NOW)
    assert f.ino != d.ino
    assert index.node(d.ino) == d._replace(outdated=True)


def test_a_symlinks_target_is_kept(index: Index) -> None:
    target = b"../" + b"t" * 4092
    link = index.record_found(
        ROOT_INO, b"l", source_stat(30, mode=stat.S_IFLNK | 0o777), target, NOW
    )
    assert link.target == target
    assert index.node(link.ino) == link


def test_attributes_of_another_version_only_outdate_the_node(index: Index) -> None:
    node = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    fresh = source_stat(10)._replace(uid=99)
    assert index.record_attributes(node.ino, fresh, NOW + 1) == node._replace(
        stat=fresh, fetched_ns=NOW + 1
    )
    outdated = index.record_attributes(node.ino, source_stat(10, version=1), NOW + 2)
    assert outdated == node._replace(stat=fresh, fetched_ns=NOW + 1, outdated=True)
    assert index.node(node.ino) == outdated
    with pytest.raises(LookupError):
        index.record_attributes(99, fresh, NOW)


def test_a_missing_name_is_gone_and_its_cookie_never_used_again(index: Index) -> None:
    index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    first = index.dirent(ROOT_INO, b"a")
    index.record_missing(ROOT_INO, b"a")
    index.record_missing(ROOT_INO, b"a")
    assert index.dirent(ROOT_INO, b"a") is None
    assert names_in(index, ROOT_INO) == []
    node = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    again = index.dirent(ROOT_INO, b"a")
    assert first is not None
    assert again is not None
    assert (again.ino, node.ino) == (first.ino, first.ino)
    assert again.cookie > first.cookie


@pytest.mark.parametrize("ns", [-(2**80), -1, 0, 2**63 - 1, 2**63, 16_725_225_600 * 10**9, 2**90])
def test_times_of_any_century(index: Index, ns: int) -> None:
    far = source_stat(10)._replace(mtime_ns=ns, ctime_ns=ns + 1, atime_ns=-ns)
    link = far._replace(mode=stat.S_IFLNK | 0o777)
    node = index.record_found(ROOT_INO, b"l", link, b"target", NOW)
    assert index.node(node.ino) == node
    assert node.stat == link
    assert index.record_found(ROOT_INO, b"l", link, b"target", NOW) == node


def test_a_path_of_4095_bytes(index: Index) -> None:
    parent, parts = ROOT_INO, []
    for depth in range(2048):
        name = bytes([ord("a") + depth % 26])
        parts.append(name)
        node = index.record_found(parent, name, source_stat(1000 + depth, mode=DIRECTORY), b"", NOW)
        parent = node.ino
    path = b"/".join(parts)
    assert len(path) == 4095
    assert index.dirref(parent) == DirRef(path, 1000 + 2047)
    assert index.dirref(ROOT_INO) == DirRef(b"", ROOT_SOURCE_INO)


def test_a_broken_or_circular_chain_has_no_path(index: Index) -> None:
    orphan = index.record_found(500, b"o", source_stat(40, mode=DIRECTORY), b"", NOW)
    assert index.dirref(orphan.ino) is None
    outer = index.record_found(ROOT_INO, b"o", source_stat(41, mode=DIRECTORY), b"", NOW)
    inner = index.record_found(outer.ino, b"i", source_stat(42, mode=DIRECTORY), b"", NOW)
    index.record_found(inner.ino, b"o", source_stat(41, mode=DIRECTORY), b"", NOW)
    assert index.dirref(inner.ino) is None


def test_the_root_found_below_itself_stays_the_root(index: Index) -> None:
    root = source_stat(ROOT_SOURCE_INO, mode=DIRECTORY)
    assert index.record_found(ROOT_INO, b"again", root, b"", NOW) == index.node(ROOT_INO)
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
            index.record_found(ROOT_INO, name, source_stat(10 + i), b"", NOW)
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


# Listings.


def test_a_listing_gives_numbers_without_nodes_until_names_are_found(index: Index) -> None:
    add_listing(index, ROOT_INO, (b"b", 11), (b"a", 10))
    assert index.listing(ROOT_INO) == Listing(NOW, NOW, NOW)
    (b, no_node), (a, _) = index.entries(ROOT_INO, 2, 10)
    assert (b.name, a.name, no_node) == (b"b", b"a", None)
    assert index.node(b.ino) is None
    found = index.record_found(ROOT_INO, b"b", source_stat(11), b"", NOW)
    assert found.ino == b.ino
    assert index.entries(ROOT_INO, 2, 10) == [(b, found), (a, None)]


def test_entries_go_on_after_a_cookie(index: Index) -> None:
    add_listing(index, ROOT_INO, *((b"%d" % i, 10 + i) for i in range(10)))
    first = index.entries(ROOT_INO, 2, 4)
    rest = index.entries(ROOT_INO, first[-1][0].cookie, 100)
    assert [d.name for d, _ in first + rest] == [b"%d" % i for i in range(10)]
    assert index.entries(ROOT_INO, rest[-1][0].cookie, 100) == []
    assert index.entries(ROOT_INO, 0, 0) == []


def test_a_second_listing_removes_what_is_gone_and_keeps_the_rest(index: Index) -> None:
    add_listing(index, ROOT_INO, (b"a", 10), (b"b", 11), (b"c", 12))
    before = {d.name: d for d, _ in index.entries(ROOT_INO, 2, 10)}
    add_listing(index, ROOT_INO, (b"c", 12), (b"d", 13), (b"b", 99))
    after = {d.name: d for d, _ in index.entries(ROOT_INO, 2, 10)}
    assert set(after) == {b"b", b"c", b"d"}
    assert after[b"c"] == before[b"c"]
    assert after[b"b"].cookie == before[b"b"].cookie
    assert after[b"b"].ino != before[b"b"].ino
    assert index.dirent(ROOT_INO, b"a") is None


def test_a_name_found_while_a_listing_runs_outlives_it(index: Index) -> None:
    index.record_found(ROOT_INO, b"before", source_stat(10), b"", NOW)
    sequence = index.begin_listing(ROOT_INO)
    index.record_found(ROOT_INO, b"meanwhile", source_stat(11), b"", NOW)
    index.add_entries(ROOT_INO, sequence, [(b"seen", FileType.REGULAR, 12, 0)], NOW)
    for _ in index.finish_listing(ROOT_INO, sequence, NOW, NOW, NOW):
        pass
    assert names_in(index, ROOT_INO) == [b"meanwhile", b"seen"]


def test_two_listings_at_once_remove_only_what_neither_saw(index: Index) -> None:
    add_listing(index, ROOT_INO, (b"a", 10), (b"gone", 11))
    first, second = index.begin_listing(ROOT_INO), index.begin_listing(ROOT_INO)
    a = [(b"a", FileType.REGULAR, 10, 0)]
    index.add_entries(ROOT_INO, second, a, NOW)
    index.add_entries(ROOT_INO, first, a, NOW)
    for sequence in (second, first):
        for _ in index.finish_listing(ROOT_INO, sequence, NOW, NOW, NOW):
            pass
    assert names_in(index, ROOT_INO) == [b"a"]


def test_finishing_a_long_listing_goes_in_steps_and_may_be_left_off(index: Index) -> None:
    add_listing(index, ROOT_INO, *((b"%d" % i, 100 + i) for i in range(2000)))
    sequence = index.begin_listing(ROOT_INO)
    steps = index.finish_listing(ROOT_INO, sequence, NOW + 1, NOW + 1, NOW + 1)
    next(steps)
    assert 0 < len(index.entries(ROOT_INO, 2, 3000)) < 2000
    assert index.listing(ROOT_INO) == Listing(NOW, NOW, NOW)
    assert len(list(steps)) >= 2
    assert index.entries(ROOT_INO, 2, 10) == []
    assert index.listing(ROOT_INO) == Listing(NOW + 1, NOW + 1, NOW + 1)


def test_a_directory_of_unknown_types_keeps_the_types_that_are_known(index: Index) -> None:
    index.record_found(ROOT_INO, b"d", source_stat(20, mode=DIRECTORY), b"", NOW)
    sequence = index.begin_listing(ROOT_INO)
    index.add_entries(
        ROOT_INO,
        sequence,
        [(b"d", FileType.UNKNOWN, 20, 0), (b"e", FileType.UNKNOWN, 21, 0)],
        NOW,
    )
    types = {d.name: d.type for d, _ in index.entries(ROOT_INO, 2, 10)}
    assert types == {b"d": FileType.DIRECTORY, b"e": FileType.UNKNOWN}


def test_a_listed_type_that_contradicts_the_node_is_another_file(index: Index) -> None:
    node = index.record_found(ROOT_INO, b"d", source_stat(20, mode=DIRECTORY), b"", NOW)
    add_listing(index, ROOT_INO, (b"d", 20))
    dirent = index.dirent(ROOT_INO, b"d")
    assert dirent is not None
    assert (dirent.type, index.node(dirent.ino)) == (FileType.REGULAR, None)
    assert index.node(node.ino) == node._replace(outdated=True)


def test_a_dropped_listing_leaves_the_names(index: Index) -> None:
    add_listing(index, ROOT_INO, (b"a", 10))
    index.drop_listing(ROOT_INO)
    index.drop_listing(ROOT_INO)
    assert index.listing(ROOT_INO) is None
    assert names_in(index, ROOT_INO) == [b"a"]


def test_a_name_of_the_other_directory_is_not_listed(index: Index) -> None:
    add_listing(index, 300, (b"a", 10))
    add_listing(index, 301, (b"b", 11))
    add_listing(index, 300, (b"c", 12))
    assert names_in(index, 300) == [b"c"]
    assert names_in(index, 301) == [b"b"]


# Replicas and extended attributes.


def test_totals_follow_the_replicas(index: Index) -> None:
    partial = replica(1, 65536, ReplicaState.PARTIAL)
    index.put_replica(20, replica(0, 4096))
    index.put_replica(21, replica(0, 8192))
    index.put_replica(22, partial)
    assert index.tier_totals() == {0: (2, 0, 12288), 1: (0, 1, 65536)}
    assert index.replica(22) == partial
    index.put_replica(22, replica(0, 1))
    assert index.tier_totals() == {0: (3, 0, 12289)}
    index.drop_replica(20)
    index.drop_replica(20)
    assert index.replica(20) is None
    assert index.tier_totals() == {0: (2, 0, 8193)}
    assert [ino for ino, _ in index.replicas()] == [21, 22]


def test_replicas_may_be_dropped_while_they_are_walked(index: Index) -> None:
    for ino in range(1000):
        index.put_replica(ino, replica())
    walked = []
    for ino, _ in index.replicas():
        walked.append(ino)
        index.drop_replica(ino)
    assert walked == list(range(1000))
    assert index.tier_totals() == {}


def test_durable_is_marked_in_batches(index: Index) -> None:
    partial = replica(1, 65536, ReplicaState.PARTIAL)
    index.put_replica(20, replica())
    index.put_replica(21, partial)
    index.put_replica(22, replica())
    index.mark_durable([20, 21, 99])
    assert dict(index.replicas()) == {
        20: replica()._replace(durable=True),
        21: partial._replace(durable=True),
        22: replica(),
    }


def test_xattrs_and_their_errors_are_remembered(index: Index) -> None:
    node = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    index.put_xattr(node.ino, b"user." + b"x" * 250, b"")
    index.put_xattr(node.ino, b"user.big", bytes(65536))
    index.put_xattr(node.ino, b"security.selinux", errno.ENODATA)
    index.put_xattr(node.ino, b"", b"user.big\0")
    assert index.xattr(node.ino, b"user." + b"x" * 250) == b""
    assert index.xattr(node.ino, b"user.big") == bytes(65536)
    assert index.xattr(node.ino, b"security.selinux") == errno.ENODATA
    assert index.xattr(node.ino, b"") == b"user.big\0"
    assert index.xattr(node.ino, b"user.other") is None


@pytest.mark.parametrize("how", ["found", "attributes"])
def test_a_directorys_xattrs_are_forgotten_with_its_ctime(index: Index, how: str) -> None:
    old, new = (source_stat(20, mode=DIRECTORY, version=v) for v in (0, 1))
    d = index.record_found(ROOT_INO, b"d", old, b"", NOW)
    other = index.record_found(ROOT_INO, b"e", source_stat(21, mode=DIRECTORY), b"", NOW)
    for ino in (d.ino, other.ino):
        index.put_xattr(ino, b"user.a", b"1")
        index.put_xattr(ino, b"user.b", b"2")
    for stat_ in (old, new):
        assert index.xattr(d.ino, b"user.b") == b"2"
        if how == "found":
            index.record_found(ROOT_INO, b"d", stat_, b"", NOW)
        else:
            index.record_attributes(d.ino, stat_, NOW)
    assert index.xattr(d.ino, b"user.a") is None
    assert index.xattr(d.ino, b"user.b") is None
    assert index.xattr(other.ino, b"user.a") == b"1"


def test_small_values_are_kept(index: Index) -> None:
    assert index.meta_get(b"boot") is None
    index.meta_put(b"boot", b"id")
    index.meta_put(b"schema", b"mine")
    assert (index.meta_get(b"boot"), index.meta_get(b"schema")) == (b"id", b"mine")
    index.meta_put(b"tier:" + b"p" * 4096, b"1")
    index.meta_put(b"tier:" + b"p" * 4095, b"2")
    assert index.meta_get(b"tier:" + b"p" * 4096) == b"1"


# Opening, closing, growing.


@contextmanager
def scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="monarchfs-index-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    assert last_close(str(tmp_path)) is LastClose.KILLED
    node = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    index.put_replica(node.ino, replica())
    index.close()
    index.close()
    assert last_close(str(tmp_path)) is LastClose.CLEAN
    index = open_index(tmp_path)
    assert index.node(node.ino) == node
    assert index.replica(node.ino) == replica()
    assert index.tier_totals() == {0: (1, 0, 4096)}
    later = index.record_found(ROOT_INO, b"b", source_stat(11), b"", NOW)
    assert later.ino > node.ino + 1
    index.close()


def test_an_unclean_close_asks_for_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_close(str(tmp_path)) is LastClose.NEW
    index = open_index(tmp_path)
    index.close(clean=False)
    assert last_close(str(tmp_path)) is LastClose.KILLED
    checked = []

    def check(directory: str) -> bool:
        checked.append(directory)
        return len(checked) > 1

    monkeypatch.setattr("monarchfs.index.recovery.check_in_child", check)
    with pytest.raises(IndexUnusable, match="damaged"):
        open_index(tmp_path)
    Index.open(str(tmp_path), source_id="lustre:/data", trust_after_kill=True).close(clean=False)
    assert len(checked) == 1
    open_index(tmp_path).close(clean=True)
    assert len(checked) == 2
    open_index(tmp_path).close()
    assert len(checked) == 2


def test_after_a_reboot_an_open_index_counts_as_crashed(tmp_path: Path) -> None:
    open_index(tmp_path).close(clean=False)
    (tmp_path / "index" / "mark").write_text("open 00000000-0000-0000-0000-000000000000")
    assert last_close(str(tmp_path)) is LastClose.CRASHED
    (tmp_path / "index" / "mark").unlink()
    assert last_close(str(tmp_path)) is LastClose.CRASHED
    open_index(tmp_path).close()
    assert last_close(str(tmp_path)) is LastClose.CLEAN


def test_a_data_file_changed_behind_a_clean_mark_is_suspicious(tmp_path: Path) -> None:
    open_index(tmp_path).close()
    data = tmp_path / "index" / "data.mdb"
    os.truncate(data, data.stat().st_size - 4096)
    assert last_close(str(tmp_path)) is LastClose.CRASHED


def test_the_directory_may_be_known_by_descriptor_only(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        by_descriptor = Path(f"/proc/self/fd/{descriptor}")
        open_index(by_descriptor).close(clean=False)
        # Checked in a child, which has another descriptor table.
        index = open_index(by_descriptor)
        index.close()
        assert last_close(str(by_descriptor)) is LastClose.CLEAN
    finally:
        os.close(descriptor)


def test_the_map_grows_by_itself(tmp_path: Path) -> None:
    index = open_index(tmp_path, map_bytes=1 << 18)
    for i in range(3000):
        index.record_found(ROOT_INO, b"%d" % i, source_stat(10 + i), b"", NOW)
        assert index.dirent(ROOT_INO, b"%d" % i) is not None
    index.close()
    assert (tmp_path / "index" / "data.mdb").stat().st_size > 1 << 19
    # A map smaller than the file is no obstacle either.
    index = open_index(tmp_path, map_bytes=1 << 18)
    inos = {node.ino for _, node in index.entries(ROOT_INO, 0, 4000) if node is not None}
    assert len(inos) == 3000
    index.record_found(ROOT_INO, b"new", source_stat(9999), b"", NOW)
    index.close()


def test_pages_are_used_again(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    for i in range(3000):
        index.meta_put(b"key", b"%d" % i)
        index.meta_get(b"key")
    index.close()
    assert (tmp_path / "index" / "data.mdb").stat().st_size < 256 * 1024


def test_a_full_disk_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    known = index.record_found(ROOT_INO, b"a", source_stat(10), b"", NOW)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "index/data.mdb").stat().st_size, hard))
    recorded = []

    def record_many() -> None:
        for i in range(1000):
            found = index.record_found(ROOT_INO, b"%d" % i, source_stat(100 + i), b"", NOW)
            recorded.append(found)

    try:
        with pytest.raises(IndexWriteError):
            record_many()
        failed = len(recorded)
        assert index.dirent(ROOT_INO, b"%d" % failed) is None
        assert index.node(known.ino) == known
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    after = index.record_found(ROOT_INO, b"after", source_stat(5000), b"", NOW)
    assert [index.node(node.ino) for node in recorded] == recorded
    assert after.ino > max(node.ino for node in [known, *recorded])
    index.close()
    assert check_in_child(str(tmp_path))


def test_sync_from_another_thread_while_writing(tmp_path: Path) -> None:
    index = open_index(tmp_path, map_bytes=1 << 18)
    failures: list[BaseException] = []
    stop = threading.Event()

    def sync() -> None:
        try:
            while not stop.is_set():
                index.sync()
        except IndexWriteError as error:
            failures.append(error)

    thread = threading.Thread(target=sync)
    thread.start()
    for i in range(2000):
        index.record_found(ROOT_INO, b"%d" % i, source_stat(10 + i), b"", NOW)
    index.close()
    stop.set()
    thread.join()
    assert failures == []
    index = open_index(tmp_path)
    assert len(index.entries(ROOT_INO, 0, 3000)) == 2000
    index.close()


# Indexes that cannot be used.


def test_an_index_of_another_source_is_refused(tmp_path: Path) -> None:
    open_index(tmp_path).close()
    with pytest.raises(IndexUnusable, match=r"another source: 'lustre:/data', not 'other'"):
        Index.open(str(tmp_path), source_id="other")
    open_index(tmp_path).close()


def environment(tmp_path: Path) -> lmdb.Environment:
    (tmp_path / "index").mkdir(exist_ok=True)
    return lmdb.open(str(tmp_path / "index"), max_dbs=8, lock=False)


@pytest.mark.parametrize("database", [None, b"meta", b"other"])
def test_a_database_of_another_program_is_refused(tmp_path: Path, database: bytes | None) -> None:
    env = environment(tmp_path)
    handle = None if database is None else env.open_db(database)
    with env.begin(write=True) as txn:
        txn.put(b"meta", b"theirs", db=handle)
    env.close()
    before = (tmp_path / "index" / "data.mdb").read_bytes()
    with pytest.raises(IndexUnusable, match="not ours"):
        open_index(tmp_path)
    assert (tmp_path / "index" / "data.mdb").read_bytes() == before


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    open_index(tmp_path).close()
    env = environment(tmp_path)
    with env.begin(write=True) as txn:
        newer = records.ID.pack(records.SCHEMA_VERSION + 1)
        txn.put(records.META_SCHEMA, newer, db=env.open_db(b"meta", txn=txn))
    env.close()
    with pytest.raises(IndexUnusable, match="schema version 2"):
        open_index(tmp_path)


def test_a_file_in_place_of_the_index_is_refused_and_can_be_set_aside(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("x")
    with pytest.raises(IndexUnusable, match="not a directory"):
        open_index(tmp_path)
    assert set_aside(str(tmp_path)) == str(tmp_path / "index.bad-1")
    open_index(tmp_path).close()


def test_setting_aside_keeps_every_bad_index(tmp_path: Path) -> None:
    assert set_aside(str(tmp_path)) is None
    for n in (1, 2):
        open_index(tmp_path).close()
        assert set_aside(str(tmp_path)) == str(tmp_path / f"index.bad-{n}")
    assert sorted(os.listdir(tmp_path)) == ["index.bad-1", "index.bad-2"]


def filled(directory: Path) -> Path:
    index = open_index(directory)
    index.record_root(source_stat(ROOT_SOURCE_INO, mode=DIRECTORY), NOW)
    for i in range(500):
        node = index.record_found(ROOT_INO, b"%d" % i, source_stat(10 + i), b"", NOW)
        index.put_replica(node.ino, replica())
    index.close()
    return directory / "index" / "data.mdb"


@pytest.mark.parametrize("kept_bytes", [1, 4096, 8192, 40_000, 100_000])
def test_a_truncated_index_is_found_out_in_the_child(tmp_path: Path, kept_bytes: int) -> None:
    data = filled(tmp_path)
    assert data.stat().st_size > 100_000
    os.truncate(data, kept_bytes)
    with pytest.raises(IndexUnusable, match="damaged"):
        open_index(tmp_path)
    assert set_aside(str(tmp_path)) is not None
    open_index(tmp_path).close()


def test_an_index_of_garbage_is_found_out_in_the_child(tmp_path: Path) -> None:
    data = filled(tmp_path)
    data.write_bytes(os.urandom(data.stat().st_size))
    with pytest.raises(IndexUnusable, match="damaged"):
        open_index(tmp_path)


def test_pages_of_garbage_never_pass_as_sound_records(tmp_path: Path) -> None:
    data = filled(tmp_path)
    good = data.read_bytes()
    pages = len(good) // 4096
    rejected = 0
    for page in range(2, pages, 7):
        data.write_bytes(good[: page * 4096] + b"\xa5" * 4096 + good[(page + 1) * 4096 :])
        if check_in_child(str(tmp_path)):
            # Only a page that nothing refers to may be garbage: all records are still there.
            index = open_index(tmp_path)
            assert len(index.entries(ROOT_INO, 0, 1000)) == 500
            index.close(clean=False)
        else:
            rejected += 1
    assert rejected > 0


def test_records_that_contradict_each_other_are_found_out(tmp_path: Path) -> None:
    filled(tmp_path)
    assert check_in_child(str(tmp_path))
    for table, key in (
        (b"names", None),
        (b"entries", None),
        (b"replicas", None),
        (b"meta", b"next"),
    ):
        copy = tmp_path / table.decode()
        shutil.copytree(tmp_path / "index", copy / "index")
        env = lmdb.open(str(copy / "index"), max_dbs=8, lock=False)
        with env.begin(write=True) as txn:
            handle = env.open_db(table, txn=txn)
            cursor = txn.cursor(handle)
            assert cursor.first()
            if key is None:
                txn.delete(cursor.key(), db=handle)
            else:
                txn.put(key, records.ID.pack(17), db=handle)
        env.close()
        assert not check_in_child(str(copy)), table


WRITER = """
import sys
from monarchfs.index import Index
from monarchfs.types import SourceStat, Replica, ReplicaState, SourceVersion
index = Index.open(sys.argv[1], source_id="lustre:/data")
i = int(sys.argv[2])
while True:
    stat = SourceStat(0, 10 + i % 300, i, i, i, i, 0o100644, 1, 0, 0, 0, 0, 4096)
    node = index.record_found(1, b"%d" % (i % 300), stat, b"", i)
    index.put_replica(node.ino, Replica(i % 3, ReplicaState.RESIDENT, stat.version, i, False, i))
    print(node.ino, flush=True)
    i += 1
"""


def test_a_killed_writer_leaves_all_that_it_told_of(tmp_path: Path) -> None:
    highest = 0
    for round_ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(round_ * 1_000_000)],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        told = [int(child.stdout.readline()) for _ in range(200 + 331 * round_)]
        child.send_signal(signal.SIGKILL)
        told += [int(line) for line in child.stdout.read().splitlines(True) if line.endswith(b"\n")]
        child.wait()
        child.stdout.close()
        assert told[0] > highest
        highest = max(told)
        assert last_close(str(tmp_path)) is LastClose.KILLED
        # The whole of it is checked: names, numbers, totals.
        index = open_index(tmp_path)
        assert all(index.node(ino) is not None for ino in told)
        index.close(clean=round_ % 2 == 0)


# Against a model.

PARENTS = st.sampled_from([ROOT_INO, 1000, 1001])
NAMES = st.sampled_from([b"a", b"b", b"\xff\xfe", b"z" * 255])
SOURCE_INOS = st.integers(10, 14)
VERSIONS = st.integers(0, 2)
MODES = st.sampled_from([FILE, DIRECTORY])


class IndexMachine(RuleBasedStateMachine):
    """The index does what dictionaries would, and no number ever stands for two things."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="monarchfs-index-"))
        self.index = open_index(self.directory)
        self.nodes: dict[int, Node] = {}
        self.by_source: dict[int, int] = {}
        self.names: dict[tuple[int, bytes], tuple[int, FileType, int]] = {}
        self.cookies: dict[tuple[int, bytes], int] = {}
        self.replicas: dict[int, Replica] = {}
        self.given: set[int] = set()

    @initialize()
    def root(self) -> None:
        root = source_stat(ROOT_SOURCE_INO, mode=DIRECTORY)
        self.nodes[ROOT_INO] = self.index.record_root(root, NOW)

    def new(self, number: int) -> None:
        assert number >= 16
        assert number not in self.given
        self.given.add(number)

    def name_now(self, parent: int, name: bytes, type_: FileType, ino: int, now: int) -> None:
        dirent = self.index.dirent(parent, name)
        assert dirent is not None
        if (parent, name) not in self.cookies:
            self.new(dirent.cookie)
        self.cookies[parent, name] = dirent.cookie
        self.names[parent, name] = (ino, type_, now)

    @rule(parent=PARENTS, name=NAMES, ino=SOURCE_INOS, version=VERSIONS, mode=MODES, now=VERSIONS)
    def found(self, parent: int, name: bytes, ino: int, version: int, mode: int, now: int) -> None:
        wanted = source_stat(ino, mode=mode, version=version)
        node = self.index.record_found(parent, name, wanted, b"", now)
        number = self.by_source.get(ino)
        known = None if number is None else self.nodes.get(number)
        if known is not None and not self.same(known.stat, wanted):
            self.nodes[known.ino] = known._replace(outdated=True)
            number = None
        if number is None:
            self.new(node.ino)
        else:
            assert node.ino == number
        assert node == Node(node.ino, wanted, parent, name, now, False, b"")
        self.nodes[node.ino] = node
        self.by_source[ino] = node.ino
        self.name_now(parent, name, FileType.of_mode(mode), node.ino, now)

    @staticmethod
    def same(known: SourceStat, now: SourceStat) -> bool:
        if known.is_directory or now.is_directory:
            return known.is_directory and now.is_directory
        return known.version == now.version

    @rule(number=st.integers(1, 60), version=VERSIONS, mode=MODES, now=VERSIONS)
    def attributes(self, number: int, version: int, mode: int, now: int) -> None:
        known = self.nodes.get(number)
        if known is None or number == ROOT_INO:
            return
        wanted = source_stat(known.stat.ino, mode=mode, version=version)
        if self.same(known.stat, wanted):
            expected = known._replace(stat=wanted, fetched_ns=now)
        else:
            expected = known._replace(outdated=True)
        assert self.index.record_attributes(number, wanted, now) == expected
        self.nodes[number] = expected

    @rule(parent=PARENTS, name=NAMES)
    def missing(self, parent: int, name: bytes) -> None:
        self.index.record_missing(parent, name)
        self.names.pop((parent, name), None)
        self.cookies.pop((parent, name), None)

    @rule(
        parent=PARENTS,
        found=st.dictionaries(NAMES, st.tuples(SOURCE_INOS, MODES)),
        now=VERSIONS,
    )
    def listed(self, parent: int, found: dict[bytes, tuple[int, int]], now: int) -> None:
        sequence = self.index.begin_listing(parent)
        self.new(sequence)
        for name, (ino, mode) in found.items():
            type_ = FileType.of_mode(mode)
            self.index.add_entries(parent, sequence, [(name, type_, ino, 0)], now)
            number = self.by_source.get(ino)
            known = None if number is None else self.nodes.get(number)
            if known is not None and FileType.of_mode(known.stat.mode) != type_:
                self.nodes[known.ino] = known._replace(outdated=True)
                number = None
            dirent = self.index.dirent(parent, name)
            assert dirent is not None
            if number is None:
                self.new(dirent.ino)
                self.by_source[ino] = number = dirent.ino
            self.name_now(parent, name, type_, number, now)
        for _ in self.index.finish_listing(parent, sequence, now, now, now):
            pass
        assert self.index.listing(parent) == Listing(now, now, now)
        for key in [k for k in self.names if k[0] == parent and k[1] not in found]:
            del self.names[key], self.cookies[key]

    @rule(ino=st.integers(16, 20), tier=st.integers(0, 2), size=st.integers(0, 10**12))
    def put_replica(self, ino: int, tier: int, size: int) -> None:
        state = ReplicaState.PARTIAL if size % 2 else ReplicaState.RESIDENT
        self.replicas[ino] = replica(tier, size, state)
        self.index.put_replica(ino, self.replicas[ino])

    @rule(ino=st.integers(16, 20))
    def drop_replica(self, ino: int) -> None:
        self.index.drop_replica(ino)
        self.replicas.pop(ino, None)

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        self.index.close(clean=clean)
        self.index = Index.open(
            str(self.directory), source_id="lustre:/data", trust_after_kill=True
        )

    @invariant()
    def agrees(self) -> None:
        assert self.index.count_nodes() == len(self.nodes)
        for ino, node in self.nodes.items():
            assert self.index.node(ino) == node
        seen = {}
        for parent in (ROOT_INO, 1000, 1001):
            entries = self.index.entries(parent, 2, 100)
            cookies = [dirent.cookie for dirent, _ in entries]
            assert cookies == sorted(cookies)
            for dirent, listed in entries:
                assert self.index.dirent(parent, dirent.name) == dirent
                assert listed == self.nodes.get(dirent.ino)
                assert self.cookies[parent, dirent.name] == dirent.cookie
                seen[parent, dirent.name] = (dirent.ino, dirent.type, dirent.checked_ns)
        assert seen == self.names
        assert dict(self.index.replicas()) == self.replicas
        assert self.index.tier_totals() == self.expected_totals()

    def expected_totals(self) -> dict[int, tuple[int, int, int]]:
        totals: dict[int, tuple[int, int, int]] = {}
        for copy in self.replicas.values():
            resident, partial, allocated = totals.get(copy.tier, (0, 0, 0))
            whole = copy.state is ReplicaState.RESIDENT
            totals[copy.tier] = (
                resident + whole,
                partial + (not whole),
                allocated + copy.allocated_bytes,
            )
        return totals

    def teardown(self) -> None:
        self.index.close()
        sound = check_in_child(str(self.directory))
        shutil.rmtree(self.directory)
        assert sound


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
