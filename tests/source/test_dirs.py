"""The way to a directory: nothing escapes, nothing leaks, deep trees are cheap."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from monarchfs.source.posix import PosixSource
from monarchfs.types import DirectoryChanged, DirRef, SourceChanged
from tests.source.tools import everything, open_descriptors, ref
from tests.support.faults import close_directories
from tests.support.flipping import Bait, at_each_call
from tests.support.surroundings import mounted_tmpfs, requires_root


def test_a_late_link_never_leads_outside(root: Path, tmp_path: Path, posix: PosixSource) -> None:
    bait = Bait(root, tmp_path / "outside", os.geteuid())
    for top, data in ((tmp_path / "outside", b"secret"), (bait.way, b"public")):
        (top / "b").mkdir(parents=True)
        (top / "b" / "file").write_bytes(data)
    directory = ref(root, b"way/b")
    read: list[bytes | None] = []

    def look() -> None:
        close_directories(posix)
        try:
            fd, _ = posix.open(directory, b"file")
        except SourceChanged:
            read.append(None)
        else:
            read.append(posix.read(fd, 0, 100)[0])
            posix.close(fd)

    assert at_each_call(bait, look, lambda: None) > 2
    assert set(read) == {b"public", None}


def test_a_cached_directory_is_the_old_one_until_forgotten(root: Path, posix: PosixSource) -> None:
    (root / "d" / "e").mkdir(parents=True)
    (root / "d" / "e" / "old").touch()
    old = ref(root, b"d/e")
    assert posix.stat(old, b"old").is_regular
    (root / "d").rename(root / "moved")
    (root / "d" / "e").mkdir(parents=True)
    (root / "d" / "e" / "new").touch()
    new = ref(root, b"d/e")

    assert posix.stat(old, b"old").is_regular
    # A reference to the new directory finds it, though the cached parent is the old one's.
    assert posix.stat(new, b"new").is_regular
    with pytest.raises(FileNotFoundError):
        posix.stat(new, b"old")
    # Both stay open, as they may take turns at this path.
    assert posix.stat(old, b"old").is_regular
    close_directories(posix, b"d")
    assert posix.stat(new, b"new").is_regular
    with pytest.raises(SourceChanged):
        posix.stat(old, b"old")


def test_a_found_directory_can_be_used_when_replaced_at_once(
    root: Path, posix: PosixSource
) -> None:
    (root / "d").mkdir()
    (root / "d" / "f").write_bytes(b"of the first one")
    found, _ = posix.found(posix.root, b"d")
    (root / "d").rename(root / "moved")
    (root / "d").mkdir()
    fd, stat = posix.open(DirRef(b"d", found.ino), b"f")
    assert stat.size == 16
    posix.close(fd)


@pytest.mark.parametrize("replacement", ["nothing", "file", "directory"])
def test_one_that_is_gone_is_a_change(root: Path, posix: PosixSource, replacement: str) -> None:
    (root / "d").mkdir()
    gone = ref(root, b"d")
    (root / "keeps the inode number").mkdir()
    (root / "d").rename(root / "moved")
    if replacement == "file":
        (root / "d").touch()
    elif replacement == "directory":
        (root / "d").mkdir()
    with pytest.raises(SourceChanged, match=r"'d' is not the directory with inode \d+"):
        posix.stat(gone, b"x")
    with pytest.raises(SourceChanged):
        posix.stat(DirRef(b"", 1 << 60), b"x")


def test_what_leads_elsewhere_is_refused(root: Path, posix: PosixSource) -> None:
    (root / "d" / "e").mkdir(parents=True)
    here = ref(root)
    for path in (b"..", b"d/..", b"d/../d", b"/etc", b"d//e", b".", b"d/"):
        with pytest.raises(OSError, match="Not a name") as error:
            posix.stat(DirRef(path, 2), b"")
        assert error.value.errno == errno.EINVAL
    for call in (
        posix.stat,
        posix.readlink,
        posix.found,
        posix.open,
        lambda directory, name: posix.getxattr(directory, name, b"user.x"),
        posix.listxattr,
        lambda directory, name: posix.access(directory, name, os.R_OK),
    ):
        for name in (b".", b"..", b"../x", b"a/b", b"nul\0"):
            with pytest.raises(OSError, match="Not a name"):
                call(here, name)


def test_paths_longer_than_path_max(root: Path, posix: PosixSource) -> None:
    path = b""
    fd = os.open(root, os.O_RDONLY)
    for level in range(40):
        name = b"%03d" % level + b"x" * 252
        os.mkdir(name, dir_fd=fd)
        above, fd = fd, os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(above)
        path += b"/" + name if path else name
    os.close(os.open(b"f" * 255, os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    deep = DirRef(path, os.fstat(fd).st_ino)
    os.close(fd)
    assert len(path) > 2 * 4096
    close_directories(posix)
    assert posix.stat(deep, b"f" * 255).size == 0
    assert [entry.name for entry in everything(posix, deep)] == [b"f" * 255]
    posix.close(posix.open(deep, b"f" * 255)[0])
    assert posix.listxattr(deep, b"f" * 255) == []
    with pytest.raises(OSError, match="too long") as error:
        posix.stat(deep, b"f" * 256)
    assert error.value.errno == errno.ENAMETOOLONG


def test_where_walks_start(root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "/".join("d" for _ in range(100))
    for name in "ab":
        (root / deep / name).mkdir(parents=True)
    first, second = (ref(root, os.fsencode(f"{deep}/{name}")) for name in "ab")
    opened = Mock(side_effect=os.open)
    monkeypatch.setattr(os, "open", opened)
    for directory, opens in ((first, 101), (second, 102), (first, 102)):
        posix.stat(directory, b"")
        assert opened.call_count == opens


def test_many_threads_share_few_directory_handles(root: Path, root_fd: int) -> None:
    names = [b"%d" % number for number in range(20)]
    for name in names:
        (root / os.fsdecode(name) / "x").mkdir(parents=True)
    posix = PosixSource(root_fd, max_directories=4)
    before = open_descriptors()
    refs = [ref(root, name + b"/x") for name in names]

    def look(start: int) -> None:
        for number in range(500):
            wanted = refs[(start + number * 7) % len(refs)]
            assert posix.stat(wanted, b"").ino == wanted.ino
            if number % 50 == 0:
                close_directories(posix, wanted.path[:1])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(look, range(8)))
    assert open_descriptors() == before + 4
    close_directories(posix)


def test_a_stale_one_is_reopened(
    root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "d").mkdir()
    (root / "d" / "f").touch()
    directory = ref(root, b"d")
    posix.stat(directory, b"f")
    before = open_descriptors()
    stale = Mock(side_effect=OSError(errno.ESTALE, os.strerror(errno.ESTALE)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        with pytest.raises(DirectoryChanged):
            posix.stat(directory, b"f")
    assert open_descriptors() == before - 1
    assert posix.stat(directory, b"f").is_regular


def test_a_removed_directory_is_not_one_without_names(root: Path, posix: PosixSource) -> None:
    for call in (
        posix.open,
        posix.listxattr,
        lambda ref, name: posix.found_each(ref, [name]),
        lambda ref, _name: everything(posix, ref),
    ):
        (root / "d").mkdir()
        directory = ref(root, b"d")
        posix.stat(directory, b"")
        (root / "d").rmdir()
        with pytest.raises(DirectoryChanged):
            call(directory, b"f")


@requires_root
def test_the_same_number_elsewhere_is_another_directory(root: Path, posix: PosixSource) -> None:
    """The roots of two tmpfs have the same st_ino, as those of subvolumes of btrfs."""
    point = root / "a"
    point.mkdir()
    with ExitStack() as stack:
        found = []
        for data in (b"first", b"second one"):
            stack.enter_context(mounted_tmpfs(point))
            (point / "file").write_bytes(data)
            stat, _ = posix.found(ref(root), b"a")
            found.append(DirRef(b"a", stat.ino, stat.device))
            assert posix.stat(found[-1], b"file").size == len(data)
        first, second = found
        assert first != second
        assert posix.stat(first, b"file").size == 5
        close_directories(posix)
        with pytest.raises(SourceChanged):
            posix.stat(first, b"file")
