"""Whose a directory in a tier is: no two mounts share one, nobody else can be first, and what an
earlier mount copied is found again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from monarchfs.config.places import dataset_id
from tests.mount.test_cache_command import FILES, mounted, work
from tests.support.fake_mounts import NOBODY, interpreter_for
from tests.support.mounting import Bench, Mount, as_user, asked, requires_mounts, run, wait_for

__all__ = ["work"]

pytestmark = [*requires_mounts, pytest.mark.timeout(120)]


def copied(mount: Mount) -> int:
    """How many files this mount has read from the source."""
    return int(mount.status()["prefetch"]["completed"])


def directories(tier: Path) -> list[Path]:
    return sorted(path for path in tier.iterdir() if path.is_dir())


def ended(mount: Mount) -> None:
    done = mount.umount()
    assert done.returncode == 0, done.stderr


def test_two_state_directories_share_no_copies(work: Bench) -> None:
    """Not even where the other one's cannot be seen, as from another container."""
    one = mounted(work, "one")
    (work.path / "one").rename(work.path / "hidden")
    other = mounted(work, "two")
    assert copied(other) == FILES
    assert run("evict", str(other.path)).returncode == 0
    wait_for(lambda: other.status()["tiers"][0]["files"] == 0, "the copies to be removed")
    assert one.status()["tiers"][0]["files"] == FILES
    (work.path / "hidden").rename(work.path / "one")
    for mount in (one, other):
        ended(mount)
    for state, files in (("one", FILES), ("two", 0)):
        report = asked("fsck", f"{work.path}/{state}")
        assert (report["findings"], report["tiers"][0]["files"]) == ({}, files)


def test_nobody_else_can_be_first(work: Bench) -> None:
    """In a directory that everybody may write to, another user has made what could be guessed."""
    interpreter_for("bin")
    tier = work.path / "tier"
    tier.chmod(0o1777)
    source = str(work.path / "src")
    for uid, options in ((0, ()), (2, ("--user", "bin"))):
        name = dataset_id(source, uid)
        squatted = [tier / name, tier / f"{name}-{'0' * 16}"]
        for path in squatted:
            subprocess.run(as_user(NOBODY, ["mkdir", "-m", "777", str(path)]), check=True)
        mount = mounted(work, f"state{uid}", *options)
        own = [path for path in directories(tier) if path.stat().st_uid == uid]
        assert [path.stat().st_mode & 0o777 for path in own] == [0o700]
        assert all(not list(path.iterdir()) for path in squatted)
        ended(mount)
        # The next mount finds its own.
        mount = mounted(work, f"state{uid}", *options)
        assert copied(mount) == 0
        ended(mount)


def test_copies_are_found_again(work: Bench) -> None:
    """After the loss of the index, of the state directory, and by another one once that is gone."""
    ended(mounted(work))
    (before,) = directories(work.path / "tier")
    shutil.rmtree(work.path / "state" / "index")
    mount = mounted(work)
    assert (copied(mount), directories(work.path / "tier")) == (0, [before])
    ended(mount)
    shutil.rmtree(work.path / "state")
    mount = mounted(work)
    assert copied(mount) == 0
    ended(mount)
    (work.path / "state").rename(work.path / "kept")
    mount = mounted(work, "another")
    assert copied(mount) == 0
    assert "took over" in work.log()
    ended(mount)
    # The first one is back: what was its own is the other's by now.
    (work.path / "kept").rename(work.path / "state")
    mount = mounted(work)
    assert copied(mount) == FILES
    ended(mount)
    assert len(directories(work.path / "tier")) == 2
    assert asked("fsck", f"{work.path}/another")["findings"] == {}


def test_a_directory_that_is_not_ours_any_more(work: Bench) -> None:
    tier = work.path / "tier"
    ended(mounted(work))
    for spoilt in ("link", "file", "foreign", "open", "fifo"):
        (made,) = {path.parent for path in tier.glob("*/owner") if path.is_file()}
        beside = work.path / f"beside {spoilt}"
        made.rename(beside)
        match spoilt:
            case "link":
                made.symlink_to(beside)
            case "file":
                made.write_text("")
            case "foreign":
                made.mkdir()
                shutil.chown(made, NOBODY)
            case "open":
                made.mkdir()
                made.chmod(0o777)
            case _:
                made.mkdir(0o700)
                os.mkfifo(made / "owner")
        before = sorted(os.listdir(beside))
        mount = mounted(work)
        assert copied(mount) == FILES, spoilt
        assert sorted(os.listdir(beside)) == before
        ended(mount)
        if made.is_symlink():
            made.unlink()
    mount = mounted(work)
    assert copied(mount) == 0
    ended(mount)


def test_copies_in_a_tier_that_is_not_named_are_told(work: Bench) -> None:
    """Who mounts is told once, the status counts them, and they are used once it is named again."""
    ended(mounted(work))
    (before,) = directories(work.path / "tier")
    point = work.path / "point"
    point.mkdir()
    words = (str(point), "--state-dir", f"{work.path}/state", "--tier", f"{work.path}/other=100M")
    done = run("mount", f"{work.path}/src", *words, "--prefetch", "none")
    assert done.returncode == 0, done.stderr
    mount = Mount(work.path / "src", point)
    work.mounts.append(mount)
    lines = [line for line in done.stderr.splitlines() if "no --tier names" in line]
    assert len(lines) == 1
    assert f"stay in {before} (" in lines[0]
    assert f"--tier {work.path}/tier again" in lines[0]
    status = mount.status()
    (other,) = status["other_tiers"]
    assert (other["path"], other["files"]) == (f"{work.path}/tier", FILES)
    assert other["used_bytes"] > 0
    assert status["files"]["resident"] == 0
    ended(mount)
    mount = mounted(work)
    assert (copied(mount), mount.status()["other_tiers"]) == (0, [])
    ended(mount)
