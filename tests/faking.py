"""Mounts whose worker is a fake: everything around the worker is real."""

from __future__ import annotations

import fcntl
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import surroundings
from tests.mounting import as_user, fuse_mounts, processes_about, wait_for

FAKE_CLI = str(Path(__file__).with_name("fake_cli.py"))
NOBODY = "nobody"


def interpreter_for(user: str | None) -> str:
    """A Python that ``user`` may run; skips the test where there is none."""
    for python in (sys.executable, "/usr/bin/python3"):
        # By way of a shell, because setpriv looks programs up with root's capabilities.
        shell = ["/bin/sh", "-c", 'exec "$0" "$@"']
        probe = as_user(user, [*shell, python, "-I", FAKE_CLI, "serve", "--version"])
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
        return as_user(self.user, [self.python, "-I", FAKE_CLI, mode, *arguments])

    def run(
        self, *arguments: str, mode: str = "serve", timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments, mode=mode),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.path,
            env=self.environment,
            check=False,
        )

    def mount(self, *options: str, mode: str = "serve") -> None:
        done = self.run("mount", "src", "mnt", *self.storage, *options, mode=mode)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def files(self) -> set[str]:
        """Everything below the area but what is mounted there, which might hang."""
        mounted = set(fuse_mounts(str(self.path)))
        found = set()
        for directory, names, files in os.walk(self.path):
            found |= {os.path.join(directory, name) for name in (*names, *files)}
            names[:] = [name for name in names if os.path.join(directory, name) not in mounted]
        return found

    def assert_nothing_runs(self) -> None:
        wait_for(lambda: not processes_about(str(self.path)), "processes to end", 5)
        wait_for(lambda: not self.workers(), "workers to end", 5)
        assert fuse_mounts(str(self.path)) == []

    def workers(self) -> list[int]:
        """Fake workers and supervisors that have something of the area open."""
        found = []
        for pid in processes_about(FAKE_CLI.removesuffix("fake_cli.py")):
            try:
                links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
            except OSError:
                continue
            if any(link.startswith(str(self.path)) for link in links):
                found.append(pid)
        return found


@contextmanager
def area(path: Path, user: str | None) -> Iterator[Area]:
    """An `Area` in ``path``, which any user may enter; fails if a process or mount is left."""
    path.chmod(0o755)
    owner = pwd.getpwnam(user).pw_uid if user is not None else os.geteuid()
    for name, mode in (("src", 0o755), ("mnt", 0o755), ("run", 0o700)):
        (path / name).mkdir(mode)
        os.chown(path / name, owner, -1)
    os.chown(path, owner, -1)
    work = Area(path, user, interpreter_for(user))
    try:
        yield work
        work.assert_nothing_runs()
    finally:
        for pid in {*processes_about(str(path)), *work.workers()}:
            os.kill(pid, signal.SIGKILL)
        for point in fuse_mounts(str(path)):
            subprocess.run(["umount", "-l", point], check=False)


@contextmanager
def device_mode(mode: int) -> Iterator[None]:
    """/dev/fuse with another mode for a while, in which no other run of tests changes it."""
    with open("/dev/fuse", "rb", buffering=0) as device:
        fcntl.flock(device, fcntl.LOCK_EX)
        before = os.fstat(device.fileno()).st_mode & 0o777
        try:
            os.chmod("/dev/fuse", mode)
        except OSError as error:
            pytest.skip(f"needs to change the mode of /dev/fuse ({error.strerror}): chmod 666")
        try:
            yield
        finally:
            os.chmod("/dev/fuse", before)
