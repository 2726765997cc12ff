"""Tiers on real directories: layout, parts, what is listed, verified and tried, and vanishing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from monarchfs.store import ReplicaLost, Tier, read_full
from monarchfs.store.checksum import checksum, combine, digests
from monarchfs.types import SourceVersion, TierFile
from tests.store.tools import BLOCK, KIB, NAME, content, files_below, mode_of, name_of, whole
from tests.support.on_disk import Place, cached_pages, spoil

GOOD = checksum(b"good")
MIB = 1024 * KIB


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
    segments = tier.segments
    segments.create(1)
    before = len(os.listdir("/proc/self/fd"))
    assert not reopen(tier, path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert tier.segments is segments
    assert content(tier, b"good") == b"good"

    path.rename(tmp_path / "before")
    path.mkdir()
    assert content(tier, b"good") == b"good"
    assert reopen(tier, path)
    assert not reopen(tier, path)
    # What is open stays so, and who had the earlier segments may still use them.
    assert read_full(fd, 0, 4) == b"good"
    os.close(fd)
    assert (segments.found(), tier.segments.found()) == ([1], [])
    with pytest.raises(ReplicaLost):
        tier.files.open(NAME, GOOD, 4)
    tier.probe()
    tier.files.write_whole(NAME, b"more")
    tier.segments.create(2)
    tier.sync()
    assert files_below(path) == {whole(b"more"), f"segments/{2:016x}"}
    assert files_below(tmp_path / "before") == {whole(b"good"), f"segments/{1:016x}"}


def test_a_directory_that_cannot_be_opened_changes_nothing(path: Path, tier: Tier) -> None:
    tier.files.write_whole(NAME, b"good")
    fd = os.open(path / whole(b"good"), os.O_RDONLY)
    with pytest.raises(NotADirectoryError):
        tier.reopen(fd)
    os.close(fd)
    assert content(tier, b"good") == b"good"


# Listing and marking


def test_files_are_listed_in_order_with_what_they_are(path: Path, tier: Tier) -> None:
    numbers = list(range(20))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        tier.files.write_whole(name_of(number), b"x" * number)
    tier.files.write_whole(name_of(3), b"another")
    tier.files.write_whole(b"\xac" * 16, b"not here")
    tier.sync()
    tier.files.mark_synced([(name_of(5), checksum(b"x" * 5)), (name_of(6), 0)])
    expected = [
        TierFile(name_of(n), checksum(data), len(data), 4 * KIB if data else 0, n == 5)
        for n, data in [(3, b"another"), *((n, b"x" * n) for n in range(20))]
    ]
    found = tier.files.complete(0xAB)
    assert [file._replace(made_ns=0) for file in found] == sorted(expected)
    for file in found:
        replica = path / "ab" / f"{file.name.hex()}.{file.checksum:016x}"
        assert file.made_ns == replica.stat().st_mtime_ns
    assert [file.name for file in tier.files.complete(0xAC)] == [b"\xac" * 16]
    assert tier.files.complete(0xAD) == []
    assert not (path / "ad").exists()


def test_parts_are_listed_in_order(tier: Tier) -> None:
    assert tier.files.parts() == []
    for number in (3, 1, 2):
        os.close(tier.files.create_part(name_of(number), number * BLOCK))
    fd = tier.files.open_part(name_of(2), 2 * BLOCK)
    tier.files.write(fd, 0, b"x" * BLOCK)
    os.close(fd)
    assert [part._replace(made_ns=0) for part in tier.files.parts()] == [
        TierFile(name_of(1), 0, BLOCK, 0, False),
        TierFile(name_of(2), 0, 2 * BLOCK, BLOCK, False),
        TierFile(name_of(3), 0, 3 * BLOCK, 0, False),
    ]


def test_only_proper_names_are_listed(path: Path, tmp_path: Path, tier: Tier) -> None:
    tier.files.write_whole(NAME, b"good")
    os.close(tier.files.create_part(NAME, 4))
    proper = "ab" + "0" * 30
    foreign = [
        *(f"ab/{proper}{end}" for end in ("", ".", ".0", "." + "0" * 17, "." + "A" * 16)),
        *(f"ab/{proper}.{'0' * 16}{end}" for end in ("\n", "~", ".tmp")),
        f"ab/{proper.upper()}.{'0' * 16}",
        f"ab/ac{proper[2:]}.{'0' * 16}",  # of another directory
        f"ab/.{proper}.{'0' * 16}",
        *(f"parts/{name}" for name in ("notes.txt", proper + "0", proper[1:], proper.upper())),
        f"parts/{proper}.{'0' * 16}",
        f"AB{'/' + proper}.{'0' * 16}",
        f"zz/{proper}.{'0' * 16}",
    ]
    for file in foreign:
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).touch()
    before = files_below(path)
    assert [file.name for file in tier.files.complete(0xAB)] == [NAME]
    assert [file.name for file in tier.files.parts()] == [NAME]
    tier.files.discard(bytes.fromhex(proper))
    tier.probe()
    assert files_below(path) == before


def test_synced_is_what_the_mode_says(path: Path, tier: Tier) -> None:
    tier.files.write_whole(NAME, b"good")
    assert not tier.files.complete(0xAB)[0].synced
    tier.files.mark_synced([(NAME, GOOD), (name_of(1), GOOD), (b"\0" * 16, GOOD)])
    assert mode_of(path / whole(b"good")) == 0o400
    assert tier.files.complete(0xAB)[0].synced
    assert tier.files.verify(NAME, GOOD, 4)
    tier.files.mark_synced([(NAME, GOOD)])
    (path / whole(b"good")).chmod(0o444)  # whoever did that, it was not us
    assert not tier.files.complete(0xAB)[0].synced
    tier.files.remove(NAME, GOOD)
    assert tier.files.complete(0xAB) == []


def test_discarding_takes_all_of_a_name_and_nothing_else(path: Path, tier: Tier) -> None:
    kept = []
    for data in (b"good", b"evil", b""):
        tier.files.write_whole(NAME, data)
        tier.files.write_whole(name_of(8), data)
        kept.append(whole(data, name_of(8)))
    tier.files.mark_synced([(NAME, GOOD)])
    os.close(tier.files.create_part(NAME, 100))
    os.close(tier.files.create_part(name_of(8), 100))
    tier.files.discard(NAME)
    assert files_below(path) == {*kept, f"parts/{name_of(8).hex()}"}
    tier.files.discard(NAME)
    tier.files.discard(b"\0" * 16)
    assert files_below(path) == {*kept, f"parts/{name_of(8).hex()}"}
    assert not (path / "00").exists()


# Verifying

SIZES = [0, 1, 4096, BLOCK, MIB - 1, MIB, MIB + 1, 3 * MIB + 12_345]


def refuse_direct(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """O_DIRECT is refused with EINVAL: when it is set, or by every read."""
    real_fcntl, real_preadv = fcntl.fcntl, os.preadv

    def checked_fcntl(fd: int, command: int, argument: int = 0) -> int:
        if when == "set" and command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(fd, command, argument)

    def checked_preadv(fd: int, buffers: tuple[memoryview], offset: int) -> int:
        if real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(fcntl, "fcntl", checked_fcntl)
    monkeypatch.setattr(os, "preadv", checked_preadv)


@pytest.mark.parametrize("direct", ["as it is", "set", "read"])
@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_verified(
    path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch, size: int, direct: str
) -> None:
    if direct != "as it is":
        refuse_direct(monkeypatch, direct)
    data = os.urandom(size)
    _, total = tier.files.write_whole(NAME, data)
    paced: list[int] = []
    assert tier.files.verify(NAME, total, size, paced.append)
    assert sum(paced) == size
    assert all(0 < count <= MIB for count in paced)
    for at in {0, size // 2, size - 1} if size else set():
        spoil(Place(path / whole(data), 0), at)
        assert not tier.files.verify(NAME, total, size)
        spoil(Place(path / whole(data), 0), at)
    assert tier.files.verify(NAME, total, size)


def test_short_reads_are_gone_on_from(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(2 * MIB + 5)
    _, total = tier.files.write_whole(NAME, data)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: real(fd, (to[0][:300_000],), at))
    paced: list[int] = []
    assert tier.files.verify(NAME, total, len(data), paced.append)
    assert paced[:4] == [MIB, MIB - 300_000, MIB - 600_000, MIB - 900_000]


def test_what_is_not_there_cannot_be_verified(path: Path, tier: Tier) -> None:
    with pytest.raises(ReplicaLost):
        tier.files.verify(NAME, GOOD, 4)
    tier.files.write_whole(NAME, b"good")
    with pytest.raises(ReplicaLost, match="Has 4 bytes instead of 5"):
        tier.files.verify(NAME, GOOD, 5)
    with pytest.raises(ReplicaLost, match="Ends at 0 instead of 4"):
        tier.files.verify(NAME, GOOD, 4, lambda _: os.truncate(path / whole(b"good"), 0))


def test_a_disk_that_does_not_give_the_bytes_is_no_answer(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.files.write_whole(NAME, b"good")

    def preadv(fd: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(OSError, match="Input/output") as error:
        tier.files.verify(NAME, GOOD, 4)
    assert not isinstance(error.value, ReplicaLost)


def cached(path: Path) -> int:
    with open(path, "rb") as file:
        return len(cached_pages(file.fileno()))


@pytest.mark.parametrize("direct", ["as it is", "set", "read"])
def test_verifying_leaves_nothing_in_the_page_cache(
    path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    if tier.memory_backed:
        pytest.skip("needs a TMPDIR on a disk: it is in memory")
    if direct != "as it is":
        refuse_direct(monkeypatch, direct)
    data = os.urandom(4 * MIB)
    _, total = tier.files.write_whole(NAME, data)
    tier.sync()
    with open(path / whole(data), "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached(path / whole(data)) == 0
    assert tier.files.verify(NAME, total, len(data))
    assert cached(path / whole(data)) == 0

    whole_reads = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: whole_reads(fd, (to[0][:4096],), at))
    turns = iter(("first", "second"))

    def pace(_: int) -> None:
        next(turns)

    with pytest.raises(StopIteration):
        tier.files.verify(NAME, total, len(data), pace)
    assert cached(path / whole(data)) == 0


def takes_direct(path: Path) -> bool:
    (path / "notes").touch()
    with contextlib.suppress(OSError):
        os.close(os.open(path / "notes", os.O_RDONLY | os.O_DIRECT))
        return True
    return False


def test_verifying_keeps_what_was_cached(path: Path, tier: Tier) -> None:
    if tier.memory_backed or not takes_direct(path):
        pytest.skip("needs O_DIRECT: TMPDIR on ext4 or xfs")
    data = os.urandom(4 * MIB)
    _, total = tier.files.write_whole(NAME, data)
    tier.sync()
    before = cached(path / whole(data))
    assert before > 0
    assert tier.files.verify(NAME, total, len(data))
    assert cached(path / whole(data)) == before


# Trying


def test_a_probe_leaves_nothing_and_removes_what_a_crash_left(
    path: Path, tmp_path: Path, tier: Tier
) -> None:
    tier.probe()
    assert files_below(path) == set()
    (tmp_path / "elsewhere").touch()
    for name in (".probe-0123456789abcdef", ".probe-0"):
        (path / "parts" / name).touch()
    others = [".probe-", ".probe-xyz", ".probe-0.txt", "probe-0", ".probe-0A"]
    for name in others:
        (path / "parts" / name).touch()
    (path / "parts" / ".probe-1").symlink_to(tmp_path / "elsewhere")
    tier.probe()
    assert files_below(path) == {f"parts/{name}" for name in [*others, ".probe-1"]}
    assert (tmp_path / "elsewhere").exists()


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_probe_reports_what_fails(
    path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pwrite", "fsync", "pread"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(errno.EIO))
            with pytest.raises(OSError, match="Input/output"):
                tier.probe()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: bytes(4096))
        with pytest.raises(OSError, match="Other bytes than were written") as error:
            tier.probe()
        assert error.value.errno == errno.EIO
    assert files_below(path) == set()
    tier.probe()
