"""Mounts of ordinary users; who sees what in them is in tests/hostile/test_access.py."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from pathlib import Path

import pytest

from monarchfs.fuse.mountinfo import find_mount
from tests.support import trees
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import Bench, as_user, free_port, requires_mounts, run
from tests.support.scraping import scrape

pytestmark = requires_mounts

NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def area(work: Bench) -> Bench:
    """A place where nobody may make directories."""
    interpreter_for("nobody")
    (work.path / "source").mkdir()
    work.path.chmod(0o1777)
    return work


@pytest.mark.usefixtures("open_device")
def test_an_ordinary_user_mounts_reads_and_unmounts(area: Bench) -> None:
    contents = trees.dataset(area.path / "source", files=3)
    port = free_port()
    mount = area.mount(area.path / "source", "--metrics-port", str(port), user="nobody")
    for path, data in contents.items():
        cat = as_user("nobody", ["cat", str(mount.path / path)])
        assert subprocess.run(cat, capture_output=True, check=True).stdout == data
    now = scrape(port)
    assert now.value("monarchfs_opens_total", served="source") > 0
    assert now.value("process_open_fds") > 5
    assert mount.wait_idle()["files"]["resident"] == len(contents)
    assert mount.umount().returncode == 0
    assert not os.path.ismount(mount.path)
    owners = {p.stat().st_uid for p in (area.path / "tier").rglob("*")}
    assert owners == {NOBODY.pw_uid}


def test_root_mounts_for_a_user_who_asks_and_unmounts(area: Bench) -> None:
    """By the socket, without root."""
    mount = area.mount(area.path / "source", "--user", "nobody")
    (dataset,) = (area.path / "tier").iterdir()
    assert (dataset.stat().st_uid, (area.path / "tier").stat().st_uid) == (NOBODY.pw_uid, 0)
    mounted = find_mount(str(mount.path))
    assert mounted is not None
    assert mounted.user_id == NOBODY.pw_uid
    done = run("status", str(mount.path), "--json", user="nobody")
    assert done.returncode == 0, done.stderr
    assert run("umount", str(mount.path), user="nobody").returncode == 0
    assert not os.path.ismount(mount.path)


def test_a_worker_of_root_keeps_only_what_reading_needs(area: Bench) -> None:
    source = area.path / "source"
    (source / "of nobody").write_bytes(b"private")
    (source / "of nobody").chmod(0o600)
    os.chown(source / "of nobody", NOBODY.pw_uid, NOBODY.pw_gid)
    mount = area.mount(source)
    assert (mount.path / "of nobody").read_bytes() == b"private"
    worker = Path(f"/proc/{mount.worker_pid()}/status").read_text()
    assert int(re.findall(r"CapEff:\s+(\w+)", worker)[0], 16) == 1 << 2
