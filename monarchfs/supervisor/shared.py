"""Getting the private mount of a source: joining the existing one, or having one made.

One mount per user, source and job on a node: the tasks of a job step share it. Another job's would
end with that job, whose processes a batch system kills.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from monarchfs.config import User
from monarchfs.config.places import DefaultPlaces
from monarchfs.control.peers import peer_uid, short_socket_path
from monarchfs.supervisor.daemon import run_in_background
from monarchfs.supervisor.lock import NamedLock
from monarchfs.supervisor.namespace import Spaces
from monarchfs.supervisor.namespace_daemon import (
    KEPT,
    MOST_END_SECONDS,
    SOCKET,
    STARTING,
    MountRequest,
    run_namespace_daemon,
    settings_digest,
)
from monarchfs.supervisor.registration import open_runtime_dir
from monarchfs.types import OperationError, UsageError

_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID")
_WELCOME_BYTES = 1 << 16
_WELCOME_SECONDS = 5.0
_MOST_SPACES = 3
_PARENT_GRACE_SECONDS = 5.0
_ATTEMPTS = 3
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class MountLease:
    """Keeps a private mount until this is closed or its process ends. ``control`` is the path of
    the mount's control socket, ``owner_uid`` who listens there. ``same_settings``: the mount has
    the settings that were asked for here."""

    spaces: Spaces
    control: str
    owner_uid: int
    same_settings: bool
    _connection: socket.socket

    def close(self) -> None:
        """Lets go of the mount. If nobody else holds it, returns when it is gone, after
        MOST_END_SECONDS at most."""
        self.spaces.close()
        with self._connection:
            self._connection.settimeout(MOST_END_SECONDS)
            try:
                self._connection.shutdown(socket.SHUT_WR)
                self._connection.recv(1)
            except OSError:
                return  # it takes longer, or was killed: the daemon's own matter


def stem_of(places: DefaultPlaces, source: str, user: User, environ: Mapping[str, str]) -> str:
    """`MountRequest.stem`: the same for all that are to share a mount."""
    job = [environ.get(name, "") for name in _JOB]
    name = "\0".join([source, str(user.uid), *job])
    return os.path.join(places.runtime_dir, hashlib.sha256(os.fsencode(name)).hexdigest()[:24])


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
    _sweep(wanted.places.runtime_dir)
    lock = NamedLock.take(wanted.stem + STARTING, deadline, overdue)
    attempts = 0
    try:
        while attempts < _ATTEMPTS:
            stems = _stems(wanted, directories())
            lease = next((one for stem in stems if (one := _connect(wanted, stem))), None)
            if lease is not None:
                return lease
            left = deadline - time.monotonic()
            timeout = left + MOST_END_SECONDS + _PARENT_GRACE_SECONDS
            try:
                run_in_background(
                    partial(run_namespace_daemon, wanted, deadline, os.getpid()),
                    timeout=timeout,
                    overdue=f"the mount of {wanted.source} did not come about within"
                    f" {timeout:.0f} s",
                )
                attempts += 1
            except UsageError:
                # The state directory may be in use by the very mount, which begins or ends.
                if time.monotonic() > deadline or not _is_elsewhere(wanted, directories()):
                    raise
                time.sleep(_POLL_SECONDS)
    finally:
        lock.release()
    raise OperationError(f"the mount of {wanted.source} ends as soon as it is made: see its log")


def _stems(wanted: MountRequest, directories: Iterable[str]) -> list[str]:
    """Where the mount's daemon may listen, the directory used here first. Other processes may use
    another one: without a session, or since somebody else took the name in /tmp."""
    name = os.path.basename(wanted.stem)
    own = [directory for directory in directories if _is_own(directory)]
    return list(dict.fromkeys([wanted.stem, *(os.path.join(place, name) for place in own)]))


def _is_own(directory: str) -> bool:
    try:
        st = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(st.st_mode) and st.st_uid == os.geteuid() and not st.st_mode & 0o022


def _is_elsewhere(wanted: MountRequest, directories: Iterable[str]) -> bool:
    """Whether a process with another runtime directory makes the mount, has it or ends it."""
    for stem in _stems(wanted, directories)[1:]:
        _sweep(os.path.dirname(stem))
        if os.path.exists(stem + STARTING) or os.path.exists(stem + KEPT):
            return True
    return False


def _sweep(runtime_dir: str) -> None:
    """Removes the files of daemons that were killed, perhaps with their job: nobody else would, as
    their names never come again."""
    for name in os.listdir(runtime_dir):
        stem, suffix = os.path.splitext(os.path.join(runtime_dir, name))
        if suffix not in (KEPT, STARTING):
            continue
        try:
            lock = NamedLock.take(stem + suffix, 0.0, "")
        except OperationError:
            continue  # somebody lives
        if suffix == KEPT:
            with suppress(FileNotFoundError):
                os.unlink(stem + SOCKET)
        lock.release()


def _connect(wanted: MountRequest, stem: str) -> MountLease | None:
    """None where there is no mount, or it is about to end."""
    path = stem + SOCKET
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_WELCOME_SECONDS)
    descriptors: list[int] = []
    try:
        with short_socket_path(path) as short:
            connection.connect(short)
        if peer_uid(connection) != os.geteuid():
            raise OSError("somebody else listens there")
        message, descriptors, _, _ = socket.recv_fds(connection, _WELCOME_BYTES, _MOST_SPACES)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        welcome = json.loads(message)
        return MountLease(
            Spaces.from_descriptors(descriptors),
            str(welcome["control"]),
            int(welcome["owner"]),
            welcome["settings"] == settings_digest(wanted.settings),
            connection,
        )
    except (OSError, ValueError, KeyError):
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()
        return None
