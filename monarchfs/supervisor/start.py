"""Mounting, from what the user asked for to a file system that answers.

All checks come before anything is made. If a later step fails, what was made is taken back in
reverse order.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType

from monarchfs.config import Config
from monarchfs.config.model import Descriptors
from monarchfs.fuse.connection import FuseConnection
from monarchfs.fuse.handle_table import make_memory, make_table
from monarchfs.fuse.mount import mount
from monarchfs.fuse.mountinfo import MONARCHFS, connection_of, find_mount
from monarchfs.fuse.protocol import InitFlag, parse_init_request
from monarchfs.fuse.requests import make_journal
from monarchfs.fuse.unmount import unmount_bounded
from monarchfs.peers.nodes import Peers
from monarchfs.supervisor.backing import BackingFiles
from monarchfs.supervisor.daemon import Report, ending_signals
from monarchfs.supervisor.directories import open_state_dir, open_tiers
from monarchfs.supervisor.failover import LARGEST_INIT, Failover
from monarchfs.supervisor.launch import module_command
from monarchfs.supervisor.logs import log_as_daemon, log_to_stderr
from monarchfs.supervisor.mounted import Mounted
from monarchfs.supervisor.peering import address_of, find_peers, open_peer_server
from monarchfs.supervisor.port import LOOPBACK, listen_on, stop_listening
from monarchfs.supervisor.preflight import MountSpec, checked
from monarchfs.supervisor.registration import ControlSocket, open_runtime_dir
from monarchfs.supervisor.supervise import Supervisor
from monarchfs.supervisor.takeover import Handover, OrphanedWorker
from monarchfs.supervisor.worker_logging import WorkerOutput
from monarchfs.types import OperationError

_COUNTS_BYTES = 256 << 10
"""Ten times what a mount with some tiers needs, twice."""

_READAHEAD_KIB = 512
"""A reader then waits for the worker a quarter as often as with the 128 KiB that FUSE begins with,
while a page fault in a map still brings no more than this."""

log = logging.getLogger(__name__)


def mount_and_supervise(
    spec: MountSpec,
    *,
    report: Report,
    worker_command: Sequence[str] | None = None,
    owner: socket.socket | None = None,
) -> int:
    """Mounts what ``spec`` says, calls ``report`` when the mount answers and supervises it until it
    is gone; the process's exit code. Closes ``spec.source_fd``. ``owner``: who ends it, and no
    signal does (`Supervisor.obey`).

    Raises UsageError or OperationError, with everything taken back, if that takes longer than
    ``start_timeout_seconds`` or fails.
    """
    deadline = time.monotonic() + spec.settings.start_timeout_seconds
    log_to_stderr(spec.settings.log_level)
    command = worker_command or module_command("monarchfs.worker")
    with ExitStack() as undo, _interruptible() if owner is None else nullcontext():
        supervisor = _start(spec, command, deadline, partial(report, False), undo)
        supervisor.obey(owner)
        report(True)
        # From here on the supervisor itself puts things back, and what it keeps (the state
        # directory, the tiers) stays for the next mount.
        undo.pop_all()
    log.info("serving %s on %s", supervisor.config.source, supervisor.config.mountpoint)
    return supervisor.run()


def take_over(
    handover: Handover,
    orphans: Sequence[OrphanedWorker],
    *,
    restarts: int,
    report: Report,
    owner: socket.socket,
) -> int:
    """Goes on with a mount whose supervisor died, and whose workers, ``orphans``, served after
    ``restarts`` others; otherwise as `mount_and_supervise`: ``report`` is called as soon as another
    worker is starting. The descriptors are this process's from now on."""
    log_to_stderr(handover.config.log_level)
    with ExitStack() as undo:
        supervisor = _resume(handover, orphans, restarts + 1, undo)
        supervisor.obey(owner)
        report(True)
        undo.pop_all()
    log.warning("took over %s on %s", supervisor.config.source, supervisor.config.mountpoint)
    return supervisor.run()


def _start(
    spec: MountSpec,
    command: Sequence[str],
    deadline: float,
    goes_on: Callable[[], object],
    undo: ExitStack,
) -> Supervisor:
    config, what = checked(spec, deadline, undo)
    if spec.source_fd is not None:
        os.close(spec.source_fd)
    open_runtime_dir(config.runtime_dir, undo)
    state_dir, lock = open_state_dir(config, undo)
    config, directories = open_tiers(config, state_dir, undo)
    tiers = [directory.descriptor for directory in directories.opened]
    peers = find_peers(config)
    address = None if peers is None else address_of(peers.nodes[peers.own])
    peer_server = open_peer_server(config, peers, address, undo)
    metrics = None
    if config.metrics_port is not None:
        metrics = listen_on(LOOPBACK, config.metrics_port, "--metrics-port").detach()
        undo.callback(lambda: stop_listening(socket.socket(fileno=metrics)))
    fuse, connection = _mount(config, undo)
    mount_ns = time.time_ns()
    handles = make_table()
    undo.callback(os.close, handles)
    counts = make_memory("monarchfs-counts", _COUNTS_BYTES)
    undo.callback(os.close, counts)
    request = read_init_request(fuse, deadline)
    journal = _journal(config, request, undo)
    descriptors = Descriptors(
        fuse,
        what.descriptor,
        state_dir,
        tuple(tiers),
        handles,
        counts,
        journal,
        metrics=metrics,
        peers=None if peer_server is None else peer_server.listener.fileno(),
    )
    backing = BackingFiles(config, fuse, tiers, handles)
    backing.prepare(request)
    handover = Handover(
        config,
        descriptors,
        (lock, *directories.locks),
        mount_ns,
        request,
        backing.stack_depth,
        what.identity,
        connection.number,
        peers=None if peers is None else peers.to_message(),
        peer_address=address,
    )
    output = _output(config, undo)
    mounted = Mounted(handover, command, connection, backing, peer_server, output)
    failover = Failover(mounted)
    undo.callback(failover.close, 1.0)
    failover.serve_first(deadline, goes_on)
    _read_ahead(connection.number)
    control_socket = ControlSocket(config, mount_ns, connection.number)
    undo.callback(control_socket.close)
    stay = [(logging.WARNING, line) for line in directories.left_out()]
    if not config.foreground:
        for level, line in stay:
            log.log(level, "%s", line)  # to who mounts; the log gets it, too
        log_as_daemon(config, state_dir)
    for level, line in (*directories.remarks, *stay):
        log.log(level, "%s", line)
    return Supervisor(mounted, failover, control_socket)


