"""What root does in places that a user controls: it reads no more than is its own, waits for
nobody; nothing of root's is given away, changed or removed, and nothing is made, mounted or
unmounted where the user could not have made it."""

import errno
import json
import logging
import os
import pwd
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from monarchfs.config import Config
from monarchfs.config.model import TierSpec, User
from monarchfs.control import client
from monarchfs.control.registration import Registration, find_mounts, own_mount_namespace
from monarchfs.doctor.leftovers import dead_sockets
from monarchfs.fuse.connection import connection_of_mount
from monarchfs.fuse.mount import mount
from monarchfs.fuse.mountinfo import find_mount, mount_of
from monarchfs.fuse.unmount import Unmounted, unmount_bounded, unmount_call
from monarchfs.peers.nodes import PeerNode, Peers
from monarchfs.slurm.leftovers import Sweeper
from monarchfs.supervisor import logs, peering
from monarchfs.supervisor.directories import open_state_dir, open_tiers, tree_size
from monarchfs.supervisor.identity import acting_as
from monarchfs.supervisor.recover import find_all
from monarchfs.supervisor.registration import remove_registration, unlink_as
from monarchfs.types import MonarchError, OperationError, TierSize
from tests.support import mounting, trees
from tests.support.fake_mounts import interpreter_for
from tests.support.flipping import Bait, at_each_call
from tests.support.surroundings import mounted_tmpfs

pytestmark = mounting.requires_root

NOBODY = pwd.getpwnam("nobody")
USER = User("nobody", NOBODY.pw_uid, NOBODY.pw_gid, ())


def as_the_users(path: Path) -> Path:
    os.chown(path, USER.uid, USER.gid, follow_symlinks=False)
    return path


@pytest.fixture
def users() -> Iterator[Path]:
    """A directory of the user's; ``roots``, beside it, is root's."""
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    path.chmod(0o755)
    (path / "users").mkdir()
    yield as_the_users(path / "users")
    assert (os.geteuid(), os.getegid()) == (0, 0)
    shutil.rmtree(path)


@pytest.fixture
def roots(users: Path) -> Path:
    (users.parent / "roots").mkdir()
    return users.parent / "roots"


class Ground:
    """``users`` is the user's, ``roots`` root's: it holds a directory for each name that root may
    be led to, and ``log``. All of it is as at first, or `check` fails."""

    NAMES = ("state", "tier", "0" * 16)

    def __init__(self, users: Path, roots: Path) -> None:
        self.path, self.users, self.roots = users.parent, users, roots
        for name in self.NAMES:
            (self.roots / name).mkdir()
        (self.roots / "tier" / ("0" * 16)).mkdir()
        (self.roots / "state" / "peers").mkdir()
        for name in ("log", "state/peers/nginx.conf"):
            (self.roots / name).write_text("keep me")
        self.bait = Bait(self.users, self.roots, USER.uid)
        self._before = self._look()

    def _look(self) -> list[object]:
        found: list[object] = []
        for path in sorted(self.roots.rglob("*")):
            st = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found.append((str(path), st.st_mode, st.st_uid, st.st_gid, st.st_ino, content))
        return found

    def check(self) -> None:
        assert self._look() == self._before

    def config(self) -> Config:
        way = self.bait.way
        tiers = (TierSpec(f"{way}/tier", TierSize(bytes=1 << 20)),)
        return Config("/s", "/m", tiers, f"{way}/state", "/run", "0" * 16, USER)


