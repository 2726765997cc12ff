"""Tiers on real directories: what they take, list, verify, try and read, without room as well; and
what has one of our names there and is not ours: refused, never followed, never changed."""

import errno
import fcntl
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from monarchfs.cache.store import Tier, listed, read_full, read_nowait
from monarchfs.cache.store import files as on_disk
from monarchfs.cache.store.checksum import BLOCK_BYTES, checksum, combine, digests
from monarchfs.core.units import Unit
from monarchfs.types import ReplicaLost, SourceStat, SourceVersion, TierFile
from monarchfs.worker import opening
from tests.store import tools
from tests.store.tools import NAME, name_of
from tests.support.on_disk import Place, cached_pages, spoil

GOOD = checksum(b"good")
MIB = 1024 * tools.KIB


def test_each_field_of_the_version_is_in_the_name() -> None:
    base = SourceVersion(1, 1, 1, 1, 1)
    others = [base._replace(**{field: 2}) for field in SourceVersion._fields]
    shifted = [SourceVersion(1, 11, 1, 1, 1), SourceVersion(11, 1, 1, 1, 1)]
    assert len({each.replica_name for each in [base, *others, *shifted]}) == 8
    data = os.urandom(2 * tools.BLOCK + 1)
    blocks = [data[: tools.BLOCK], data[tools.BLOCK : -1], data[-1:]]
    assert digests(data) == b"".join(xxh3_64_digest(block) for block in blocks)
    assert checksum(memoryview(data)) == combine(digests(data)) == xxh3_64_intdigest(digests(data))


def test_a_whole_replica_is_written_opened_and_removed(path: Path, tier: Tier) -> None:
    data = os.urandom(10_000)
    assert tier.files.write_whole(NAME, data) == (12 * tools.KIB, checksum(data))
    assert tools.files_below(path) == {tools.whole(data)}
    assert tools.mode_of(path / tools.whole(data)) == 0o600
    assert tools.mode_of(path / "ab") == 0o700

    fd = tier.files.open(NAME, checksum(data), 10_000)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    assert not os.get_inheritable(fd)
    assert read_full(fd, 0, 10_000) == data
    assert tier.files.allocated(fd) == 12 * tools.KIB
    os.close(fd)

    tier.files.remove(NAME, checksum(data) ^ 1)
    assert tools.files_below(path) == {tools.whole(data)}
    for _ in range(2):
        tier.files.remove(NAME, checksum(data))
    assert tools.files_below(path) == set()
    with pytest.raises(ReplicaLost):
        tier.files.open(NAME, checksum(data), 10_000)


def test_writing_again_replaces(path: Path, tier: Tier) -> None:
    tier.files.write_whole(NAME, b"good")
    tier.files.mark_synced([(NAME, GOOD)])
    place = path / tools.whole(b"good")
    first = os.lstat(place).st_ino
    fd = tier.files.open(NAME, GOOD, 4)
    tier.files.write_whole(NAME, b"good")
    assert os.lstat(place).st_ino != first
    assert tools.mode_of(place) == 0o600  # its data are not on the disk yet
    assert read_full(fd, 0, 4) == b"good"
    os.close(fd)


def test_a_part_is_sparse_filled_and_finished(path: Path, tier: Tier) -> None:
    size = 7 * tools.BLOCK + 1000
    middle = 4 * tools.BLOCK
    data = os.urandom(size)
    fd = tier.files.create_part(NAME, size)
    assert tier.files.allocated(fd) == 0
    assert tools.files_below(path) == {f"parts/{NAME.hex()}"}
    with pytest.raises(FileExistsError):
        tier.files.create_part(NAME, size)
    with pytest.raises(FileExistsError):
        tier.files.write_whole(NAME, data)
    last = tier.files.write(fd, middle, data[middle:])
    assert last == digests(data[middle:])
    os.close(fd)

    fd = tier.files.open_part(NAME, size)
    assert 3 * tools.BLOCK <= tier.files.allocated(fd) < 4 * tools.BLOCK
    assert read_full(fd, middle, size - middle) == data[middle:]
    first = tier.files.write(fd, 0, memoryview(data)[:middle])
    assert combine(first + last) == checksum(data)
    tier.sync()
    assert tier.files.finish_part(fd, NAME, checksum(data)) == tier.files.allocated(fd) >= size
    os.close(fd)
    assert tools.files_below(path) == {tools.whole(data)}
    fd = tier.files.open(NAME, checksum(data), size)
    assert read_full(fd, 0, size) == data
    os.close(fd)
    with pytest.raises(ReplicaLost):
        tier.files.open_part(NAME, size)


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
    assert tools.files_below(path) == {f"parts/{NAME.hex()}"}