def _resume(
    handover: Handover, orphans: Sequence[OrphanedWorker], restarts: int, undo: ExitStack
) -> Supervisor:
    config, descriptors = handover.config, handover.descriptors
    open_runtime_dir(config.runtime_dir, undo)
    log_as_daemon(config, descriptors.state)
    peers = None if handover.peers is None else Peers.from_message(handover.peers)
    peer_server = open_peer_server(config, peers, handover.peer_address, undo)
    if peer_server is not None:
        assert descriptors.peers is not None
        os.close(descriptors.peers)  # the name of the socket is the new one's
        descriptors = replace(descriptors, peers=peer_server.listener.fileno())
        handover = replace(handover, descriptors=descriptors)
    mount_there = find_mount(config.mountpoint)
    connection = FuseConnection(handover.connection, mount_there, descriptors.fuse)
    undo.callback(connection.close)
    backing = BackingFiles(config, descriptors.fuse, descriptors.tiers, descriptors.handles)
    backing.take_over(handover.stack_depth)
    for orphan in orphans:
        orphan.kill()
    command, output = module_command("monarchfs.worker"), _output(config, undo)
    mounted = Mounted(handover, command, connection, backing, peer_server, output)
    failover = Failover(mounted, restarts=restarts, orphans=orphans)
    undo.callback(failover.close, 1.0)
    control_socket = ControlSocket(config, handover.mount_ns, connection.number)
    undo.callback(control_socket.close)
    return Supervisor(mounted, failover, control_socket)


def _output(config: Config, undo: ExitStack) -> WorkerOutput | None:
    """Where workers write to in the foreground."""
    if not config.foreground:
        return None
    output = WorkerOutput()
    undo.callback(output.close)
    return output


def read_init_request(fuse: int, deadline: float) -> bytes:
    """The kernel's FUSE_INIT, the first thing that a new connection sends."""
    poll = select.poll()
    poll.register(fuse, select.POLLIN)
    if not poll.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        raise OperationError("the kernel sent no FUSE_INIT: check dmesg")
    try:
        return os.read(fuse, LARGEST_INIT)
    except OSError as error:
        raise OperationError(f"cannot read from /dev/fuse: {error.strerror}") from None


def _read_ahead(connection: int) -> None:
    """Have the kernel read ahead further on the mount of this connection. Only root may, and only
    after FUSE_INIT is answered, which resets it (fs/fuse/inode.c, process_init_reply). Elsewhere
    reads go on with the kernel's own value."""
    try:
        with open(f"/sys/class/bdi/0:{connection}/read_ahead_kb", "w", encoding="ascii") as file:
            file.write(str(_READAHEAD_KIB))
    except OSError as error:
        log.debug("readahead stays as it is: %s", error)


def _journal(config: Config, request: bytes, undo: ExitStack) -> int | None:
    """Memory for the requests that workers have taken, where the kernel does not repeat those; None
    elsewhere."""
    if config.kernel_resend and parse_init_request(request).flags & InitFlag.HAS_RESEND:
        return None
    journal = make_journal()
    undo.callback(os.close, journal)
    return journal


def _mount(config: Config, undo: ExitStack) -> tuple[int, FuseConnection]:
    """The descriptor of /dev/fuse and the connection."""
    fuse = mount(
        source=config.source,
        mountpoint=config.mountpoint,
        uid=config.user.uid,
        gid=config.user.gid,
        allow_other=config.allow_other,
        noexec=config.noexec,
    )
    undo.callback(os.close, fuse)
    number, mounted = connection_of(fuse), find_mount(config.mountpoint)
    if mounted is not None and number not in (None, mounted.minor):
        mounted = None  # somebody mounted over it
    if number is None:
        if mounted is None or mounted.fstype != MONARCHFS:
            raise OperationError(
                f"somebody else unmounted or covered {config.mountpoint}: try again"
            )
        number = mounted.minor
    connection = FuseConnection(number, mounted, fuse)
    undo.callback(connection.close)
    undo.callback(lambda: unmount_bounded(connection, time.monotonic() + 1))
    return fuse, connection


@contextmanager
def _interruptible() -> Iterator[None]:
    """Signals end the start in the orderly way (see `ending_signals`)."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise OperationError(f"interrupted by {signal.Signals(number).name}: nothing was mounted")

    numbers = ending_signals()
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    except BaseException:
        # Not again while things are being taken back.
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise
