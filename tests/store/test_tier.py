"""Tiers on real directories: layout, what a replica must be, parts, and vanishing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from monarchfs.store import ReplicaLost, Tier, read_full
from monarchfs.store.checksum import checksum, combine, digests
from monarchfs.types import SourceVersion
from tests.store.tools import (
    BLOCK,
    KIB,
    NAME,
    PLANTED,
    content,
    files_below,
    mode_of,
    name_of,
    open_tier,
    plant,
    whole,
)

GOOD = checksum(b"good")


def reopen(tier: Tier, path: Path) -> bool:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        return tier.reopen(fd)
    finally:
        os.close(fd)


# Names


def test_each_field_of_the_version_is_in_the_name() -> None:
    base = SourceVersion(1, 1, 1, 1, 1)
    others = [base._replace(**{field: 2}) for field in SourceVersion._fields]
    shifted = [SourceVersion(1, 11, 1, 1, 1), SourceVersion(11, 1, 1, 1, 1)]
    assert len({each.replica_name for each in [base, *others, *shifted]}) == 8


# Complete replicas


def test_a_whole_replica_is_written_opened_and_removed(path: Path, tier: Tier) -> None:
    data = os.urandom(10_000)
    assert tier.files.write_whole(NAME, data) == (12 * KIB, checksum(data))
    assert files_below(path) == {whole(data)}
    assert mode_of(path / whole(data)) == 0o600
    assert mode_of(path / "ab") == 0o700

    fd = tier.files.open(NAME, checksum(data), 10_000)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    assert not os.get_inheritable(fd)
    assert read_full(fd, 0, 10_000) == data
    assert tier.files.allocated(fd) == 12 * KIB
    os.close(fd)
    with pytest.raises(ReplicaLost):
        tier.files.open(NAME, checksum(data) ^ 1, 10_000)

    tier.files.remove(NAME, checksum(data) ^ 1)
    assert files_below(path) == {whole(data)}
    tier.files.remove(NAME, checksum(data))
    tier.files.remove(NAME, checksum(data))
    assert files_below(path) == set()
    with pytest.raises(ReplicaLost):
        tier.files.open(NAME, checksum(data), 10_000)


@pytest.mark.parametrize("data", [b"", bytearray(b"abc"), memoryview(b"xabcx")[1:4]])
def test_whole_replicas_of_any_buffer(tier: Tier, data: bytes) -> None:
    tier.files.write_whole(NAME, data)
    assert content(tier, bytes(data)) == bytes(data)


def test_writing_again_replaces(path: Path, tier: Tier) -> None:
    tier.files.write_whole(NAME, b"good")
    tier.files.mark_synced([(NAME, GOOD)])
    place = path / whole(b"good")
    first = os.lstat(place).st_ino
    fd = tier.files.open(NAME, GOOD, 4)
    tier.files.write_whole(NAME, b"good")
    assert os.lstat(place).st_ino != first
    assert mode_of(place) == 0o600  # its data are not on the disk yet
    assert read_full(fd, 0, 4) == b"good"
    os.close(fd)


def test_replicas_of_other_content_lie_beside_each_other(path: Path, tier: Tier) -> None:
    tier.files.write_whole(NAME, b"good")
    tier.files.write_whole(NAME, b"evil")
    assert files_below(path) == {whole(b"good"), whole(b"evil")}
    assert content(tier, b"good") == b"good"
    assert content(tier, b"evil") == b"evil"


@pytest.mark.parametrize("planted", [*PLANTED, "wrong size"])
def test_what_is_not_the_replica_is_refused(
    path: Path, tmp_path: Path, tier: Tier, planted: str
) -> None:
    tier.files.write_whole(NAME, b"good")
    place = path / whole(b"good")
    place.unlink()
    (tmp_path / "elsewhere").write_bytes(b"good")
    if planted == "wrong size":
        place.write_bytes(b"longer")
    else:
        plant(place, planted, tmp_path / "elsewhere")
    with pytest.raises(ReplicaLost) as error:
        tier.files.open(NAME, GOOD, 4)
    assert error.value.errno == errno.ESTALE
    assert place.name in str(error.value)


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_not_ours_stays(
    path: Path, tmp_path: Path, tier: Tier, planted: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").write_bytes(b"good")
    (path / "ab").mkdir()
    for place in (path / whole(b"good"), path / "parts" / NAME.hex()):
        plant(place, planted, tmp_path / "elsewhere")
    before = {file: os.lstat(file) for file in path.rglob("*") if file.name != "ab"}
    for _ in range(2):
        tier.files.remove(NAME, GOOD)
        tier.files.remove_part(NAME)
        tier.files.discard(NAME)
        tier.files.mark_synced([(NAME, GOOD)])
    with pytest.raises(FileExistsError):
        tier.files.create_part(NAME, 4)
    with pytest.raises(FileExistsError):
        tier.files.write_whole(NAME, b"good")
    after = {file: os.lstat(file) for file in path.rglob("*") if file.name != "ab"}
    assert {file: (st.st_ino, st.st_mode) for file, st in after.items()} == {
        file: (st.st_ino, st.st_mode) for file, st in before.items()
    }
    assert (tmp_path / "elsewhere").read_bytes() == b"good"
    assert mode_of(tmp_path / "elsewhere") != 0o400
    assert sorted(record.getMessage() for record in caplog.records) == sorted(
        f"{place} is not ours and stays as it is"
        for place in (path / whole(b"good"), path / "parts" / NAME.hex())
    )
    assert tier.files.complete(0xAB) == tier.files.parts() == []


@pytest.mark.parametrize("planted", PLANTED)
def test_a_replica_does_not_replace_what_is_not_ours(
    path: Path, tmp_path: Path, tier: Tier, planted: str
) -> None:
    (tmp_path / "elsewhere").write_bytes(b"evil")
    (path / "ab").mkdir()
    place = path / whole(b"good")
    plant(place, planted, tmp_path / "elsewhere")
    before = os.lstat(place)
    with pytest.raises(FileExistsError):
        tier.files.write_whole(NAME, b"good")
    assert os.lstat(place).st_ino == before.st_ino
    assert list((path / "parts").iterdir()) == []

    fd = tier.files.create_part(NAME, 4)
    tier.files.write(fd, 0, b"good")
    with pytest.raises(FileExistsError):
        tier.files.finish_part(fd, NAME, GOOD)
    os.close(fd)
    assert os.lstat(place).st_ino == before.st_ino


# Parts


def test_a_part_is_sparse_filled_and_finished(path: Path, tier: Tier) -> None:
    size = 7 * BLOCK + 1000
    middle = 4 * BLOCK
    data = os.urandom(size)
    fd = tier.files.create_part(NAME, size)
    assert tier.files.allocated(fd) == 0
    assert files_below(path) == {f"parts/{NAME.hex()}"}
    with pytest.raises(FileExistsError):
        tier.files.create_part(NAME, size)
    with pytest.raises(FileExistsError):
        tier.files.write_whole(NAME, data)
    last = tier.files.write(fd, middle, data[middle:])
    assert last == digests(data[middle:])
    os.close(fd)

    fd = tier.files.open_part(NAME, size)
    assert 3 * BLOCK <= tier.files.allocated(fd) < 4 * BLOCK
    assert read_full(fd, middle, size - middle) == data[middle:]
    first = tier.files.write(fd, 0, memoryview(data)[:middle])
    assert combine(first + last) == checksum(data)
    tier.sync()
    assert tier.files.finish_part(fd, NAME, checksum(data)) == tier.files.allocated(fd) >= size
    os.close(fd)
    assert files_below(path) == {whole(data)}
    fd = tier.files.open(NAME, checksum(data), size)
    assert read_full(fd, 0, size) == data
    os.close(fd)
    with pytest.raises(ReplicaLost):
        tier.files.open_part(NAME, size)


def test_a_part_of_another_size_is_refused(tier: Tier) -> None:
    os.close(tier.files.create_part(NAME, 99))
    with pytest.raises(ReplicaLost, match="Has 99 bytes instead of 100"):
        tier.files.open_part(NAME, 100)
    tier.files.remove_part(NAME)
    tier.files.remove_part(NAME)
    os.close(tier.files.create_part(NAME, 100))


def test_only_the_file_that_was_written_is_finished(path: Path, tier: Tier) -> None:
    fd = tier.files.create_part(NAME, 4)
    tier.files.write(fd, 0, b"good")
    (path / "parts" / NAME.hex()).unlink()
    with pytest.raises(ReplicaLost):
        tier.files.finish_part(fd, NAME, GOOD)
    other = tier.files.create_part(NAME, 4)
    with pytest.raises(ReplicaLost, match="Not the file that was written"):
        tier.files.finish_part(fd, NAME, GOOD)
    os.close(fd)
    os.close(other)
    assert files_below(path) == {f"parts/{NAME.hex()}"}


@pytest.mark.parametrize(
    ("offset", "size"), [(1, BLOCK), (0, BLOCK - 1), (BLOCK, BLOCK + 1), (4 * KIB, 4 * KIB)]
)
def test_only_whole_blocks_have_digests(tier: Tier, offset: int, size: int) -> None:
    fd = tier.files.create_part(NAME, 3 * BLOCK)
    with pytest.raises(ValueError, match="not whole blocks"):
        tier.files.write(fd, offset, bytes(size))
    assert tier.files.write(fd, BLOCK, b"") == b""
    os.close(fd)


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
    fd = tier.files.create_part(NAME, BLOCK + len(data))
    assert tier.files.write(fd, BLOCK, data) == digests(data)
    assert read_full(fd, 0, BLOCK + len(data)) == bytes(BLOCK) + data
    os.fsync(fd)
    slack = 2 * 4 * KIB
    assert allocated_chunks * chunk <= tier.files.allocated(fd) <= allocated_chunks * chunk + slack
    total = combine(digests(bytes(BLOCK)) + digests(data))
    tier.files.finish_part(fd, NAME, total)
    os.close(fd)
    assert tier.files.verify(NAME, total, BLOCK + len(data))


def test_writes_go_on_after_short_ones(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(10_000)
    real_pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: real_pwrite(fd, view[:777], at))
    tier.files.write_whole(NAME, data)
    assert content(tier, data) == data


# Directories that are not what they were


def test_a_planted_fan_out_directory_is_not_followed(path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    tier = open_tier(path)
    tier.files.write_whole(NAME, b"good")
    tier.close()
    (path / "ab").rename(elsewhere)
    (path / "ab").symlink_to(elsewhere)
    tier = open_tier(path)
    with pytest.raises(NotADirectoryError):
        tier.files.write_whole(name_of(9), b"good")
    with pytest.raises(ReplicaLost):
        tier.files.open(NAME, GOOD, 4)
    with pytest.raises(ReplicaLost):
        tier.files.verify(NAME, GOOD, 4)
    tier.files.mark_synced([(NAME, GOOD)])
    tier.files.remove(NAME, GOOD)
    tier.files.discard(NAME)
    assert tier.files.complete(0xAB) == []
    tier.close()
    good = elsewhere / Path(whole(b"good")).name
    assert list(elsewhere.iterdir()) == [good]
    assert mode_of(good) == 0o600
    assert (path / "ab").is_symlink()
    assert list((path / "parts").iterdir()) == []


def test_a_planted_directory_of_parts_is_not_followed(path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    tier = open_tier(path)
    os.close(tier.files.create_part(NAME, 4))
    (path / "parts").rename(elsewhere)
    (elsewhere / ".probe-0").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "parts").symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError):
        open_tier(tmp_path / "other")
    assert reopen(tier, tmp_path / "other")
    for use in (
        lambda: tier.files.write_whole(NAME, b"good"),
        lambda: tier.files.create_part(name_of(9), 4),
        tier.probe,
    ):
        with pytest.raises(NotADirectoryError):
            use()
    with pytest.raises(ReplicaLost):
        tier.files.open_part(NAME, 4)
    tier.files.remove_part(NAME)
    tier.files.discard(NAME)
    assert tier.files.parts() == []
    tier.close()
    assert files_below(elsewhere) == {NAME.hex(), ".probe-0"}
    assert (tmp_path / "other" / "parts").is_symlink()


def test_directories_that_were_cleaned_away_are_made_again(path: Path, tier: Tier) -> None:
    tier.files.write_whole(NAME, b"good")
    for directory in path.iterdir():
        shutil.rmtree(directory)
    with pytest.raises(ReplicaLost):
        tier.files.open(NAME, GOOD, 4)
    tier.files.write_whole(NAME, b"good")
    assert content(tier, b"good") == b"good"
    tier.probe()

    shutil.rmtree(path)
    with pytest.raises(FileNotFoundError):
        tier.files.write_whole(NAME, b"good")
    with pytest.raises(FileNotFoundError):
        tier.probe()
    tier.files.remove(NAME, GOOD)
    assert tier.files.complete(0xAB) == tier.files.parts() == []


def test_a_tier_goes_on_in_another_directory(path: Path, tmp_path: Path, tier: Tier) -> None:
    tier.files.write_whole(NAME, b"good")
    fd = tier.files.open(NAME, GOOD, 4)
    before = len(os.listdir("/proc/self/fd"))
    assert not reopen(tier, path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert content(tier, b"good") == b"good"

    path.rename(tmp_path / "before")
    path.mkdir()
    assert content(tier, b"good") == b"good"
    assert reopen(tier, path)
    assert not reopen(tier, path)
    assert read_full(fd, 0, 4) == b"good"  # what is open stays so
    os.close(fd)
    with pytest.raises(ReplicaLost):
        tier.files.open(NAME, GOOD, 4)
    tier.probe()
    tier.files.write_whole(NAME, b"more")
    tier.sync()
    assert files_below(path) == {whole(b"more")}
    assert files_below(tmp_path / "before") == {whole(b"good")}


def test_a_directory_that_cannot_be_opened_changes_nothing(path: Path, tier: Tier) -> None:
    tier.files.write_whole(NAME, b"good")
    fd = os.open(path / whole(b"good"), os.O_RDONLY)
    with pytest.raises(NotADirectoryError):
        tier.reopen(fd)
    os.close(fd)
    assert content(tier, b"good") == b"good"
