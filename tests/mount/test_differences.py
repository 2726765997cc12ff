"""What a mount shows otherwise than its source, on purpose: as docs/SEMANTICS.md says."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.mounting import Bench, as_user, requires_mounts, wait_for

pytestmark = requires_mounts

IN_OPEN, IN_ACCESS, IN_CLOSE_NOWRITE, IN_ALL_EVENTS, IN_ISDIR = 0x20, 0x1, 0x10, 0xFFF, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def watched(path: Path) -> Iterator[int]:
    """An inotify(7) descriptor that is told of all that happens there."""
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert fd >= 0
    try:
        assert libc.inotify_add_watch(fd, bytes(path), IN_ALL_EVENTS) >= 0
        yield fd
    finally:
        os.close(fd)


def events(fd: int) -> set[int]:
    """What happened since, without IN_ISDIR."""
    found: set[int] = set()
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return found
    while data:
        _watch, mask, _cookie, length = struct.unpack_from("iIII", data)
        found.add(mask & ~IN_ISDIR)
        data = data[16 + length :]
    return found


def test_trusted_attributes_are_not_shown(work: Bench) -> None:
    source = work.path / "source"
    source.mkdir()
    (source / "f").write_bytes(b"f")
    for name in ("trusted.a", "user.a"):
        os.setxattr(source / "f", name, b"value")
    mount = work.mount(source)
    assert set(os.listxattr(source / "f")) >= {"trusted.a", "user.a"}
    assert os.listxattr(mount.path / "f") == ["user.a"]
    assert os.getxattr(mount.path / "f", "user.a") == b"value"
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(mount.path / "f", "trusted.a")


@pytest.mark.parametrize(
    ("options", "runs_unread"),
    [(("--user", "nobody"), False), (("-o", "allow_other"), True)],
    ids=["a user's mount", "a mount for all"],
)
def test_what_may_be_run_but_not_read(
    work: Bench, options: tuple[str, str], runs_unread: bool
) -> None:
    source = work.path / "source"
    source.mkdir()
    program = source / "program"
    program.write_bytes(Path("/bin/true").read_bytes())

    def runs(path: Path) -> bool:
        done = subprocess.run(
            as_user("nobody", ["sh", "-c", '"$0"', str(path)]), capture_output=True, check=False
        )
        assert done.returncode in (0, 126), done.stderr
        return done.returncode == 0

    if not runs_unread:  # its state directory is made by the user
        work.path.chmod(0o777)
    mount = work.mount(source, *options, "--freshness", "open")
    for mode, as_ever in ((0o755, True), (0o711, runs_unread)):
        program.chmod(mode)
        assert runs(program)
        assert runs(mount.path / "program") == as_ever


def test_inotify_tells_of_the_mounts_own_users_alone(work: Bench) -> None:
    source = work.path / "source"
    source.mkdir()
    (source / "f").write_bytes(b"old")
    mount = work.mount(source, "--freshness", "open")
    with watched(source) as of_source, watched(mount.path) as of_mount:
        assert (mount.path / "f").read_bytes() == b"old"
        assert events(of_mount) == {IN_OPEN, IN_ACCESS, IN_CLOSE_NOWRITE}
        events(of_source)
        (source / "f").write_bytes(b"another")
        (source / "new").write_bytes(b"new")
        (source / "new").rename(source / "newer")
        assert events(of_source)
        wait_for(lambda: (mount.path / "f").read_bytes() == b"another", "the change to show")
        assert (mount.path / "newer").read_bytes() == b"new"
        assert events(of_mount) <= {IN_OPEN, IN_ACCESS, IN_CLOSE_NOWRITE}


@pytest.mark.parametrize("prefetch", ["none", "all"])
@pytest.mark.parametrize("data_path", ["auto", "relay"])
def test_holes_are_data(work: Bench, prefetch: str, data_path: str) -> None:
    """A sparse file that is read from the source, or from a replica that has holes itself."""
    source = work.path / "source"
    source.mkdir()
    size, at = 4 << 20, 3 << 20
    with (source / "sparse").open("wb") as file:
        file.truncate(size)
        file.seek(at)
        file.write(b"data")
    mount = work.mount(source, "--prefetch", prefetch, "-o", f"data_path={data_path}")
    if prefetch == "all":
        wait_for(lambda: mount.status()["files"]["resident"] == 1, "the copy")
    path = mount.path / "sparse"
    with path.open("rb") as file:
        for where in (0, 5, at, size - 1):
            assert os.lseek(file.fileno(), where, os.SEEK_DATA) == where
            assert os.lseek(file.fileno(), where, os.SEEK_HOLE) == size
        with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
            os.lseek(file.fileno(), size, os.SEEK_DATA)
    assert path.stat().st_blocks == (source / "sparse").stat().st_blocks < size // 512
    # cp(1) sees by the blocks that there are holes, and looks for zeros.
    subprocess.run(["cp", path, work.path / "copy"], check=True)
    assert (work.path / "copy").read_bytes() == (source / "sparse").read_bytes()
    assert (work.path / "copy").stat().st_blocks * 512 < size // 2
