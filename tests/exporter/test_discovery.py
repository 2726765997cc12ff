"""What the exporter's privileged part finds, and what hostile users can put in its way."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from monarchfs.control.registration import Registration
from monarchfs.exporter import discovery
from monarchfs.exporter.discovery import MOST_OF_A_USER, Discovery, Roots
from tests.support.mounting import REPOSITORY, Bench, requires_fuse, requires_root

pytestmark = requires_root

USER, OTHER = 4242, 4343


class Node:
    """Runtime directories of root, of sessions, and in a directory for all."""

    def __init__(self, path: Path, closing: ExitStack) -> None:
        self.path, self.closing = path, closing
        self.listeners: list[socket.socket] = []
        for name in ("run", "user", "tmp"):
            (path / name).mkdir(parents=True)
        (path / "tmp").chmod(0o1777)
        self.roots = Roots(f"{path}/run", f"{path}/user", f"{path}/tmp")

    def directory(self, root: str = "run", uid: int = 0, name: int | str | None = None) -> Path:
        """The runtime directory of ``uid``, made; ``name`` if its path names another uid."""
        named = uid if name is None else name
        if root == "run":
            return self.path / "run"
        above = self.path / root / (f"monarchfs-{named}" if root == "tmp" else str(named))
        below = above / ("run" if root == "tmp" else "monarchfs")
        below.mkdir(parents=True, exist_ok=True)
        for made in (above, below):
            made.chmod(0o700)
            os.chown(made, uid, uid)
        return below

    def register(
        self, directory: Path, uid: int = 0, *, listens: bool = True, mountpoint: str = "/mnt"
    ) -> str:
        stem = directory / f"{len(self.listeners):024x}"
        entry = Registration(mountpoint, 1, "/lustre", uid, 1, 1, "/state", 1)
        stem.with_suffix(".json").write_text(entry.to_json())
        listener = self.closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(f"{stem}.sock")
        self.listeners.append(listener)
        if listens:
            listener.listen(16)
        for suffix in (".json", ".sock"):
            os.chmod(f"{stem}{suffix}", 0o600)
            os.chown(f"{stem}{suffix}", uid, uid)
        return str(stem)

    def users(self, uid: int = USER, root: str = "tmp", *, listens: bool = True) -> str:
        return self.register(self.directory(root, uid), uid, listens=listens)

    def look(self) -> tuple[dict[str, bool], int]:
        now = Discovery(self.roots)
        found = {}
        for mount in now.mounts():
            assert mount.stem not in found
            assert json.loads(os.pread(mount.registration, 1 << 16, 0))["source"] == "/lustre"
            found[mount.stem] = mount.connection is not None
            mount.close()
        return found, now.left_off


@pytest.fixture
def node() -> Iterator[Node]:
    descriptors = len(os.listdir("/proc/self/fd"))
    # A short path: sun_path has 108 bytes.
    with tempfile.TemporaryDirectory(prefix="m-") as directory, ExitStack() as closing:
        yield Node(Path(directory), closing)
    assert len(os.listdir("/proc/self/fd")) == descriptors, "none is left open"


def test_mounts_are_found_wherever_they_are_registered(node: Node) -> None:
    stems = [
        node.register(node.directory()),
        node.users(root="user"),
        node.users(),
        node.users(OTHER),
    ]
    dead = node.users(OTHER, listens=False)
    assert node.look() == ({**dict.fromkeys(stems, True), dead: False}, 0)


def test_what_is_passed_on_can_only_listen(node: Node) -> None:
    """Else a reader that was taken over could have root unmount what it likes."""
    stem = node.users()
    (listener,) = node.listeners
    (mount,) = Discovery(node.roots).mounts()
    assert (mount.stem, mount.full) == (stem, False)
    assert mount.connection is not None
    with socket.socket(fileno=os.dup(mount.connection)) as passed:
        with pytest.raises(BrokenPipeError):
            passed.send(b'{"command": "umount"}\n')
        asked, _ = listener.accept()
        with asked:
            assert asked.recv(4096) == b'{"command": "metrics"}\n'
            assert asked.recv(4096) == b""
            asked.sendall(b"answer")
            assert passed.recv(10) == b"answer"
    mount.close()


def test_directories_that_others_could_change_are_passed_over(node: Node) -> None:
    for uid, change in ((USER, "run"), (OTHER, "above")):
        directory = node.directory("tmp", uid)
        node.register(directory, uid)
        (directory if change == "run" else directory.parent).chmod(0o770)
    node.register(node.directory("tmp", OTHER, name=USER + 1), OTHER)
    (node.path / "tmp" / "monarchfs-0").mkdir()  # root's, as it should be
    node.register(node.directory("tmp", USER, name=0), USER)
    assert node.look() == ({}, 0)
    node.register(node.directory())
    node.directory().chmod(0o777)
    assert node.look() == ({}, 0)


def test_links_are_not_followed(node: Node, tmp_path: Path) -> None:
    real = node.directory("tmp", USER)
    stem = node.register(real, USER)
    elsewhere = tmp_path / "elsewhere"
    real.rename(elsewhere)
    real.symlink_to(elsewhere)
    os.chown(real, USER, USER, follow_symlinks=False)
    assert node.look() == ({}, 0)
    real.unlink()
    elsewhere.rename(real)
    assert node.look() == ({stem: True}, 0)
    for suffix in (".json", ".sock"):
        file = Path(stem + suffix)
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
        assert True not in node.look()[0].values()
        file.unlink()
        (tmp_path / file.name).rename(file)
    assert node.look() == ({stem: True}, 0)


def test_what_is_no_registration_is_passed_over(node: Node, tmp_path: Path) -> None:
    directory = node.directory("tmp", USER)
    good = node.register(directory, USER)
    others = node.register(directory, OTHER)  # another's file in the user's directory
    fifo, folder, device = (node.register(directory, USER) for _ in range(3))
    for stem in (fifo, folder, device):
        os.unlink(f"{stem}.json")
    os.mkfifo(f"{fifo}.json")
    os.mkdir(f"{folder}.json")
    os.mknod(f"{device}.json", 0o600 | 0o020000, os.makedev(1, 5))
    for stem in (fifo, folder, device):
        os.chown(f"{stem}.json", USER, USER)
    (directory / "not-a-stem.json").write_text("{}")
    (directory / ("A" * 24 + ".json")).write_text("{}")
    assert node.look() == ({good: True}, 0)
    assert others not in node.look()[0]
    # A socket that is none.
    plain = node.register(directory, USER)
    os.unlink(f"{plain}.sock")
    Path(f"{plain}.sock").write_text("")
    assert node.look()[0] == {good: True, plain: False}


def test_a_lease_on_a_registration_holds_nobody_up(node: Node) -> None:
    """Its owner may take one, and root's open would wait 45 s for it to be given back."""
    stem = node.users()
    descriptor = os.open(f"{stem}.json", os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, 0)
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            pytest.skip("needs leases (fcntl(2)): TMPDIR on ext4, xfs or tmpfs")
        # A signal comes (SIGIO by default), which nobody has asked for here.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, 28)  # SIGWINCH: ignored
        assert node.look() == ({}, 0)
    finally:
        os.close(descriptor)
    assert node.look() == ({stem: True}, 0)


