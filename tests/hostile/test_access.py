"""A user gets through the mount exactly what that user gets in the source, and nobody else gets
anything: modes, POSIX ACLs, supplementary groups, and a source that root may not enter."""

import grp
import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarchfs.fuse.mountinfo import find_mount
from tests.support import mounting, trees
from tests.support.fake_mounts import device_mode, interpreter_for
from tests.support.processes import status_of
from tests.support.programs import execute

pytestmark = mounting.requires_mounts

NOBODY = pwd.getpwnam("nobody")
DAEMON = pwd.getpwnam("daemon")
GROUP = grp.getgrnam("games").gr_gid

# What each way to look at each name says: bytes, names or the error.
LOOK = """
import hashlib, json, os, sys
def outcome(call):
    try:
        return call()
    except OSError as error:
        return error.strerror
def content(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
found = {}
for name in json.loads(sys.argv[2]):
    path = os.path.join(sys.argv[1], name)
    found[name] = [
        outcome(lambda: content(path)),
        outcome(lambda: sorted(os.listdir(path))),
        outcome(lambda: oct(os.stat(path).st_mode)),
        outcome(lambda: os.access(path, os.R_OK)),
        outcome(lambda: os.getxattr(path, "user.colour").decode()),
    ]
print(json.dumps(found))
"""


def person(entry: pwd.struct_passwd, *groups: int) -> list[str]:
    listed = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", listed]


PEOPLE = {
    "nobody": person(NOBODY),
    "nobody in the group": person(NOBODY, GROUP),
    "daemon": person(DAEMON),
    "daemon in the group": person(DAEMON, GROUP),
}


