"""mountinfo, names of mount points, and calls that may hang."""

import errno
import os
import shlex
import socket
import subprocess
import sys
import time
from contextlib import closing
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from monarchfs.fuse import mountinfo
from monarchfs.fuse.connection import CONTROL, FuseConnection, connection_of_mount, is_dead
from monarchfs.fuse.mount import mount
from monarchfs.fuse.unmount import Unmount, Unmounted, unmount_bounded, unmount_call
from monarchfs.system.bounded import Answer, bounded_call
from monarchfs.types import OperationError, UsageError
from tests.support.mounting import fuse_mounts, needs_mounts, requires_root
from tests.support.programs import execute
from tests.support.surroundings import requires_namespaces
from tests.support.timing import Stopwatch

pytestmark = pytest.mark.smoke

SAMPLE = (
    b"22 27 0:21 / /proc rw,relatime - proc proc rw\n"
    b"27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw,discard\n"
    b"42 27 0:300 / /mnt/a\\040b\\134c\\011\xff ro,nosuid - fuse.monarchfs /d\\040s,x\\012"
    b" ro,user_id=1000,group_id=1000,allow_other\n"
    b"43 42 0:301 / /mnt/a\\040b\\134c\\011\xff ro - nfs4 server:/x rw\n"
    b"44 27 0:40 / /run rw - tmpfs \n"
)


def test_mountinfo_is_taken_apart() -> None:
    mounts = mountinfo.parse_mountinfo(SAMPLE)
    assert [mount.mount_id for mount in mounts] == [22, 27, 42, 43, 44]
    ours = mounts[2]
    point, options = "/mnt/a b\\c\t\udcff", "ro,user_id=1000,group_id=1000,allow_other"
    where = (42, 27, 0, 300, "/", point, "ro,nosuid")
    assert ours == mountinfo.Mount(*where, "fuse.monarchfs", "/d s,x\n", options)
    assert ours.user_id == 1000
    assert mounts[1].user_id is None


def test_mount_points_are_resolved_and_never_asked(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "link")
    (tmp_path / "loop").symlink_to("loop")
    base = os.path.realpath(tmp_path)
    assert (
        mountinfo.resolve_mountpoint(f"{tmp_path}/absolute/../real/./x//y/") == f"{base}/real/x/y"
    )
    assert mountinfo.resolve_mountpoint(f"{tmp_path}/absolute/x") == f"{base}/real/x"
    assert mountinfo.resolve_mountpoint(f"{tmp_path}/loop").startswith(base)
    assert mountinfo.resolve_mountpoint("/") == "/"
    # A name that is in the mount table is not followed, though a symbolic link is there; nor is
    # what leads to one.
    (tmp_path / "fake").symlink_to("/")
    fake = mountinfo.Mount(1, 1, 0, 1, "/", f"{base}/fake", "ro", "fuse.monarchfs", "/s", "ro")
    mounts = [*mountinfo.read_mountinfo(), fake]
    assert mountinfo.resolve_mountpoint(f"{base}/fake", mounts) == f"{base}/fake"
    assert mountinfo.resolve_mountpoint(f"{base}/x/../fake/in", mounts) == f"{base}/fake/in"
    (tmp_path / "way").symlink_to("fake/m")
    below = [*mountinfo.read_mountinfo(), fake._replace(mountpoint=f"{base}/fake/m")]
    assert mountinfo.resolve_mountpoint(f"{base}/way", below) == f"{base}/fake/m"


def one(number: int, parent: int, point: str, fstype: str = "ext4") -> mountinfo.Mount:
    return mountinfo.Mount(number, parent, 0, number, "/", point, "", fstype, "", "")


ROOT = one(1, 0, "/")


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ([ROOT, one(2, 1, "/a/m")], 2),
        ([ROOT, one(2, 1, "/a/m"), one(3, 2, "/a/m")], 3),
        ([ROOT, one(3, 2, "/a/m"), one(2, 1, "/a/m")], 3),
        ([ROOT, one(2, 1, "/a/m"), one(3, 1, "/a")], None),
        ([ROOT, one(3, 1, "/a"), one(2, 3, "/a/m")], 2),
        ([ROOT, one(2, 1, "/a/m"), one(3, 1, "/a"), one(4, 3, "/a/m")], 4),
        ([ROOT, one(2, 1, "/a/m2"), one(3, 1, "/a/mm")], None),
        ([one(2, 9, "/a/m"), one(3, 2, "/a/m")], 3),
        ([], None),
    ],
)
def test_the_mount_on_a_path_is_the_kernels(
    mounts: list[mountinfo.Mount], expected: int | None
) -> None:
    found = mountinfo.find_mount("/a/m", mounts)
    assert (found and found.mount_id) == expected


