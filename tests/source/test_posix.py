"""The blocking functions, on files of every kind, and reads past the page cache."""

import errno
import fcntl
import math
import mmap
import os
import random
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from monarchfs.core.units import Unit
from monarchfs.source import posix as posix_module
from monarchfs.source.direct import TRIALS, DirectDescriptor
from monarchfs.source.posix import Found, PosixSource
from monarchfs.system.file_system_type import FUSE
from monarchfs.types import DirRef, FileType, SourceChanged, SourceStat, SourceVersion
from tests.source.tools import everything, open_descriptors, ref
from tests.support import surroundings
from tests.support.on_disk import cached_pages


def test_stat_says_what_lstat_says(root: Path, posix: PosixSource) -> None:
    (root / "f").write_bytes(b"x" * 5000)
    os.utime(root / "f", ns=(-5, 7_000_000_123))
    (root / "l").symlink_to("f")
    (root / "d").mkdir(mode=0o2711)
    for name in ("f", "l", "d"):
        st = os.lstat(root / name)
        assert posix.stat(ref(root), name.encode()) == SourceStat.of(st, st.st_dev)
    assert posix.stat(ref(root, b"d"), b"") == posix.stat(ref(root), b"d")
    assert posix.stat(ref(root), b"").ino == posix.root.ino == os.stat(root).st_ino


def shown(call: Callable[[], Found | OSError]) -> object:
    """But for the time of access of links, which reading them changes."""
    try:
        answer = call()
    except OSError as error:
        answer = error
    if isinstance(answer, OSError):
        return answer.errno, str(answer)
    return answer[0]._replace(atime_ns=0), answer[1]


def test_found_each_answers_as_found_does(root: Path, posix: PosixSource) -> None:
    special_files(root)
    (root / "d").mkdir()
    (root / "l").symlink_to("f")
    for name, when in ((b"f", 1), (b"past", -(10**9)), (b"future", 10**10)):
        (root / os.fsdecode(name)).write_bytes(name)
        with suppress(OSError, OverflowError):
            os.utime(root / os.fsdecode(name), (when, when))
    here = ref(root)
    names = [*os.listdir(os.fsencode(root)), *(b"none", b".", b"..", b"", b"d/x", b"nul\0")]
    names.append(b"x" * 256)
    for name, answer in zip(names, posix.found_each(here, names), strict=True):
        together, alone = shown(lambda: answer), shown(lambda: posix.found(here, name))  # noqa: B023
        assert together == shown(lambda: posix.found_each(here, [name])[0]) == alone, name  # noqa: B023
    assert posix.found_each(here, []) == []
    with pytest.raises(SourceChanged):
        posix.found_each(DirRef(b"d", 1), [b"f"])


def test_small_files_that_were_opened_for_their_attributes_stay_open_for_a_while(
    root: Path, posix: PosixSource
) -> None:
    special_files(root)
    (root / "d").mkdir()
    for name, size in (("small", 9), ("also", 1000), ("large", 1001), ("empty", 0)):
        (root / name).write_bytes(bytes(size))
    names = sorted([*os.listdir(os.fsencode(root)), b"none"])
    opened = posix.opened_each(ref(root), names, math.inf, 1000)
    for each, answer in zip(names, opened, strict=True):
        assert shown(lambda: answer) == shown(lambda: posix.found(ref(root), each)), each  # noqa: B023
    assert list(posix.stale_descriptors(30)) == []
    kept = list(posix.stale_descriptors(0))
    small = [(root / name).stat().st_ino for name in ("small", "also")]
    assert sorted(os.fstat(fd).st_ino for fd in kept) == sorted(small)
    for fd in kept:
        os.close(fd)
    assert list(posix.stale_descriptors(0)) == []


def test_found_each_ends_when_its_time_is_over(root: Path, posix: PosixSource) -> None:
    (root / "d").mkdir()
    (root / "f").touch()
    here = ref(root)
    for names in ([b"f", b"d"], [b"d", b"f"], [b"none", b"f"]):
        assert len(posix.found_each(here, names, 0.0)) == 1


