"""Holding the private mount of a source: a connection to a namespace daemon.

The jobs of a user on a node share one mount of a source, and the tasks of a job one namespace
daemon (``supervisor.namespace_daemon``). Who shares is told by the names of their files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import selectors
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from monarchfs.config.places import Search, is_own
from monarchfs.control.peers import peer_uid, short_socket_path
from monarchfs.supervisor.namespace import Spaces
from monarchfs.supervisor.preflight import MountSpec
from monarchfs.system.locks import release_named_lock, take_named_lock
from monarchfs.types import OperationError

log = logging.getLogger(__name__)

SOCKET, KEPT, STARTING = ".run", ".kept", ".starting"
"""Suffixes of a namespace daemon's files: its socket; what it locks for its life; what a process
locks that looks for the daemon, or starts it."""

MOST_END_SECONDS = 8.0
"""How long the end of a private mount takes at most, after the last lease is gone."""

_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID")
_BACKLOG = 128
_WELCOME_BYTES = 1 << 16
_WELCOME_SECONDS = 5.0
_MOST_SPACES = 3


def job_stem(spec: MountSpec, environ: Mapping[str, str]) -> str:
    """The path, without suffixes, of the files of the daemon that a job of the user's has for a
    private mount."""
    return _stem(spec, [environ.get(name, "") for name in _JOB])


def mount_stem(spec: MountSpec) -> str:
    """The same of the daemon that owns the mount, for all of the user's jobs."""
    return _stem(spec, [])


def _stem(spec: MountSpec, job: list[str]) -> str:
    words = "\0".join([spec.source, str(spec.user.uid), *job])
    name = hashlib.sha256(os.fsencode(words)).hexdigest()[:24]
    return os.path.join(spec.places.runtime_dir, name)


@dataclass(slots=True)
class MountLease:
    """Keeps a private mount until this is closed or its process ends. ``control`` is the path of
    the mount's control socket, ``owner_uid`` who listens there; ``settings`` is the digest of the
    mount's settings."""

    spaces: Spaces
    control: str
    owner_uid: int
    settings: str
    _connection: socket.socket

    @classmethod
    def take_lease(cls, stem: str, search: Search) -> MountLease | None:
        """From the daemon with the files ``stem``; None if there is none, or it is about to end.
        The directory used here comes first; other processes may use another one: without a
        session, or since somebody else took the name in /tmp."""
        name = os.path.basename(stem)
        own = [place for place in search(set()) if is_own(place, os.geteuid())]
        stems = dict.fromkeys([stem, *(os.path.join(place, name) for place in own)])
        return next((lease for one in stems if (lease := cls._connected(one)) is not None), None)

    @classmethod
    def _connected(cls, stem: str) -> MountLease | None:
        """With these files alone."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_WELCOME_SECONDS)
        descriptors: list[int] = []
        try:
            with short_socket_path(stem + SOCKET) as short:
                connection.connect(short)
            if peer_uid(connection) != os.geteuid():
                raise OSError("somebody else listens there")
            message, descriptors, _, _ = socket.recv_fds(connection, _WELCOME_BYTES, _MOST_SPACES)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            welcome = json.loads(message)
            return cls(
                Spaces.from_descriptors(descriptors),
                str(welcome["control"]),
                int(welcome["owner"]),
                str(welcome["settings"]),
                connection,
            )
        except (OSError, ValueError, KeyError):
            for descriptor in descriptors:
                os.close(descriptor)
            connection.close()
            return None

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


class LeaseServer:
    """A namespace daemon's side. Changing: ``welcome``, what who comes is told; ``spaces``, what
    they get; where it listens; who holds the mount, and who was the last to let go."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.welcome: dict[str, Any] = {}
        self.spaces: Spaces | None = None
        self._selector = selector
        self._listeners: dict[str, socket.socket] = {}
        self._holders: list[socket.socket] = []
        self._last: socket.socket | None = None

    @property
    def ended(self) -> bool:
        """Whether the last lease is gone."""
        return self._last is not None

    @property
    def unused(self) -> bool:
        return not self._holders

    def listen(self, stem: str) -> None:
        """The caller has the lock on the daemon's files."""
        path = stem + SOCKET
        with suppress(FileNotFoundError):
            os.unlink(path)  # of a daemon that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listeners[path] = listener
        before = os.umask(0o177)
        try:
            with short_socket_path(path) as short:
                listener.bind(short)
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._selector.register(
            listener, selectors.EVENT_READ, partial(self._on_connection, listener)
        )

    def close(self) -> None:
        """Nobody else is served."""
        for path, listener in self._listeners.items():
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()

    def _on_connection(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        # Stricter than `control.may_ask`: who connects gets the namespaces and holds the mount.
        # Only this user has a use for that, and root needs no help to enter them.
        if peer_uid(connection) not in (0, os.geteuid()):
            connection.close()
            return
        assert self.spaces is not None
        connection.setblocking(False)
        try:
            message = json.dumps(self.welcome).encode()
            socket.send_fds(connection, [message], self.spaces.descriptors)
        except OSError as error:
            log.debug("somebody left before the welcome: %s", error)
            connection.close()
            return
        self._holders.append(connection)
        self._selector.register(
            connection, selectors.EVENT_READ, partial(self._on_holder, connection)
        )

    def _on_holder(self, connection: socket.socket) -> None:
        """Nobody says anything here: a connection that can be read is closed."""
        self._selector.unregister(connection)
        self._holders.remove(connection)
        if self._holders:
            connection.close()
        else:
            self._last = connection  # closed when this process ends, which is what it waits for


def sweep(runtime_dir: str) -> None:
    """Removes the files of daemons that were killed, perhaps with their job: nobody else would, as
    their names never come again."""
    for name in os.listdir(runtime_dir):
        stem, suffix = os.path.splitext(os.path.join(runtime_dir, name))
        if suffix not in (KEPT, STARTING):
            continue
        try:
            lock = take_named_lock(stem + suffix, 0.0, "")
        except OperationError:
            continue  # somebody lives
        if suffix == KEPT:
            with suppress(FileNotFoundError):
                os.unlink(stem + SOCKET)
        release_named_lock(stem + suffix, lock)
