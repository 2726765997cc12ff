"""Another user takes the names in /tmp first that a user's mounts would use."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarchfs.config import places
from monarchfs.config.places import own_directory, runtime_dir_of, runtime_dirs_to_search
from tests.support import surroundings, trees
from tests.support.fake_mounts import device_mode, interpreter_for
from tests.support.mounting import MONARCHFS, Bench, as_user, requires_fuse, requires_root, run
from tests.support.programs import Running

pytestmark = requires_root

USER, SQUATTER = pwd.getpwnam("nobody"), pwd.getpwnam("daemon")
USUAL = Path(f"/tmp/monarchfs-{USER.pw_uid}")


Start = Callable[..., Running]


@pytest.fixture
def usual() -> Iterator[Path]:
    """The user's name in /tmp, free; what has it is put aside meanwhile."""
    aside = USUAL.with_name(f"{USUAL.name}-aside")
    there = os.path.lexists(USUAL)
    if there:
        USUAL.rename(aside)
    yield USUAL
    for path in Path("/tmp").glob(f"{USUAL.name}*"):
        if path.is_dir() and not path.is_symlink() and path != aside:
            shutil.rmtree(path)
        elif path != aside:
            path.unlink()
    if there:
        aside.rename(USUAL)


def users_own(path: Path) -> Path:
    path.mkdir(0o700)
    os.chown(path, USER.pw_uid, USER.pw_gid)
    return path


def squat(path: Path, make: Callable[[Path], None] = Path.mkdir) -> None:
    make(path)
    os.chown(path, SQUATTER.pw_uid, SQUATTER.pw_gid, follow_symlinks=False)


@requires_fuse
def test_a_user_mounts_all_the_same(usual: Path, work: Bench) -> None:
    """Every command finds the mount again, the user's and root's."""
    interpreter_for(USER.pw_name)
    squat(usual)
    for decoy in ("0" * 16, "f" * 16):
        squat(usual.with_name(f"{usual.name}.{decoy}"))
    source = trees.write_files(work.path / "src", {"file": b"content"})
    os.chown(work.path, USER.pw_uid, USER.pw_gid)
    with device_mode(0o666):
        mount = work.mount(source, user=USER.pw_name)
        for user in (USER.pw_name, None):
            assert str(mount.path) in run("status", user=user).stdout
            asked = run("status", str(mount.path), "--json", user=user)
            assert asked.returncode == 0, asked.stderr
        (own,) = (p for p in Path("/tmp").glob(f"{usual.name}.*") if p.owner() == USER.pw_name)
        assert own.stat().st_mode & 0o777 == 0o700
        # The next one has the same place.
        assert own_directory("/tmp", USER.pw_uid) == str(own)
        assert mount.umount().returncode == 0
        assert os.listdir(own / "run") == []


@pytest.fixture
def runs(work: Bench) -> Iterator[Start]:
    interpreter_for(USER.pw_name)
    source = trees.write_files(work.path / "src", {"file": b"content"})
    os.chown(work.path, USER.pw_uid, USER.pw_gid)
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("SUDO_", "XDG_", "SLURM_"))}

    def start(*words: str, **environment: str) -> Running:
        command = [*MONARCHFS, "run", "--strict", str(source), *work.storage(), "--", *words]
        place: dict[str, Any] = {"env": {**outside, **environment}, "cwd": "/"}
        return Running(as_user(USER.pw_name, command), stderr=subprocess.PIPE, **place)

    with device_mode(0o666):
        yield start


@pytest.fixture
def session() -> Iterator[Path]:
    path = Path(f"/run/user/{USER.pw_uid}")
    if path.exists():
        pytest.skip(f"{path} is there: end the sessions of {USER.pw_name}")
    path.parent.mkdir(exist_ok=True)
    yield users_own(path)
    shutil.rmtree(path)


UNTIL_TOLD = ("sh", "-c", "echo in; read line")


def ended(process: Running) -> tuple[int, str]:
    _, said = process.communicate("\n", timeout=60)
    return process.returncode, said


@requires_fuse
@surroundings.requires_namespaces
def test_runs_at_the_same_moment_all_have_a_mount(usual: Path, runs: Start, session: Path) -> None:
    """Each in a directory of its own: two hardly ever make one in /tmp at the same moment, so one
    has a session."""
    squat(usual)
    for _ in range(2):
        started = [runs(*UNTIL_TOLD), runs(*UNTIL_TOLD, XDG_RUNTIME_DIR=str(session))]
        for process in started:
            process.line()
        assert [ended(process) for process in started] == [(0, "")] * 2
        for path in usual.parent.glob(f"{usual.name}.*"):
            shutil.rmtree(path)


@requires_fuse
@surroundings.requires_namespaces
@pytest.mark.parametrize("second", ["another directory", "a session directory"])
def test_runs_join_another_directory(usual: Path, runs: Start, session: Path, second: str) -> None:
    squat(usual)
    owned = [usual.with_name(f"{usual.name}.{digit * 16}") for digit in "0f"]
    users_own(owned[1])
    with runs(*UNTIL_TOLD) as first:
        assert first.line() == "in\n"
        environment = {"XDG_RUNTIME_DIR": str(session)}
        if second == "another directory":
            users_own(owned[0])
            environment = {}
        assert ended(runs("true", **environment)) == (0, "")
        assert ended(first) == (0, "")
    assert [*owned[1].glob("run/*")] == []


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("/nowhere")])
def test_a_taken_name_is_passed_over(usual: Path, make: Callable[[Path], None]) -> None:
    assert own_directory("/tmp", USER.pw_uid) == str(usual)
    squat(usual, make)
    places._random_suffix.cache_clear()
    first = own_directory("/tmp", USER.pw_uid)
    assert own_directory("/tmp", USER.pw_uid) == first
    places._random_suffix.cache_clear()
    other = own_directory("/tmp", USER.pw_uid)
    assert first != other
    assert {Path(first).parent, Path(other).parent} == {usual.parent}
    # What another owns, or may write to, is none of the user's.
    for path, owner, mode in ((first, SQUATTER.pw_uid, 0o700), (other, USER.pw_uid, 0o777)):
        os.mkdir(path)
        os.chmod(path, mode)
        os.chown(path, owner, -1)
    assert own_directory("/tmp", USER.pw_uid) not in (first,)
    os.chmod(other, 0o700)
    assert own_directory("/tmp", USER.pw_uid) == other
    for uid in (0, USER.pw_uid):
        assert f"{other}/run" in runtime_dirs_to_search(uid, {}, {USER.pw_uid})
        assert f"{first}/run" not in runtime_dirs_to_search(uid, {}, {USER.pw_uid})


def test_another_users_session_directory_is_not_used(usual: Path, session: Path) -> None:
    """As `su` leaves it in the environment."""
    own = f"{session}/monarchfs"
    for owner, used in ((SQUATTER.pw_uid, f"{usual}/run"), (0, f"{usual}/run"), (USER.pw_uid, own)):
        os.chown(session, owner, -1)
        os.setresuid(USER.pw_uid, USER.pw_uid, 0)
        try:
            assert runtime_dir_of(USER.pw_uid, {"XDG_RUNTIME_DIR": str(session)}) == used
        finally:
            os.setresuid(0, 0, 0)
