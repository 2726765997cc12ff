"""Getting the private mount of a source: joining the existing one, or having one made.

The jobs of a user on a node share one mount of a source, and the tasks of a job one namespace
daemon (``supervisor.namespace_daemon``).
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial

from monarchfs.config import User
from monarchfs.config.places import DefaultPlaces
from monarchfs.supervisor.daemon import run_in_background
from monarchfs.supervisor.lease import MOST_END_SECONDS, STARTING, MountLease, sweep
from monarchfs.supervisor.lock import NamedLock
from monarchfs.supervisor.namespace_daemon import MountRequest, run_namespace_daemon
from monarchfs.supervisor.registration import open_runtime_dir
from monarchfs.types import OperationError

_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID")
_PARENT_GRACE_SECONDS = 5.0
_ATTEMPTS = 3
_POLL_SECONDS = 0.05


def stems_of(
    places: DefaultPlaces, source: str, user: User, environ: Mapping[str, str]
) -> tuple[str, str]:
    """`MountRequest.stem` and `mount_stem`: the first is the same for all of a job, the second for
    all of the user's jobs."""
    job = [environ.get(name, "") for name in _JOB]
    mount = "\0".join([source, str(user.uid)])
    names = ("\0".join([mount, *job]), mount)
    stem, mount_stem = (hashlib.sha256(os.fsencode(name)).hexdigest()[:24] for name in names)
    return os.path.join(places.runtime_dir, stem), os.path.join(places.runtime_dir, mount_stem)


def lease_mount(
    wanted: MountRequest, deadline: float, directories: Callable[[], Iterable[str]]
) -> MountLease:
    """Joins the mount that is ``wanted``, or makes it first; blocks until ``deadline``
    (time.monotonic()) and a few seconds at most. ``directories`` are the runtime directories in
    which the user may have it already. Raises UsageError or OperationError."""
    overdue = f"the mount of {wanted.source} that another process makes does not come about"
    with ExitStack() as made:
        open_runtime_dir(wanted.places.runtime_dir, made)
        made.pop_all()
    sweep(wanted.places.runtime_dir)
    lock = NamedLock.take(wanted.stem + STARTING, deadline, overdue)
    give_up = min(deadline, time.monotonic() + MOST_END_SECONDS)
    attempts = 0
    try:
        while attempts < _ATTEMPTS:
            lease = _take_lease(wanted.stem, directories)
            if lease is not None:
                return lease
            left = deadline - time.monotonic()
            timeout = left + MOST_END_SECONDS + _PARENT_GRACE_SECONDS
            join_mount = partial(_take_lease, wanted.mount_stem, directories)
            try:
                run_in_background(
                    partial(run_namespace_daemon, wanted, deadline, os.getpid(), join_mount),
                    timeout=timeout,
                    overdue=f"the mount of {wanted.source} did not come about within"
                    f" {timeout:.0f} s",
                )
                attempts += 1
            except OperationError as error:
                # The mount of another job that begins or ends, perhaps, or that is taken over.
                in_use = f"state directory {wanted.state_dir} is in use" in str(error)
                if not in_use or time.monotonic() > give_up:
                    raise
                time.sleep(_POLL_SECONDS)
    finally:
        lock.release()
    raise OperationError(f"the mount of {wanted.source} ends as soon as it is made: see its log")


def _take_lease(stem: str, directories: Callable[[], Iterable[str]]) -> MountLease | None:
    """From the daemon with these files, the directory used here first. Other processes may use
    another one: without a session, or since somebody else took the name in /tmp."""
    name = os.path.basename(stem)
    own = [directory for directory in directories() if _is_own(directory)]
    stems = dict.fromkeys([stem, *(os.path.join(place, name) for place in own)])
    return next((lease for one in stems if (lease := MountLease.take(one)) is not None), None)


def _is_own(directory: str) -> bool:
    try:
        st = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(st.st_mode) and st.st_uid == os.geteuid() and not st.st_mode & 0o022
