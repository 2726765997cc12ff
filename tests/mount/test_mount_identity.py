"""A mount is known by its connection, wherever it is, and not by the path where it was made."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.fuse.mountinfo import Mount, find_mount, mount_of
from tests.support.fake_mounts import (
    NOBODY,
    Area,
    area,
    assert_unmounted,
    device_mode,
    is_gone,
    registered,
    status,
    umount,
)
from tests.support.mounting import fuse_mounts, requires_mounts, wait_for

pytestmark = requires_mounts


@pytest.fixture(params=[None, NOBODY], ids=["root", "user"])
def moved(place: Path, request: pytest.FixtureRequest) -> Iterator[Area]:
    """A mount in a directory that was renamed afterwards."""
    with device_mode(0o666), area(place, request.param) as work:
        for directory in ("before", "before/mnt"):
            (work.path / directory).mkdir()
            os.chown(work.path / directory, work.path.stat().st_uid, -1)
        done = work.run("mount", "src", "before/mnt", *work.storage)
        assert (done.returncode, done.stderr) == (0, "")
        (work.path / "before").rename(work.path / "after")
        yield work


def bind(work: Area, name: str = "copy") -> None:
    (work.path / name).mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", work.path / "mnt", work.path / name], check=True)


@pytest.mark.parametrize("how", ["umount", "signal"])
def test_a_mount_that_was_renamed_is_found_and_unmounted(moved: Area, how: str) -> None:
    supervisor = registered(moved).entry.supervisor_pid
    if how == "umount":
        assert status(moved, "after/mnt")["state"] == "serving"
        assert f"{moved.path}/before" not in moved.run("status").stdout
        assert umount(moved, name="after/mnt") < 3
        assert "by force" not in (moved.path / "state" / "supervisor.log").read_text()
    else:
        os.kill(supervisor, signal.SIGTERM)
    wait_for(lambda: is_gone(supervisor), "the supervisor to end", 10)
    assert_unmounted(moved)


def test_unmounting_a_bind_mount_leaves_the_mount_which_takes_its_own_along(
    root_work: Area,
) -> None:
    work = root_work
    work.mount()
    bind(work)
    assert status(work, "copy")["state"] == "serving"
    umount(work, name="copy")
    assert fuse_mounts(str(work.path)) == [f"{work.path}/mnt"]
    assert status(work)["state"] == "serving"
    assert os.stat(work.path / "mnt")
    bind(work)
    umount(work)  # with what was bound
    assert_unmounted(work)


def test_a_bind_mount_stands_for_a_mount_that_is_gone(root_work: Area) -> None:
    work = root_work
    work.mount()
    bind(work)
    supervisor = registered(work).entry.supervisor_pid
    subprocess.run(["umount", work.path / "mnt"], check=True)
    assert status(work, "copy")["worker"]["pid"] > 0
    umount(work, name="copy")
    assert is_gone(supervisor)
    assert_unmounted(work)


def test_what_lies_over_a_mount_is_said_and_left_alone(root_work: Area) -> None:
    work = root_work
    work.mount()
    subprocess.run(["mount", "-t", "tmpfs", "over", work.path / "mnt"], check=True)
    done = work.run("umount", "mnt")
    assert done.returncode == 1
    assert "is hidden by another mount" in done.stderr
    subprocess.run(["umount", work.path / "mnt"], check=True)
    assert status(work)["state"] == "serving"
    assert os.stat(work.path / "mnt")


def test_two_mounts_on_one_place_are_both_known(root_work: Area) -> None:
    """The second was made while something else lay over the first."""
    work = root_work
    work.mount()
    first = registered(work).entry
    subprocess.run(["mount", "-t", "tmpfs", "over", work.path / "mnt"], check=True)
    (work.path / "src2").mkdir()
    storage = ["--tier", f"{work.path}/tier2=10M", "--state-dir", f"{work.path}/state2"]
    done = work.run("mount", "src2", "mnt", *storage)
    assert (done.returncode, done.stderr) == (0, "")
    assert status(work)["source"] == f"{work.path}/src2"
    lines = [line for line in work.run("status").stdout.splitlines() if f"{work.path}/" in line]
    assert len(lines) == 2
    umount(work)
    assert not is_gone(first.supervisor_pid)
    subprocess.run(["umount", work.path / "mnt"], check=True)
    assert status(work)["source"] == f"{work.path}/src"
    umount(work)
    assert_unmounted(work)


def one(number: int, parent: int, point: str, fstype: str = "ext4") -> Mount:
    return Mount(number, parent, 0, number, "/", point, "", fstype, "", "")


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
def test_the_mount_on_a_path_is_the_one_that_the_kernel_would_meet(
    mounts: list[Mount], expected: int | None
) -> None:
    found = find_mount("/a/m", mounts)
    assert (found and found.mount_id) == expected


def test_the_mount_of_a_path_is_not_its_longest_prefix(tmp_path: Path) -> None:
    """Two mounts of one file system, of which one lies hidden below the other's path."""
    top, deep = tmp_path / "a", tmp_path / "a" / "m"
    deep.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "x", tmp_path], check=True)
    try:
        deep.mkdir(parents=True)
        subprocess.run(["mount", "--bind", tmp_path, deep], check=True)
        assert (mount_of(str(deep)) or ROOT).mountpoint == str(deep)
        subprocess.run(["mount", "--bind", tmp_path, top], check=True)
        (tmp_path / "m").mkdir()
        assert (mount_of(str(deep)) or ROOT).mountpoint == str(top)
        subprocess.run(["umount", top], check=True)
        subprocess.run(["umount", deep], check=True)
    finally:
        subprocess.run(["umount", "-R", tmp_path], check=True)