@pytest.mark.parametrize(("pattern", "chunks"), [("zzzz", 0), ("xzzx", 2), ("zzx", 1), ("zs", 1)])
def test_chunks_of_zeros_stay_holes(tier: Tier, pattern: str, chunks: int) -> None:
    chunk, slack = 64 * tools.KIB, 2 * 4 * tools.KIB
    kinds = {"z": bytes(chunk), "x": b"\1" * chunk, "s": bytes(chunk - 1) + b"\1"}
    data = b"".join(kinds[kind] for kind in pattern) + bytes(100)
    fd = tier.files.create_part(NAME, tools.BLOCK + len(data))
    assert tier.files.write(fd, tools.BLOCK, data) == digests(data)
    assert read_full(fd, 0, tools.BLOCK + len(data)) == bytes(tools.BLOCK) + data
    os.fsync(fd)
    assert chunks * chunk <= tier.files.allocated(fd) <= chunks * chunk + slack
    os.close(fd)


def test_writes_go_on_after_short_ones(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(10_000)
    real_pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: real_pwrite(fd, view[:777], at))
    tier.files.write_whole(NAME, data)
    assert tools.content(tier, data) == data


def test_directories_that_were_cleaned_away_are_made_again(path: Path, tier: Tier) -> None:
    tier.files.write_whole(NAME, b"good")
    for directory in path.iterdir():
        shutil.rmtree(directory)
    with pytest.raises(ReplicaLost):
        tier.files.open(NAME, GOOD, 4)
    tier.files.write_whole(NAME, b"good")
    assert tools.content(tier, b"good") == b"good"
    tier.probe()

    shutil.rmtree(path)
    with pytest.raises(FileNotFoundError):
        tier.files.write_whole(NAME, b"good")
    with pytest.raises(FileNotFoundError):
        tier.probe()
    tier.files.remove(NAME, GOOD)
    assert tier.files.complete(0xAB) == tier.files.parts() == []


