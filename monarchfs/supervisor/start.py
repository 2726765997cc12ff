"""Mounting, from what the user asked for to a file system that answers.

Everything that can be wrong is looked at before anything is made; what was made is taken back in
reverse order if a later step fails.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from monarchfs.config import Config, PrefetchMode, User
from monarchfs.config.places import DefaultPlaces, build_config
from monarchfs.config.settings import Settings
from monarchfs.fuse.mount import check_device, mount
from monarchfs.fuse.mountinfo import find_mount, is_network_filesystem
from monarchfs.fuse.protocol import InitFlag, parse_init_request
from monarchfs.fuse.requests import make_journal
from monarchfs.fuse.slots import make_memory, make_table, read_vitals
from monarchfs.fuse.unmount import unmount_bounded, waiting_requests
from monarchfs.supervisor.backing import BackingFiles, check_privileges
from monarchfs.supervisor.daemon import ending_signals
from monarchfs.supervisor.hearing import Hearing
from monarchfs.supervisor.identity import acting_as
from monarchfs.supervisor.launch import (
    Descriptors,
    WorkerProcess,
    await_ready,
    default_worker_command,
    negotiate,
    read_init_request,
    start_worker,
)
from monarchfs.supervisor.leftout import left_out
from monarchfs.supervisor.lists import complaint_of_list
from monarchfs.supervisor.logs import check_log_file, log_as_daemon, log_to_stderr
from monarchfs.supervisor.messages import printable
from monarchfs.supervisor.output import WorkerOutput
from monarchfs.supervisor.port import listen_locally, stop_listening
from monarchfs.supervisor.probe import (
    Mountpoint,
    OpenedSource,
    check_filled,
    complaint_of_empty,
    probe_mountpoint,
    probe_source,
)
from monarchfs.supervisor.readahead import read_ahead
from monarchfs.supervisor.registration import (
    ControlSocket,
    check_runtime_dir,
    open_runtime_dir,
)
from monarchfs.supervisor.startup import Mounted, Start
from monarchfs.supervisor.storage import (
    WORKER_LOG,
    check_storage,
    last_log_line,
    mark_suspect,
    open_log,
    open_state_dir,
)
from monarchfs.supervisor.succession import Succession
from monarchfs.supervisor.supervise import Supervisor
from monarchfs.supervisor.tieropening import open_tiers
from monarchfs.types import OperationError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_COUNTS_BYTES = 256 << 10
"""Ten times what a mount with some tiers needs, twice."""

log = logging.getLogger(__name__)


def mount_and_supervise(
    settings: Settings,
    source: str,
    mountpoint: str,
    user: User,
    places: DefaultPlaces,
    *,
    report: Callable[[], None],
    source_fd: int | None = None,
    worker_command: Sequence[str] | None = None,
) -> int:
    """Mounts ``source`` on ``mountpoint`` (absolute paths), calls ``report`` when the mount answers
    and supervises it until it is gone; the process's exit code. With ``source_fd`` the directory
    behind that descriptor, which is closed then, is mounted, and ``source`` is its name.

    Raises UsageError or OperationError, having taken everything back, if it does not come about
    within ``settings.start_timeout_seconds``.
    """
    deadline = time.monotonic() + settings.start_timeout_seconds
    log_to_stderr(settings.log_level)
    with ExitStack() as undo:
        with _interruptible():
            supervisor = _start(
                settings,
                source,
                mountpoint,
                user,
                places,
                source_fd,
                worker_command or default_worker_command(),
                deadline,
                undo,
            )
            supervisor.catch_signals()
            report()
        # From here on the supervisor itself puts things back, and what it keeps (the state
        # directory, the tiers) stays for the next mount.
        undo.pop_all()
    log.info("serving %s on %s", supervisor.config.source, supervisor.config.mountpoint)
    return supervisor.run()


def check_mount(
    settings: Settings,
    source: str,
    mountpoint: str,
    user: User,
    places: DefaultPlaces,
    source_fd: int | None = None,
) -> None:
    """Looks at all that `mount_and_supervise` looks at before it makes anything, and raises what
    that would raise. Changes nothing."""
    deadline = time.monotonic() + settings.start_timeout_seconds
    with ExitStack() as undo:
        _checked(settings, source, mountpoint, user, places, source_fd, deadline, undo)


def path_is_remote(path: str) -> bool:
    """Whether ``path``, which need not exist, lies on a network file system."""
    return is_network_filesystem(path)


def _start(
    settings: Settings,
    source: str,
    mountpoint: str,
    user: User,
    places: DefaultPlaces,
    source_fd: int | None,
    command: Sequence[str],
    deadline: float,
    undo: ExitStack,
) -> Supervisor:
    config, what = _checked(settings, source, mountpoint, user, places, source_fd, deadline, undo)
    if source_fd is not None:
        os.close(source_fd)
    open_runtime_dir(config.runtime_dir, undo)
    state_dir, lock = open_state_dir(config, undo)
    config, directories = open_tiers(config, state_dir, undo)
    tiers = [directory.descriptor for directory in directories.opened]
    metrics = None
    if config.metrics_port is not None:
        metrics = listen_locally(config.metrics_port)
        undo.callback(stop_listening, metrics)
    fuse, connection = _mount(config, undo)
    mount_ns = time.time_ns()
    handles = make_table()
    undo.callback(os.close, handles)
    counts = make_memory("monarchfs-counts", _COUNTS_BYTES)
    undo.callback(os.close, counts)
    request = read_init_request(fuse, deadline)
    journal = _journal(config, request, undo)
    descriptors = Descriptors(
        *(fuse, what.descriptor, state_dir, tuple(tiers), handles, counts, journal),
        metrics=None if metrics is None else metrics.fileno(),
    )
    backing = BackingFiles(config, fuse, tiers, handles)
    backing.prepare(request)
    hearing = Hearing()
    output = WorkerOutput() if config.foreground else None
    if output is not None:
        undo.callback(output.close)
    launch = partial(
        _start_worker,
        config,
        command,
        descriptors,
        mount_ns,
        hearing,
        None if output is None else output.end,
        source_root=what.identity,
        passes=backing.stack_depth > 0,
    )
    serve = partial(_serving_worker, config, launch, descriptors, request, backing, deadline)
    restarts = 0
    try:
        worker = serve(undo)
    except _Crashed as crash:
        # It may have been the index that killed it. The next one checks that, and can do without.
        log.warning("%s: starting another one", crash)
        restarts = 1
        worker = serve(undo, init_answered=crash.init_answered, restarts=restarts)
    read_ahead(connection)
    control_socket = ControlSocket(config, config.state_dir, mount_ns, connection)
    undo.callback(control_socket.close)
    stay = [(logging.WARNING, line) for line in left_out(config, directories.record)]
    if not config.foreground:
        for level, line in stay:
            log.log(level, "%s", line)  # to who mounts; the log gets it, too
        log_as_daemon(config, state_dir)
    for level, line in (*directories.remarks, *stay):
        log.log(level, "%s", line)
    suspect = partial(mark_suspect, state_dir, config.user)
    mounted = Mounted(
        fuse,
        request,
        journal is not None,
        config.start_timeout_seconds,
        partial(read_vitals, handles),
        partial(_waiting, connection, fuse),
        suspect,
        backing,
    )
    return Supervisor(
        config,
        Succession(worker, launch, mounted, restarts, hearing),
        control_socket,
        fuse=fuse,
        connection=connection,
        backing=backing,
        output=output,
        mark_suspect=suspect,
        release=partial(_release, [lock, *directories.locks], metrics),
    )


def _waiting(connection: int, fuse: int) -> int | None:
    """How many requests wait; where the kernel does not show that, whether one was not taken."""
    count = waiting_requests(connection)
    if count is not None:
        return count
    poll = select.poll()
    poll.register(fuse, select.POLLIN)
    return 1 if poll.poll(0) else None


def _journal(config: Config, request: bytes, undo: ExitStack) -> int | None:
    """For what workers take of the kernel, which would be lost with them otherwise; they write it
    in their C part."""
    if config.kernel_resend and parse_init_request(request).flags & InitFlag.HAS_RESEND:
        return None
    journal = make_journal()
    undo.callback(os.close, journal)
    return journal


def _release(locks: Sequence[int], metrics: socket.socket | None) -> None:
    for lock in locks:
        os.close(lock)
    if metrics is not None:
        stop_listening(metrics)


def _checked(
    settings: Settings,
    source: str,
    mountpoint: str,
    user: User,
    places: DefaultPlaces,
    source_fd: int | None,
    deadline: float,
    undo: ExitStack,
) -> tuple[Config, OpenedSource]:
    """What will be mounted, and its source, opened. Changes nothing; raises for what is wrong."""
    check_privileges(settings.data_path)
    check_device()
    check_runtime_dir(places.runtime_dir)
    if settings.log_file is not None:
        check_log_file(settings.log_file, user)
    where = probe_mountpoint(mountpoint, _left(deadline))
    what = probe_source(source, user, _left(deadline), source_fd)
    undo.callback(os.close, what.descriptor)
    _check_overlap(what, where)
    if settings.require_files:
        check_filled(what)
    elif (complaint := complaint_of_empty(what)) is not None:
        log.warning("%s", complaint)
    config = build_config(
        settings, source=what.path, mountpoint=where.path, user=user, places=places
    )
    _check_lists(config)
    if config.prefetch_list is not None:
        complaint = complaint_of_list(config.prefetch_list, what, config.mountpoint, user)
        if complaint is not None:
            log.warning("%s", complaint)
    check_storage(config, what, where, places.cache_dir, _left(deadline))
    return config, what


def _check_overlap(source: OpenedSource, mountpoint: Mountpoint) -> None:
    if mountpoint.identity == source.identity:
        return
    if source.identity in mountpoint.lineage:
        raise UsageError(
            f"mount point {mountpoint.path} lies inside the source {source.path}: mount on the"
            " source itself, or outside of it"
        )
    if mountpoint.identity in source.lineage:
        raise UsageError(
            f"mount point {mountpoint.path} would hide the source {source.path}, which lies inside"
            " it: mount on the source itself, or outside of it"
        )


def _check_lists(config: Config) -> None:
    """Raises UsageError for a file that the worker is to read and could not."""
    if config.prefetch is PrefetchMode.FILE:
        assert config.prefetch_list is not None
        remedy = "use none, access, auto, all or the path of a readable list"
        _check_readable("prefetch list", config.prefetch_list, config.user, remedy)
    if config.index_file is not None:
        remedy = "name what monarchfs index export has written"
        # The kernel goes by the modes that are in it where it decides who may read what.
        _check_readable(
            "index file", config.index_file, config.user, remedy, trusted=config.allow_other
        )


def _check_readable(
    what: str, path: str, user: User, remedy: str, *, trusted: bool = False
) -> None:
    reason = ""
    with acting_as(user):
        try:
            # A FIFO without a writer would be waited for, and could be read once only.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            st = os.fstat(descriptor)
            if not stat.S_ISREG(st.st_mode):
                reason = "it is not a file"
            elif trusted and (st.st_uid not in (0, user.uid) or st.st_mode & 0o022):
                reason = "with allow_other it must be yours, and nobody else may write it"
            os.close(descriptor)
        except OSError as error:
            reason = str(error.strerror)
    if reason:
        raise UsageError(f"{what} {path} cannot be read by {user.name}: {reason}: {remedy}")


def _mount(config: Config, undo: ExitStack) -> tuple[int, int]:
    """The descriptor of /dev/fuse and the number of the connection."""
    fuse = mount(
        source=config.source,
        mountpoint=config.mountpoint,
        uid=config.user.uid,
        gid=config.user.gid,
        allow_other=config.allow_other,
        noexec=config.noexec,
    )
    undo.callback(os.close, fuse)
    mounted = find_mount(config.mountpoint)
    if mounted is None:
        raise OperationError(f"{config.mountpoint} was unmounted by somebody else: mount again")
    undo.callback(_take_back_mount, config.mountpoint, mounted.minor)
    return fuse, mounted.minor


def _take_back_mount(mountpoint: str, connection: int) -> None:
    unmount_bounded(mountpoint, time.monotonic() + 1, connection)


class _Crashed(OperationError):
    """A worker died of a signal that a damaged index causes, before it was ready."""

    def __init__(self, message: str, *, init_answered: bool) -> None:
        super().__init__(message)
        self.init_answered = init_answered


def _serving_worker(
    config: Config,
    launch: Start,
    descriptors: Descriptors,
    request: bytes,
    backing: BackingFiles,
    deadline: float,
    undo: ExitStack,
    *,
    init_answered: bool = False,
    restarts: int = 0,
) -> WorkerProcess:
    """A worker that serves; ``undo`` ends it. Raises _Crashed or another OperationError.

    With ``init_answered`` the kernel has its answer to FUSE_INIT from an earlier worker, of the
    same program, and waits for no other.
    """
    worker = launch(restarts=restarts, safe=False, waits=False)
    undo.callback(worker.end)
    try:
        reply = negotiate(
            worker,
            request,
            posix_acl=config.allow_other,
            stack_depth=backing.stack_depth,
            deadline=deadline,
        )
        if not init_answered:
            os.write(descriptors.fuse, reply)
            init_answered = True
            backing.begin()
        await_ready(worker, deadline, backing_ids=backing.most)
    except (OperationError, OSError) as error:
        # An OSError is the kernel's refusal of the reply.
        message = _with_last_words(str(error), config, descriptors.state)
        if worker.crashed:
            mark_suspect(descriptors.state, config.user)
            worker.end()
            raise _Crashed(message, init_answered=init_answered) from None
        raise OperationError(message) from None
    return worker


def _start_worker(
    config: Config,
    command: Sequence[str],
    descriptors: Descriptors,
    mount_ns: int,
    hearing: Hearing,
    output: int | None,
    *,
    source_root: tuple[int, int],
    passes: bool,
    restarts: int,
    safe: bool,
    waits: bool,
) -> WorkerProcess:
    start = partial(
        start_worker,
        config,
        command,
        descriptors,
        mount_ns,
        restarts=restarts,
        safe=safe,
        waits=waits,
        source_root=source_root,
        passes=passes,
    )
    if output is not None:
        return start(output, hearing)
    # What the dead said is kept.
    stderr = open_log(descriptors.state, WORKER_LOG, config.user, truncate=not restarts)
    try:
        return start(stderr, hearing)
    finally:
        os.close(stderr)


def _with_last_words(error: str, config: Config, state_dir: int) -> str:
    words = "" if config.foreground else last_log_line(state_dir, WORKER_LOG, config.user)
    words = printable(words)
    return f"cannot serve {config.source}: {error}" + (
        f" (its last words: {words})" if words else ""
    )


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


class _Interrupted(OperationError):
    """A signal came while the mount was being made."""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Signals end the start in the orderly way, instead of the process (see `ending_signals`)."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise _Interrupted(f"interrupted by {signal.Signals(number).name}: nothing was mounted")

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
