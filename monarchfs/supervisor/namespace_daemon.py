"""The daemon of the private mount of ``monarchfs run``: the namespace, the mount in it, and the
leases.

It lives in a mount namespace of its own, in which the source's own path shows the mount. Its child
is the usual supervisor. Whoever connects to its socket is sent the namespaces, and holds the mount
while the connection is open, so every end of a process is noticed. When the last lease is gone,
the daemon unmounts within a few seconds, whatever still uses the mount, and then closes that last
connection.

If several start at once, one makes the mount and the others join it: locks in the runtime directory
see to that (``supervisor.shared`` has the other side).
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

from monarchfs.config import User
from monarchfs.config.places import DefaultPlaces, default_state_dir
from monarchfs.config.settings import Settings
from monarchfs.control.peers import peer_uid, short_socket_path
from monarchfs.supervisor.daemon import Report, run_in_background
from monarchfs.supervisor.lock import NamedLock
from monarchfs.supervisor.namespace import Spaces, leave_for_own
from monarchfs.supervisor.preflight import MountSpec
from monarchfs.supervisor.recover import FoundMount, find_one, remove_by_force
from monarchfs.supervisor.start import mount_and_supervise
from monarchfs.system.parent_death import die_with_parent
from monarchfs.types import OperationError

log = logging.getLogger(__name__)

SOCKET, KEPT, STARTING = ".run", ".kept", ".starting"
"""Suffixes of the daemon's files: its socket; what it locks for its life; what a process locks that
looks for the daemon, or starts it."""

_FIRST_LEASE_SECONDS = 10.0
_POLITE_SECONDS = 2.0
_END_SECONDS = 3.0
_FORCE_SECONDS = 1.0
MOST_END_SECONDS = _POLITE_SECONDS + _END_SECONDS + _FORCE_SECONDS + 2.0
"""How long the end of a private mount takes at most, after the last lease is gone."""

_PARENT_GRACE_SECONDS = 2.0
_TICK_SECONDS = 1.0
_POLL_SECONDS = 0.01
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class MountRequest:
    """What is to be mounted on ``source`` itself (absolute, resolved), for whom. ``stem`` is the
    path of the daemon's files without suffixes: those with the same stem share the mount.
    ``cache``: 2 and more where other jobs' mounts have those before."""

    settings: Settings
    source: str
    user: User
    places: DefaultPlaces
    stem: str
    cache: int = 1

    @property
    def state_dir(self) -> str:
        """Where the mount's index is."""
        return self.settings.state_dir or default_state_dir(
            self.places, self.source, self.user.uid, self.cache
        )

    @property
    def socket_path(self) -> str:
        return self.stem + SOCKET


def run_namespace_daemon(
    wanted: MountRequest, deadline: float, starter: int, report: Report
) -> int:
    """The daemon's life: mounts, calls ``report``, and returns 0 when the mount is gone; at once if
    its parent ``starter`` has ended meanwhile.

    Raises UsageError or OperationError if it does not come about by ``deadline``
    (time.monotonic()); nothing is left then.
    """
    # Who reads the command's output is not to wait for our end.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    with ExitStack() as undo:
        # An earlier daemon of the same mount may still be unmounting it.
        lock = NamedLock.take(
            wanted.stem + KEPT, deadline, f"an earlier mount of {wanted.source} does not end"
        )
        undo.callback(lock.release)
        with_users = leave_for_own()
        supervisor = _start_supervisor(wanted, deadline)
        spaces = Spaces.own(with_users=with_users)
        daemon = NamespaceDaemon(wanted, supervisor, spaces)
        undo.callback(daemon.end)
        if os.getppid() == starter:
            daemon.listen()
            report()
            daemon.run()
    return 0


def _start_supervisor(wanted: MountRequest, deadline: float) -> int:
    """The process number of the mount's supervisor, once the mount answers."""
    parent = os.getpid()

    def run(report: Report) -> int:
        # Without its daemon nobody would ever end it.
        die_with_parent(parent, signal.SIGTERM)
        settings = replace(wanted.settings, state_dir=wanted.state_dir)
        spec = MountSpec(settings, wanted.source, wanted.source, wanted.user, wanted.places)
        return mount_and_supervise(spec, report=report)

    left = max(0.1, deadline - time.monotonic())
    return run_in_background(
        run,
        timeout=left + _PARENT_GRACE_SECONDS,
        overdue=f"the mount did not come about within {left:.0f} s",
    )


