"""Starting a worker and speaking with it until it serves.

The worker is told everything by a JSON document in a memory file and by inherited descriptors; it
gets a clean environment and, where this process is root, the identity of the mount's user.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import monarchfs
from monarchfs.config import Config
from monarchfs.config.model import PROTOCOL_VERSION
from monarchfs.fuse.mount import SYSTEM_PATH
from monarchfs.fuse.protocol import ProtocolError, amend_init_reply
from monarchfs.supervisor.channel import WorkerChannel, refuse_descriptors
from monarchfs.supervisor.identity import is_self
from monarchfs.supervisor.messages import Failed, MalformedMessage, Ready
from monarchfs.supervisor.vital_signs import Activity
from monarchfs.supervisor.worker_logging import WorkerLogging
from monarchfs.types import OperationError

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT})

_LARGEST_INIT = 1 << 18
"""What is read from /dev/fuse at once: the kernel wants room for a full request."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What a worker inherits, and its successors too; ``tiers`` are the dataset's directories in
    the order of the tiers, ``handles`` is the table of open files, ``counts`` memory for what
    workers count, ``metrics`` a listening socket, if there is one."""

    fuse: int
    source: int
    state: int
    tiers: tuple[int, ...]
    handles: int
    counts: int
    requests: int | None
    metrics: int | None = None


def default_worker_command() -> tuple[str, ...]:
    """How the worker is started."""
    return module_command("monarchfs.worker")


def module_command(module: str) -> tuple[str, ...]:
    """How a module of ours is run: isolated from the user's environment variables and directory.

    A package that was installed with ``pip --user`` is found without isolation only; the working
    directory is ``/`` then.
    """
    ours = os.path.realpath(os.path.dirname(monarchfs.__file__))
    user_site = os.path.realpath(site.getusersitepackages())
    isolation = "-E" if ours.startswith(user_site + "/") else "-I"
    return (sys.executable, isolation, "-X", "utf8", "-m", module)


class WorkerProcess:
    """A worker's process, the channel to it, and the socket on which its libfuse gets FUSE_INIT."""

    def __init__(
        self, process: subprocess.Popen[bytes], channel: WorkerChannel, init: socket.socket
    ):
        self.process = process
        self.channel = channel
        self.init = init
        self._killed = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """As ``Popen.returncode``; None while it lives, and where that cannot be seen yet."""
        code = self.process.poll()
        if code is not None:
            return code
        # What its first thread left, while others cannot die (proc_pid_stat(5), fields 3 and 52).
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return self.process.poll()
        if fields[0] not in (b"Z", b"X") or int(fields[49]) == 0:
            return None
        return os.waitstatus_to_exitcode(int(fields[49]))

    def kill(self) -> None:
        """Have it die; it may take its time (`is_gone`)."""
        self._killed = True
        self.process.kill()

    @property
    def was_killed(self) -> bool:
        """Whether somebody else killed it (SIGKILL): that says nothing about it."""
        return not self._killed and self.exit_code == -signal.SIGKILL

    def activity(self) -> Activity | None:
        """What its threads are doing now; None where that cannot be seen. Blocks for nothing."""
        try:
            with open(f"/proc/{self.pid}/task/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:
            return None
        # proc_pid_stat(5): state, utime and stime.
        cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
        rests = not any(state in b"RD" for state in self._thread_states())
        return Activity(fields[0] == b"R", cpu_seconds, rests)

    def is_quiet(self) -> bool:
        """Whether none of its threads can run any more: each is gone, or dead, or waits in the
        kernel for what no signal ends. (A killed one that waits there dies when it comes back.)"""
        if self.process.poll() is not None:
            return True
        return all(state in b"ZXD" for state in self._thread_states())

    def _thread_states(self) -> list[bytes]:
        states = []
        try:
            threads = os.listdir(f"/proc/{self.pid}/task")
        except FileNotFoundError:
            return []
        for thread in threads:
            try:
                with open(f"/proc/{self.pid}/task/{thread}/stat", "rb") as file:
                    states.append(file.read().rpartition(b") ")[2][:1])
            except (FileNotFoundError, ProcessLookupError):
                continue
        return states

    def is_gone(self) -> bool:
        """Whether it ended, or at least all of it that does not hang in the kernel."""
        if self.process.poll() is not None:
            return True
        # The first thread is a zombie while others cannot die yet (proc_pid_stat(5), field 3).
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return file.read().rpartition(b") ")[2][:1] in (b"Z", b"X")
        except FileNotFoundError:
            return True

    def wait_gone(self, timeout: float) -> bool:
        """Waits at most ``timeout`` seconds; whether it is gone."""
        deadline = time.monotonic() + timeout
        while not self.is_gone():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                self.process.wait(min(left, 0.05))
            except subprocess.TimeoutExpired:
                continue
        return True

    @property
    def crashed(self) -> bool:
        """Whether it died as a process does whose mapped file is damaged: LMDB maps the index."""
        return self.exit_code in _CRASHES

    def end(self, patience: float = 1.0) -> None:
        """Tells it to stop; kills it after ``patience`` seconds; leaves behind what cannot die in
        another. Idempotent."""
        self.channel.send({"do": "stop"})
        if not self.wait_gone(patience):
            self.kill()
            self.wait_gone(1.0)
        self.channel.close()
        self.init.close()

    def describe_end(self) -> str:
        """How it ended, for a log line."""
        code = self.exit_code
        if code is None:
            return "was killed and hangs in the kernel"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def start_worker(
    config: Config,
    command: Sequence[str],
    descriptors: Descriptors,
    mount_ns: int,
    stderr: int,
    worker_log: WorkerLogging,
    *,
    restarts: int = 0,
    safe: bool = False,
    waits: bool = False,
    source_root: tuple[int, int] | None = None,
    passes: bool = False,
) -> WorkerProcess:
    """Starts a worker for the mount, after ``restarts`` others; raises OperationError if its
    program cannot be run.

    A ``safe`` one leaves out all but the source. One that ``waits`` says when it is loaded, and
    touches nothing before it is told to begin. ``source_root`` is the inode and the device number
    of the source's directory, which might not answer. ``passes``: the kernel may come to read
    replicas itself.
    """
    our_init, their_init = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    our_channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    refuse_descriptors(our_init)
    bootstrap: dict[str, Any] = {
        "speaks": PROTOCOL_VERSION,
        "config": config.to_json(),
        "fds": {
            "fuse": descriptors.fuse,
            "init": their_init.fileno(),
            "channel": their_channel.fileno(),
            "source": descriptors.source,
            "state": descriptors.state,
            "tiers": list(descriptors.tiers),
            "handles": descriptors.handles,
            "counts": descriptors.counts,
            "requests": descriptors.requests,
            "metrics": descriptors.metrics,
        },
        "mount_ns": mount_ns,
        "restarts": restarts,
        "safe": safe,
        "waits": waits,
        "source_root": source_root,
        "passes": passes,
    }
    memory = os.memfd_create("monarchfs-bootstrap")
    try:
        os.write(memory, json.dumps(bootstrap).encode())
        os.lseek(memory, 0, os.SEEK_SET)
        process = _spawn(
            # The mount point is for people who look at processes (ps(1)).
            [*command, "--bootstrap-fd", str(memory), config.mountpoint],
            config,
            [
                *(descriptors.fuse, descriptors.source, descriptors.state, *descriptors.tiers),
                *(their_init.fileno(), their_channel.fileno(), memory, descriptors.handles),
                descriptors.counts,
                *(() if descriptors.metrics is None else (descriptors.metrics,)),
                *(() if descriptors.requests is None else (descriptors.requests,)),
            ],
            stderr,
        )
    except BaseException:
        our_init.close()
        our_channel.close()
        raise
    finally:
        os.close(memory)
        their_init.close()
        their_channel.close()
    return WorkerProcess(process, WorkerChannel(our_channel, worker_log), our_init)


def read_init_request(fuse: int, deadline: float) -> bytes:
    """The kernel's FUSE_INIT, the first thing that a new connection sends."""
    _wait_readable(fuse, deadline, "the kernel sent no FUSE_INIT: check dmesg")
    try:
        return os.read(fuse, _LARGEST_INIT)
    except OSError as error:
        raise OperationError(f"cannot read from /dev/fuse: {error.strerror}") from None


def negotiate(
    worker: WorkerProcess, request: bytes, *, posix_acl: bool, stack_depth: int = 0, deadline: float
) -> bytes:
    """Gives FUSE_INIT to the worker's libfuse; its reply, amended, for the kernel.

    Raises OperationError if the worker fails or says nothing sensible before ``deadline``.
    """
    poll = select.poll()
    poll.register(worker.init, select.POLLIN)
    poll.register(worker.channel, select.POLLIN)
    reply = b""
    # A socket that fails means that the worker is gone; why, the channel and its end tell.
    with contextlib.suppress(ConnectionError):
        worker.init.send(request)
    while not reply:
        ready = dict(poll.poll(_milliseconds_until(deadline)))
        if not ready:
            raise OperationError("the worker did not answer FUSE_INIT in time")
        if worker.channel.fileno() in ready:
            _expect_alive(worker, deadline)
            continue
        with contextlib.suppress(ConnectionError):
            reply = worker.init.recv(_LARGEST_INIT)
        if not reply:
            poll.unregister(worker.init)
    try:
        return amend_init_reply(request, reply, posix_acl=posix_acl, stack_depth=stack_depth)
    except ProtocolError as error:
        raise OperationError(f"FUSE_INIT failed: {error}") from None


def await_ready(worker: WorkerProcess, deadline: float, *, backing_ids: int = 0) -> None:
    """Tells the worker that FUSE_INIT is through, and how many backing files it may have, and waits
    until it serves; or OperationError."""
    worker.channel.send({"do": "serve", "backing_ids": backing_ids})
    while not _expect_alive(worker, deadline):
        pass


def _expect_alive(worker: WorkerProcess, deadline: float) -> bool:
    """One message of a worker that is starting; whether it says that it serves."""
    try:
        message = worker.channel.receive(deadline - time.monotonic())
    except TimeoutError:
        raise OperationError("the worker did not become ready in time") from None
    except MalformedMessage as malformed:
        raise OperationError(f"the worker speaks nonsense: {malformed}") from None
    if message is None:
        worker.wait_gone(1.0)
        raise OperationError(f"the worker {worker.describe_end()} while it started")
    if isinstance(message, Failed):
        raise OperationError(message.error)
    return isinstance(message, Ready)


def _spawn(
    command: list[str], config: Config, inherited: list[int], stderr: int
) -> subprocess.Popen[bytes]:
    user = config.user
    identity: dict[str, Any] = {}
    if not is_self(user):
        identity = {"user": user.uid, "group": user.gid, "extra_groups": list(user.groups)}
    try:
        return subprocess.Popen(
            command,
            env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
            cwd="/",
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            # Ctrl-C at a terminal is for the supervisor alone.
            start_new_session=True,
            **identity,
        )
    except PermissionError:
        raise OperationError(
            f"{user.name} may not run {command[0]}: install monarchfs where every user can read it"
        ) from None
    except OSError as error:
        raise OperationError(f"cannot run {command[0]}: {error.strerror}") from None


def _wait_readable(descriptor: int, deadline: float, overdue: str) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(_milliseconds_until(deadline)):
        raise OperationError(overdue)


def _milliseconds_until(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000))
