"""Indexes that cannot be used, writers that die, disks that fail; how an index opens and closes."""

import contextlib
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from monarchfs.cache.index import (
    Index,
    LastClose,
    check_in_child,
    last_close,
    mark_suspect,
    problems,
    records,
    set_aside,
)
from monarchfs.cache.index.environment import DATABASES
from monarchfs.types import ROOT_INO, IndexUnusable, IndexWriteError
from tests.index import tools
from tests.support import surroundings
from tests.support.programs import execute

Tables = dict[bytes, Any]


@contextmanager
def written(directory: Path) -> Iterator[tuple[lmdb.Transaction, Tables]]:
    """A transaction in the tables of an index, past the index."""
    env = lmdb.open(str(directory / "index"), max_dbs=64, lock=False)
    tables = {name: env.open_db(name, create=False) for name in DATABASES}
    with env.begin(write=True) as txn:
        yield txn, tables
    env.close()


def test_an_index_of_another_source_is_refused(tmp_path: Path) -> None:
    tools.open_index(tmp_path).close()
    with pytest.raises(IndexUnusable, match=r"another source: 'lustre:/data', not 'other'"):
        Index.open(str(tmp_path), source_id="other")
    tools.open_index(tmp_path).close()


@pytest.mark.parametrize("database", [None, b"meta", b"other"])
def test_a_database_of_another_program_is_refused(tmp_path: Path, database: bytes | None) -> None:
    (tmp_path / "index").mkdir()
    env = lmdb.open(str(tmp_path / "index"), max_dbs=16, lock=False)
    handle = None if database is None else env.open_db(database)
    with env.begin(write=True) as txn:
        txn.put(b"meta", b"theirs", db=handle)
    env.close()
    before = (tmp_path / "index" / "data.mdb").read_bytes()
    with pytest.raises(IndexUnusable, match="not ours"):
        tools.open_index(tmp_path)
    assert (tmp_path / "index" / "data.mdb").read_bytes() == before


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    tools.open_index(tmp_path).close()
    newer = records.SCHEMA_VERSION + 1
    with written(tmp_path) as (txn, tables):
        txn.put(records.META_SCHEMA, records.ID.pack(newer), db=tables[b"meta"])
    with pytest.raises(IndexUnusable, match=f"schema version {newer}"):
        tools.open_index(tmp_path)


