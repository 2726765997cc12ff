"""The private mount of ``monarchfs run``: the daemon that holds it, and the leases on it.

A namespace daemon lives in a mount namespace of its own, in which the source's own path shows the
mount. Its child is the usual supervisor. A lease is a connection to its socket: who connects is
sent the namespaces, and holds the mount while the connection is open, so every end of a process is
noticed. When the last lease is gone, the daemon unmounts within a few seconds, whatever still uses
the mount, and then closes that last connection.

Each job of a user on a node has such a daemon, for all of its tasks, and all of them share one
mount of a source; the names of their files say who shares. The first one's *owns* the mount. The
others have a lease there, and are *standbys* of its supervisor (``supervisor.takeover``): a batch
system kills all processes of a job that ends, and then one of the standbys owns the mount.

If several start at once, one makes the mount and the others join it: locks in the runtime directory
and on the state directory see to that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from monarchfs.config.places import Search, default_state_dir, is_own
from monarchfs.config.settings import Settings
from monarchfs.control.peers import peer_uid, short_socket_path
from monarchfs.fuse.connection import is_dead
from monarchfs.supervisor.daemon import Report, run_in_background
from monarchfs.supervisor.namespace import Spaces, join, leave_for_own
from monarchfs.supervisor.preflight import MountSpec
from monarchfs.supervisor.recover import FoundMount, find_one, remove_by_force
from monarchfs.supervisor.registration import open_runtime_dir
from monarchfs.supervisor.start import mount_and_supervise, take_over
from monarchfs.supervisor.takeover import OtherRelease, StandbyConnection, own
from monarchfs.system.inherited import drop_streams
from monarchfs.system.limits import explained
from monarchfs.system.locks import locked
from monarchfs.types import MonarchError, OperationError

log = logging.getLogger(__name__)

SOCKET, KEPT, STARTING = ".run", ".kept", ".starting"
"""Suffixes of a namespace daemon's files: its socket; what it locks for its life; what a process
locks that looks for the daemon, or starts it."""

MOST_END_SECONDS = 8.0
"""How long the end of a private mount takes at most, after the last lease is gone."""

_SIGNALS = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
)
"""Batch systems send these to all processes of a job, whose command may catch them and go on."""

_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID")
_BACKLOG = 128
_WELCOME_BYTES = 1 << 16
_WELCOME_SECONDS = 5.0
_MOST_SPACES = 3

_FIRST_LEASE_SECONDS = 10.0
_POLITE_SECONDS = 2.0
_END_SECONDS = 3.0
_FORCE_SECONDS = 1.0
assert MOST_END_SECONDS >= _POLITE_SECONDS + _END_SECONDS + _FORCE_SECONDS + 2.0

_ATTEMPTS = 3
_IN_USE_POLL_SECONDS = 0.05
_DAEMON_GRACE_SECONDS, _SUPERVISOR_GRACE_SECONDS = 5.0, 2.0
"""How much longer than these may take is waited for them."""

_TICK_SECONDS = 1.0
_FAILED_SECONDS = 0.1
_POLL_SECONDS = 0.01

_GO_ON_SECONDS = 20.0
_TAKE_OVER_SECONDS = 10.0
_MOST_TAKEOVERS, _TAKEOVER_SECONDS = 5, 60.0
"""Of a mount whose supervisors die more often than this, a daemon lets go."""


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


def settings_digest(settings: Settings) -> str:
    """What tells whether two wanted the same mount."""
    return repr(settings)


def lease_mount(spec: MountSpec, stem: str, deadline: float, search: Search) -> MountLease:
    """Joins the private mount that is wanted, or has it made first, by a daemon with the files
    ``stem``; blocks until ``deadline`` (time.monotonic()) and a few seconds at most. ``search``
    names the runtime directories in which the user may have it already. Raises UsageError or
    OperationError."""
    with ExitStack() as made:
        open_runtime_dir(spec.places.runtime_dir, made)
        made.pop_all()
    sweep(spec.places.runtime_dir)
    overdue = f"the mount of {spec.source} that another process makes does not come about"
    attempts = 0
    with locked(stem + STARTING, deadline, overdue, removes=True):
        while attempts < _ATTEMPTS:
            lease = MountLease.take_lease(stem, search)
            if lease is not None:
                return lease
            timeout = deadline - time.monotonic() + MOST_END_SECONDS + _DAEMON_GRACE_SECONDS
            overdue = f"the mount of {spec.source} did not come about within {timeout:.0f} s"
            run = partial(_run_daemon, spec, stem, deadline, search)
            try:
                run_in_background(run, timeout=timeout, overdue=overdue)
                attempts += 1
            except OperationError as error:
                # The mount of another job that begins or ends, perhaps, or that is taken over: on a
                # busy node each of these takes a while.
                in_use = f"state directory {_state_dir(spec)} is in use" in str(error)
                if not in_use or time.monotonic() > deadline:
                    raise
                time.sleep(_IN_USE_POLL_SECONDS)
    raise OperationError(f"the mount of {spec.source} ends as soon as it is made: see its log")


def _run_daemon(spec: MountSpec, stem: str, deadline: float, search: Search, report: Report) -> int:
    """The daemon's life; returns 0 when it has let go of the mount. Raises UsageError or
    OperationError if the mount does not come about by ``deadline``, or who waits for it is gone;
    nothing is left then."""
    drop_streams()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the leases tell when to end
    with ExitStack() as undo:
        # An earlier daemon of the same job may still be letting go.
        overdue = f"an earlier mount of {spec.source} does not end"
        undo.enter_context(locked(stem + KEPT, deadline, overdue, removes=True))
        daemon = NamespaceDaemon(spec, stem, search)
        undo.callback(daemon.let_go)
        daemon.mount_or_join(deadline)
        report(True)
        daemon.run()
    return 0


class NamespaceDaemon:
    """Holds the mount for its job. It owns the mount if the supervisor is its child, and is a
    standby otherwise; then it owns the mount when the owner dies.

    Constant: what is mounted, how to join it. Changing: the namespaces; the supervisor's process,
    the channel that tells it to end, and the locks, of the owner; the lease at the owner, of a
    standby; the connection to the supervisor (``_standby``), which the owner has, too; who holds
    the mount here; when it took over.
    """

    def __init__(self, spec: MountSpec, stem: str, search: Search) -> None:
        self._spec = spec
        self._stem = stem
        self._mount_stem = mount_stem(spec)
        self._search = search
        self._supervisor: int | None = None
        self._channel: socket.socket | None = None
        self._standby: StandbyConnection | None = None
        self._lease: MountLease | None = None
        self._ownership: int | None = None
        self._mount_lock = ExitStack()
        self._takeovers: deque[float] = deque(maxlen=_MOST_TAKEOVERS)
        self._selector = selectors.DefaultSelector()
        self._leases = LeaseServer(self._selector)
        self._leases.welcome["origin"] = _place()

    def mount_or_join(self, deadline: float) -> None:
        """Join the mount of another job, or mount. Raises UsageError or OperationError."""
        lease = self._joined(deadline)
        if lease is None:
            with_users = leave_for_own()
            self._start_supervisor(deadline)
            self._leases.welcome["settings"] = settings_digest(self._spec.settings)
            self._connect()
            self._own()
        else:
            with_users = lease.spaces.users is not None
            self._leases.welcome["settings"] = lease.settings
            join(lease.spaces)
        self._leases.spaces = Spaces.own(with_users=with_users)
        self._leases.listen(self._stem)

    def _joined(self, deadline: float) -> MountLease | None:
        """`_join_owner`. Raises OperationError if the supervisor there does not answer by
        ``deadline``, is of another release, or elsewhere."""
        while True:
            try:
                return self._join_owner()
            except OperationError as error:
                # Somebody may be about to take it over.
                if isinstance(error, (OtherRelease, Elsewhere)) or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def _join_owner(self) -> MountLease | None:
        """Stand by the mount of another job, with a lease there. None if there is none. Raises
        OperationError if its supervisor does not answer."""
        lease = MountLease.take_lease(self._mount_stem, self._search)
        if lease is None:
            return None
        try:
            self._stand_by(lease.control, lease.owner_uid, lease)
        except OperationError:
            lease.close()
            raise
        return lease

    def _connect(self) -> None:
        """The supervisor is a child of this process, and serves or will soon."""
        found = self._find()
        if found is None or found.registered is None:
            raise OperationError(f"{self._spec.source} was unmounted by somebody else: try again")
        self._stand_by(found.registered.socket_path, found.registered.owner_uid, None)

    def _own(self) -> None:
        """From here on daemons of other jobs find this one."""
        assert self._standby is not None
        if self._ownership is None:
            self._ownership = own(self._standby.handover)
        if self._ownership is None:
            raise OperationError(f"another process owns the mount of {self._spec.source}")
        overdue = f"another mount of {self._spec.source} does not come about, and does not end"
        until = time.monotonic() + MOST_END_SECONDS
        kept = self._mount_stem + KEPT
        self._mount_lock.enter_context(locked(kept, until, overdue, removes=True))
        self._leases.listen(self._mount_stem)

    def _stand_by(self, control: str, owner_uid: int, lease: MountLease | None) -> None:
        """By the supervisor of ``owner_uid`` that listens on ``control``; ``lease``: at the daemon
        that owns the mount, if that is another one. Raises OperationError."""
        standby = StandbyConnection(control)
        self._drop_standby()
        earlier, self._lease = self._lease, lease
        if earlier is not None:
            earlier.close()
        self._standby = standby
        self._selector.register(standby, selectors.EVENT_READ, self._on_supervisor)
        self._leases.welcome |= {"control": control, "owner": owner_uid}

    def _drop_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            self._selector.unregister(standby)
            standby.close()

    def run(self) -> None:
        """Until the last lease is gone, or the mount."""
        first_by = time.monotonic() + _FIRST_LEASE_SECONDS
        while not self._leases.ended:
            for key, _ in self._selector.select(_TICK_SECONDS):
                try:
                    key.data()
                except OSError as error:
                    # For want of a descriptor, say: what is due comes again.
                    log.error("%s", explained(error))
                    time.sleep(_FAILED_SECONDS)
            if self._leases.unused and time.monotonic() > first_by:
                log.info("nobody wants %s any more", self._spec.source)
                return
            if self._standby is None:
                log.warning("the mount of %s has ended", self._spec.source)
                return

    def let_go(self) -> None:
        """Lets go of the mount; the owner unmounts, in MOST_END_SECONDS at most. Whoever comes now
        waits for the lock."""
        self._leases.close()
        self._drop_standby()
        if self._supervisor is not None:
            if not self._told_to_end(_POLITE_SECONDS) and not self._told_to_end(_END_SECONDS):
                log.warning("the supervisor of %s does not end", self._spec.source)
            found = self._find()
            if found is not None:
                remove_by_force(found, time.monotonic() + _FORCE_SECONDS)
        self._mount_lock.close()
        if self._lease is not None:
            self._lease.close()
        sweep(self._spec.places.runtime_dir)  # what daemons of killed jobs left

    # -- the supervisor

    def _on_supervisor(self) -> None:
        assert self._standby is not None
        if self._standby.lives() and not self._standby.ended:
            return
        if self._standby.ended:
            self._drop_standby()
            return
        log.warning("the supervisor of %s died", self._spec.source)
        try:
            self._go_on(time.monotonic() + _GO_ON_SECONDS)
        except MonarchError as error:
            log.error("nobody goes on with the mount of %s: %s", self._spec.source, error)
            self._drop_standby()

    def _go_on(self, deadline: float) -> None:
        """Take over, or stand by the one who does. Raises UsageError or OperationError if nobody
        does by ``deadline``."""
        standby = self._standby
        assert standby is not None
        while not is_dead(standby.handover.descriptors.fuse):
            if self._ownership is None:
                self._ownership = own(standby.handover)
            if self._ownership is not None:
                self._take_over(standby)
                return
            with suppress(OperationError):
                if self._join_owner() is not None:
                    return
            if time.monotonic() > deadline:
                raise OperationError("no other job has taken it over")
            time.sleep(_POLL_SECONDS)
        self._drop_standby()

    def _take_over(self, standby: StandbyConnection) -> None:
        """One supervisor after the other, until this process stands by one."""
        workers = standby.workers
        runtime_dir = self._spec.places.runtime_dir
        config = replace(standby.handover.config, runtime_dir=runtime_dir)
        handover = replace(standby.handover, config=config)
        assert self._ownership is not None
        # With the ownership: if this process is killed now, nobody goes on before that one ends.
        keep = [*handover.all_descriptors, *(one.descriptor for one in workers), self._ownership]
        while self._standby is standby:
            now, times = time.monotonic(), self._takeovers
            if len(times) == _MOST_TAKEOVERS and now - times[0] < _TAKEOVER_SECONDS:
                raise OperationError("its supervisors die one after the other")
            if self._supervisor is not None:
                os.kill(self._supervisor, signal.SIGKILL)
                if not self._ends(_END_SECONDS):
                    raise OperationError("its supervisor cannot die")
            try:
                self._run_supervisor(
                    partial(take_over, handover, workers, restarts=standby.restarts),
                    timeout=_TAKE_OVER_SECONDS,
                    overdue="the next supervisor does not come about",
                    keep=keep,
                )
                self._connect()
            except OperationError as error:
                log.warning("nobody has taken over the mount of %s yet: %s", config.source, error)
            times.append(now)
        if not self._leases.listens_at(self._mount_stem):
            self._own()

    def _start_supervisor(self, deadline: float) -> None:
        """The mount answers then."""
        settings = replace(self._spec.settings, state_dir=_state_dir(self._spec))
        left = max(0.1, deadline - time.monotonic())
        self._run_supervisor(
            partial(mount_and_supervise, replace(self._spec, settings=settings)),
            timeout=left + _SUPERVISOR_GRACE_SECONDS,
            overdue=f"the mount did not come about within {left:.0f} s",
        )

    def _run_supervisor(
        self, run: Callable[..., int], *, timeout: float, overdue: str, keep: Collection[int] = ()
    ) -> None:
        """As `run_in_background`. It sees the end of its socket if this process dies. (The kernel's
        signal at a parent's death is lost with each change of identity.)"""
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._supervisor = run_in_background(
                lambda report: run(report=report, owner=theirs),
                timeout=timeout,
                overdue=overdue,
                keep=[*keep, theirs.fileno()],
            )

    def _told_to_end(self, seconds: float) -> bool:
        """Tells the supervisor to unmount (a second time: by force); whether it went in time."""
        assert self._channel is not None
        with suppress(OSError):  # it has ended
            self._channel.send(b"\n")
        return self._ends(seconds)

    def _ends(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._supervisor is not None:
            if os.waitpid(self._supervisor, os.WNOHANG) != (0, 0):
                self._supervisor = None
            elif time.monotonic() > deadline:
                return False
            else:
                time.sleep(_POLL_SECONDS)
        return True

    def _find(self) -> FoundMount | None:
        return find_one(self._spec.source, lambda _: [self._spec.places.runtime_dir])


def _state_dir(spec: MountSpec) -> str:
    """Where the mount's index is."""
    settings = spec.settings
    return settings.state_dir or default_state_dir(spec.places, spec.source, spec.user.uid)


def sweep(runtime_dir: str) -> None:
    """Removes the files of daemons that were killed, perhaps with their job: nobody else would, as
    their names never come again."""
    for name in os.listdir(runtime_dir):
        stem, suffix = os.path.splitext(os.path.join(runtime_dir, name))
        if suffix not in (KEPT, STARTING):
            continue
        lock = locked(stem + suffix, 0.0, "somebody lives", removes=True)
        with suppress(OperationError), lock:
            if suffix == KEPT:
                with suppress(FileNotFoundError):
                    os.unlink(stem + SOCKET)


# Leases


class Elsewhere(OperationError):
    """The mount was made in another container, or another job's own mount namespace. Who entered it
    would have that one's other directories, too."""


def _place() -> list[int]:
    with closing(Spaces.own(with_users=False)) as own:
        return own.place


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
        Raises Elsewhere.
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
            lease = cls(
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
        # A daemon in its mount was where that one was made. Earlier releases name no origin.
        if _place() not in (welcome.get("origin", _place()), lease.spaces.place):
            lease.close()
            raise Elsewhere("it is mounted for you in another container or mount namespace")
        return lease

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

    def listens_at(self, stem: str) -> bool:
        return stem + SOCKET in self._listeners

    def listen(self, stem: str) -> None:
        """The caller has the lock on the daemon's files."""
        path = stem + SOCKET
        with suppress(FileNotFoundError):
            os.unlink(path)  # of a daemon that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        self._listeners[path] = listener

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
