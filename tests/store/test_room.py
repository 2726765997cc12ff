"""Tiers that have no room, cannot be written, or lie in memory."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from monarchfs.core.units import Unit
from monarchfs.store import ReplicaLost, read_nowait
from monarchfs.store.checksum import BLOCK_BYTES, checksum
from monarchfs.types import SourceStat
from tests.store.tools import BLOCK, KIB, NAME, files_below, name_of, needs_root, open_tier, whole


def test_a_unit_that_finds_no_room_says_so(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * BLOCK_BYTES)
    source, full = os.open(tmp_path / "f", os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    try:
        version = SourceStat.of(os.fstat(source), 0).version
        unit = Unit(1, 0, BLOCK_BYTES, chunk_bytes=BLOCK_BYTES, version=version, device=0)
        assert unit.read(source)
        with pytest.raises(OSError, match="No space left"):
            unit.write(full, 1.0)
        assert list(unit.stored()) == []
    finally:
        os.close(source)
        os.close(full)


@needs_root
def test_no_room_leaves_nothing_behind(small: Path) -> None:
    tier = open_tier(small)
    data = os.urandom(5 * BLOCK)
    assert tier.files.write_whole(name_of(1), data) == (len(data), checksum(data))
    with pytest.raises(OSError, match="No space left") as error:
        tier.files.write_whole(name_of(2), data)
    assert error.value.errno == errno.ENOSPC
    assert files_below(small) == {whole(data, name_of(1))}

    fd = tier.files.create_part(name_of(3), len(data))
    with pytest.raises(OSError, match="No space left"):
        tier.files.write(fd, 0, data)
    os.close(fd)
    with pytest.raises(OSError, match="No space left"):
        tier.probe()
    tier.files.remove_part(name_of(3))
    space = tier.space()
    assert space.total_bytes == 1024 * KIB
    assert space.free_bytes == 1024 * KIB - 5 * BLOCK
    assert space.total_inodes == 64
    assert space.free_inodes == 64 - 4  # the root, parts, a fan-out directory, a replica
    tier.close()


@needs_root
def test_no_inodes_leaves_nothing_behind(small: Path) -> None:
    tier = open_tier(small)
    stored = 0
    while tier.space().free_inodes >= 2:  # a replica may need a fan-out directory as well
        tier.files.write_whole(bytes([stored]) * 16, b"x")
        stored += 1
    for number in range(tier.space().free_inodes):
        (small / f"filler {number}").touch()
    before = files_below(small)
    with pytest.raises(OSError, match="No space left"):
        tier.files.write_whole(bytes([stored]) * 16, b"x")
    assert stored > 20
    assert files_below(small) == before
    tier.close()


@needs_root
def test_a_read_only_tier_serves_and_refuses(small: Path) -> None:
    tier = open_tier(small)
    _, total = tier.files.write_whole(NAME, b"good")
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    tier = open_tier(small)
    fd = tier.files.open(NAME, total, 4)
    assert read_nowait(fd, 0, 4, memory_backed=tier.memory_backed) == b"good"
    os.close(fd)
    assert tier.files.verify(NAME, total, 4)
    for write in (
        lambda: tier.files.write_whole(name_of(5), b"other"),
        lambda: tier.files.create_part(name_of(5), 5),
        lambda: tier.files.remove(NAME, total),
        lambda: tier.files.discard(NAME),
        lambda: tier.files.mark_synced([(NAME, total)]),
        tier.probe,
    ):
        with pytest.raises(OSError, match="Read-only") as error:
            write()
        assert error.value.errno == errno.EROFS
    with pytest.raises(ReplicaLost):
        tier.files.open(name_of(5), total, 5)
    assert [file.name for file in tier.files.complete(0xAB)] == [NAME]
    tier.close()


@needs_root
def test_memory_is_known_as_such(small: Path, tmp_path: Path) -> None:
    tier = open_tier(small)
    assert tier.memory_backed
    tier.sync()
    disk = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
    )
    (tmp_path / "other").mkdir()
    fd = os.open(tmp_path / "other", os.O_RDONLY)
    assert tier.reopen(fd)
    os.close(fd)
    assert tier.memory_backed == (disk.stdout.strip() in ("tmpfs", "ramfs"))
    tier.close()


@needs_root
def test_a_file_system_that_counts_nothing_has_no_room(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "ramfs", "none", tmp_path], check=True)
    try:
        tier = open_tier(tmp_path)
        with pytest.raises(OSError, match="has no size"):
            tier.space()
        tier.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_sync_reports_the_error(path: Path) -> None:
    closed = open_tier(path)
    closed.sync()
    closed.close()
    with pytest.raises(OSError, match="Bad file descriptor") as error:
        closed.sync()
    assert error.value.errno == errno.EBADF