@requires_root
def test_the_mount_of_a_path_is_not_its_longest_prefix(tmp_path: Path) -> None:
    """Two mounts of one file system, of which one lies hidden below the other's path."""
    top, deep = tmp_path / "a", tmp_path / "a" / "m"
    deep.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "x", tmp_path], check=True)
    try:
        deep.mkdir(parents=True)
        subprocess.run(["mount", "--bind", tmp_path, deep], check=True)
        assert (mountinfo.mount_of(str(deep)) or ROOT).mountpoint == str(deep)
        subprocess.run(["mount", "--bind", tmp_path, top], check=True)
        (tmp_path / "m").mkdir()
        assert (mountinfo.mount_of(str(deep)) or ROOT).mountpoint == str(top)
        subprocess.run(["umount", top], check=True)
        subprocess.run(["umount", deep], check=True)
    finally:
        subprocess.run(["umount", "-R", tmp_path], check=True)


def test_a_bounded_calls_errors_arrive() -> None:
    for call, kind, words in (
        (Mock(side_effect=UsageError("wrong")), UsageError, r"^wrong$"),
        (Mock(side_effect=OperationError("broken")), OperationError, r"^broken$"),
        (Mock(side_effect=ZeroDivisionError("x")), OperationError, "ZeroDivisionError"),
        (lambda: os._exit(9), OperationError, "killed"),
        (lambda: ("x" * 100_000, ()), OperationError, "too long"),
    ):
        with pytest.raises(kind, match=words):
            bounded_call(call, timeout=10, overdue="late")
    reading, writing = os.pipe()
    ours, theirs = socket.socketpair()
    started = Stopwatch()

    def hang() -> Answer:
        # The child keeps `reading` alone of what the parent has open.
        assert not os.path.exists(f"/proc/self/fd/{ours.fileno()}")
        os.read(reading, 1)
        return None, ()

    with ours, theirs, pytest.raises(OperationError, match=r"^late$"):
        bounded_call(hang, timeout=0.2, overdue="late", keep=[reading])
    assert started.elapsed() >= 0.2
    started.check(5)
    os.close(reading)
    os.close(writing)


@needs_mounts
def test_unmounting_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "/data, with\\odd na\nme"
    device = mount(source=source, mountpoint=str(tmp_path), uid=0, gid=0, allow_other=False)
    assert (os.get_inheritable(device), os.get_blocking(device)) == (False, False)
    mounted = mountinfo.find_mount(str(tmp_path))
    assert mounted is not None
    assert (mounted.source, mounted.fstype) == (source, "fuse.monarchfs")
    assert "default_permissions" not in mounted.super_options
    here = os.getcwd()
    refuse = Mock(side_effect=BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
    monkeypatch.setattr(os, "fork", refuse)
    assert unmount_call(str(tmp_path)) == 0
    assert os.getcwd() == here
    assert fuse_mounts(str(tmp_path)) == []
    os.close(device)


def reuse_a_number(tmp_path: Path) -> None:
    """In a mount namespace with the connections' control files."""

    def made(name: str) -> tuple[int, mountinfo.Mount]:
        (tmp_path / name).mkdir()
        at = str(tmp_path / name)
        device = mount(source=name, mountpoint=at, uid=0, gid=0, allow_other=False)
        mounted = mountinfo.find_mount(at)
        assert mounted is not None
        return device, mounted

    device, first = made("first")
    connection = FuseConnection(first.minor, first, device)
    assert connection.waiting is not None
    attempt = Unmount(connection, time.monotonic() + 5)
    assert unmount_call(first.mountpoint) == 0
    others: list[tuple[int, mountinfo.Mount]] = []
    guard = time.monotonic() + 30
    for number in count():
        others.append(made(str(number)))
        if others[-1][1].minor == first.minor:
            break
        assert time.monotonic() < guard, "the number is not given out again"
        if others[-1][1].minor > first.minor:  # somebody else on this machine has it just now
            other, mounted = others.pop()
            os.close(other)
            assert unmount_call(mounted.mountpoint) == 0
            time.sleep(0.01)
    assert not connection.is_meant()
    connection.abort()
    assert attempt.step() is Unmounted.CLEAN
    assert unmount_bounded(connection, time.monotonic() + 5) is Unmounted.NOT_MOUNTED
    with closing(connection_of_mount(first)) as late:
        late.abort()
        assert not late.lives
    for other, mounted in others:
        assert mountinfo.find_mount(mounted.mountpoint) == mounted
        assert not is_dead(other)
        os.close(other)
        assert unmount_call(mounted.mountpoint) == 0
    connection.close()
    os.close(device)


@needs_mounts
@requires_namespaces
def test_a_number_that_another_mount_has_by_now(tmp_path: Path) -> None:
    """The kernel gives it out again at once. The next mount must not suffer for the last."""
    code = f"from tests.mount import test_mount as t; t.reuse_a_number(t.Path({str(tmp_path)!r}))"
    python = shlex.join([sys.executable, "-c", code])
    script = f"mount -t fusectl none {CONTROL} && exec {python}"
    done = execute(["unshare", "--mount", "sh", "-c", script])
    assert done.returncode == 0, done.stderr
