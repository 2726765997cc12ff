"""The daemon of a share: started, asked and ended, each within a deadline.

It is started by the command line, as a site would do it by hand. It soon is no child of the prolog,
and it is in slurmd's control group, not the job's. With systemd it gets a scope of its own, so that
a restart of slurmd.service does not end it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from monarchfs.config.model import User
from monarchfs.config.places import ROOT_RUNTIME_DIR
from monarchfs.control import client
from monarchfs.fuse.mount import SYSTEM_PATH
from monarchfs.slurm.shares import Dataset
from monarchfs.supervisor.launch import module_command
from monarchfs.supervisor.recover import FoundMount, find_all, find_one
from monarchfs.types import OperationError

STATUS_SECONDS = 3.0
_GIVE_UP_SECONDS = 2.0
_FIT = frozenset({"serving", "source not responding", "restarting", "safe mode"})
_BOOTED = "/run/systemd/system"
"""There if systemd is the system's manager (sd_booted(3))."""
_SYSTEMD_RUN = "/usr/bin/systemd-run"


def command_of_ours(*words: str) -> list[str]:
    """How a prolog runs a command of this program, whatever the environment and the working
    directory."""
    return [*module_command("monarchfs"), *words]


def clean_environment() -> dict[str, str]:
    """A prolog's own holds what a job's user wrote."""
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"}


def start(
    dataset: Dataset,
    mountpoint: str,
    user: User,
    *,
    tiers: Sequence[str],
    state_dir: str,
    options: Sequence[str],
    log_file: str | None,
    unit: str,
    deadline: float,
) -> None:
    """Mounts, for ``user``. Raises OperationError, with the reason in one line, if that fails or
    takes longer than ``deadline`` (time.monotonic); nothing is mounted then, or soon will not be.
    """
    left = deadline - time.monotonic()
    words = ["mount", dataset.path, mountpoint, "--source-fd", str(dataset.descriptor)]
    words += ["--user", user.name, "--state-dir", state_dir]
    for tier in tiers:
        words += ["--tier", tier]
    for option in (*options, f"start_timeout_seconds={max(1.0, left - 0.5):.1f}"):
        words += ["-o", option]
    if log_file is not None:
        words += ["--log-file", log_file]
    command = command_of_ours(*words)
    scope = _scope(f"--unit={unit}")
    _run([*scope, *command], command if scope else None, dataset.descriptor, deadline)


def find(mountpoint: str) -> FoundMount | None:
    """The mount at ``mountpoint``, by the mount table and registrations."""
    return find_one(mountpoint, lambda _owners: [ROOT_RUNTIME_DIR])


def find_below(directory: str) -> list[FoundMount]:
    """All mounts of ours, and registrations of such, below a directory: also a mount that came
    about after its prolog was killed."""
    found = find_all(lambda _owners: [ROOT_RUNTIME_DIR])
    return [one for one in found if one.mountpoint.startswith(directory + "/")]


def status_of(found: FoundMount, timeout: float = STATUS_SECONDS) -> dict[str, Any] | None:
    """What a mount's daemon says of itself; None if it does not answer in time."""
    if found.registered is None or not found.supervisor_alive:
        return None
    try:
        return client.request(found.registered, {"command": "status"}, max(0.1, timeout))
    except OperationError:
        return None


def started_ns(found: FoundMount) -> int | None:
    """When a mount came about, which distinguishes it from another in its place; None if
    unknown."""
    return None if found.registered is None else found.registered.entry.started_ns


def serves(status: dict[str, Any] | None) -> bool:
    """Whether a mount with this status is fit for a job: also if its source does not answer just
    now (local files are served), or its worker is being replaced."""
    return status is not None and str(status.get("state")) in _FIT


def leave_running(words: Sequence[str]) -> None:
    """Runs a command of ours that outlives this process; it logs what it has to say."""
    begun([*_scope(), *command_of_ours(*words)], start_new_session=True)


def _scope(*options: str) -> list[str]:
    """What a command has in front, to be in a scope of its own: systemd-run(1) makes that and then
    becomes the command. Nothing where there is no systemd."""
    if not os.path.isdir(_BOOTED) or not os.access(_SYSTEMD_RUN, os.X_OK):
        return []
    return [_SYSTEMD_RUN, "--scope", "--quiet", "--collect", "--slice=monarchfs", *options, "--"]


def _run(
    command: Sequence[str], instead: Sequence[str] | None, descriptor: int, deadline: float
) -> None:
    """Runs ``command``; ``instead`` if it failed without a word of ours. Either inherits
    ``descriptor``."""
    # Not a pipe: a process that hangs in the kernel would keep it open.
    with open(os.memfd_create("monarchfs-mount-errors"), "w+b") as errors:
        process = begun(
            command, stderr=errors.fileno(), pass_fds=[descriptor], start_new_session=True
        )
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _give_up(process)
            raise OperationError("it was not mounted in time: see the log of the mount") from None
        errors.seek(0)
        lines = errors.read(1 << 16).decode(errors="replace").splitlines()
    if code == 0:
        return
    said = next((line for line in reversed(lines) if line.startswith("monarchfs: ")), None)
    if said is None and instead is not None:
        _run(instead, None, descriptor, deadline)
        return
    reason = (said or (lines[-1] if lines else f"exit code {code}")).removeprefix("monarchfs: ")
    raise OperationError(reason)


def begun(command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    """A process with a clean environment, in /; ``how`` are further arguments of Popen."""
    null = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen(command, cwd="/", **{"env": clean_environment(), **null, **how})


def _give_up(process: subprocess.Popen[bytes]) -> None:
    """An interrupted ``monarchfs mount`` takes back what it began; waits a moment for that."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_GIVE_UP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
