"""What lies in a tier: listing, marking, discarding, verifying and trying it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from monarchfs.store import ReplicaLost, Tier
from monarchfs.store.checksum import checksum
from monarchfs.types import TierFile
from tests.store.tools import (
    BLOCK,
    KIB,
    NAME,
    PLANTED,
    files_below,
    mode_of,
    name_of,
    needs_root,
    open_tier,
    plant,
    whole,
)

GOOD = checksum(b"good")
MIB = 1024 * KIB

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


@pytest.mark.parametrize("planted", PLANTED)
def test_nothing_planted_is_marked(path: Path, tmp_path: Path, tier: Tier, planted: str) -> None:
    (tmp_path / "elsewhere").write_bytes(b"good")
    (path / "ab").mkdir()
    plant(path / whole(b"good"), planted, tmp_path / "elsewhere")
    modes = mode_of(path / whole(b"good")), mode_of(tmp_path / "elsewhere")
    tier.files.mark_synced([(NAME, GOOD)])
    assert (mode_of(path / whole(b"good")), mode_of(tmp_path / "elsewhere")) == modes


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
        with open(path / whole(data), "r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 0x10]))
        assert not tier.files.verify(NAME, total, size)
        with open(path / whole(data), "r+b") as file:
            file.write(data)
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


def test_verifying_ends_when_the_pace_says_so(tier: Tier) -> None:
    _, total = tier.files.write_whole(NAME, bytes(3 * MIB))

    class Enough(Exception):
        pass

    def pace(count: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        tier.files.verify(NAME, total, 3 * MIB, pace)


def cached_pages(path: Path) -> int:
    """Pages of a file in the page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        mapped = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    vector = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    start = ctypes.c_char.from_buffer(mapped)
    try:
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert libc.mincore(address, ctypes.c_size_t(size), vector) == 0
    finally:
        del start
        mapped.close()
    return sum(page & 1 for page in vector)


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
    assert cached_pages(path / whole(data)) == 0
    assert tier.files.verify(NAME, total, len(data))
    assert cached_pages(path / whole(data)) == 0

    whole_reads = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: whole_reads(fd, (to[0][:4096],), at))
    turns = iter(("first", "second"))

    def pace(_: int) -> None:
        next(turns)

    with pytest.raises(StopIteration):
        tier.files.verify(NAME, total, len(data), pace)
    assert cached_pages(path / whole(data)) == 0


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
    before = cached_pages(path / whole(data))
    assert before > 0
    assert tier.files.verify(NAME, total, len(data))
    assert cached_pages(path / whole(data)) == before


@needs_root
def test_verifying_in_memory(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(small)
    data = os.urandom(500_000)
    _, total = tier.files.write_whole(NAME, data)
    assert tier.files.verify(NAME, total, len(data))
    refuse_direct(monkeypatch, "set")
    assert tier.files.verify(NAME, total, len(data))
    (small / whole(data)).write_bytes(bytes(len(data)))
    assert not tier.files.verify(NAME, total, len(data))
    tier.close()


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
