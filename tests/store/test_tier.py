"""Tiers on real directories: layout, what a replica must be, and every way to run out of room."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from monarchfs.store import ReplicaLost, Tier, read_full, read_nowait, replica_name
from monarchfs.types import SourceVersion
from tests.store.tools import KIB, files_below, needs_root, open_tier, version

# Names


def test_names_never_change() -> None:
    # Of another release, these would be lost replicas.
    assert replica_name(SourceVersion(0, 1, 2, 3, 4)) == "86769ea8ad65d5a0819dd5029c740dad"
    assert replica_name(version(10)) == "aa896427ac85317bfe31c17da071bee1"
    # ext4 and XFS have times whose nanoseconds do not fit in 64 bits.
    assert replica_name(SourceVersion(2**64 - 1, 2**64 - 1, 2**63, 2**70, -(2**70)))


def test_each_field_of_the_version_is_in_the_name() -> None:
    base = SourceVersion(1, 1, 1, 1, 1)
    others = [base._replace(**{field: 2}) for field in SourceVersion._fields]
    shifted = [SourceVersion(1, 11, 1, 1, 1), SourceVersion(11, 1, 1, 1, 1)]
    assert len({replica_name(each) for each in [base, *others, *shifted]}) == 8


# Complete replicas


def test_a_whole_replica_is_written_opened_and_removed(path: Path, tier: Tier) -> None:
    data = os.urandom(10_000)
    name = replica_name(version(10_000))
    assert tier.write_whole(version(10_000), data) == 12 * KIB
    assert files_below(path) == {f"{name[:2]}/{name}"}
    assert os.lstat(path / name[:2] / name).st_mode & 0o777 == 0o600
    assert os.lstat(path / name[:2]).st_mode & 0o777 == 0o700

    fd = tier.open_replica(version(10_000), 10_000)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    assert not os.get_inheritable(fd)
    assert read_full(fd, 0, 10_000) == data
    assert tier.allocated(fd) == 12 * KIB
    os.close(fd)

    tier.remove(version(10_000))
    tier.remove(version(10_000))
    assert files_below(path) == set()
    with pytest.raises(ReplicaLost):
        tier.open_replica(version(10_000), 10_000)


@pytest.mark.parametrize("data", [b"", bytearray(b"abc"), memoryview(b"xabcx")[1:4]])
def test_whole_replicas_of_any_buffer(tier: Tier, data: bytes) -> None:
    tier.write_whole(version(len(data)), data)
    fd = tier.open_replica(version(len(data)), len(data))
    assert read_full(fd, 0, len(data)) == bytes(data)
    os.close(fd)


def test_writing_again_replaces(tier: Tier) -> None:
    tier.write_whole(version(3), b"old")
    fd = tier.open_replica(version(3), 3)
    tier.write_whole(version(3), b"new")
    assert read_full(fd, 0, 3) == b"old"
    os.close(fd)
    fd = tier.open_replica(version(3), 3)
    assert read_full(fd, 0, 3) == b"new"
    os.close(fd)


@pytest.mark.parametrize("planted", ["symlink", "fifo", "directory", "wrong size", "socket"])
def test_what_is_not_the_replica_is_refused(
    path: Path, tmp_path: Path, tier: Tier, planted: str
) -> None:
    name = replica_name(version(4))
    tier.write_whole(version(4), b"good")
    place = path / name[:2] / name
    place.unlink()
    (tmp_path / "elsewhere").write_bytes(b"evil")
    if planted == "symlink":
        place.symlink_to(tmp_path / "elsewhere")
    elif planted == "fifo":
        os.mkfifo(place)
    elif planted == "directory":
        place.mkdir()
    elif planted == "socket":
        os.mknod(place, 0o140600)
    else:
        place.write_bytes(b"longer")
    with pytest.raises(ReplicaLost) as error:
        tier.open_replica(version(4), 4)
    assert error.value.errno == errno.ESTALE
    assert name in str(error.value)


@needs_root
def test_a_file_of_another_user_is_refused(path: Path, tier: Tier) -> None:
    name = replica_name(version(4))
    tier.write_whole(version(4), b"good")
    os.chown(path / name[:2] / name, 65534, 65534)
    with pytest.raises(ReplicaLost, match="Belongs to user 65534"):
        tier.open_replica(version(4), 4)


@pytest.mark.parametrize("directory", ["fan-out", "parts"])
def test_planted_directories_are_not_followed(
    path: Path, tmp_path: Path, tier: Tier, directory: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    name = replica_name(version(4))
    place = path / (name[:2] if directory == "fan-out" else "parts")
    shutil.rmtree(place, ignore_errors=True)
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError):
        tier.write_whole(version(4), b"good")
    if directory == "fan-out":
        with pytest.raises(ReplicaLost):
            tier.open_replica(version(4), 4)
    assert files_below(tmp_path / "elsewhere") == set()
    assert files_below(path / "parts") == set()


def test_directories_that_were_cleaned_away_are_made_again(path: Path, tier: Tier) -> None:
    tier.write_whole(version(4), b"good")
    for directory in path.iterdir():
        shutil.rmtree(directory)
    with pytest.raises(ReplicaLost):
        tier.open_replica(version(4), 4)
    tier.write_whole(version(4), b"good")
    os.close(tier.open_replica(version(4), 4))

    shutil.rmtree(path)
    with pytest.raises(FileNotFoundError):
        tier.write_whole(version(4), b"good")


# Parts


def test_a_part_is_sparse_filled_and_finished(path: Path, tier: Tier) -> None:
    size = 1_000_000
    data = os.urandom(size)
    wanted = version(size)
    fd = tier.create_part(wanted, size)
    assert tier.allocated(fd) == 0
    assert files_below(path) == {f"parts/{replica_name(wanted)}"}
    with pytest.raises(FileExistsError):
        tier.create_part(wanted, size)
    with pytest.raises(FileExistsError):
        tier.write_whole(wanted, data)
    tier.write(fd, 500_000, data[500_000:])
    os.close(fd)

    fd = tier.open_part(wanted)
    assert 500_000 <= tier.allocated(fd) < 600_000
    assert read_full(fd, 500_000, 500_000) == data[500_000:]
    tier.write(fd, 0, memoryview(data)[:500_000])
    tier.sync()
    assert tier.finish_part(fd, wanted) == tier.allocated(fd) >= size
    os.close(fd)
    name = replica_name(wanted)
    assert files_below(path) == {f"{name[:2]}/{name}"}
    fd = tier.open_replica(wanted, size)
    assert read_full(fd, 0, size) == data
    os.close(fd)
    with pytest.raises(ReplicaLost):
        tier.open_part(wanted)


def test_a_part_of_another_size_is_refused(tier: Tier) -> None:
    os.close(tier.create_part(version(100), 99))
    with pytest.raises(ReplicaLost, match="Has 99 bytes instead of 100"):
        tier.open_part(version(100))
    tier.remove_part(version(100))
    tier.remove_part(version(100))
    os.close(tier.create_part(version(100), 100))


@pytest.mark.parametrize(
    ("pattern", "allocated_chunks"),
    [("zzzz", 0), ("zxzz", 1), ("xzzx", 2), ("xxxx", 4), ("zzx", 1), ("xz", 1), ("zs", 1)],
)
def test_chunks_of_zeros_stay_holes(tier: Tier, pattern: str, allocated_chunks: int) -> None:
    chunk = 64 * KIB
    kinds = {
        "z": bytes(chunk),
        "x": b"\1" * chunk,
        "s": b"\0" * (chunk // 2) + b"\1" + b"\0" * (chunk // 2 - 1),
    }
    data = b"".join(kinds[kind] for kind in pattern) + bytes(100)
    wanted = version(3 * 4096 + len(data))
    fd = tier.create_part(wanted, wanted.size)
    tier.write(fd, 3 * 4096, data)
    assert read_full(fd, 0, wanted.size) == bytes(3 * 4096) + data
    os.fsync(fd)
    # The chunks are those of the buffer, not of the file, so a block more at either end.
    slack = 2 * 4 * KIB
    assert allocated_chunks * chunk <= tier.allocated(fd) <= allocated_chunks * chunk + slack
    os.close(fd)


def test_writes_go_on_after_short_ones(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(10_000)
    real_pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: real_pwrite(fd, view[:777], at))
    tier.write_whole(version(10_000), data)
    fd = tier.open_replica(version(10_000), 10_000)
    assert read_full(fd, 0, 10_000) == data
    os.close(fd)


# Room and trouble


@needs_root
def test_no_room_leaves_nothing_behind(small: Path) -> None:
    tier = open_tier(small)
    data = os.urandom(700 * KIB)
    assert tier.write_whole(version(len(data), 1), data) == len(data)
    with pytest.raises(OSError, match="No space left") as error:
        tier.write_whole(version(len(data), 2), data)
    assert error.value.errno == errno.ENOSPC
    name = replica_name(version(len(data), 1))
    assert files_below(small) == {f"{name[:2]}/{name}"}

    part = version(len(data), 3)
    fd = tier.create_part(part, len(data))
    with pytest.raises(OSError, match="No space left"):
        tier.write(fd, 0, data)
    os.close(fd)
    tier.remove_part(part)
    space = tier.space()
    assert space.total_bytes == 1024 * KIB
    assert space.free_bytes == 324 * KIB
    assert space.total_inodes == 64
    assert space.free_inodes == 64 - 4  # the root, parts, a fan-out directory, a replica
    tier.close()


@needs_root
def test_no_inodes_leaves_nothing_behind(small: Path) -> None:
    tier = open_tier(small)
    stored = 0
    while tier.space().free_inodes >= 2:  # a replica may need a fan-out directory as well
        tier.write_whole(version(1, stored), b"x")
        stored += 1
    for number in range(tier.space().free_inodes):
        (small / f"filler {number}").touch()
    before = files_below(small)
    with pytest.raises(OSError, match="No space left"):
        tier.write_whole(version(1, stored), b"x")
    assert stored > 20
    assert files_below(small) == before
    tier.close()


@needs_root
def test_a_read_only_tier_serves_and_refuses(small: Path) -> None:
    tier = open_tier(small)
    tier.write_whole(version(4), b"good")
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    tier = open_tier(small)
    fd = tier.open_replica(version(4), 4)
    assert read_nowait(fd, 0, 4, memory_backed=tier.memory_backed) == b"good"
    os.close(fd)
    for write in (
        lambda: tier.write_whole(version(5), b"other"),
        lambda: tier.create_part(version(5), 5),
        lambda: tier.remove(version(4)),
    ):
        with pytest.raises(OSError, match="Read-only") as error:
            write()
        assert error.value.errno == errno.EROFS
    with pytest.raises(ReplicaLost):
        tier.open_replica(version(5), 5)
    tier.close()


@needs_root
def test_memory_is_known_as_such(small: Path, tmp_path: Path) -> None:
    tier = open_tier(small)
    assert tier.memory_backed
    tier.sync()
    tier.close()
    disk = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
    )
    (tmp_path / "other").mkdir()
    tier = open_tier(tmp_path / "other")
    assert tier.memory_backed == (disk.stdout.strip() in ("tmpfs", "ramfs"))
    tier.close()


def test_sync_reports_the_error(path: Path) -> None:
    closed = open_tier(path)
    closed.sync()
    closed.close()
    with pytest.raises(OSError, match="Bad file descriptor") as error:
        closed.sync()
    assert error.value.errno == errno.EBADF


def test_cleaning_removes_leftovers_and_nothing_foreign(
    path: Path, tmp_path: Path, tier: Tier
) -> None:
    kept, lost = replica_name(version(1, 1)), replica_name(version(1, 2))
    for ino in (1, 2):
        os.close(tier.create_part(version(1, ino), 1))
    for ino in (11, 12):
        tier.write_whole(version(1, ino), b"x")
    (tmp_path / "outside").write_text("precious")
    (path / "parts" / "notes.txt").touch()
    (path / "parts" / ("A" * 32)).touch()
    (path / "parts" / ("a" * 33)).touch()
    (path / "parts" / ("a" * 32)).symlink_to(tmp_path / "outside")
    (path / "parts" / ("b" * 32)).mkdir()
    (path / "zz").mkdir()
    (path / "zz" / ("c" * 32)).touch()
    before = files_below(path)

    assert tier.clean_parts({kept}) == [lost]
    assert files_below(path) == before - {f"parts/{lost}"}
    extra = replica_name(version(1, 12))
    assert tier.clean_replicas({replica_name(version(1, 11))}) == [extra]
    assert files_below(path) == before - {f"parts/{lost}", f"{extra[:2]}/{extra}"}
    assert (path / "parts" / ("b" * 32)).is_dir()
    assert (tmp_path / "outside").read_text() == "precious"
