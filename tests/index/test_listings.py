"""Directory listings."""

from __future__ import annotations

from pathlib import Path

from monarchfs.index import Index
from monarchfs.types import ROOT_INO, FileType, Listing
from tests.index.tools import (
    DIRECTORY,
    NOW,
    add_listing,
    finish_listing,
    names_in,
    open_index,
    source_stat,
)
from tests.support.indexing import record_found


def test_a_listing_gives_numbers_without_nodes_until_names_are_found(index: Index) -> None:
    add_listing(index, ROOT_INO, (b"b", 11), (b"a", 10))
    assert index.listing(ROOT_INO) == Listing(NOW, NOW, NOW, True)
    (b, no_node), (a, _) = index.entries(ROOT_INO, 2, 10)
    assert (b.name, a.name, no_node) == (b"b", b"a", None)
    assert (a.ino, b.ino) == (0, 0)
    found = record_found(index, ROOT_INO, b"b", source_stat(11), b"", NOW)
    assert found.ino == b.shown_ino
    assert index.entries(ROOT_INO, 2, 10) == [(b._replace(ino=found.ino), found), (a, None)]


def test_what_a_listing_shows_is_what_a_look_up_says_also_of_hard_links(index: Index) -> None:
    add_listing(index, ROOT_INO, (b"a", 10), (b"linked", 10))
    a, linked = (dirent for dirent, _ in index.entries(ROOT_INO, 2, 10))
    assert a.shown_ino == linked.shown_ino
    assert record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW).ino == a.shown_ino
    add_listing(index, 300, (b"also", 10))
    (also,) = (dirent for dirent, _ in index.entries(300, 2, 10))
    assert also.shown_ino == a.shown_ino
    # But what they stand for is not known before somebody asks.
    assert [d.ino for d, _ in index.entries(ROOT_INO, 2, 10)] == [a.shown_ino, 0]
    assert also.ino == 0


def test_a_number_that_a_listing_only_shows_is_not_anothers(index: Index) -> None:
    """What is found has the inode number that was listed for another name."""
    add_listing(index, ROOT_INO, (b"a", 10), (b"b", 11))
    b = record_found(index, ROOT_INO, b"b", source_stat(10), b"", NOW)
    assert [d.ino for d, _ in index.entries(ROOT_INO, 2, 10)] == [0, b.ino]
    a = record_found(index, ROOT_INO, b"a", source_stat(11), b"", NOW)
    assert [d.ino for d, _ in index.entries(ROOT_INO, 2, 10)] == [a.ino, b.ino]
    assert a.ino != b.ino
    # Listed again, they are doubted, but not forgotten: the next look-up finds them as they are.
    add_listing(index, ROOT_INO, (b"a", 10), (b"b", 11))
    assert [(d.ino, d.checked_ns) for d, _ in index.entries(ROOT_INO, 2, 10)] == [
        (a.ino, 0),
        (b.ino, 0),
    ]
    assert record_found(index, ROOT_INO, b"a", source_stat(11), b"", NOW) == a


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
    assert after[b"b"].shown_ino != before[b"b"].shown_ino
    assert index.dirent(ROOT_INO, b"a") is None


def test_a_name_found_while_a_listing_runs_outlives_it(index: Index) -> None:
    record_found(index, ROOT_INO, b"before", source_stat(10), b"", NOW)
    sequence = index.begin_listing(ROOT_INO)
    record_found(index, ROOT_INO, b"meanwhile", source_stat(11), b"", NOW)
    index.add_entries(ROOT_INO, sequence, [(b"seen", FileType.REGULAR, 12, 0)], NOW)
    finish_listing(index, ROOT_INO, sequence)
    assert names_in(index, ROOT_INO) == [b"meanwhile", b"seen"]


def test_a_name_found_while_a_listing_runs_that_has_it_is_a_listed_one(index: Index) -> None:
    """Where listings lack names that look-ups find, those are not shown."""
    sequence = index.begin_listing(ROOT_INO)
    for name, ino in ((b"a", 10), (b".snapshot", 11)):
        record_found(index, ROOT_INO, name, source_stat(ino), b"", NOW)
    index.add_entries(ROOT_INO, sequence, [(b"a", FileType.REGULAR, 10, 0)], NOW)
    list(index.finish_listing(ROOT_INO, sequence, Listing(NOW, NOW, NOW, False)))
    shown = index.entries(ROOT_INO, 2, 10, only_listed=True)
    assert [dirent.name for dirent, _node in shown] == [b"a"]


def test_two_listings_at_once_remove_only_what_neither_saw(index: Index) -> None:
    add_listing(index, ROOT_INO, (b"a", 10), (b"gone", 11))
    first, second = index.begin_listing(ROOT_INO), index.begin_listing(ROOT_INO)
    a = [(b"a", FileType.REGULAR, 10, 0)]
    index.add_entries(ROOT_INO, second, a, NOW)
    index.add_entries(ROOT_INO, first, a, NOW)
    for sequence in (second, first):
        finish_listing(index, ROOT_INO, sequence)
    assert names_in(index, ROOT_INO) == [b"a"]


def test_finishing_a_long_listing_goes_in_steps_and_may_be_left_off(index: Index) -> None:
    add_listing(index, ROOT_INO, *((b"%d" % i, 100 + i) for i in range(2000)))
    sequence = index.begin_listing(ROOT_INO)
    steps = index.finish_listing(ROOT_INO, sequence, Listing(*3 * (NOW + 1,), True))
    next(steps)
    assert 0 < len(index.entries(ROOT_INO, 2, 3000)) < 2000
    assert index.listing(ROOT_INO) == Listing(NOW, NOW, NOW, True)
    assert len(list(steps)) >= 2
    assert index.entries(ROOT_INO, 2, 10) == []
    assert index.listing(ROOT_INO) == Listing(*3 * (NOW + 1,), True)


def test_a_directory_of_unknown_types_keeps_the_types_that_are_known(index: Index) -> None:
    record_found(index, ROOT_INO, b"d", source_stat(20, mode=DIRECTORY), b"", NOW)
    sequence = index.begin_listing(ROOT_INO)
    index.add_entries(
        ROOT_INO,
        sequence,
        [(b"d", FileType.UNKNOWN, 20, 0), (b"e", FileType.UNKNOWN, 21, 0)],
        NOW,
    )
    types = {d.name: d.type for d, _ in index.entries(ROOT_INO, 2, 10)}
    assert types == {b"d": FileType.DIRECTORY, b"e": FileType.UNKNOWN}


def test_a_listed_type_that_contradicts_the_node_is_a_doubt(index: Index) -> None:
    node = record_found(index, ROOT_INO, b"d", source_stat(20, mode=DIRECTORY), b"", NOW)
    add_listing(index, ROOT_INO, (b"d", 20))
    dirent = index.dirent(ROOT_INO, b"d")
    assert dirent is not None
    assert (dirent.type, dirent.ino, dirent.checked_ns) == (FileType.REGULAR, node.ino, 0)
    file = record_found(index, ROOT_INO, b"d", source_stat(20), b"", NOW)
    assert file.ino != node.ino
    assert index.node(node.ino) == node._replace(outdated=True)


def test_a_name_of_the_other_directory_is_not_listed(index: Index) -> None:
    add_listing(index, 300, (b"a", 10))
    add_listing(index, 301, (b"b", 11))
    add_listing(index, 300, (b"c", 12))
    assert names_in(index, 300) == [b"c"]
    assert names_in(index, 301) == [b"b"]


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