def clear(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def ground(users: Path, roots: Path) -> Ground:
    return Ground(users, roots)


PEERS = Peers((PeerNode("a", "a", 9),), 0, "secret")


def open_storage(config: Config, *, keep: bool) -> bool:
    """What a mount does with its directories, kept or taken back; whether that worked."""
    with ExitStack() as undo, ExitStack() as closing:
        try:
            state, lock = open_state_dir(config, undo)
            _, directories = open_tiers(config, state, undo)
            server = peering.open_peer_server(config, PEERS, "127.0.0.1", undo)
        except MonarchError:
            return False
        tiers = [directory.descriptor for directory in directories.opened]
        for descriptor in (state, *tiers):
            assert os.fstat(descriptor).st_uid == USER.uid
        assert server is not None
        server.tick(1.0)
        if keep:
            undo.pop_all()
            closing.callback(server.close)
            for descriptor in (state, lock, *tiers, *directories.locks):
                closing.callback(os.close, descriptor)
    return True


@pytest.mark.parametrize("there", [False, True], ids=["new", "there"])
@pytest.mark.parametrize("keep", [False, True], ids=["taken back", "kept"])
def test_no_call_is_led_astray(
    ground: Ground, there: bool, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peering, "find_nginx", lambda: "/bin/true")
    config = ground.config()
    if not there:
        clear(ground.roots)
        ground._before = ground._look()

    def act() -> None:
        open_storage(config, keep=keep)

    def check() -> None:
        ground.check()
        clear(ground.bait.way)

    assert at_each_call(ground.bait, act, check) > 10


LINE = logging.LogRecord("x", logging.INFO, "", 0, "root::0:0", (), None)


def write_log(path: Path) -> None:
    """As a daemon does, with a rotation in between; trouble with the file raises nothing later."""
    try:
        handler = logs.log_file_handler(str(path), USER)
    except OSError:
        return
    with closing(handler):
        handler.handle(LINE)
        with acting_as(USER), suppress(OSError):
            path.rename(path.with_name("log.1"))
        handler.handle(LINE)


def test_no_line_is_led_astray(ground: Ground) -> None:
    (ground.bait.way / "log").touch()
    as_the_users(ground.bait.way / "log")

    def act() -> None:
        write_log(ground.bait.way / "log")

    assert at_each_call(ground.bait, act, ground.check) > 3


@pytest.mark.parametrize("kind", ["link", "hard link", "FIFO", "directory"])
def test_what_a_user_puts_in_a_logs_place_gets_no_line(ground: Ground, kind: str) -> None:
    """In the user's directory, and in one that everybody may write to."""
    shared = ground.path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for directory in (ground.bait.way, shared):
        path = directory / "log"
        handler = logs.log_file_handler(str(path), USER)
        with closing(handler):
            path.unlink()
            match kind:
                case "link":
                    path.symlink_to(ground.roots / "log")
                case "hard link":
                    path.hardlink_to(ground.roots / "log")
                case "FIFO":
                    os.mkfifo(path)
                case _:
                    path.mkdir()
            if kind != "hard link":
                as_the_users(path)
            handler.handle(LINE)
        with pytest.raises(MonarchError):
            logs.check_log_file(str(path), USER)
        ground.check()


def test_the_size_of_a_users_tree_is_nothing_elses(ground: Ground) -> None:
    """Neither what a link leads to, nor what the user has mounted in it and may never answer."""
    (ground.roots / "big").write_bytes(bytes(1 << 20))
    (ground.bait.way / "small").write_bytes(bytes(1 << 13))
    inside = ground.bait.way / "mounted"
    inside.mkdir()
    sizes: list[int] = []
    with mounted_tmpfs(inside):
        (inside / "big").write_bytes(bytes(1 << 20))

        def look() -> None:
            sizes.append(tree_size(str(ground.users)).bytes)

        calls = at_each_call(ground.bait, look, lambda: None)
    assert calls >= 6
    assert max(sizes) >= 1 << 13
    assert max(sizes) < 1 << 20
    assert not tree_size("/proc/self/cwd").whole, "what cannot be looked at is not nothing"


@pytest.fixture
def mountable(ground: Ground) -> Iterator[Ground]:
    interpreter_for(USER.name)
    trees.dataset(ground.path / "src", files=2)
    (ground.path / "mnt").mkdir()
    yield ground
    for point in mounting.fuse_mounts(str(ground.path)):
        mounting.run("umount", point, "--timeout", "5")
    mounting.wait_for(
        lambda: not mounting.processes_about(f"{ground.path}/"), "everything to have ended"
    )


def try_mount(
    ground: Ground, *options: str, state: str = "way/state", tier: str = "way/tier"
) -> int:
    """The exit code; what went wrong is told in lines of ours."""
    done = mounting.run(
        *("mount", f"{ground.path}/src", f"{ground.path}/mnt", "--user", USER.name),
        *("--state-dir", f"{ground.users}/{state}", "--tier", f"{ground.users}/{tier}=10M"),
        *("-o", "reserve_percent=1", *options),
    )
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        assert lines, done
        assert all(line.startswith("monarchfs: ") for line in lines), done.stderr
        assert "Errno" not in done.stderr
    return done.returncode


@mounting.requires_fuse
def test_a_mount_makes_its_directories_in_the_users_own(mountable: Ground) -> None:
    """So that the tests below are about something."""
    assert try_mount(mountable) == 0
    way = mountable.bait.way
    made = [way / "state", way / "tier", *(way / "tier").iterdir()]
    assert [path.owner() for path in made] == [USER.name] * 3
    assert mounting.run("umount", f"{mountable.path}/mnt").returncode == 0
    mountable.check()


@mounting.requires_fuse
@pytest.mark.parametrize("which", ["state", "tier", "tier's own", "log"])
def test_a_link_on_the_way_is_not_made_through(mountable: Ground, which: str) -> None:
    """Without any race: the way leads to root's directory all the time."""
    for name in Ground.NAMES:
        shutil.rmtree(mountable.roots / name)
    mountable._before = mountable._look()
    match which:
        case "state" | "tier":
            assert try_mount(mountable, **{which: f"link/{which}"}) != 0
        case "tier's own":
            assert try_mount(mountable, tier="link") != 0
        case _:
            assert try_mount(mountable, "--log-file", f"{mountable.users}/link/new") != 0
    mountable.check()


@mounting.requires_fuse
def test_mounts_are_not_led_astray(mountable: Ground) -> None:
    """A running attack against real mounts, for the state directory, the tier and the log; also
    when a mount that runs has another worker started, and says so in its log."""
    log, point = f"{mountable.bait.way}/log", f"{mountable.path}/mnt"
    restarted = False
    with mountable.bait.flipping():
        for _ in range(6):
            if try_mount(mountable, "--log-file", log) != 0:
                continue
            if not restarted:
                os.kill(worker(point)["pid"], signal.SIGKILL)
                mounting.wait_for(lambda: worker(point)["restarts"] == 1, "another worker")
                restarted = True
            mounting.run("umount", point, "--timeout", "5")
    mountable.check()


def worker(point: str) -> dict[str, int]:
    done = mounting.run("status", point, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)["worker"]
    return found


def users_link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return as_the_users(path)


def registration(
    stem: Path, mountpoint: str = "/mnt/gone", *, pid: int = 1 << 22, namespace: int | None = None
) -> None:
    namespace = namespace or own_mount_namespace()
    entry = Registration(mountpoint, namespace, "/src", USER.uid, pid, 1, "/state", 1)
    stem.with_suffix(".json").write_text(entry.to_json())
    as_the_users(stem.with_suffix(".json"))


def dead_socket(path: Path, uid: int = USER.uid) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    os.chown(path, uid, -1)


@pytest.fixture
def run_dir(users: Path) -> Path:
    (users / "run").mkdir(mode=0o700)
    return as_the_users(users / "run")


@pytest.fixture
def led(users: Path, roots: Path) -> Path:
    """A way of the user's that leads to the directory ``data`` of root's."""
    (roots / "data").mkdir()
    return users_link(users / "a", roots) / "data"


def test_what_is_dead_is_removed(run_dir: Path) -> None:
    """So that the tests below are about something. What serves in a container stays, though its
    process has a number that is another one's here."""
    registration(run_dir / "one")
    dead_socket(run_dir / "two.sock")
    registration(run_dir / "three", pid=os.getpid(), namespace=1)
    sweeper = Sweeper(remove=True)
    with socket.socket(socket.AF_UNIX) as serving:
        serving.bind(f"{run_dir}/three.sock")
        serving.listen()
        sweeper.registrations(lambda _owners: [str(run_dir)])
        sweeper.sockets(lambda _owners: [str(run_dir)])
    assert [one.removed for one in sweeper.found] == [True, True], sweeper.found
    assert sorted(os.listdir(run_dir)) == ["three.json", "three.sock"]


@pytest.mark.parametrize("kind", ["file", "socket"])
def test_a_runtime_directory_that_is_a_link_is_left(users: Path, roots: Path, kind: str) -> None:
    if kind == "file":
        (roots / "precious.sock").write_text("keep me")
    else:
        dead_socket(roots / "precious.sock", 0)
    users_link(users / "run", roots)
    sweeper = Sweeper(remove=True)
    for search in (sweeper.sockets, sweeper.registrations):
        search(lambda _owners: [str(users / "run")])
    assert sweeper.found == []
    assert sorted(os.listdir(roots)) == ["precious.sock"]


def test_a_directory_becomes_a_link_after_the_look(run_dir: Path, roots: Path) -> None:
    """What was found is removed with the rights of its owner, who may remove nothing there."""
    registration(run_dir / "precious")
    dead_socket(run_dir / "other.sock")
    (found,) = find_mounts([str(run_dir)])
    (dead,) = dead_sockets(str(run_dir))
    for name in ("precious.sock", "precious.json", "other.sock"):
        (roots / name).write_text("keep me")
    run_dir.rename(run_dir.with_name("aside"))
    run_dir.symlink_to(roots)
    with pytest.raises(PermissionError):
        remove_registration(found.stem, found.owner_uid)
    with pytest.raises(PermissionError):
        unlink_as(USER.uid, dead)
    assert sorted(os.listdir(roots)) == ["other.sock", "precious.json", "precious.sock"]


def test_status_of_root_removes_what_is_dead_and_nothing_else(run_dir: Path, roots: Path) -> None:
    """What is no registration is passed over."""
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
    assert sorted(os.listdir(run_dir)) == ["five.json", "four.json", "three.json", "two.json"]
    assert sorted(os.listdir(roots)) == ["keep"]
    registration(run_dir / "six")
    run_dir.chmod(0o777)
    assert find_mounts([str(run_dir)]) == []


@pytest.mark.parametrize("lazy", [False, True])
def test_a_link_is_not_unmounted_through(users: Path, roots: Path, led: Path, lazy: bool) -> None:
    """The user's mount was there; then the way became a link to where root has a `data`."""
    with mounted_tmpfs(roots / "data", "size=1M"):
        assert unmount_call(str(led), lazy=lazy) in (errno.ELOOP, errno.ENOTDIR)
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


@mounting.requires_fuse
def test_a_link_on_the_way_is_not_mounted_through(roots: Path, led: Path) -> None:
    owner: dict[str, Any] = {"uid": USER.uid, "gid": USER.gid, "allow_other": False}
    with pytest.raises(OperationError, match="Too many levels of symbolic links"):
        mount(source="/src", mountpoint=str(led), **owner)
    assert find_mount(str(roots / "data")) is None


@mounting.requires_fuse
@pytest.mark.parametrize("last", [False, True])
def test_root_hides_nothing_a_users_link_leads_to(users: Path, roots: Path, last: bool) -> None:
    """The link is there all the time."""
    (roots / "data").mkdir()
    (roots / "src").mkdir()
    point = users_link(users / "a", roots / "data" if last else roots)
    point = point if last else point / "data"
    words = (str(roots / "src"), str(point), "--user", "nobody")
    done = mounting.run("mount", *words, *mounting.Bench(users).storage("10M"))
    if done.returncode == 0:
        mounting.run("umount", str(roots / "data"), "--timeout", "5")
    assert done.returncode == 1, done.stderr
    assert f"others than root can change {users}/a" in done.stderr
    assert find_mount(str(roots / "data")) is None


def test_fsck_is_led_to_nothing_of_roots(users: Path, roots: Path) -> None:
    (roots / "state" / "index").mkdir(parents=True)
    users_link(users / "a", roots)
    done = mounting.run("fsck", str(users / "a" / "state"), "--repair")
    mounting.assert_one_line(done, 2, "others than root can change")
    assert sorted(os.listdir(roots / "state")) == ["index"]


@pytest.mark.parametrize("how", ["link", "directory"])
def test_what_root_asks_a_daemon_reaches_no_other(run_dir: Path, roots: Path, how: str) -> None:
    """What is meant for the user's mount would unmount another's: root's daemon obeys root."""
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
    done = mounting.run("report", "7", "--dir", str(roots), timeout=20)
    mounting.assert_one_line(done, 1, "makes no sense" if kind == "nonsense" else "cannot be read")


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
    done = mounting.run("fsck", str(state), "--repair", timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2)
    if done.returncode == 2 or not done.stdout:
        mounting.assert_one_line(done, done.returncode, "")
