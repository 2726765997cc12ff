"""Permissions, extended attributes and file systems mounted below the root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.source import PosixSource
from monarchfs.types import DirRef, FileType
from tests.source.tools import everything, ref
from tests.support import surroundings
from tests.support.open_directories import close_directories

needs_root = surroundings.requires_root


@pytest.fixture
def as_nobody(posix: PosixSource) -> Iterator[None]:
    """Be an ordinary user, whom the directories above the root would not let in."""
    os.setresgid(65534, 65534, 0)
    os.setresuid(65534, 65534, 0)
    yield
    os.seteuid(0)
    os.setresuid(0, 0, 0)
    os.setresgid(0, 0, 0)


def prepare(root: Path) -> None:
    (root / "mine").write_text("x")
    (root / "secret").write_text("x")
    os.chmod(root / "secret", 0o600)
    (root / "link").symlink_to("secret")
    os.setxattr(root / "secret", "user.colour", b"red\0\xff")
    for name, mode in (("names only", 0o744), ("search only", 0o711), ("closed", 0o700)):
        (root / name).mkdir()
        (root / name / "f").write_text("x")
        os.mkfifo(root / name / "fifo")
        os.chmod(root / name, mode)


@pytest.fixture
def prepared(root: Path) -> dict[str, DirRef]:
    prepare(root)
    return {name: ref(root, name.encode()) for name in ("", *os.listdir(root))}


@needs_root
def test_permissions_are_those_of_the_process(
    prepared: dict[str, DirRef], posix: PosixSource, as_nobody: None
) -> None:
    here = prepared[""]
    posix.close(posix.open(here, b"mine")[0])
    with pytest.raises(PermissionError):
        posix.open(here, b"secret")
    assert posix.access(here, b"mine", os.R_OK)
    assert not posix.access(here, b"secret", os.R_OK)
    assert posix.access(here, b"link", os.R_OK)
    assert posix.access(here, b"", os.X_OK)
    assert not posix.access(here, b"", os.W_OK)
    with pytest.raises(FileNotFoundError):
        posix.access(here, b"none", os.R_OK)

    names = {entry.name: entry.type for entry in everything(posix, prepared["names only"])}
    assert names == {b"f": FileType.REGULAR, b"fifo": FileType.UNKNOWN}
    with pytest.raises(PermissionError):
        posix.stat(prepared["names only"], b"f")
    with pytest.raises(PermissionError):
        everything(posix, prepared["search only"])
    assert posix.stat(prepared["search only"], b"f").size == 1
    with pytest.raises(PermissionError):
        posix.stat(prepared["closed"], b"f")
    assert posix.stat(prepared["closed"], b"").is_directory


@needs_root
def test_xattrs_of_a_file_that_may_not_be_read(
    prepared: dict[str, DirRef], posix: PosixSource, as_nobody: None
) -> None:
    # user.* needs read permission, but the answer must be the source's, not open(2)'s.
    with pytest.raises(PermissionError):
        posix.getxattr(prepared[""], b"secret", b"user.colour")
    assert posix.listxattr(prepared[""], b"secret") == [b"user.colour"]


def test_xattrs_of_files_directories_and_links(root: Path, posix: PosixSource) -> None:
    (root / "d").mkdir()
    (root / "f").touch()
    os.setxattr(root / "f", b"user.\xc3\xff", b"value\0\xfe")
    os.setxattr(root / "d", "user.d", b"dir")
    (root / "l").symlink_to("f")
    assert posix.listxattr(ref(root), b"f") == [b"user.\xc3\xff"]
    assert posix.getxattr(ref(root), b"f", b"user.\xc3\xff") == b"value\0\xfe"
    assert posix.getxattr(ref(root), b"d", b"user.d") == b"dir"
    assert posix.getxattr(ref(root, b"d"), b"", b"user.d") == b"dir"
    assert posix.listxattr(ref(root, b"d"), b"") == [b"user.d"]
    assert posix.listxattr(ref(root), b"l") == []
    with pytest.raises(OSError, match="No data available"):
        posix.getxattr(ref(root), b"f", b"user.none")


@needs_root
def test_a_file_system_mounted_below_the_root_has_a_device(root: Path, posix: PosixSource) -> None:
    (root / "m").mkdir()
    covered = ref(root, b"m")
    with surroundings.mounted_tmpfs(root / "m"):
        (root / "m" / "f").touch()
        st = posix.stat(ref(root), b"m")
        assert st.device == os.stat(root / "m").st_dev
        assert st.ino != covered.ino
        (entry,) = everything(posix, ref(root, b"m"))
        assert entry.device == posix.stat(ref(root, b"m"), b"f").device == st.device
        fd, opened = posix.open(ref(root, b"m"), b"f")
        assert posix.read(fd, 0, 1)[1] == opened.version
        posix.close(fd)
        assert posix.statvfs().f_files == os.statvfs(root).f_files
        close_directories(posix)
