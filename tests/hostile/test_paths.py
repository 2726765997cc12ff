"""What root makes, opens and removes on ways that a user can change: nothing of root's is given
away, changed or removed, and nothing is made where the user could not have made it."""

from __future__ import annotations

import json
import logging
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from monarchfs.config import Config
from monarchfs.config.model import TierSpec, User
from monarchfs.supervisor import logs
from monarchfs.supervisor.directories import open_state_dir, open_tiers, tree_size
from monarchfs.supervisor.identity import acting_as
from monarchfs.types import MonarchError, TierSize
from tests.support import trees
from tests.support.fake_mounts import interpreter_for
from tests.support.flipping import Bait, at_each_call
from tests.support.mounting import (
    fuse_mounts,
    processes_about,
    requires_fuse,
    requires_root,
    run,
    wait_for,
)

pytestmark = requires_root

NOBODY = pwd.getpwnam("nobody")
USER = User("nobody", NOBODY.pw_uid, NOBODY.pw_gid, ())


class Ground:
    """``users`` is the user's, ``roots`` root's: it holds a directory for each name that root may
    be led to, and ``log``. All of it is as at first, or `check` fails."""

    NAMES = ("state", "tier", "0" * 16)

    def __init__(self, path: Path) -> None:
        self.path, self.users, self.roots = path, path / "users", path / "roots"
        path.chmod(0o755)
        self.users.mkdir()
        os.chown(self.users, USER.uid, USER.gid)
        self.roots.mkdir()
        for name in self.NAMES:
            (self.roots / name).mkdir()
        (self.roots / "tier" / ("0" * 16)).mkdir()
        (self.roots / "log").write_text("keep me")
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
def ground() -> Iterator[Ground]:
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    yield Ground(path)
    assert (os.geteuid(), os.getegid()) == (0, 0)
    shutil.rmtree(path)


def open_storage(config: Config, *, keep: bool) -> bool:
    """What a mount does with its directories, kept or taken back; whether that worked."""
    with ExitStack() as undo, ExitStack() as closing:
        try:
            state, lock = open_state_dir(config, undo)
            _, directories = open_tiers(config, state, undo)
        except MonarchError:
            return False
        tiers = [directory.descriptor for directory in directories.opened]
        for descriptor in (state, *tiers):
            assert os.fstat(descriptor).st_uid == USER.uid
        if keep:
            undo.pop_all()
            for descriptor in (state, lock, *tiers, *directories.locks):
                closing.callback(os.close, descriptor)
    return True


@pytest.mark.parametrize("there", [False, True], ids=["new", "there"])
@pytest.mark.parametrize("keep", [False, True], ids=["taken back", "kept"])
def test_no_call_is_led_astray(ground: Ground, there: bool, keep: bool) -> None:
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


# Logs


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
    os.chown(ground.bait.way / "log", USER.uid, USER.gid)

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
                os.chown(path, USER.uid, USER.gid, follow_symlinks=False)
            handler.handle(LINE)
        with pytest.raises(MonarchError):
            logs.check_log_file(str(path), USER)
        ground.check()


# Sizes


def test_the_size_of_a_users_tree_is_nothing_elses(ground: Ground) -> None:
    """Neither what a link leads to, nor what the user has mounted in it and may never answer."""
    (ground.roots / "big").write_bytes(bytes(1 << 20))
    (ground.bait.way / "small").write_bytes(bytes(1 << 13))
    inside = ground.bait.way / "mounted"
    inside.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(inside)], check=True)
    try:
        (inside / "big").write_bytes(bytes(1 << 20))
        sizes: list[int] = []

        def look() -> None:
            sizes.append(tree_size(str(ground.users)).bytes)

        calls = at_each_call(ground.bait, look, lambda: None)
    finally:
        subprocess.run(["umount", str(inside)], check=True)
    assert calls >= 6
    assert max(sizes) >= 1 << 13
    assert max(sizes) < 1 << 20


# With real mounts


@pytest.fixture
def mountable(ground: Ground) -> Iterator[Ground]:
    interpreter_for(USER.name)
    trees.dataset(ground.path / "src", files=2)
    (ground.path / "mnt").mkdir()
    yield ground
    for point in fuse_mounts(str(ground.path)):
        run("umount", point, "--timeout", "5")
    wait_for(lambda: not processes_about(f"{ground.path}/"), "everything to have ended")


def mount(ground: Ground, *options: str, state: str = "way/state", tier: str = "way/tier") -> int:
    """The exit code; what went wrong is told in lines of ours."""
    done = run(
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


@requires_fuse
def test_a_mount_makes_its_directories_in_the_users_own(mountable: Ground) -> None:
    """So that the tests below are about something."""
    assert mount(mountable) == 0
    way = mountable.bait.way
    made = [way / "state", way / "tier", *(way / "tier").iterdir()]
    assert [path.owner() for path in made] == [USER.name] * 3
    assert run("umount", f"{mountable.path}/mnt").returncode == 0
    mountable.check()


@requires_fuse
@pytest.mark.parametrize("which", ["state", "tier", "tier's own", "log"])
def test_a_link_on_the_way_is_not_made_through(mountable: Ground, which: str) -> None:
    """Without any race: the way leads to root's directory all the time."""
    for name in Ground.NAMES:
        shutil.rmtree(mountable.roots / name)
    mountable._before = mountable._look()
    match which:
        case "state" | "tier":
            assert mount(mountable, **{which: f"link/{which}"}) != 0
        case "tier's own":
            assert mount(mountable, tier="link") != 0
        case _:
            assert mount(mountable, "--log-file", f"{mountable.users}/link/new") != 0
    mountable.check()


@requires_fuse
def test_mounts_are_not_led_astray(mountable: Ground) -> None:
    """A running attack against real mounts, for the state directory, the tier and the log; also
    when a mount that runs has another worker started, and says so in its log."""
    log, point = f"{mountable.bait.way}/log", f"{mountable.path}/mnt"
    restarted = False
    with mountable.bait.flipping():
        for _ in range(6):
            if mount(mountable, "--log-file", log) != 0:
                continue
            if not restarted:
                os.kill(worker(point)["pid"], signal.SIGKILL)
                wait_for(lambda: worker(point)["restarts"] == 1, "another worker")
                restarted = True
            run("umount", point, "--timeout", "5")
    mountable.check()


def worker(point: str) -> dict[str, int]:
    done = run("status", point, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)["worker"]
    return found
