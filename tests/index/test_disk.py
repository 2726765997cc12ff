"""Disks below the index that are full, fail, or become read-only: real ones, on loop devices."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.index import Index, LastClose, check_in_child, last_close, problems
from monarchfs.types import ROOT_INO, IndexWriteError
from tests.index.tools import (
    DIRECTORY,
    NOW,
    ROOT_SOURCE_INO,
    add_listing,
    name_of,
    names_in,
    open_index,
    replica,
    source_stat,
    tier_file,
)
from tests.support import surroundings
from tests.support.indexing import record_found

_EXT4_IOC_SHUTDOWN = 0x8004587D  # fs/ext4/ext4.h; its argument 2: without flushing the journal


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


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
        run("umount", "--lazy", str(mounted))


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
    run("mount", "-o", "remount,abort", str(disk))


def shut_down(disk: Path) -> None:
    """Every access to the disk is EIO from now on."""
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, (2).to_bytes(4, "little"))
    finally:
        os.close(fd)


def prepared(disk: Path) -> Index:
    index = open_index(disk)
    index.replicas.begin_boot(b"one")
    index.tree.record_root(source_stat(ROOT_SOURCE_INO, mode=DIRECTORY), NOW)
    index.replicas.put_replica(20, replica(20))
    index.replicas.put_replica(21, replica(21))
    index.replicas.begin_copy(22, 0, name_of(22))
    index.replicas.record_found_files(0, [tier_file(30)])
    return index


def record_until_frozen(index: Index) -> list[int]:
    """Names are recorded without an error, whatever the disk does."""
    inos = []
    for i in range(100_000):
        inos.append(record_found(index, ROOT_INO, b"%d" % i, source_stat(100 + i), b"", NOW).ino)
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
    known = record_found(index, ROOT_INO, b"known", source_stat(10), b"", NOW)
    assert index.tree.node(known.ino) == known
    fail(disk)
    inos = record_until_frozen(index)
    frozen = index.environment.frozen
    assert frozen is not None
    assert any(part in frozen for part in message.split("|"))
    assert "\n" not in frozen
    # All that was known is, and names, attributes, listings and pins go on.
    assert index.tree.node(known.ino) == known
    assert len(set(inos)) == len(inos)
    assert all(index.tree.node(ino) is not None for ino in inos)
    add_listing(index, 700, (b"a", 1), (b"b", 2))
    assert names_in(index, 700) == [b"a", b"b"]
    index.xattrs.put_xattr(known.ino, b"user.a", bytes(1 << 20))
    index.pins.pin(known.ino)
    index.tree.mark_outdated(known.ino)
    assert index.pins.pinned(known.ino)
    assert index.replicas.replica(20) == replica(20)
    # What lies in the tiers is as the disk says.
    for refused in (
        lambda: index.replicas.put_replica(known.ino, replica(1)),
        lambda: index.replicas.drop_replica(20),
        lambda: index.replicas.begin_copy(known.ino, 0, name_of(1)),
        lambda: index.replicas.mark_durable([20]),
        lambda: index.replicas.record_found_files(0, [tier_file(1)]),
        lambda: index.replicas.claim(known.ino, name_of(30), 100),
        index.environment.sync,
    ):
        with pytest.raises(IndexWriteError, match=message):
            refused()
    assert index.replicas.tier_totals()[0].resident == 2
    assert index.replicas.journal() == [(0, name_of(22))]
    index.close()
    if how != "failing":  # there the mark cannot be read
        assert last_close(str(disk)) is LastClose.KILLED


def test_a_write_about_the_tiers_that_meets_the_failure_is_refused(disk: Path) -> None:
    index = prepared(disk)
    abort(disk)
    with pytest.raises(IndexWriteError, match="Read-only"):
        index.replicas.drop_replica(20)
    assert index.environment.frozen is not None
    assert index.replicas.replica(20) == replica(20)
    index.close()


def test_after_a_full_disk_the_index_is_as_it_was_when_it_froze(disk: Path) -> None:
    index = prepared(disk)
    fill(disk)
    inos = record_until_frozen(index)
    later = record_found(index, ROOT_INO, b"later", source_stat(5), b"", NOW)
    index.close()
    for path in disk.glob("filler-*"):
        path.unlink()
    # Blocks are free once the journal's transaction is written.
    os.sync()
    assert last_close(str(disk)) is LastClose.KILLED
    assert check_in_child(str(disk))
    assert problems(str(disk)) == []
    index = open_index(disk)
    assert index.replicas.begin_boot(b"one") is False
    assert index.environment.frozen is None
    assert index.replicas.replica(20) == replica(20)
    assert index.tree.node(inos[-2]) is not None
    assert index.tree.node(later.ino) is None
    # Numbers that only the frozen one gave out are not given to others.
    new = record_found(index, ROOT_INO, b"new", source_stat(6), b"", NOW)
    assert new.ino > later.ino
    index.close()
    assert last_close(str(disk)) is LastClose.CLEAN


@pytest.mark.parametrize("how", ["full", "read-only"])
@pytest.mark.parametrize("clean", [True, False])
def test_an_index_on_a_disk_that_failed_is_opened_frozen(disk: Path, how: str, clean: bool) -> None:
    index = prepared(disk)
    known = record_found(index, ROOT_INO, b"known", source_stat(10), b"", NOW)
    index.close(clean=clean)
    FAILURES[how][0](disk)
    numbers = set()
    for _ in range(2):
        index = open_index(disk, trust=True)
        if how == "read-only":
            assert index.environment.frozen is not None
        index.replicas.begin_boot(b"one")
        assert index.tree.node(known.ino) == known
        assert index.replicas.replica(21) == replica(21)
        numbers.add(record_found(index, ROOT_INO, b"new", source_stat(11), b"", NOW).ino)
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
        record_found(index, ROOT_INO, b"%d" % i, source_stat(100 + i), b"", NOW)
    assert index.environment.frozen is None
    index.close(clean=False)


def test_an_error_that_is_not_the_disks_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    known = record_found(index, ROOT_INO, b"a", source_stat(10), b"", NOW)
    # Not even a copy in memory can be made.
    with surroundings.no_file_larger_than(4096):
        with pytest.raises(IndexWriteError):
            record_found(index, ROOT_INO, b"b", source_stat(11), b"", NOW)
        assert index.environment.frozen is None
        assert index.tree.dirent(ROOT_INO, b"b") is None
        assert index.tree.node(known.ino) == known
    after = record_found(index, ROOT_INO, b"after", source_stat(5000), b"", NOW)
    assert after.ino > known.ino
    index.close()
    assert problems(str(tmp_path)) == []
