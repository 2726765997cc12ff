"""Mounts of ordinary users, and who may enter them."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import pytest

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


def read_as(user: str, path: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(as_user(user, ["cat", str(path)]), capture_output=True, check=False)


@pytest.mark.usefixtures("open_device")
def test_an_ordinary_user_mounts_reads_and_unmounts(area: Bench) -> None:
    contents = trees.dataset(area.path / "source", files=10)
    mount = area.mount(area.path / "source", user="nobody")
    for path, data in contents.items():
        assert read_as("nobody", mount.path / path).stdout == data
    assert mount.wait_idle()["files"]["resident"] == len(contents)
    for path, data in contents.items():
        assert read_as("nobody", mount.path / path).stdout == data
    with pytest.raises(PermissionError):
        os.listdir(mount.path)  # not even root
    assert mount.umount().returncode == 0
    assert not os.path.ismount(mount.path)
    owners = {p.stat().st_uid for p in (area.path / "tier").rglob("*")}
    assert owners == {NOBODY.pw_uid}


@pytest.mark.usefixtures("open_device")
def test_an_ordinary_users_mount_has_metrics(area: Bench) -> None:
    (area.path / "source" / "file").write_bytes(b"content")
    port = free_port()
    mount = area.mount(area.path / "source", "--metrics-port", str(port), user="nobody")
    assert read_as("nobody", mount.path / "file").stdout == b"content"
    now = scrape(port)
    assert now.value("monarchfs_opens_total", served="source") == 1
    assert now.value("process_open_fds") > 5


@pytest.mark.usefixtures("open_device")
def test_a_port_that_only_root_may_have_is_refused(area: Bench) -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 81:
        pytest.skip(
            "needs ports that are not everybody's: sysctl net.ipv4.ip_unprivileged_port_start=1024"
        )
    (area.path / "mnt").mkdir()
    os.chown(area.path / "mnt", NOBODY.pw_uid, -1)
    done = run(
        *("mount", str(area.path / "source"), str(area.path / "mnt"), "--metrics-port", "81"),
        *("--tier", f"{area.path}/tier=1G", "--state-dir", f"{area.path}/state"),
        user="nobody",
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("monarchfs: cannot serve metrics on 127.0.0.1:81: Permission")
    assert done.stderr.count("\n") == 1
    assert not (area.path / "tier").exists()
    assert not (area.path / "state").exists()


@pytest.mark.usefixtures("open_device")
def test_an_ordinary_user_sees_what_the_source_lets_them_see(area: Bench) -> None:
    source = area.path / "source"
    (source / "secret").write_bytes(b"root only")
    (source / "secret").chmod(0o600)
    (source / "empty secret").touch(mode=0o600)
    (source / "locked").mkdir()
    (source / "locked" / "inner").write_bytes(b"unreachable")
    (source / "locked").chmod(0o700)
    (source / "with acl").write_bytes(b"for nobody")
    (source / "with acl").chmod(0o600)
    acl = f"u:{NOBODY.pw_uid}:r"
    subprocess.run(["setfacl", "-m", acl, str(source / "with acl")], check=True)
    mount = area.mount(source, "--prefetch", "all", user="nobody")
    mount.wait_idle()
    for name in ("secret", "empty secret", "locked/inner"):
        for _ in range(2):
            done = read_as("nobody", mount.path / name)
            assert done.returncode != 0, name
            assert b"Permission denied" in done.stderr
    assert read_as("nobody", mount.path / "with acl").stdout == b"for nobody"


def test_root_mounts_for_a_user_who_alone_may_enter(area: Bench) -> None:
    source = area.path / "source"
    contents = trees.dataset(source, files=5)
    (source / "secret").write_bytes(b"root only")
    (source / "secret").chmod(0o600)
    mount = area.mount(source, "--user", "nobody")
    for path, data in contents.items():
        assert read_as("nobody", mount.path / path).stdout == data
    assert read_as("nobody", mount.path / "secret").returncode != 0
    assert read_as("daemon", mount.path / "secret").returncode != 0
    assert read_as("daemon", mount.path / next(iter(contents))).returncode != 0
    worker = Path(f"/proc/{mount.worker_pid()}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in worker.splitlines() if ":\t" in line)
    assert set(fields["Uid"].split()) == {str(NOBODY.pw_uid)}
    assert int(fields["CapPrm"], 16) == int(fields["CapEff"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    done = run("status", str(mount.path), "--json", user="nobody")
    assert done.returncode == 0, done.stderr


def test_allow_other_lets_the_kernel_check_modes_and_acls(area: Bench) -> None:
    source = area.path / "source"
    (source / "open").write_bytes(b"for all")
    (source / "secret").write_bytes(b"root only")
    (source / "secret").chmod(0o600)
    (source / "with acl").write_bytes(b"for nobody")
    (source / "with acl").chmod(0o600)
    acl = f"u:{NOBODY.pw_uid}:r"
    subprocess.run(["setfacl", "-m", acl, str(source / "with acl")], check=True)
    mount = area.mount(source, "-o", "allow_other")
    for _ in range(2):
        for user in ("nobody", "daemon"):
            assert read_as(user, mount.path / "open").stdout == b"for all"
            assert read_as(user, mount.path / "secret").returncode != 0
        assert read_as("nobody", mount.path / "with acl").stdout == b"for nobody"
        assert read_as("daemon", mount.path / "with acl").returncode != 0
        mount.wait_idle()


def test_a_worker_of_root_keeps_only_what_reading_needs(area: Bench) -> None:
    source = area.path / "source"
    (source / "of nobody").write_bytes(b"private")
    (source / "of nobody").chmod(0o600)
    os.chown(source / "of nobody", NOBODY.pw_uid, NOBODY.pw_gid)
    mount = area.mount(source)
    assert (mount.path / "of nobody").read_bytes() == b"private"
    worker = Path(f"/proc/{mount.worker_pid()}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in worker.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == 1 << 2
