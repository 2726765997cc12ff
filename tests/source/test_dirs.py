"""The way to a directory: nothing escapes, nothing leaks, deep trees are cheap."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from monarchfs.source import PosixSource
from monarchfs.types import DirRef, SourceChanged
from tests.source.tools import everything, open_descriptors, ref
from tests.support.open_directories import close_directories
from tests.support.surroundings import mounted_tmpfs, requires_root


def test_a_symlink_in_place_of_a_component_is_not_followed(
    root: Path, tmp_path: Path, posix: PosixSource
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("secret")
    (root / "a").symlink_to(tmp_path / "outside")
    for path in (b"a", b"a/b"):
        with pytest.raises(SourceChanged):
            posix.stat(DirRef(path, os.stat(tmp_path / "outside").st_ino), b"file")
    with pytest.raises(OSError, match="symbolic links") as error:
        posix.open(ref(root), b"a")
    assert error.value.errno == errno.ELOOP


def test_a_component_swapped_for_a_symlink_again_and_again_never_leads_outside(
    root: Path, tmp_path: Path, posix: PosixSource
) -> None:
    outside = tmp_path / "outside"
    (outside / "b").mkdir(parents=True)
    (outside / "b" / "file").write_bytes(b"secret")
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_bytes(b"public")
    (root / "link").symlink_to(outside)
    directory = ref(root, b"a/b")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            (root / "a").rename(root / "real")
            (root / "link").rename(root / "a")
            (root / "a").rename(root / "link")
            (root / "real").rename(root / "a")

    swapper = threading.Thread(target=swap)
    swapper.start()
    read, refused = 0, 0
    try:
        while (read < 200 or refused < 50) and read + refused < 50_000:
            close_directories(posix)
            try:
                fd, _ = posix.open(directory, b"file")
            except SourceChanged:
                refused += 1
                continue
            try:
                assert posix.read(fd, 0, 100)[0] == b"public"
            finally:
                os.close(fd)
            read += 1
    finally:
        stop.set()
        swapper.join()
    assert read
    assert refused


def test_a_cached_directory_goes_on_meaning_the_old_one_until_forgotten(
    root: Path, posix: PosixSource
) -> None:
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


def test_a_directory_that_was_found_can_be_used_when_it_is_replaced_at_once(
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
def test_a_directory_that_is_gone_is_a_changed_source(
    root: Path, posix: PosixSource, replacement: str
) -> None:
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


@pytest.mark.parametrize("path", [b"..", b"d/..", b"d/../d", b"/etc", b"d//e", b".", b"d/"])
def test_paths_with_dots_or_empty_components_are_refused(
    root: Path, posix: PosixSource, path: bytes
) -> None:
    (root / "d" / "e").mkdir(parents=True)
    with pytest.raises(OSError, match="Not a name") as error:
        posix.stat(DirRef(path, 2), b"")
    assert error.value.errno == errno.EINVAL


@pytest.mark.parametrize("name", [b".", b"..", b"../x", b"a/b", b"nul\0"])
def test_names_that_are_not_entries_are_refused(
    root: Path, posix: PosixSource, name: bytes
) -> None:
    here = ref(root)
    calls: list[Callable[[], object]] = [
        lambda: posix.stat(here, name),
        lambda: posix.readlink(here, name),
        lambda: posix.found(here, name),
        lambda: posix.open(here, name),
        lambda: posix.getxattr(here, name, b"user.x"),
        lambda: posix.listxattr(here, name),
        lambda: posix.access(here, name, os.R_OK),
    ]
    for call in calls:
        with pytest.raises(OSError, match="Not a name"):
            call()


def test_paths_longer_than_path_max(root: Path, posix: PosixSource) -> None:
    path = b""
    fd = os.open(root, os.O_RDONLY)
    for level in range(40):
        name = b"%03d" % level + b"x" * 252
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
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


def test_the_walk_starts_at_the_nearest_known_ancestor(
    root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = "/".join("d" * 1 for _ in range(100))
    (root / deep / "a").mkdir(parents=True)
    (root / deep / "b").mkdir()
    refs = [ref(root, os.fsencode(f"{deep}/{name}")) for name in "ab"]
    opened = []
    real_open = os.open

    def counting_open(path: bytes, flags: int, *, dir_fd: int) -> int:
        opened.append(path)
        return real_open(path, flags, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", counting_open)
    posix.stat(refs[0], b"")
    assert len(opened) == 101
    posix.stat(refs[1], b"")
    assert opened[101:] == [b"b"]
    posix.stat(refs[0], b"")
    assert len(opened) == 102


def test_evicted_directories_in_use_are_closed_at_the_last_release(
    root: Path, root_fd: int
) -> None:
    for name in "abcdef":
        (root / name).mkdir()
    posix = PosixSource(root_fd, max_directories=2)
    handles = posix._dirs
    before = open_descriptors()
    first = handles.acquire(ref(root, b"a"))
    again = handles.acquire(ref(root, b"a"))
    assert first is again
    for other in (b"b", b"c", b"d", b"e"):
        handles.release(handles.acquire(ref(root, other)))
    assert open_descriptors() == before + 3
    handles.release(first)
    assert os.fstat(again.fd).st_ino == first.ref.ino
    handles.release(again)
    assert open_descriptors() == before + 2
    close_directories(posix)
    assert open_descriptors() == before


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


def test_a_stale_directory_is_opened_again(
    root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "d").mkdir()
    (root / "d" / "f").touch()
    directory = ref(root, b"d")
    posix.stat(directory, b"f")
    before = open_descriptors()

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        with pytest.raises(OSError, match="Stale"):
            posix.stat(directory, b"f")
    assert open_descriptors() == before - 1
    assert posix.stat(directory, b"f").is_regular


@requires_root
def test_another_file_system_with_the_same_number_is_another_directory(
    root: Path, posix: PosixSource
) -> None:
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
