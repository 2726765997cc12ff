"""``monarchfs run`` as root and as an ordinary user, in a place of its own."""

import json
import os
import pwd
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import mounting
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import ENVIRONMENT, Bench, fuse_mounts, processes_about, wait_for
from tests.support.programs import execute
from tests.support.trees import write_files

NOBODY = pwd.getpwnam("nobody")
GROUP = 4
"""A supplementary group that nobody is in by default."""


def as_nobody(groups: str) -> list[str]:
    return ["setpriv", f"--reuid={NOBODY.pw_uid}", f"--regid={NOBODY.pw_gid}", groups]


@dataclass
class Place:
    """A source, room for tiers and state, and who runs the commands."""

    path: Path
    user: bool
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    holder: subprocess.Popen[str] | None = None

    @property
    def source(self) -> Path:
        return self.path / "source"

    def command(self, *words: str, options: list[str] | None = None) -> list[str]:
        return [*self.entered(), *self.bare(*words, options=options)]

    def bare(self, *words: str, options: list[str] | None = None) -> list[str]:
        """Not in the place that `entered` leads to."""
        storage = ["--tier", f"{self.path}/tier=1G", "--state-dir", f"{self.path}/state"]
        return [
            *(*mounting.MONARCHFS, "run", str(self.source)),
            *(*storage, "--log-file", f"{self.path}/log", *(options or ()), "--", *words),
        ]

    def entered(self) -> list[str]:
        """Where /dev/fuse is open to everybody, as on most machines, and for others as it was: in
        one mount namespace for all."""
        if not self.user:
            return []
        if self.holder is None:
            command = [*self.wrapper(), "sh", "-c", "echo && exec cat"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.holder = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
            self.started.append(self.holder)
            next(lines_of(self.holder))
        enter = f'exec nsenter --mount=/proc/{self.holder.pid}/ns/mnt sh -c "$0" "$PWD" "$@"'
        go_on = ["sh", "-c", enter, 'cd "$0" && exec "$@"']
        return [*go_on, *as_nobody(f"--groups={GROUP}")]

    def wrapper(self) -> list[str]:
        """The same, in a mount namespace of its own."""
        if not self.user:
            return []
        script = f'mount --bind {shlex.quote(str(self.path / "fuse"))} /dev/fuse && exec "$@"'
        inner = ["sh", "-c", script, "sh", *as_nobody(f"--groups={GROUP}")]
        return ["unshare", "--mount", "--propagation", "slave", *inner]

    @property
    def environment(self) -> dict[str, str]:
        environment = {k: v for k, v in ENVIRONMENT.items() if not k.startswith("SLURM_")}
        return {**environment, "XDG_RUNTIME_DIR": f"{self.path}/run"}

    def run(
        self, *words: str, options: list[str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        return self.call(self.command(*words, options=options), **more)

    def call(self, command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Any command, in this place; ``env`` is added to its environment."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": self.path, **more}
        streams["env"] = {**self.environment, **more.get("env", {})}
        return subprocess.run(command, text=True, timeout=60, check=False, **streams)

    def start(self, *words: str, job: int | None = None, **more: Any) -> subprocess.Popen[str]:
        environment = self.environment | ({} if job is None else {"SLURM_JOB_ID": str(job)})
        command = self.command(*words, options=more.pop("options", None))
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        process: subprocess.Popen[str] = subprocess.Popen(
            command, env=environment, cwd=self.path, text=True, **streams
        )
        self.started.append(process)
        return process

    def status(self, *words: str) -> subprocess.CompletedProcess[str]:
        as_user = as_nobody("--clear-groups") if self.user else []
        return self.call([*as_user, *mounting.MONARCHFS, "status", *words])

    def told(self) -> dict[str, Any]:
        done = self.status(str(self.source), "--json")
        report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        return report

    def runtime_files(self) -> list[str]:
        """What is in the runtime directories about this place."""
        names = [str(p) for p in (self.path / "run").rglob("*") if not p.is_dir()]
        for file in Path("/run/monarchfs").glob("*.json"):
            try:
                mentioned = str(self.path) in file.read_text()
            except FileNotFoundError:
                continue
            names += [str(file)] if mentioned else []
        return names

    def processes(self) -> list[int]:
        return processes_about(str(self.path))

    def wait_nothing_left(self) -> None:
        wait_for(lambda: not self.processes(), "all processes to end")
        assert self.runtime_files() == []
        assert fuse_mounts(str(self.path)) == []


def make_place(work: Bench, *, user: bool) -> Place:
    interpreter_for("nobody" if user else None)
    write_files(work.path / "source", {"file": b"content", "below/other": b"deeper"})
    os.mknod(work.path / "fuse", 0o020666, os.makedev(10, 229))
    (work.path / "fuse").chmod(0o666)
    (work.path / "run").mkdir(mode=0o700)
    if user:
        os.chown(work.path / "run", NOBODY.pw_uid, NOBODY.pw_gid)
        work.path.chmod(0o1777)
    place = Place(work.path, user)
    # Both are refused in a chroot, say, or where /tmp is mounted nodev.
    probe = ["unshare", "--user", "sh", "-c", "exec 3<>/dev/fuse"]
    if user and execute([*place.wrapper(), *probe]).returncode != 0:
        pytest.skip("needs user namespaces of ordinary users, and TMPDIR without nodev: no chroot")
    return place


@contextmanager
def left_clean(place: Place) -> Iterator[Place]:
    try:
        yield place
    finally:
        for process in place.started:
            with process:  # closes its pipes
                process.kill()
    place.wait_nothing_left()


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return iter(process.stdout.readline, "")
