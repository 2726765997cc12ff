"""What root does in places that a user controls: it reads no more than is its own, waits for
nobody, and neither mounts, unmounts nor removes anything elsewhere."""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monarchfs.control import client
from monarchfs.control.registration import Registration, find_mounts, own_mount_namespace
from monarchfs.doctor.leftovers import dead_sockets
from monarchfs.fuse.connection import connection_of_mount
from monarchfs.fuse.mount import mount
from monarchfs.fuse.mountinfo import find_mount, mount_of
from monarchfs.fuse.unmount import Unmounted, unmount_bounded, unmount_call
from monarchfs.slurm.leftovers import Sweeper
from monarchfs.supervisor.recover import find_all
from monarchfs.supervisor.registration import remove_registration, unlink_as
from monarchfs.types import OperationError
from tests.support.mounting import Bench, assert_one_line, requires_fuse, requires_root, run
from tests.support.surroundings import mounted_tmpfs

pytestmark = requires_root

NOBODY = pwd.getpwnam("nobody")


@contextmanager
def directory_of(uid: int) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    path.chmod(0o755)
    os.chown(path, uid, -1)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def users() -> Iterator[Path]:
    with directory_of(NOBODY.pw_uid) as path:
        yield path


@pytest.fixture
def roots() -> Iterator[Path]:
    with directory_of(0) as path:
        yield path


def as_the_users(path: Path) -> Path:
    os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid, follow_symlinks=False)
    return path


def users_link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return as_the_users(path)


def registration(stem: Path, mountpoint: str = "/mnt/gone") -> None:
    entry = Registration(
        *(mountpoint, own_mount_namespace(), "/src", NOBODY.pw_uid, 1 << 22, 1, "/state", 1)
    )
    stem.with_suffix(".json").write_text(entry.to_json())
    as_the_users(stem.with_suffix(".json"))


