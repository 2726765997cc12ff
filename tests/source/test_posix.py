"""The blocking functions, on files of every kind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from monarchfs.source import PosixSource
from monarchfs.source import posix as posix_module
from monarchfs.source.posix import Found
from monarchfs.system.file_system_type import FUSE
from monarchfs.types import DirRef, FileType, SourceChanged, SourceStat
from tests.source.tools import everything, open_descriptors, ref
from tests.support import surroundings
from tests.support.on_disk import cached_pages


def test_stat_says_what_lstat_says(root: Path, posix: PosixSource) -> None:
    (root / "f").write_bytes(b"x" * 5000)
    os.link(root / "f", root / "hard")
    os.utime(root / "f", ns=(-5, 7_000_000_123))
    (root / "l").symlink_to("f")
    (root / "d").mkdir(mode=0o2711)
    for name in ("f", "hard", "l", "d"):
        st = os.lstat(root / name)
        assert posix.stat(ref(root), name.encode()) == SourceStat.of(st, st.st_dev)
        assert posix.stat(ref(root), name.encode()).device == 0
    assert posix.stat(ref(root), b"").ino == posix.root.ino == os.stat(root).st_ino
    assert posix.stat(ref(root, b"d"), b"") == posix.stat(ref(root), b"d")
    with pytest.raises(FileNotFoundError):
        posix.stat(ref(root), b"none")


def test_names_of_any_bytes(root: Path, posix: PosixSource) -> None:
    names = {bytes([byte]) * 3 for byte in range(1, 256) if byte != ord("/")}
    names |= {bytes(range(1, 47)), bytes(range(48, 256)), "ü".encode(), b"\xc3", b"y" * 255}
    for name in names:
        with open(os.path.join(os.fsencode(root), name), "wb") as file:
            file.write(name)
    entries = everything(posix, ref(root), batch=7)
    assert {entry.name for entry in entries} == names
    for entry in entries:
        assert posix.found(ref(root), entry.name)[0].ino == entry.ino
        fd, _ = posix.open(ref(root), entry.name)
        assert posix.read(fd, 0, 1000)[0] == entry.name
        posix.close(fd)


def test_found_brings_the_target_of_a_link(root: Path, posix: PosixSource) -> None:
    for number, target in enumerate([b"f", b"/absolute/\xff", b"../../up", b"t" * 4095]):
        os.symlink(target, os.fsencode(root) + b"/%d" % number)
        st, found = posix.found(ref(root), b"%d" % number)
        assert (found, st.is_symlink, st.size) == (target, True, len(target))
        assert posix.readlink(ref(root), b"%d" % number) == target
    (root / "f").touch()
    assert posix.found(ref(root), b"f")[1] == b""
    with pytest.raises(OSError, match="Invalid argument"):
        posix.readlink(ref(root), b"f")


def shown(answer: Found | OSError) -> object:
    """But for the time of access of links, which reading them changes."""
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
    names = [
        *os.listdir(os.fsencode(root)),
        b"none",
        b".",
        b"..",
        b"",
        b"d/x",
        b"nul\0",
        b"x" * 256,
    ]
    for name, answer in zip(names, posix.found_each(here, names), strict=True):
        assert shown(answer) == shown(posix.found_each(here, [name])[0]), name
        try:
            alone: Found | OSError = posix.found(here, name)
        except OSError as error:
            alone = error
        assert shown(answer) == shown(alone), name
    assert posix.found_each(here, []) == []
    with pytest.raises(SourceChanged):
        posix.found_each(DirRef(b"d", 1), [b"f"])


def test_found_each_ends_when_its_time_is_over(root: Path, posix: PosixSource) -> None:
    (root / "d").mkdir()
    (root / "f").touch()
    here = ref(root)
    for names in ([b"f", b"d"], [b"d", b"f"], [b"none", b"f"]):
        assert len(posix.found_each(here, names, 0.0)) == 1


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


def test_a_listing_can_be_left_early(root: Path, posix: PosixSource) -> None:
    for number in range(10):
        (root / str(number)).touch()
    before = open_descriptors()
    batches = posix.list(ref(root), 4)
    assert len(next(batches)) == 4
    batches.close()
    assert open_descriptors() == before
    assert [len(batch) for batch in posix.list(ref(root), 4)] == [4, 4, 2]
    assert [len(batch) for batch in posix.list(ref(root), 5)] == [5, 5]
    with pytest.raises(SourceChanged):
        next(posix.list(DirRef(b"none", 1), 4))


@surroundings.program("strace")
def test_listing_20000_names_costs_no_stat_each(root: Path, tmp_path: Path) -> None:
    fd = os.open(root, os.O_RDONLY)
    for number in range(20_000):
        os.mknod(b"%d" % number, dir_fd=fd)
    os.close(fd)
    program = (
        "import os, sys\n"
        "from monarchfs.source import PosixSource\n"
        "posix = PosixSource(os.open(sys.argv[1], os.O_PATH))\n"
        "print(sum(len(batch) for batch in posix.list(posix.root, 1000)))\n"
    )
    trace = tmp_path / "trace"
    filters = "trace=stat,lstat,newfstatat,statx,getdents64"
    listing = subprocess.run(
        ["strace", "-f", "-qq", "-o", trace, "-e", filters, sys.executable, "-c", program, root],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert listing.stdout == "20000\n", listing.stderr
    shutil.rmtree(root)  # sooner than pytest would
    calls = trace.read_text().splitlines()
    assert any("getdents64" in line for line in calls)
    assert len(calls) < 5_000  # the interpreter's own start takes some hundreds


def test_read_gives_data_and_the_version_after_it(root: Path, posix: PosixSource) -> None:
    data = os.urandom(300_000)
    (root / "f").write_bytes(data)
    fd, st = posix.open(ref(root), b"f")
    assert not os.get_inheritable(fd)
    assert os.get_blocking(fd)
    assert posix.read(fd, 1000, 200_000) == (data[1000:201_000], st.version)
    assert posix.read(fd, 299_990, 1000) == (data[-10:], st.version)
    assert posix.read(fd, 300_000, 1000)[0] == b""
    with open(root / "f", "ab") as file:
        file.write(b"more")
    more, version = posix.read(fd, 299_990, 1000)
    assert more == data[-10:] + b"more"
    assert version == posix.stat(ref(root), b"f").version != st.version
    posix.close(fd)


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

    def refuse(*_arguments: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    for read in (posix.read, posix.read_once, posix.read_for_reader):
        assert read(fd, 0, 4) == (b"data", st.version)
    posix.close(fd)


def test_short_reads_are_gone_on_with(
    root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert posix.read(fd, 0, 10)[0] == b"leased"
        posix.close(fd)
    finally:
        signal.signal(signal.SIGIO, before)
        os.close(holder)
    assert broken


def test_which_listings_have_all_names_that_a_look_up_finds(
    root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix_module, "file_system_type", lambda fd: 0xEF53)
    assert posix.known_to_list_all(ref(root)) is None
    (root / "Name").write_bytes(b"")
    assert posix.lists_all(ref(root), b"")
    assert posix.lists_all(ref(root), b"Name")
    # Two files, which differ in that.
    (root / "nAME").write_bytes(b"")
    assert posix.lists_all(ref(root), b"Name")
    # One file, as a directory says that finds names in any case.
    (root / "nAME").unlink()
    os.link(root / "Name", root / "nAME")
    assert not posix.lists_all(ref(root), b"Name")
    assert posix.known_to_list_all(ref(root)) is None
    for kind, known in ((0x0BD00BD0, True), (0x6969, False), (FUSE, False)):
        monkeypatch.setattr(posix_module, "file_system_type", lambda fd, kind=kind: kind)
        assert posix.lists_all(ref(root), b"Name") is known
        assert posix.known_to_list_all(ref(root)) is known
    assert posix.known_to_list_all(DirRef(b".lustre/fid", 2)) is False