class NamespaceDaemon:
    """Constant: what is mounted, its supervisor's process, the namespaces, the socket. Changing:
    who holds the mount."""

    def __init__(self, wanted: MountRequest, supervisor: int, spaces: Spaces) -> None:
        self._wanted = wanted
        self._supervisor = supervisor
        self._supervisor_ended = False
        self._spaces = spaces
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._leases: list[socket.socket] = []
        self._last: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        found = self._find()
        registered = found.registered if found is not None else None
        if registered is None:
            raise OperationError(f"{wanted.source} was unmounted by somebody else: try again")
        self._welcome = {
            "control": registered.socket_path,
            "owner": registered.owner_uid,
            "settings": settings_digest(wanted.settings),
        }

    def listen(self) -> None:
        path = self._wanted.socket_path
        with suppress(FileNotFoundError):
            os.unlink(path)  # of a daemon that was killed: we have its lock
        before = os.umask(0o177)
        try:
            with short_socket_path(path) as short:
                self._listener.bind(short)
        finally:
            os.umask(before)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)

    def run(self) -> None:
        """Until the last lease is gone, or the mount."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)
        first_by = time.monotonic() + _FIRST_LEASE_SECONDS
        while self._last is None:
            for key, _ in self._selector.select(_TICK_SECONDS):
                key.data()
            if not self._leases and self._last is None and time.monotonic() > first_by:
                log.info("nobody wants %s any more", self._wanted.source)
                return
            if self._has_ended():
                log.warning("the mount of %s has ended", self._wanted.source)
                return

    def end(self) -> None:
        """Unmounts, in MOST_END_SECONDS at most. Whoever comes now waits for the lock."""
        with suppress(FileNotFoundError):
            os.unlink(self._wanted.socket_path)
        self._listener.close()
        if not self._told_to_end(_POLITE_SECONDS) and not self._told_to_end(_END_SECONDS):
            log.warning("the supervisor of %s does not end", self._wanted.source)
        found = self._find()
        if found is not None:
            remove_by_force(found, time.monotonic() + _FORCE_SECONDS)

    def _on_connection(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        # Stricter than `control.may_ask`: who connects gets the namespaces and holds the mount.
        # Only this user has a use for that, and root needs no help to enter them.
        if peer_uid(connection) not in (0, os.geteuid()):
            connection.close()
            return
        connection.setblocking(False)
        try:
            message = json.dumps(self._welcome).encode()
            socket.send_fds(connection, [message], self._spaces.descriptors)
        except OSError as error:
            log.debug("somebody left before the welcome: %s", error)
            connection.close()
            return
        self._leases.append(connection)
        self._selector.register(
            connection, selectors.EVENT_READ, partial(self._on_lease, connection)
        )

    def _on_lease(self, connection: socket.socket) -> None:
        """Nobody says anything here: a connection that can be read is closed."""
        self._selector.unregister(connection)
        self._leases.remove(connection)
        if self._leases:
            connection.close()
        else:
            self._last = connection  # closed when this process ends, which is what it waits for

    def _told_to_end(self, seconds: float) -> bool:
        """Tells the supervisor to unmount (a second time: by force); whether it went in time."""
        deadline = time.monotonic() + seconds
        if not self._has_ended():
            os.kill(self._supervisor, signal.SIGTERM)
        while not self._has_ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _has_ended(self) -> bool:
        if not self._supervisor_ended:
            self._supervisor_ended = os.waitpid(self._supervisor, os.WNOHANG) != (0, 0)
        return self._supervisor_ended

    def _find(self) -> FoundMount | None:
        return find_one(self._wanted.source, lambda _: [self._wanted.places.runtime_dir])


def settings_digest(settings: Settings) -> str:
    """What tells whether two wanted the same mount."""
    return repr(settings)