def left(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def dead_socket(path: Path, uid: int = NOBODY.pw_uid) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    os.chown(path, uid, -1)


def runtime_dir(users: Path) -> Path:
    (users / "run").mkdir(mode=0o700)
    return as_the_users(users / "run")


# Removing


def test_what_is_dead_is_removed(users: Path) -> None:
    """So that the tests below are about something."""
    run_dir = runtime_dir(users)
    registration(run_dir / "one")
    dead_socket(run_dir / "two.sock")
    sweeper = Sweeper(remove=True)
    sweeper.registrations(lambda _owners: [str(run_dir)])
    sweeper.sockets(lambda _owners: [str(run_dir)])
    assert [one.removed for one in sweeper.found] == [True, True], sweeper.found
    assert left(run_dir) == []


@pytest.mark.parametrize("kind", ["file", "socket"])
def test_a_runtime_directory_that_is_a_link_is_passed_over(
    users: Path, roots: Path, kind: str
) -> None:
    if kind == "file":
        (roots / "precious.sock").write_text("keep me")
    else:
        dead_socket(roots / "precious.sock", 0)
    users_link(users / "run", roots)
    sweeper = Sweeper(remove=True)
    for search in (sweeper.sockets, sweeper.registrations):
        search(lambda _owners: [str(users / "run")])
    assert sweeper.found == []
    assert left(roots) == ["precious.sock"]


def test_a_directory_becomes_a_link_after_the_look(users: Path, roots: Path) -> None:
    """What was found is removed with the rights of its owner, who may remove nothing there."""
    run_dir = runtime_dir(users)
    registration(run_dir / "precious")
    dead_socket(run_dir / "other.sock")
    (found,) = find_mounts([str(run_dir)])
    (dead,) = dead_sockets(str(run_dir))
    for name in ("precious.sock", "precious.json", "other.sock"):
        (roots / name).write_text("keep me")
    run_dir.rename(users / "aside")
    run_dir.symlink_to(roots)
    with pytest.raises(PermissionError):
        remove_registration(found.stem, found.owner_uid)
    with pytest.raises(PermissionError):
        unlink_as(NOBODY.pw_uid, dead)
    assert left(roots) == ["other.sock", "precious.json", "precious.sock"]
    assert (os.geteuid(), os.getegid()) == (0, 0)


def test_status_of_root_removes_what_is_dead_and_nothing_else(users: Path, roots: Path) -> None:
    """What is no registration is passed over."""
    run_dir = runtime_dir(users)
    registration(run_dir / "one")
    (roots / "keep").write_text("keep me")
    (run_dir / "two.json").symlink_to(roots / "keep")
    os.mkfifo(run_dir / "three.json")
    (run_dir / "four.json").mkdir()
    nulls = json.dumps(dict.fromkeys(Registration.__slots__, None)).encode()
    odd = (b'{"a":' * 10_000, b"", b"junk", b"{}", b'{"mountpoint": 5}', nulls, bytes(1 << 20))
    for content in odd:
        (run_dir / "five.json").write_bytes(content)
        as_the_users(run_dir / "five.json")
        found = find_all(lambda _owners: [str(run_dir)])
        assert [one for one in found if one.registered is not None] == []
    assert left(run_dir) == ["five.json", "four.json", "three.json", "two.json"]
    assert left(roots) == ["keep"]
    registration(run_dir / "six")
    run_dir.chmod(0o777)
    assert find_mounts([str(run_dir)]) == []


# Mounting and unmounting


@pytest.mark.parametrize("lazy", [False, True])
def test_a_link_on_the_way_is_not_unmounted_through(users: Path, roots: Path, lazy: bool) -> None:
    """The user's mount was on users/a/data; then `a` became a link to where root has a `data`."""
    (roots / "data").mkdir()
    users_link(users / "a", roots)
    with mounted_tmpfs(roots / "data", "size=1M"):
        assert unmount_call(str(users / "a" / "data"), lazy=lazy) in (errno.ELOOP, errno.ENOTDIR)
        (users / "b").mkdir()
        (users / "b" / "a").symlink_to(roots)
        (roots / "c").mkdir()
        with mounted_tmpfs(roots / "c", "size=1M"):
            assert unmount_call(str(users / "b" / "a" / "c"), lazy=lazy) != 0
            assert find_mount(str(roots / "c")) is not None
        assert find_mount(str(roots / "data")) is not None
        # Nor is anything that is no FUSE mount.
        other = mount_of(str(roots / "data"))
        assert other is not None
        assert unmount_bounded(connection_of_mount(other), 0) is Unmounted.NOT_MOUNTED


@requires_fuse
def test_a_link_on_the_way_is_not_mounted_through(users: Path, roots: Path) -> None:
    (roots / "data").mkdir()
    users_link(users / "a", roots)
    point, uid, gid = f"{users}/a/data", NOBODY.pw_uid, NOBODY.pw_gid
    with pytest.raises(OperationError, match="Too many levels of symbolic links"):
        mount(source="/src", mountpoint=point, uid=uid, gid=gid, allow_other=False)
    assert find_mount(str(roots / "data")) is None


@requires_fuse
@pytest.mark.parametrize("last", [False, True])
def test_root_hides_nothing_that_a_users_link_leads_to(
    users: Path, roots: Path, last: bool
) -> None:
    """The link is there all the time."""
    (roots / "data").mkdir()
    (roots / "src").mkdir()
    point = users_link(users / "a", roots / "data" if last else roots)
    point = point if last else point / "data"
    words = (str(roots / "src"), str(point), "--user", "nobody")
    done = run("mount", *words, *Bench(users).storage("10M"))
    if done.returncode == 0:
        run("umount", str(roots / "data"), "--timeout", "5")
    assert done.returncode == 1, done.stderr
    assert f"others than root can change {users}/a" in done.stderr
    assert find_mount(str(roots / "data")) is None


def test_fsck_is_led_to_nothing_of_roots(users: Path, roots: Path) -> None:
    (roots / "state" / "index").mkdir(parents=True)
    users_link(users / "a", roots)
    done = run("fsck", str(users / "a" / "state"), "--repair")
    assert_one_line(done, 2, "others than root can change")
    assert left(roots / "state") == ["index"]


# Asking


@pytest.mark.parametrize("how", ["link", "directory"])
def test_what_root_asks_a_users_daemon_reaches_no_other(users: Path, roots: Path, how: str) -> None:
    """What is meant for the user's mount would unmount another's: root's daemon obeys root."""
    run_dir = runtime_dir(users)
    registration(run_dir / "one")
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str((roots if how == "link" else run_dir) / "one.sock"))
        daemon.listen()
        daemon.settimeout(0)
        if how == "link":
            (run_dir / "one.sock").symlink_to(roots / "one.sock")
        (found,) = find_mounts([str(run_dir)])
        with pytest.raises(OperationError, match=r"does not answer|somebody else listens"):
            client.request(found, {"command": "umount", "timeout": 1}, 2)
        try:
            connection, _ = daemon.accept()
        except BlockingIOError:
            return
        with connection:
            assert connection.recv(1) == b""


# Reading


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "depth", "nonsense"])
def test_a_report_of_any_kind_is_one_line(roots: Path, kind: str) -> None:
    path = roots / "7.here.json"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/etc/passwd")
        case "directory":
            path.mkdir()
        case "depth":
            path.write_bytes(b'{"a":' * 100_000)
        case _:
            path.write_text(json.dumps({"datasets": [{"source": 5}], "job": {}}))
    done = run("report", "7", "--dir", str(roots), timeout=20)
    assert_one_line(done, 1, "makes no sense" if kind == "nonsense" else "cannot be read")


@pytest.mark.parametrize("place", ["lock", "index", "index/mark", "suspect"])
def test_fsck_by_root_waits_for_no_fifo(users: Path, place: str) -> None:
    state = users / "state"
    (state / "index").mkdir(parents=True)
    (state / "index" / "data.mdb").write_bytes(b"x" * 4096)
    (state / "lock").write_text("{}")
    for path in (state, *state.rglob("*")):
        as_the_users(path)
        path.chmod(0o700 if path.is_dir() else 0o600)
    target = state / place
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    os.mkfifo(target, 0o600)
    as_the_users(target)
    done = run("fsck", str(state), "--repair", timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2)
    if done.returncode == 2 or not done.stdout:
        assert_one_line(done, done.returncode, "")