@pytest.mark.parametrize("code", [0, errno.EIO])
def test_a_later_worker_begins_whatever_became_of_a_tier(
    path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """It gets the directory from the supervisor, which opened it for the first one."""
    shutil.rmtree(path)
    with monkeypatch.context() as patch:
        if code:
            for call in ("mkdir", "open", "fstat", "fstatvfs"):
                patch.setattr(os, call, Mock(side_effect=OSError(code, "")))
            patch.setattr(on_disk, "file_system_type", os.open)
        later = opening._open_tier(tier.dir_fd, "tier", 3, str(path))
    if code:
        with monkeypatch.context() as patch:  # the former one is gone for good
            patch.setattr(os.path, "samestat", Mock(side_effect=OSError(code, "")))
            assert later.find_again()
    later.probe()
    assert [entry.name for entry in path.iterdir()] == ["parts"]
    later.close()


def test_files_are_listed_in_order_with_what_they_are(path: Path, tier: Tier) -> None:
    numbers = list(range(20))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        tier.files.write_whole(name_of(number), b"x" * number)
    tier.files.write_whole(name_of(3), b"another")
    tier.files.write_whole(b"\xac" * 16, b"not here")
    tier.sync()
    tier.files.mark_synced([(name_of(5), checksum(b"x" * 5)), (name_of(6), 0)])
    assert tools.mode_of(path / tools.whole(b"x" * 5, name_of(5))) == 0o400
    (path / tools.whole(b"x" * 7, name_of(7))).chmod(0o444)  # whoever did that, it was not us
    expected = [
        TierFile(name_of(n), checksum(data), len(data), 4 * tools.KIB if data else 0, n == 5)
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
    before = tools.files_below(path)
    assert [file.name for file in tier.files.complete(0xAB)] == [NAME]
    assert [part._replace(made_ns=0) for part in tier.files.parts()] == [
        TierFile(NAME, 0, 4, 0, False)
    ]
    tier.files.discard(bytes.fromhex(proper))
    tier.probe()
    assert tools.files_below(path) == before


def test_discarding_takes_all_of_a_name_and_nothing_else(path: Path, tier: Tier) -> None:
    kept = []
    for data in (b"good", b"evil", b""):
        tier.files.write_whole(NAME, data)
        tier.files.write_whole(name_of(8), data)
        kept.append(tools.whole(data, name_of(8)))
    tier.files.mark_synced([(NAME, GOOD)])
    os.close(tier.files.create_part(NAME, 100))
    os.close(tier.files.create_part(name_of(8), 100))
    for name in (NAME, NAME, b"\0" * 16):
        tier.files.discard(name)
        assert tools.files_below(path) == {*kept, f"parts/{name_of(8).hex()}"}
    assert not (path / "00").exists()


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
def test_all_verified(path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch, direct: str) -> None:
    if direct != "as it is":
        refuse_direct(monkeypatch, direct)
    for size in (0, 1, 4096, tools.BLOCK, MIB - 1, MIB, MIB + 1, 3 * MIB + 12_345):
        data = os.urandom(size)
        _, total = tier.files.write_whole(NAME, data)
        paced: list[int] = []
        assert tier.files.verify(NAME, total, size, paced.append), size
        assert sum(paced) == size
        assert all(0 < count <= MIB for count in paced)
        for at in {0, size // 2, size - 1} if size else set():
            spoil(Place(path / tools.whole(data), 0), at)
            assert not tier.files.verify(NAME, total, size), (size, at)
            spoil(Place(path / tools.whole(data), 0), at)
        assert tier.files.verify(NAME, total, size), size


def test_what_is_not_there_cannot_be_verified(path: Path, tier: Tier) -> None:
    with pytest.raises(ReplicaLost):
        tier.files.verify(NAME, GOOD, 4)
    tier.files.write_whole(NAME, b"good")
    with pytest.raises(ReplicaLost, match="Has 4 bytes instead of 5"):
        tier.files.verify(NAME, GOOD, 5)
    with pytest.raises(ReplicaLost, match="Ends at 0 instead of 4"):
        tier.files.verify(NAME, GOOD, 4, lambda _: os.truncate(path / tools.whole(b"good"), 0))


def test_a_disk_that_gives_none_is_no_answer(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.files.write_whole(NAME, b"good")
    failing = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(os, "preadv", failing)
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
    with open(path / tools.whole(data), "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached(path / tools.whole(data)) == 0
    assert tier.files.verify(NAME, total, len(data))
    assert cached(path / tools.whole(data)) == 0

    # Also where reads are short, and where it is ended on the way.
    whole_reads = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: whole_reads(fd, (to[0][:300_000],), at))
    assert tier.files.verify(NAME, total, len(data))
    paced: Iterator[list[int]] = iter(([], []))
    with pytest.raises(StopIteration):
        tier.files.verify(NAME, total, len(data), lambda count: next(paced).append(count))
    assert cached(path / tools.whole(data)) == 0


def test_a_probe_removes_what_it_or_a_crash_left(path: Path, tmp_path: Path, tier: Tier) -> None:
    tier.probe()
    assert tools.files_below(path) == set()
    (tmp_path / "elsewhere").touch()
    for name in (".probe-0123456789abcdef", ".probe-0"):
        (path / "parts" / name).touch()
    others = [".probe-", ".probe-xyz", ".probe-0.txt", "probe-0", ".probe-0A"]
    for name in others:
        (path / "parts" / name).touch()
    (path / "parts" / ".probe-1").symlink_to(tmp_path / "elsewhere")
    tier.probe()
    assert tools.files_below(path) == {f"parts/{name}" for name in [*others, ".probe-1"]}
    assert (tmp_path / "elsewhere").exists()


def test_a_probe_says_what_fails(path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pwrite", "fsync", "pread"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, Mock(side_effect=OSError(errno.EIO, "Input/output error")))
            with pytest.raises(OSError, match="Input/output"):
                tier.probe()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: bytes(4096))
        with pytest.raises(OSError, match="Other bytes than were written") as error:
            tier.probe()
        assert error.value.errno == errno.EIO
    assert tools.files_below(path) == set()
    tier.probe()


def test_reading_at_once_is_all_or_nothing(tier: Tier) -> None:
    data = os.urandom(200_000)
    tier.files.write_whole(NAME, data)
    fd = tier.files.open(NAME, checksum(data), 200_000)
    read_full(fd, 0, 200_000)
    assert read_nowait(fd, 0, 200_000, memory_backed=True) == data
    if not tier.memory_backed:
        assert read_nowait(fd, 0, 200_000) == data
        assert read_nowait(fd, 199_000, 1_000) == data[199_000:]
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert read_nowait(fd, 0, 200_000) in (None, data)  # None, but for a disk of no latency
    for memory_backed in (False, True):
        assert read_nowait(fd, 199_000, 2_000, memory_backed=memory_backed) is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            read_nowait(-1, 0, 1, memory_backed=memory_backed)
    os.close(fd)


@pytest.mark.parametrize("answer", [errno.EAGAIN, errno.EOPNOTSUPP, 0, 5])
def test_what_is_partly_in_memory(tier: Tier, monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    def preadv(fd: int, buffers: object, offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if answer > 5:
            raise OSError(answer, os.strerror(answer))
        return answer

    monkeypatch.setattr(os, "preadv", preadv)
    assert read_nowait(0, 0, 10) is None


def test_reading_in_full_never_returns_less(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(5_000)
    tier.files.write_whole(NAME, data)
    fd = tier.files.open(NAME, checksum(data), 5_000)
    with pytest.raises(ReplicaLost, match="Replica ends at 5000"):
        read_full(fd, 1_000, 4_001)
    real_pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real_pread(fd, min(size, 999), at))
    assert read_full(fd, 1, 4_999) == data[1:]
    with pytest.raises(ReplicaLost, match="Replica ends at 5000"):
        read_full(fd, 1_000, 4_001)
    os.close(fd)


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


@tools.needs_root
def test_no_room_leaves_nothing_behind(small: Path) -> None:
    tier = tools.open_tier(small)
    data = os.urandom(5 * tools.BLOCK)
    assert tier.files.write_whole(name_of(1), data) == (len(data), checksum(data))
    with pytest.raises(OSError, match="No space left") as error:
        tier.files.write_whole(name_of(2), data)
    assert error.value.errno == errno.ENOSPC
    assert tools.files_below(small) == {tools.whole(data, name_of(1))}

    fd = tier.files.create_part(name_of(3), len(data))
    with pytest.raises(OSError, match="No space left"):
        tier.files.write(fd, 0, data)
    os.close(fd)
    with pytest.raises(OSError, match="No space left"):
        tier.probe()
    tier.files.remove_part(name_of(3))
    space = tier.space()
    assert space.total_bytes == 1024 * tools.KIB
    assert space.free_bytes == 1024 * tools.KIB - 5 * tools.BLOCK
    assert space.total_inodes == 64
    assert space.free_inodes == 64 - 4  # the root, parts, a fan-out directory, a replica
    tier.close()


@tools.needs_root
def test_no_inodes_leaves_nothing_behind(small: Path) -> None:
    tier = tools.open_tier(small)
    stored = 0
    while tier.space().free_inodes >= 2:  # a replica may need a fan-out directory as well
        tier.files.write_whole(bytes([stored]) * 16, b"x")
        stored += 1
    for number in range(tier.space().free_inodes):
        (small / f"filler {number}").touch()
    before = tools.files_below(small)
    with pytest.raises(OSError, match="No space left"):
        tier.files.write_whole(bytes([stored]) * 16, b"x")
    assert stored > 20
    assert tools.files_below(small) == before
    tier.close()


@tools.needs_root
def test_a_read_only_tier_serves_and_refuses(small: Path) -> None:
    tier = tools.open_tier(small)
    _, total = tier.files.write_whole(NAME, b"good")
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    tier = tools.open_tier(small)
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


@tools.needs_root
def test_memory_is_known_as_such_and_a_sync_reports_errors(small: Path, disk: Path) -> None:
    tier = tools.open_tier(small)
    in_memory = tier.memory_backed
    tier.sync()
    fd = os.open(disk, os.O_RDONLY)
    assert tier.reopen(fd)
    os.close(fd)
    assert (in_memory, tier.memory_backed) == (True, False)
    tier.sync()
    tier.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        tier.sync()


@tools.needs_root
def test_a_file_system_that_counts_nothing_has_no_room(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "ramfs", "none", tmp_path], check=True)
    try:
        tier = tools.open_tier(tmp_path)
        with pytest.raises(OSError, match="has no size"):
            tier.space()
        tier.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


KINDS = ["symlink", "fifo", "directory", "socket", pytest.param("foreign", marks=tools.needs_root)]
LONG = b"good" * 1024
ONE, TWO = 0x1, 0xFEDC_BA98_7654_3210
ROW = TierFile(name_of(1), 1, 4096, 4096, True, 0, TWO, 0)


def plant(place: Path, kind: str, elsewhere: Path) -> None:
    """``elsewhere`` is what a link leads to."""
    if kind == "symlink":
        place.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "socket":
        os.mknod(place, 0o140600)
    else:
        place.write_bytes(b"good")
        os.chown(place, 65534, 65534)  # foreign


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_of_files(
    path: Path, tmp_path: Path, tier: Tier, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, segments = tier.files, tier.segments
    assert segments.write_each([(TWO, 0, LONG)]) == [checksum(LONG)]
    (path / "ab").mkdir()
    part, unfinished = path / "parts" / NAME.hex(), path / tools.whole(b"good", name_of(9))
    places = {
        path / tools.whole(b"good"): b"good",
        part: b"good",
        unfinished: b"good",
        path / f"segments/{ONE:016x}": LONG,
        path / f"segments/{TWO:016x}.list": listed.batch(TWO, [ROW]),
    }
    for number, (place, data) in enumerate(places.items()):
        (tmp_path / f"elsewhere {number}").write_bytes(data)
        plant(place, kind, tmp_path / f"elsewhere {number}")

    def seen() -> list[tuple[int, int]]:
        files_now = [os.lstat(file) for file in (*places, *tmp_path.glob("elsewhere *"))]
        return [(st.st_ino, st.st_mode) for st in files_now]

    before = seen()
    for use in (
        lambda: files.open(NAME, GOOD, 4),
        lambda: files.verify(NAME, GOOD, 4),
        lambda: files.open_part(NAME, 4),
        lambda: segments.open(ONE, 0),
        lambda: segments.punch(ONE, [(0, 4096)]),
        lambda: segments.data_ranges(ONE),
        lambda: segments.verify(ONE, 0, 4, GOOD),
    ):
        with pytest.raises(ReplicaLost, match=r"[0-9a-f]{16}") as lost:
            use()
        assert lost.value.errno == errno.ESTALE
    for make in (
        lambda: files.create_part(NAME, 4),
        lambda: files.write_whole(NAME, b"good"),
        lambda: files.write_whole(name_of(9), b"good"),
        lambda: segments._make(ONE),
    ):
        with pytest.raises(FileExistsError):
            make()
    assert list((path / "parts").iterdir()) == [part]
    fd = files.create_part(name_of(9), 4)
    files.write(fd, 0, b"good")
    with pytest.raises(FileExistsError):
        files.finish_part(fd, name_of(9), GOOD)
    os.close(fd)
    files.remove_part(name_of(9))
    assert tools.code_of(*segments.write_each([(ONE, 0, b"bad")])) == errno.EEXIST
    with pytest.raises(OSError, match=r"\.list"):
        segments.lists.append(TWO, [ROW])
    assert files.complete(0xAB) == files.parts() == []
    assert segments.found() == [TWO]
    assert segments.noted(ONE) == segments.noted(TWO) == []
    assert segments.blocks(ONE) == 0
    for _ in range(2):
        files.remove(NAME, GOOD)
        files.remove_part(NAME)
        files.discard(NAME)
        files.mark_synced([(NAME, GOOD)])
        segments.remove(ONE)
        segments.remove(TWO)
    assert seen() == before
    for number, data in enumerate(places.values()):
        assert (tmp_path / f"elsewhere {number}").read_bytes() == data
    said = [record.getMessage() for record in caplog.records]
    for place in set(places) - {unfinished}:
        assert said.count(f"{place} is not ours and stays as it is") == 1


@pytest.mark.parametrize("kind", ["symlink", "fifo"])
def test_in_place_of_directories(path: Path, tmp_path: Path, kind: str) -> None:
    tier = tools.open_tier(path)
    tier.files.write_whole(NAME, b"good")
    tier.segments.write_each([(ONE, 0, LONG)])
    tier.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted = [path / "ab", path / "segments"]
    for directory in planted:
        directory.rename(elsewhere / directory.name)
        plant(directory, kind, elsewhere / directory.name)
    before = [os.lstat(directory) for directory in planted]
    tier = tools.open_tier(path)
    files, segments = tier.files, tier.segments
    with pytest.raises(NotADirectoryError):
        files.write_whole(name_of(9), b"good")
    assert tools.code_of(*segments.write_each([(TWO, 0, b"bad")])) == errno.ENOTDIR
    for use in (
        lambda: files.open(NAME, GOOD, 4),
        lambda: files.verify(NAME, GOOD, 4),
        lambda: segments.open(ONE, 0),
        lambda: segments.punch(ONE, [(0, 4096)]),
    ):
        with pytest.raises(ReplicaLost):
            use()
    with pytest.raises(OSError, match="segments"):
        segments.frees_punched()
    files.mark_synced([(NAME, GOOD)])
    files.remove(NAME, GOOD)
    files.discard(NAME)
    segments.remove(ONE)
    assert files.complete(0xAB) == segments.noted(ONE) == []
    assert segments.found() == []
    assert segments.blocks(ONE) == 0
    tier.close()
    assert [os.lstat(directory) for directory in planted] == before
    assert tools.files_below(elsewhere) == {tools.whole(b"good"), f"segments/{ONE:016x}"}
    assert tools.mode_of(elsewhere / tools.whole(b"good")) == 0o600
    assert (elsewhere / f"segments/{ONE:016x}").read_bytes() == LONG
    assert list((path / "parts").iterdir()) == []


def test_in_place_of_the_directory_of_parts(path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    tier = tools.open_tier(path)
    os.close(tier.files.create_part(NAME, 4))
    (path / "parts").rename(elsewhere)
    (elsewhere / ".probe-0").touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "parts").symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError):
        tools.open_tier(other)
    fd = os.open(other, os.O_DIRECTORY)
    assert tier.reopen(fd)
    os.close(fd)
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
    assert tools.files_below(elsewhere) == {NAME.hex(), ".probe-0"}
    assert (other / "parts").is_symlink()