def test_a_queue_that_is_full_is_not_the_same_as_nobody(node: Node) -> None:
    stem = node.users()
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        node.closing.enter_context(client)
        try:
            client.connect(f"{stem}.sock")
        except BlockingIOError:
            break
    (mount,) = Discovery(node.roots).mounts()
    assert (mount.connection, mount.full) == (None, True)
    mount.close()


def test_more_mounts_than_allowed_are_left_off(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MOST_OF_A_USER", 2)
    monkeypatch.setattr(discovery, "MOST_OF_ROOT", 4)
    for _ in range(5):
        node.users()
        node.register(node.directory())
    stems = [node.users(OTHER, "user") for _ in range(2)]
    found, left_off = node.look()
    assert (len(found), left_off) == (8, 4)
    assert set(stems) <= set(found)
    monkeypatch.setattr(discovery, "MOST_IN_ALL", 5)
    found, left_off = node.look()
    assert (len(found), left_off) == (5, 7)


LOOK = """
import sys
from monarchfs.exporter.discovery import Discovery, Roots
for mount in Discovery(Roots(*sys.argv[1:4])).mounts():
    print(mount.stem, mount.connection is not None)
"""


@requires_fuse
@pytest.mark.parametrize(
    "where", ["monarchfs-4242", "monarchfs-4242/run", "4242", "4242/monarchfs"]
)
def test_a_users_file_system_that_hangs_is_never_entered(work: Bench, where: str) -> None:
    backing = work.path / "backing"
    for path in (backing, backing / "run", backing / "monarchfs"):
        path.mkdir()
        os.chown(path, USER, USER)
    hanging = work.faulty_source(backing)
    with ExitStack() as closing:
        node = Node(work.path / "node", closing)
        good = node.users(OTHER)
        root = "tmp" if where.startswith("monarchfs") else "user"
        node.directory(root, USER)
        point = node.path / root / where
        subprocess.run(["mount", "--bind", str(hanging.path), str(point)], check=True, timeout=10)
        try:
            hanging.faults(hang=["* *"])
            roots = (node.roots.system, node.roots.sessions, node.roots.temporary)
            look = [sys.executable, "-c", LOOK, *roots]
            seen = subprocess.check_output(look, text=True, timeout=10, cwd=REPOSITORY)
            assert seen == f"{good} True\n"
            assert hanging.data_operations() == 0
        finally:
            hanging.faults()
            subprocess.run(["umount", "-l", str(point)], check=True, timeout=10)


def jobs(node: Node) -> list[tuple[str, ...]]:
    found = []
    for mount in Discovery(node.roots).mounts():
        found.append(mount.jobs)
        mount.close()
    return sorted(found)


def test_jobs_beside_a_mount_point_of_roots_are_found(node: Node) -> None:
    share = node.path / "run" / "slurm" / "shares" / "0123"
    (share / "jobs").mkdir(parents=True)
    for name in ("17", "18_4", ".17.new", "a b", "x" * 65):
        (share / "jobs" / name).touch()
    node.register(node.directory(), mountpoint=f"{share}/data")
    assert jobs(node) == [("17", "18_4")]
    # Somebody else could have made them.
    share.chmod(0o777)
    assert jobs(node) == [()]
    share.chmod(0o755)
    for number in range(discovery.MOST_JOBS + 10):
        (share / "jobs" / str(number)).touch()
    assert len(jobs(node)[0]) == discovery.MOST_JOBS
    (share / "jobs").rename(share / "real")
    (share / "jobs").symlink_to("real")
    assert jobs(node) == [()]


def test_jobs_are_looked_for_below_the_directory_alone_and_for_roots_mounts(node: Node) -> None:
    for beside in ("run", "run/x", "runx/x", "elsewhere"):
        (node.path / beside / "jobs").mkdir(parents=True)
        (node.path / beside / "jobs" / "1").touch()
    node.register(node.directory("tmp", USER), USER, mountpoint=f"{node.path}/run/x/data")
    places = ("elsewhere/x", "run/data", "runx/x/data", "run/../elsewhere/x", "run//x")
    for place in places:
        node.register(node.directory(), mountpoint=f"{node.path}/{place}")
    assert jobs(node) == [()] * (1 + len(places))


def test_a_user_whose_name_was_taken_is_found_and_gets_no_more(node: Node) -> None:
    """Under names with a random number, of which nobody has another's."""
    directories = [
        node.directory("tmp", USER, name=f"{USER}.{number:016x}")
        for number in range(MOST_OF_A_USER + 3)
    ]
    stems = [node.register(directory, USER) for directory in directories]
    node.register(node.directory("tmp", OTHER, name=f"{USER}.{99:016x}"), OTHER)
    node.register(node.directory("tmp", USER, name=f"{USER}.x"), USER)
    other = node.users(OTHER)
    found, _ = node.look()
    assert found == {**dict.fromkeys(stems[:MOST_OF_A_USER], True), other: True}
