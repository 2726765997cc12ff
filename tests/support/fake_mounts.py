"""Mounts whose worker is a fake: everything around the worker is real."""

import math
import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from monarchfs.control import registration
from monarchfs.fuse.mount import DEVICE
from monarchfs.supervisor.namespace import bind, leave_for_own
from monarchfs.types import OperationError
from tests.support import mounting, surroundings
from tests.support.processes import state_of
from tests.support.programs import execute
from tests.support.timing import Stopwatch

FAKE_CLI = str(Path(__file__).with_name("fake_cli.py"))
NOBODY = "nobody"


def interpreter_for(user: str | None) -> str:
    """A Python that ``user`` may run; skips the test where there is none."""
    for python in (sys.executable, "/usr/bin/python3"):
        # By way of a shell, because setpriv looks programs up with root's capabilities.
        shell = ["/bin/sh", "-c", 'exec "$0" "$@"']
        probe = mounting.as_user(user, [*shell, python, "-I", FAKE_CLI, "serve", "--version"])
        try:
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return python
        except FileNotFoundError:
            continue
    pytest.skip(surroundings.cannot_be(user) if user else "needs a Python")


@dataclass
class Area:
    """A directory with ``src``, ``mnt`` and room for the rest; ``user`` runs the commands."""

    path: Path
    user: str | None
    python: str

    @property
    def storage(self) -> list[str]:
        return ["--tier", f"{self.path}/tier=10M", "--state-dir", f"{self.path}/state"]

    @property
    def environment(self) -> dict[str, str]:
        # The runtime directory of an ordinary user is below the area too, so it is seen as well.
        path = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
        return path if self.user is None else {**path, "XDG_RUNTIME_DIR": f"{self.path}/run"}

    def command(self, *arguments: str, mode: str = "serve") -> list[str]:
        surroundings.skip_unless_named(arguments)
        return mounting.as_user(self.user, [self.python, "-I", FAKE_CLI, mode, *arguments])

    def run(
        self, *arguments: str, mode: str = "serve", timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        return execute(
            self.command(*arguments, mode=mode),
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            cwd=self.path,
            env=self.environment,
        )

    def mount(self, *options: str, mode: str = "serve") -> None:
        done = self.run("mount", "src", "mnt", *self.storage, *options, mode=mode)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def files(self) -> set[str]:
        mounted = set(mounting.fuse_mounts(str(self.path)))
        found = set()
        for directory, names, files in os.walk(self.path):
            found |= {os.path.join(directory, name) for name in (*names, *files)}
            names[:] = [name for name in names if os.path.join(directory, name) not in mounted]
        return found

    def assert_nothing_runs(self) -> None:
        mounting.wait_for(lambda: not mounting.processes_about(str(self.path)), "all to end", 5)
        mounting.wait_for(lambda: not self.workers(), "workers to end", 5)
        assert mounting.fuse_mounts(str(self.path)) == []

    def workers(self) -> list[int]:
        """Fake workers and supervisors that have something of the area open."""
        found = []
        for pid in mounting.processes_about(FAKE_CLI.removesuffix("fake_cli.py")):
            try:
                links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
            except OSError:
                continue
            if any(link.startswith(str(self.path)) for link in links):
                found.append(pid)
        return found


@contextmanager
def area(path: Path, user: str | None) -> Iterator[Area]:
    """An `Area` in ``path``, which any user may enter. What is mounted at the end is unmounted;
    fails if anything is left then."""
    path.chmod(0o755)
    owner = pwd.getpwnam(user).pw_uid if user is not None else os.geteuid()
    for name, mode in (("src", 0o755), ("mnt", 0o755), ("run", 0o700)):
        (path / name).mkdir(mode)
        os.chown(path / name, owner, -1)
    os.chown(path, owner, -1)
    work = Area(path, user, interpreter_for(user))
    try:
        yield work
        for point in mounting.fuse_mounts(str(path)):
            done = work.run("umount", point)
            assert done.returncode == 0, done.stderr
        work.assert_nothing_runs()
    finally:
        mounting.kill_each({*mounting.processes_about(str(path)), *work.workers()})
        for point in mounting.fuse_mounts(str(path)):
            subprocess.run(["umount", "-l", point], check=False)


@cache
def no_own_device() -> str:
    """Gives this process, and what it starts from now on, a /dev/fuse of its own in a mount
    namespace of its own: tests leave the machine's as it is, and what they leave mounted goes with
    them. Empty, or why that cannot be."""
    if os.geteuid() != 0:
        return "this is not root"
    try:
        st = os.stat(DEVICE)
        leave_for_own()
        with tempfile.TemporaryDirectory(prefix="monarchfs-test-") as place:
            # /tmp may be mounted nodev.
            subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
            try:
                os.mknod(f"{place}/fuse", stat.S_IFCHR, st.st_rdev)
                os.chmod(f"{place}/fuse", stat.S_IMODE(st.st_mode))
                bind(f"{place}/fuse", DEVICE)
            finally:
                subprocess.run(["umount", "--lazy", place], check=True)
    except (OSError, OperationError, subprocess.CalledProcessError) as error:
        return str(error)
    return ""


@contextmanager
def device_mode(mode: int) -> Iterator[None]:
    """/dev/fuse with another mode for a while; skips where that is the machine's own."""
    before = stat.S_IMODE(os.stat(DEVICE).st_mode)
    if before == mode:
        yield
        return
    if reason := no_own_device():
        pytest.skip(f"needs a {DEVICE} of its own ({reason}): chmod {mode:o} {DEVICE}")
    os.chmod(DEVICE, mode)
    try:
        yield
    finally:
        os.chmod(DEVICE, before)


def registered(work: Area) -> registration.Registered:
    runtime_dir = "/run/monarchfs" if work.user is None else f"{work.path}/run/monarchfs"
    (found,) = [
        one
        for one in registration.find_mounts([runtime_dir])
        if one.entry.mountpoint.startswith(f"{work.path}/")
    ]
    return found


def status(work: Area, name: str = "mnt") -> dict[str, Any]:
    uid = None if work.user is None else pwd.getpwnam(work.user).pw_uid
    return mounting.report_on(work.path / name, uid, work.environment)


def kill_worker(work: Area, number: signal.Signals) -> dict[str, Any]:
    before = status(work)["worker"]
    os.kill(before["pid"], number)

    def served() -> dict[str, Any] | None:
        now = status(work)
        return now if now["worker"]["restarts"] > before["restarts"] and serves(now) else None

    result: dict[str, Any] = mounting.wait_for(served, "another worker", 10)
    return result


def serves(report: dict[str, Any]) -> bool:
    return report["state"] in ("serving", "safe mode")


def is_gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z", "X")


def assert_unmounted(work: Area) -> None:
    work.assert_nothing_runs()
    assert list(work.path.glob("run/monarchfs/*")) == []
    for path in Path("/run/monarchfs").glob("*.json"):
        with suppress(FileNotFoundError):  # another test's, which has just ended
            assert str(work.path) not in path.read_text()


def umount(work: Area, *options: str, name: str = "mnt") -> float:
    started = Stopwatch()
    done = work.run("umount", name, *options)
    assert (done.returncode, done.stdout) == (0, "")
    assert [line for line in done.stderr.splitlines() if "in use" not in line] == []
    return started.seconds()


def start_as_owner(work: Area, *command: str) -> subprocess.Popen[bytes]:
    """A process of the mount's user; unless allow_other, nobody else may enter."""
    identity: dict[str, Any] = {}
    if work.user is not None:
        owner = pwd.getpwnam(work.user)
        identity = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", **identity
    )


def run_as_owner(work: Area, *command: str) -> int:
    with start_as_owner(work, *command) as process:
        process.communicate(timeout=20)
        return process.returncode


@contextmanager
def somebody_inside(work: Area) -> Iterator[subprocess.Popen[bytes]]:
    script = f"cd {work.path}/mnt && echo in && read line"
    with start_as_owner(work, "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        yield process
        process.kill()


def assert_refused(
    work: Area, arguments: list[str], code: int, *words: str, mode: str = "serve"
) -> None:
    before = work.files()
    done = work.run(*arguments, mode=mode)
    for word in words:
        mounting.assert_one_line(done, code, word)
    assert done.stderr.endswith("\n")
    work.assert_nothing_runs()
    assert work.files() == before


def is_plain(value: object, depth: int = 10) -> bool:
    """Whether JSON can hold it, and any reader take it: finite, of bounded depth and size."""
    if isinstance(value, dict):
        return depth > 0 and all(is_plain(one, depth - 1) for one in value.values())
    if isinstance(value, list):
        return depth > 0 and all(is_plain(one, depth - 1) for one in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) < 1 << 64