def look(who: list[str], root: Path, names: list[str]) -> dict[str, Any]:
    python = interpreter_for("nobody")
    done = execute([*who, python, "-I", "-c", LOOK, str(root), json.dumps(names)], check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def guarded_tree(root: Path) -> list[str]:
    """Files and directories that some may read and others not; their names."""
    root.mkdir()
    names = []
    for name, owner, group, mode, acl in (
        ("open", 0, 0, 0o644, None),
        ("roots", 0, 0, 0o600, None),
        ("nobodys", NOBODY.pw_uid, 0, 0o600, None),
        ("closed to its owner", NOBODY.pw_uid, 0, 0o044, None),
        ("of the group", 0, GROUP, 0o640, None),
        ("not of the group", 0, GROUP, 0o604, None),
        ("acl gives", 0, 0, 0o600, f"u:{NOBODY.pw_uid}:r"),
        ("acl takes", 0, 0, 0o644, f"u:{NOBODY.pw_uid}:-"),
        ("acl of the group", 0, 0, 0o600, f"g:{GROUP}:r"),
    ):
        for directory in (False, True):
            path = root / (f"{name} directory" if directory else name)
            if directory:
                path.mkdir()
                (path / "inner").write_text(f"inside of {name}")
                names.append(f"{path.name}/inner")
            else:
                path.write_text(f"content of {name}")
            os.setxattr(path, "user.colour", b"red")
            os.chown(path, owner, group)
            path.chmod(mode | (mode & 0o444) >> 2 if directory else mode)
            if acl is not None:
                entry = acl + "x" * (directory and not acl.endswith("-"))
                subprocess.run(["setfacl", "-m", entry, str(path)], check=True)
            names.append(path.name)
    for name, mode in (("names only", 0o744), ("search only", 0o711), ("private", 0o700)):
        (root / name).mkdir()
        (root / name / "inner").write_text(f"inside of {name}")
        (root / name).chmod(mode)
        names += [name, f"{name}/inner"]
    return sorted(names)


Guarded = tuple[mounting.Bench, Path, list[str]]


@pytest.fixture
def guarded(work: mounting.Bench) -> Guarded:
    interpreter_for("nobody")
    names = guarded_tree(work.path / "src")
    work.path.chmod(0o1777)
    return work, work.path / "src", names


def test_the_people_differ(guarded: Guarded) -> None:
    """So that what is compared below is about something."""
    _, source, names = guarded
    assert len({json.dumps(look(who, source, names)) for who in PEOPLE.values()}) == len(PEOPLE)


def test_a_users_own_mount(guarded: Guarded) -> None:
    work, source, names = guarded
    user = PEOPLE["nobody in the group"]
    mount = mounting.Mount(source, work.path / "own", NOBODY.pw_name)
    mount.path.mkdir()
    os.chown(mount.path, NOBODY.pw_uid, -1)
    command = [*mounting.MONARCHFS, "mount", str(source), str(mount.path), *work.storage()]
    with device_mode(0o666):
        path = {"PATH": os.environ["PATH"]}
        done = execute([*user, *command, "--prefetch", "all"], cwd="/", env=path)
        assert done.returncode == 0, done.stderr
        work.mounts.append(mount)
        for _ in range(2):  # not known, and copied
            assert look(user, mount.path, names) == look(user, source, names)
            mount.wait_idle()
        assert_denied(mount, PEOPLE["daemon in the group"])
        assert mount.umount().returncode == 0
    assert {path.owner() for path in (work.path / "tier").rglob("*")} == {"nobody"}


@pytest.mark.parametrize("freshness", ["immutable", "ttl=60"])
def test_roots_mount_for_a_user(guarded: Guarded, freshness: str) -> None:
    work, source, names = guarded
    mount = work.mount(source, "--user", "nobody", "--prefetch", "all", "--freshness", freshness)
    for _ in range(2):
        assert look(PEOPLE["nobody"], mount.path, names) == look(PEOPLE["nobody"], source, names)
        mount.wait_idle()
    assert_denied(mount, PEOPLE["daemon in the group"])
    fields = status_of(mount.worker_pid())
    assert {int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {0}
    assert fields["NoNewPrivs"] == "1"
    assert set(fields["Uid"].split()) == {str(NOBODY.pw_uid)}
    groups = set(os.getgrouplist("nobody", NOBODY.pw_gid))
    assert {int(one) for one in fields["Groups"].split()} == groups
    assert (work.path / "tier").owner() == "root"
    mounted = find_mount(str(mount.path))
    assert mounted is not None
    assert mounted.user_id == NOBODY.pw_uid
    # Its user asks and unmounts without root.
    assert mounting.run("status", str(mount.path), user="nobody").returncode == 0
    assert mounting.run("umount", str(mount.path), user="nobody").returncode == 0
    assert not os.path.ismount(mount.path)


def test_a_worker_of_root_keeps_only_what_reading_needs(guarded: Guarded) -> None:
    work, source, _ = guarded
    mount = work.mount(source)
    assert (mount.path / "nobodys").read_bytes() == b"content of nobodys"
    assert int(status_of(mount.worker_pid())["CapEff"], 16) == 1 << 2


@pytest.mark.parametrize("freshness", ["immutable", "open"])
def test_a_mount_for_all(guarded: Guarded, freshness: str) -> None:
    """The kernel checks; the worker, which reads for all of them, has rights that they have not."""
    work, source, names = guarded
    options = ("-o", "allow_other", "--prefetch", "all", "--freshness", freshness)
    mount = work.mount(source, *options)
    for _ in range(2):
        for who in PEOPLE.values():
            assert look(who, mount.path, names) == look(who, source, names), who
        mount.wait_idle()


def assert_denied(mount: mounting.Mount, other: list[str]) -> None:
    """Somebody else, root included, can neither enter the mount nor read its copies."""
    copies = mount.path.parent / "tier"
    closed = [f'"{mount.path}"', f'"{mount.path.parent}/state"', f'"{copies}"/*/*']
    for who, what in (*((other, what) for what in closed), ([], closed[0])):
        done = execute([*who, "sh", "-c", f"ls {what}"], timeout=20)
        assert done.returncode != 0, (who, what, done.stdout)
    for directory in (mount.path.parent / "state", *copies.iterdir()):
        st = directory.stat()
        assert (st.st_uid, st.st_mode & 0o777) == (NOBODY.pw_uid, 0o700)


@pytest.fixture
def squashed(work: mounting.Bench) -> Iterator[tuple[mounting.Bench, Path]]:
    """A source that only its user may enter, as a file system with root squash and a directory of
    mode 0700: a FUSE mount of that user's, of which root gets nothing."""
    if shutil.which("bindfs") is None:
        pytest.skip("needs bindfs: apt-get install bindfs")
    interpreter_for("nobody")
    real, source = work.path / "real", work.path / "lustre"
    trees.dataset(real, files=6)
    source.mkdir()
    for path in (real, *real.rglob("*"), source):
        os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
    real.chmod(0o700)
    work.path.chmod(0o1777)
    with device_mode(0o666):
        words = ["bindfs", "-f", "--no-allow-other", str(real), str(source)]
        process = subprocess.Popen([*person(NOBODY), *words])
        try:
            mounting.wait_for(lambda: mounting.fuse_mounts(str(source)), "the source to be mounted")
            yield work, source
        finally:
            for mount in work.mounts:
                mount.umount()
            subprocess.run(["umount", "-l", str(source)], check=False)
            process.wait(20)


def diff(real: Path, path: Path) -> None:
    done = execute([*person(NOBODY), "diff", "-r", str(real), str(path)])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("freshness", ["immutable", "open"])
def test_a_source_that_root_may_not_enter(
    squashed: tuple[mounting.Bench, Path], freshness: str
) -> None:
    work, source = squashed
    with pytest.raises(PermissionError):
        os.listdir(source)
    mount = work.mount(source, "--user", "nobody", "--prefetch", "all", "--freshness", freshness)
    diff(work.path / "real", mount.path)
    mount.wait_idle()
    diff(work.path / "real", mount.path)
    assert_denied(mount, person(DAEMON))
    # Another worker gets what the first one got.
    os.kill(mount.worker_pid(), 9)
    diff(work.path / "real", mount.path)
    assert mount.status()["files"]["resident"] == 6


def test_root_does_not_mount_for_itself_what_it_may_not_enter(
    squashed: tuple[mounting.Bench, Path],
) -> None:
    work, source = squashed
    mounting.assert_one_line(work.try_to_mount(source), 1, "cannot be read by root")
    assert not (work.path / "state").exists()