def test_a_file_in_place_of_the_index_is_refused_and_can_be_set_aside(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("x")
    with pytest.raises(IndexUnusable, match="not a directory"):
        tools.open_index(tmp_path)
    assert set_aside(str(tmp_path)) == str(tmp_path / "index.bad-1")
    tools.open_index(tmp_path).close()


def test_setting_aside_keeps_the_two_newest(tmp_path: Path) -> None:
    assert set_aside(str(tmp_path)) is None
    for n in range(1, 5):
        tools.open_index(tmp_path).close()
        mark_suspect(str(tmp_path))
        assert set_aside(str(tmp_path)) == str(tmp_path / f"index.bad-{n}")
    assert sorted(os.listdir(tmp_path)) == ["index.bad-3", "index.bad-4"]


def test_setting_aside_removes_nothing_that_is_not_an_index(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data.mdb").write_text("x")
    (tmp_path / "index.bad-1").symlink_to(elsewhere)
    (tmp_path / "index.bad-2").write_text("x")
    for n, file in ((3, "theirs"), (4, "data.mdb/deeper")):
        (tmp_path / f"index.bad-{n}" / file).parent.mkdir(parents=True)
        (tmp_path / f"index.bad-{n}" / file).write_text("x")
    (tmp_path / "index.bad-5").mkdir()
    (tmp_path / "index.bad-5" / "mark").symlink_to(elsewhere / "data.mdb")
    (tmp_path / "index.bad-06").mkdir()
    before = sorted(os.listdir(tmp_path))
    added = ["index.bad-6", "index.bad-7", "index.bad-8"]
    for name in added:
        tools.open_index(tmp_path).close()
        assert set_aside(str(tmp_path)) == str(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, *added[1:]])
    assert (elsewhere / "data.mdb").read_text() == "x"
    assert os.listdir(tmp_path / "index.bad-5") == ["mark"]


def filled(directory: Path) -> Path:
    index = tools.rooted(directory)
    for i in range(500):
        index.replicas.put_replica(tools.found(index, b"%d" % i, 10 + i).ino, tools.replica(i))
    index.close()
    return directory / "index" / "data.mdb"


@pytest.mark.parametrize("kept_bytes", [None, 1, 4096, 40_000])
def test_a_truncated_index_or_garbage_is_found_out_in_the_child(
    tmp_path: Path, kept_bytes: int | None
) -> None:
    data = filled(tmp_path)
    if kept_bytes is None:
        data.write_bytes(os.urandom(data.stat().st_size))
    else:
        os.truncate(data, kept_bytes)
    assert problems(str(tmp_path)) != [], "they are said, not raised"
    with pytest.raises(IndexUnusable, match="damaged"):
        tools.open_index(tmp_path)
    assert set_aside(str(tmp_path)) is not None
    tools.open_index(tmp_path).close()


def test_pages_of_garbage_never_pass_as_sound_records(tmp_path: Path) -> None:
    data = filled(tmp_path)
    good = data.read_bytes()
    pages = len(good) // 4096
    rejected = 0
    for page in range(2, pages, 7):
        data.write_bytes(good[: page * 4096] + b"\xa5" * 4096 + good[(page + 1) * 4096 :])
        if check_in_child(str(tmp_path)):
            # Only a page that nothing refers to may be garbage: all records are still there. (One
            # that only the list of free pages refers to would not be found before a write.)
            index = tools.open_index(tmp_path)
            assert len(index.listings.entries(ROOT_INO, 0, 1000)) == 500
            for number in range(20):
                tools.found(index, b"new%d" % number, 900 + number)
            index.close(clean=False)
        else:
            rejected += 1
    assert rejected > 0


def full(directory: Path) -> None:
    """An index with rows in every table, and nothing wrong with it."""
    index = tools.rooted(directory)
    inos = [tools.found(index, b"%d" % i, 10 + i).ino for i in range(10)]
    for i, ino in enumerate(inos):
        index.replicas.put_replica(ino, tools.replica(i))
    index.nodes.mark_outdated(inos[3])
    index.replicas.begin_copies([(inos[4], 1, tools.replica(99).name)])
    index.replicas.record_found_files(2, [tools.tier_file(50)])
    index.segments.begin_segments(0, [tools.SEGMENT])
    index.replicas.put_replicas([(40, tools.shared(101, 0)), (41, tools.shared(102, 4096))])
    index.xattrs.put_xattr(inos[0], b"user.a", b"1")
    index.pins.pin(inos[5])
    tools.finish_listing(index, ROOT_INO, 0)
    index.close()


Damage = Callable[[lmdb.Transaction, Tables], object]


def without_a_row(table: bytes) -> Damage:
    def damage(txn: lmdb.Transaction, tables: Tables) -> None:
        cursor = txn.cursor(tables[table])
        assert cursor.first()
        assert cursor.delete()

    return damage


def with_a_row(table: bytes, key: bytes, value: bytes) -> Damage:
    return lambda txn, tables: txn.put(key, value, db=tables[table])


def without_an_outdated_node(txn: lmdb.Transaction, tables: Tables) -> None:
    stale = txn.cursor(tables[b"stale"])
    assert stale.first()
    assert txn.delete(stale.key(), db=tables[b"nodes"])


SECOND = records.RECORD_KEY.pack(0, tools.SEGMENT, 4096)
WHERE = f"of segment {tools.SEGMENT:016x} of tier 0"
NOT_RECORDED = f"offset 4096 {WHERE} belongs to a replica that is not recorded"
NOT_ITS_OWN = "the record of the replica of inode 41 is not its own"
TOTALS_KEY = records.META_TIER + records.TIER_KEY.pack(0)
TOTALS = "the totals of the tiers are not the sums of their replicas"
NO_REPLICA = "what is to go first is not a replica"
LONGER = tools.shared(101, 0)._replace(allocated_bytes=4097)
# What is done to one row, and what the deep check says to it.
CONTRADICTIONS: list[tuple[Damage, list[str]]] = [
    (without_a_row(b"names"), ["entry without its name"]),
    (without_a_row(b"entries"), ["name without its entry"]),
    (without_a_row(b"replicas"), [TOTALS, "belongs to a replica that is not recorded"]),
    (without_a_row(b"files"), ["not recorded as its own"]),
    (without_a_row(b"stale"), ["not since when", "a time of becoming outdated"]),
    (
        without_an_outdated_node,
        ["a time of becoming outdated", "is among those that go first", NO_REPLICA],
    ),
    (without_a_row(b"outdated"), ["is not among those that go first", NO_REPLICA]),
    (
        with_a_row(b"meta", records.META_NEXT, records.ID.pack(25)),
        [
            f"{what} never given out"
            for what in ("inode 25 was", "number that was", "number that was")
        ],
    ),
    (with_a_row(b"pins", records.ID.pack(5_000), b""), ["pinned, but was never given out"]),
    (with_a_row(b"meta", TOTALS_KEY, records.TOTALS.pack(1, 2, 3, 4)), [TOTALS]),
    (lambda txn, tables: txn.delete(SECOND, db=tables[b"records"]), [NOT_ITS_OWN]),
    (with_a_row(b"records", SECOND, records.ID.pack(77)), [NOT_RECORDED, NOT_ITS_OWN]),
    (with_a_row(b"records", SECOND, records.ID.pack(40)), [NOT_RECORDED, NOT_ITS_OWN]),
    (
        without_a_row(b"segments"),
        [f"offset {at} {WHERE} has a replica, but no such segment is known" for at in (0, 4096)],
    ),
    (
        with_a_row(b"replicas", records.ID.pack(40), records.pack_replica(LONGER, 0)),
        [TOTALS, f"offset 4096 {WHERE} belongs to two replicas"],
    ),
]


@pytest.mark.parametrize(("damage", "said"), CONTRADICTIONS, ids=[c[1][0] for c in CONTRADICTIONS])
def test_records_that_contradict_each_other_are_found_out(
    tmp_path: Path, damage: Damage, said: list[str]
) -> None:
    full(tmp_path)
    with written(tmp_path) as (txn, tables):
        damage(txn, tables)
    # The quick check only reads; the deep one compares.
    assert check_in_child(str(tmp_path))
    lines = problems(str(tmp_path))
    assert len(lines) == len(said), lines
    for part, line in zip(said, lines, strict=True):
        assert part in line


def test_keys_of_a_wrong_length_are_found_out_by_the_quick_check(tmp_path: Path) -> None:
    full(tmp_path)
    assert problems(str(tmp_path)) == []
    with written(tmp_path) as (txn, tables):
        txn.put(b"short", b"", db=tables[b"pins"])
    signs = list[None]()
    assert not check_in_child(str(tmp_path), lambda: signs.append(None))
    assert signs
    assert problems(str(tmp_path)) == ["table pins has keys of a wrong length"]


def test_a_check_may_wait_for_the_disk_but_not_walk_without_an_end() -> None:
    program = (
        "from monarchfs.cache.index import check\n"
        "check.STEP_ROWS, check.STEP_SECONDS = 1, 1\n"
        "for _ in check.steps(range(9)): sum(range(4_000_000))\n"
        "while True: pass"
    )
    done = execute([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (-signal.SIGXCPU, 9 * "\n")


@pytest.mark.parametrize(
    "limit", ["RLIMIT_AS, 500 << 20", "RLIMIT_AS, 40 << 20", "RLIMIT_NOFILE, 4"]
)
def test_what_cannot_be_checked_is_not_taken_for_damaged(tmp_path: Path, limit: str) -> None:
    """Set aside for that, or by fsck --repair, a sound index would be lost."""
    full(tmp_path)
    program = (
        "import resource, subprocess, sys\n"
        "from monarchfs.cache.index import check_in_child, problems\n"
        f"which, most = resource.{limit}\n"
        "prepare = lambda: resource.setrlimit(which, (most, most))\n"
        "run = subprocess.Popen\n"
        "subprocess.Popen = lambda *a, **k: run(*a, preexec_fn=prepare, **k)\n"
        "for check in (check_in_child, problems):\n"
        "    try: print(check(sys.argv[1]))\n"
        "    except OSError as error: print(error.strerror)\n"
    )
    done = execute([sys.executable, "-c", program, tmp_path], check=True)
    assert done.stdout.splitlines() == 2 * ["the index cannot be checked"]


def test_a_mark_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", sync)
    tools.open_index(tmp_path).close()
    staged, directory = f"{tmp_path}/index/mark.new", f"{tmp_path}/index"
    assert [path for path in synced if path in (staged, directory)] == 2 * [staged, directory]


def test_an_unclean_close_asks_for_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_close(str(tmp_path)) is LastClose.NEW
    tools.open_index(tmp_path).close(clean=False)
    assert last_close(str(tmp_path)) is LastClose.KILLED
    answers = [False, True]
    monkeypatch.setattr("monarchfs.cache.index.recovery.check_in_child", lambda *_: answers.pop(0))
    with pytest.raises(IndexUnusable, match="damaged"):
        tools.open_index(tmp_path)
    tools.open_index(tmp_path, trust=True).close(clean=False)
    assert answers == [True]
    tools.open_index(tmp_path).close(clean=True)
    assert answers == []
    tools.open_index(tmp_path).close()


def test_after_a_reboot_an_open_index_and_one_that_was_changed_count_as_crashed(
    tmp_path: Path,
) -> None:
    tools.open_index(tmp_path).close(clean=False)
    (tmp_path / "index" / "mark").write_text("open 00000000-0000-0000-0000-000000000000")
    assert last_close(str(tmp_path)) is LastClose.CRASHED
    (tmp_path / "index" / "mark").unlink()
    assert last_close(str(tmp_path)) is LastClose.CRASHED
    tools.open_index(tmp_path).close()
    assert last_close(str(tmp_path)) is LastClose.CLEAN
    # The data file was changed behind a clean mark.
    data = tmp_path / "index" / "data.mdb"
    os.truncate(data, data.stat().st_size - 4096)
    assert last_close(str(tmp_path)) is LastClose.CRASHED


def test_the_map_grows_by_itself_while_another_thread_syncs(tmp_path: Path) -> None:
    index, stop = tools.open_index(tmp_path, map_bytes=1 << 18), threading.Event()

    def sync() -> None:
        while not stop.is_set():
            index.environment.sync()

    with ThreadPoolExecutor(1) as other:
        syncing = other.submit(sync)
        try:
            for i in range(3000):
                tools.found(index, b"%d" % i, 10 + i)
                assert index.nodes.dirent(ROOT_INO, b"%d" % i) is not None
            index.close()
        finally:
            stop.set()
        syncing.result()
    assert (tmp_path / "index" / "data.mdb").stat().st_size > 1 << 19
    # A map smaller than the file is no obstacle either.
    index = tools.open_index(tmp_path, map_bytes=1 << 18)
    inos = {node.ino for _, node in index.listings.entries(ROOT_INO, 0, 4000) if node is not None}
    assert len(inos) == 3000
    tools.found(index, b"new", 9999)
    index.close()


def test_a_suspect_index_is_checked_however_it_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [False, True, True]
    monkeypatch.setattr("monarchfs.cache.index.recovery.check_in_child", lambda *_: answers.pop(0))
    tools.open_index(tmp_path, trust=True).close()
    mark_suspect(str(tmp_path))
    with pytest.raises(IndexUnusable, match="damaged"):
        tools.open_index(tmp_path, trust=True)
    # Not forgotten before it passed.
    assert (tmp_path / "suspect").exists()
    tools.open_index(tmp_path, trust=True).close(clean=False)
    assert os.listdir(tmp_path) == ["index"]
    mark_suspect(str(tmp_path))
    tools.open_index(tmp_path, trust=True).close()
    assert answers == []
    tools.open_index(tmp_path, trust=True).close()


def test_suspicion_is_no_way_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "suspect").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        mark_suspect(str(tmp_path))
    assert not (tmp_path / "elsewhere").exists()


def test_numbers_leap_where_a_mount_may_know_some_that_are_not_recorded(tmp_path: Path) -> None:
    def number_of(name: bytes) -> int:
        index = tools.open_index(tmp_path, trust=True)
        ino = tools.found(index, name, len(name)).ino
        index.close(clean=name != b"bb")
        return ino

    first, second = number_of(b"a"), number_of(b"bb")
    assert first == 16
    assert second < 30
    assert number_of(b"ccc") > second + 1_000_000
    set_aside(str(tmp_path))
    assert number_of(b"d") > 1_000_000


# Disks below the index that are full, fail, or become read-only: real ones, on loop devices


_EXT4_IOC_SHUTDOWN = 0x8004587D  # fs/ext4/ext4.h; its argument 2: without flushing the journal


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 32 MiB, mounted."""
    mounted = tmp_path / "disk"
    surroundings.mount_ext4(tmp_path / "image", mounted, 32 << 20, "-m", "0")
    before = shared_memory()
    try:
        yield mounted
        # The index in memory leaves no name behind.
        assert shared_memory() == before
    finally:
        # Lazily: a test that failed may have left the index open.
        execute(["umount", "--lazy", mounted], check=True)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("monarchfs-index-")}


def fill(disk: Path) -> None:
    """Take what is left of the disk, to the last block."""
    for size in (1 << 20, 4096):
        with contextlib.suppress(OSError), open(disk / f"filler-{size}", "wb", buffering=0) as file:
            while file.write(bytes(size)) == size:
                pass


def abort(disk: Path) -> None:
    """What ext4 does when it meets an error, with errors=remount-ro."""
    execute(["mount", "-o", "remount,abort", disk], check=True)


def shut_down(disk: Path) -> None:
    """Every access to the disk is EIO from now on."""
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, (2).to_bytes(4, "little"))
    finally:
        os.close(fd)


def prepared(disk: Path) -> Index:
    index = tools.open_index(disk)
    index.replicas.begin_boot(b"one")
    index.nodes.record_root(
        tools.source_stat(tools.ROOT_SOURCE_INO, mode=tools.DIRECTORY), tools.NOW
    )
    index.replicas.put_replica(20, tools.replica(20))
    index.replicas.put_replica(21, tools.replica(21))
    index.replicas.begin_copies([(22, 0, tools.name_of(22))])
    index.replicas.record_found_files(0, [tools.tier_file(30)])
    return index


def record_until_frozen(index: Index) -> list[int]:
    """Names are recorded without an error, whatever the disk does."""
    inos = []
    for i in range(100_000):
        inos.append(tools.found(index, b"%d" % i, 100 + i).ino)
        if index.environment.frozen is not None:
            return inos
    raise AssertionError("the disk never failed")


FAILURES = {
    "full": (fill, "No space left on device|Input/output error"),
    "read-only": (abort, "Read-only file system"),
    "failing": (shut_down, "Input/output error"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_disk_that_fails_freezes_the_index_and_nothing_else(disk: Path, how: str) -> None:
    fail, message = FAILURES[how]
    index = prepared(disk)
    known = tools.found(index, b"known", 10)
    assert index.nodes.node(known.ino) == known
    fail(disk)
    inos = record_until_frozen(index)
    frozen = index.environment.frozen
    assert frozen is not None
    assert any(part in frozen for part in message.split("|"))
    assert "\n" not in frozen
    # All that was known is, and names, attributes, listings and pins go on.
    assert index.nodes.node(known.ino) == known
    assert len(set(inos)) == len(inos)
    assert all(index.nodes.node(ino) is not None for ino in inos)
    tools.add_listing(index, 700, (b"a", 1), (b"b", 2))
    assert tools.names_in(index, 700) == [b"a", b"b"]
    index.xattrs.put_xattr(known.ino, b"user.a", bytes(1 << 20))
    index.pins.pin(known.ino)
    index.nodes.mark_outdated(known.ino)
    assert index.pins.pinned(known.ino)
    assert index.replicas.replica(20) == tools.replica(20)
    # What lies in the tiers is as the disk says.
    for refused in (
        lambda: index.replicas.put_replica(known.ino, tools.replica(1)),
        lambda: index.replicas.drop_replicas([20]),
        lambda: index.replicas.begin_copies([(known.ino, 0, tools.name_of(1))]),
        lambda: index.replicas.mark_durable([20]),
        lambda: index.replicas.record_found_files(0, [tools.tier_file(1)]),
        lambda: index.replicas.claim(known.ino, tools.name_of(30), 100),
        lambda: index.segments.begin_segments(0, [tools.SEGMENT]),
        lambda: index.replicas.put_replicas([(known.ino, tools.shared(2, 4096))]),
        lambda: index.segments.segment_clean(0, tools.SEGMENT),
        index.environment.sync,
    ):
        with pytest.raises(IndexWriteError, match=message):
            refused()
    assert index.replicas.tier_totals()[0].resident == 2
    assert index.replicas.journal() == [(0, tools.name_of(22))]
    index.close()
    if how != "failing":  # there the mark cannot be read
        assert last_close(str(disk)) is LastClose.KILLED


@pytest.mark.parametrize("writes", [False, True])
def test_after_a_sync_that_fails_nothing_counts_as_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    index = prepared(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _fd: os.stat("x" * 300))
        with pytest.raises(IndexWriteError, match="name too long"):
            index.environment.sync()
    if writes:
        known = tools.found(index, b"known", 10)
        assert index.nodes.node(known.ino) == known
        assert index.environment.frozen is not None
        index.close()
    else:
        with pytest.raises(IndexWriteError, match="name too long"):
            index.close()
    assert last_close(str(tmp_path)) is LastClose.CRASHED
    index = tools.open_index(tmp_path, trust=True)
    # What was not durable may be gone from the tiers, as after a reboot.
    assert index.replicas.begin_boot(b"one")
    assert index.replicas.replica(20) is None
    index.close()


def test_a_write_about_the_tiers_that_meets_the_failure_is_refused(disk: Path) -> None:
    index = prepared(disk)
    abort(disk)
    with pytest.raises(IndexWriteError, match="Read-only"):
        index.replicas.drop_replicas([20])
    assert index.environment.frozen is not None
    assert index.replicas.replica(20) == tools.replica(20)
    index.close()


def test_after_a_full_disk_the_index_is_as_it_was_when_it_froze(disk: Path) -> None:
    index = prepared(disk)
    fill(disk)
    inos = record_until_frozen(index)
    later = tools.found(index, b"later", 5)
    index.close()
    for path in disk.glob("filler-*"):
        path.unlink()
    # Blocks are free once the journal's transaction is written.
    os.sync()
    assert last_close(str(disk)) is LastClose.KILLED
    assert check_in_child(str(disk))
    assert problems(str(disk)) == []
    index = tools.open_index(disk)
    assert index.replicas.begin_boot(b"one") is False
    assert index.environment.frozen is None
    assert index.replicas.replica(20) == tools.replica(20)
    assert index.nodes.node(inos[-2]) is not None
    assert index.nodes.node(later.ino) is None
    # Numbers that only the frozen one gave out are not given to others.
    new = tools.found(index, b"new", 6)
    assert new.ino > later.ino
    index.close()
    assert last_close(str(disk)) is LastClose.CLEAN


@pytest.mark.parametrize("how", ["full", "read-only"])
@pytest.mark.parametrize("clean", [True, False])
def test_an_index_on_a_disk_that_failed_is_opened_frozen(disk: Path, how: str, clean: bool) -> None:
    index = prepared(disk)
    known = tools.found(index, b"known", 10)
    index.close(clean=clean)
    FAILURES[how][0](disk)
    numbers = set()
    for _ in range(2):
        index = tools.open_index(disk, trust=True)
        if how == "read-only":
            assert index.environment.frozen is not None
        index.replicas.begin_boot(b"one")
        assert index.nodes.node(known.ino) == known
        assert index.replicas.replica(21) == tools.replica(21)
        numbers.add(tools.found(index, b"new", 11).ino)
        index.close(clean=False)
    if how == "read-only":
        # Each was given in memory only; the kernel may have heard of both.
        assert len(numbers) == 2


def test_others_may_fill_the_disk_without_stopping_commits(disk: Path) -> None:
    index = prepared(disk)
    data = disk / "index" / "data.mdb"
    ahead = data.stat().st_blocks * 512 - data.stat().st_size
    assert ahead >= 1 << 20
    fill(disk)
    for i in range(1000):
        tools.found(index, b"%d" % i, 100 + i)
    assert index.environment.frozen is None
    index.close(clean=False)


def test_an_error_that_is_not_the_disks_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    index = tools.open_index(tmp_path)
    known = tools.found(index, b"a", 10)
    # Not even a copy in memory can be made.
    with surroundings.no_file_larger_than(4096):
        with pytest.raises(IndexWriteError):
            tools.found(index, b"b", 11)
        assert index.environment.frozen is None
        assert index.nodes.dirent(ROOT_INO, b"b") is None
        assert index.nodes.node(known.ino) == known
    after = tools.found(index, b"after", 5000)
    assert after.ino > known.ino
    index.close()
    assert problems(str(tmp_path)) == []
