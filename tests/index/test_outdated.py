"""Pins, and the end of outdated nodes."""

from __future__ import annotations

import pytest

from monarchfs.index import Index
from monarchfs.types import ROOT_INO, FileType, Node
from tests.index.tools import DIRECTORY, NOW, add_listing, names_in, replica, source_stat
from tests.support.indexing import record_found


def found(index: Index, name: bytes, ino: int, version: int = 0, parent: int = ROOT_INO) -> Node:
    return record_found(index, parent, name, source_stat(ino, version=version), b"", NOW + version)


def found_directory(index: Index, name: bytes, ino: int, parent: int = ROOT_INO) -> Node:
    return record_found(index, parent, name, source_stat(ino, mode=DIRECTORY), b"", NOW)


# Pins.


def test_a_pin_holds_all_below_a_directory(index: Index) -> None:
    outer = found_directory(index, b"o", 20)
    inner = found_directory(index, b"i", 21, outer.ino)
    file = found(index, b"f", 10, parent=inner.ino)
    beside = found(index, b"g", 11)
    assert not index.pins.pinned(file.ino)
    index.pins.pin(outer.ino)
    index.pins.pin(outer.ino)
    assert [index.pins.pinned(n.ino) for n in (outer, inner, file, beside)] == [
        True,
        True,
        True,
        False,
    ]
    assert index.pins.pins() == [outer.ino]
    index.pins.pin(file.ino)
    index.pins.unpin(file.ino)
    assert (index.pins.pins(), index.pins.pinned(file.ino)) == ([outer.ino], True)
    index.pins.pin(file.ino)
    index.pins.pin(beside.ino)
    index.pins.unpin(outer.ino)
    assert [index.pins.pinned(n.ino) for n in (outer, inner, file, beside)] == [False] * 3 + [True]
    index.pins.pin(ROOT_INO)
    assert index.pins.pinned(beside.ino)


def test_a_circle_of_directories_ends_the_climb(index: Index) -> None:
    outer = found_directory(index, b"o", 41)
    inner = found_directory(index, b"i", 42, outer.ino)
    found_directory(index, b"o", 41, inner.ino)
    pinned = found(index, b"pinned", 10).ino
    index.pins.pin(pinned)
    assert not index.pins.pinned(inner.ino)
    index.pins.unpin(inner.ino)
    assert index.pins.pins() == [pinned]


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


# Purging.


def test_only_old_outdated_nodes_without_replicas_are_purged(index: Index) -> None:
    good, held, late, gone = (found(index, b"%d" % i, 10 + i) for i in range(4))
    index.replicas.put_replica(held.ino, replica(1))
    index.xattrs.put_xattr(gone.ino, b"user.a", b"1")
    index.tree.mark_outdated(held.ino, NOW)
    index.tree.mark_outdated(late.ino, NOW + 5)
    index.tree.mark_outdated(gone.ino, NOW)
    # Outdated since the first time.
    index.tree.mark_outdated(gone.ino, NOW + 9)
    assert index.tree.purge_outdated(NOW, 10) == 0
    assert index.tree.purge_outdated(NOW + 5, 10) == 1
    assert [index.tree.node(n.ino) is None for n in (good, held, late, gone)] == [False] * 3 + [
        True
    ]
    assert index.xattrs.xattr(gone.ino, b"user.a") is None


@pytest.mark.parametrize("listed", [None, FileType.REGULAR, FileType.UNKNOWN])
def test_a_purged_number_never_stands_for_anything_again(
    index: Index, listed: FileType | None
) -> None:
    old = found(index, b"a", 10)
    index.tree.mark_outdated(old.ino, NOW)
    assert index.tree.purge_outdated(NOW + 1, 10) == 1
    if listed is not None:
        sequence = index.listings.begin_listing(ROOT_INO)
        index.listings.add_entries(ROOT_INO, sequence, [(b"a", listed, 10, 0)], NOW)
        dirent = index.tree.dirent(ROOT_INO, b"a")
        assert dirent is not None
        assert dirent.ino == 0
        assert dirent.shown_ino != old.ino
    assert found(index, b"a", 10).ino != old.ino
    assert index.tree.node(old.ino) is None


def test_a_purged_directory_takes_its_names_along_in_steps(index: Index) -> None:
    directory = found_directory(index, b"d", 20)
    add_listing(index, directory.ino, *((b"%d" % i, 100 + i) for i in range(50)))
    index.tree.mark_outdated(directory.ino, NOW)
    assert index.tree.purge_outdated(NOW + 1, 20) == 0
    assert len(names_in(index, directory.ino)) == 30
    assert sum(index.tree.purge_outdated(NOW + 1, 20) for _ in range(4)) == 1
    assert index.listings.entries(directory.ino, 0, 100) == []
    assert index.listings.listing(directory.ino) is None


def test_purging_gets_to_the_end_past_those_that_stay(index: Index) -> None:
    nodes = [found(index, b"%d" % i, 10 + i) for i in range(200)]
    for i, node in enumerate(nodes):
        index.tree.mark_outdated(node.ino, NOW + (0 if i >= 180 else 10))
    purged = [index.tree.purge_outdated(NOW + 5, 3) for _ in range(40)]
    assert max(purged) == 3
    assert sum(purged) == 20
    assert index.tree.count_nodes() == 181