def test_xattrs_are_those_of_the_entry(root: Path, posix: PosixSource) -> None:
    (root / "f").touch()
    (root / "l").symlink_to("f")
    os.setxattr(root / "f", b"user.\xc3\xff", b"value\0\xfe")
    assert posix.listxattr(ref(root), b"f") == [b"user.\xc3\xff"]
    assert posix.getxattr(ref(root), b"f", b"user.\xc3\xff") == b"value\0\xfe"
    assert posix.listxattr(ref(root), b"l") == []
    with pytest.raises(OSError, match="No data available"):
        posix.getxattr(ref(root), b"l", b"user.\xc3\xff")


def special_files(root: Path) -> dict[bytes, FileType]:
    os.mkfifo(root / "fifo")
    listener = socket.socket(socket.AF_UNIX)
    path = root / "s"
    listener.bind(str(path)) if len(str(path)) < 100 else os.mknod(path, stat.S_IFSOCK | 0o600)
    listener.close()
    kinds = {b"fifo": FileType.FIFO, b"s": FileType.SOCKET}
    if os.geteuid() == 0:
        os.mknod(root / "char", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(root / "block", stat.S_IFBLK | 0o600, os.makedev(7, 200))
        kinds |= {b"char": FileType.CHARACTER, b"block": FileType.BLOCK}
    return kinds


def test_special_files_are_listed_and_not_opened(root: Path, posix: PosixSource) -> None:
    kinds = special_files(root)
    (root / "d").mkdir()
    (root / "l").symlink_to("d")
    (root / "f").touch()
    entries = everything(posix, ref(root))
    assert {entry.name: entry.type for entry in entries} == kinds | {
        b"d": FileType.DIRECTORY,
        b"l": FileType.SYMLINK,
        b"f": FileType.REGULAR,
    }
    assert {entry.device for entry in entries} == {0}
    for name in kinds:
        with pytest.raises(OSError, match="No such device or address") as error:
            posix.open(ref(root), name)
        assert error.value.errno == errno.ENXIO
    with pytest.raises(IsADirectoryError):
        posix.open(ref(root), b"d")


@surroundings.requires_root
def test_a_directory_whose_names_alone_may_be_read(root: Path, posix: PosixSource) -> None:
    (root / "d").mkdir()
    os.mkfifo(root / "d" / "fifo")
    (root / "d").chmod(0o744)
    directory = ref(root, b"d")
    os.seteuid(65534)
    try:
        assert [entry.type for entry in everything(posix, directory)] == [FileType.UNKNOWN]
    finally:
        os.seteuid(0)


def test_what_was_read_is_not_kept_in_memory_too(root: Path, posix: PosixSource) -> None:
    mib = 1 << 20
    data = os.urandom(8 * mib)
    (root / "f").write_bytes(data)
    fd, st = posix.open(ref(root), b"f")
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_pages(fd):
            pytest.skip("needs a TMPDIR on a disk: it is in memory")
        # In order, as a copy is read: nothing is read ahead, and nothing stays.
        for start in (0, mib, 2 * mib):
            found = posix.read_once(fd, start, mib)
            assert found == (data[start : start + mib], st.version)
        assert cached_pages(fd) == []
        # A reader's own reads may be read ahead of; what it got does not stay either.
        assert posix.read_for_reader(fd, 3 * mib, mib)[0] == data[3 * mib : 4 * mib]
        assert not any(page < 4 * mib // mmap.PAGESIZE for page in cached_pages(fd))
    finally:
        posix.close(fd)


def test_advice_that_is_not_taken_costs_no_read(
    root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "f").write_bytes(b"data")
    fd, st = posix.open(ref(root), b"f")
    refuse = Mock(side_effect=OSError(errno.EOPNOTSUPP, "not here"))
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    for read in (posix.read, posix.read_once, posix.read_for_reader):
        assert read(fd, 0, 4) == (b"data", st.version)
    posix.close(fd)


def test_short_reads_go_on(root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(10_000)
    (root / "f").write_bytes(data)
    fd, st = posix.open(ref(root), b"f")
    real_pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real_pread(fd, min(size, 999), at))
    assert posix.read(fd, 0, 9_000) == (data[:9_000], st.version)
    assert posix.read(fd, 1, 20_000) == (data[1:], st.version)
    os.truncate(root / "f", 5_000)
    assert posix.read(fd, 0, 10_000)[0] == data[:5_000]
    posix.close(fd)


def test_open_waits_for_a_lease_as_any_reader_would(root: Path, posix: PosixSource) -> None:
    (root / "f").write_text("leased")
    holder = os.open(root / "f", os.O_RDWR)
    broken = []

    def give_up(*_: object) -> None:
        broken.append(True)
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    before = signal.signal(signal.SIGIO, give_up)
    try:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fd, _ = posix.open(ref(root), b"f")
        assert (os.get_inheritable(fd), os.get_blocking(fd)) == (False, True)
        assert posix.read(fd, 0, 10)[0] == b"leased"
        posix.close(fd)
    finally:
        signal.signal(signal.SIGIO, before)
        os.close(holder)
    assert broken


def test_complete_listings(root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "Name").write_bytes(b"")
    (root / "nAME").write_bytes(b"")  # another file
    for kind, known in ((0xEF53, None), (0x0BD00BD0, True), (0x6969, False), (FUSE, False)):
        monkeypatch.setattr(posix_module, "file_system_type", lambda fd, kind=kind: kind)
        assert posix.lists_all(ref(root), b"Name") is (known is not False)
        assert posix.known_to_list_all(ref(root)) is known
    assert posix.known_to_list_all(DirRef(b".lustre/fid", 2)) is False
    # One file, as a directory says that finds names in any case.
    monkeypatch.setattr(posix_module, "file_system_type", lambda fd: 0xEF53)
    (root / "nAME").unlink()
    os.link(root / "Name", root / "nAME")
    assert not posix.lists_all(ref(root), b"Name")
    assert posix.lists_all(ref(root), b"")


CHUNK = 128 << 10


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "f").write_bytes(b"x")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    yield fd
    os.close(fd)


def test_threads_that_open_it_at_once_have_the_same(fd: int) -> None:
    descriptor, before = DirectDescriptor(), open_descriptors()
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: descriptor.get(fd), range(200)))
    assert found == {descriptor.get(fd)}
    assert descriptor.take_opens() >= 1
    assert descriptor.take_opens() == 0
    os.close(descriptor.close())
    assert descriptor.get(fd) == -1, "its number may stand for another file by then"
    assert open_descriptors() == before


@pytest.mark.parametrize("past", [0, 1, 4095, 4096, CHUNK + 5])
def test_the_same_bytes_come_either_way(root: Path, posix: PosixSource, past: int) -> None:
    """Also those that were written a moment ago and are on no disk."""
    data = random.Random(past).randbytes((2 << 20) + past)
    (root / "f").write_bytes(data)
    fd, stat = posix.open(ref(root), b"f")
    st_dev, st_ino, size, mtime_ns, ctime_ns = stat.version
    version = SourceVersion(st_dev or posix.device, st_ino, size, mtime_ns, ctime_ns)
    ways, descriptor = set(), DirectDescriptor()
    for _ in range(2 * TRIALS):
        unit = Unit(1, CHUNK, size, chunk_bytes=CHUNK, version=version, device=posix.device)
        assert posix.read_unit(fd, descriptor, unit) == size - CHUNK
        assert unit.peek(CHUNK, size) == data[CHUNK:]
        ways.add(unit.direct)
    for opened in (descriptor.close(), fd):
        if opened >= 0:
            posix.close(opened)
    assert False in ways
