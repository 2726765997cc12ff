"""The first worker of a mount: started, and waited for until it serves."""

from __future__ import annotations

import contextlib
import os
import select
import time
from contextlib import ExitStack

from monarchfs.config import Config
from monarchfs.fuse.protocol import ProtocolError, amend_init_reply
from monarchfs.supervisor.backing import BackingFiles
from monarchfs.supervisor.launch import WorkerLauncher, WorkerProcess
from monarchfs.supervisor.messages import Failed, MalformedMessage, Ready, printable
from monarchfs.supervisor.storage import WORKER_LOG, last_log_line, mark_suspect
from monarchfs.types import OperationError

_LARGEST_INIT = 1 << 18
"""What is read from /dev/fuse at once: the kernel wants room for a full request."""


class Crashed(OperationError):
    """A worker died of a signal that a damaged index causes, before it was ready."""

    def __init__(self, message: str, *, init_answered: bool) -> None:
        super().__init__(message)
        self.init_answered = init_answered


def serving_worker(
    launcher: WorkerLauncher,
    request: bytes,
    backing: BackingFiles,
    deadline: float,
    undo: ExitStack,
    *,
    init_answered: bool = False,
    restarts: int = 0,
) -> WorkerProcess:
    """A worker that serves; ``undo`` ends it. Raises Crashed or another OperationError. With
    ``init_answered`` an earlier worker of the same program has answered FUSE_INIT."""
    config, descriptors = launcher.config, launcher.descriptors
    worker = launcher.start(restarts=restarts)
    undo.callback(worker.end)
    try:
        reply = _negotiate(
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
        worker.channel.send({"do": "serve", "backing_ids": backing.most})
        while not _expect_alive(worker, deadline):
            continue
    except (OperationError, OSError) as error:
        # An OSError is the kernel's refusal of the reply.
        message = _with_last_words(str(error), config, descriptors.state)
        if worker.crashed:
            mark_suspect(descriptors.state, config.user)
            worker.end()
            raise Crashed(message, init_answered=init_answered) from None
        raise OperationError(message) from None
    return worker


def read_init_request(fuse: int, deadline: float) -> bytes:
    """The kernel's FUSE_INIT, the first thing that a new connection sends."""
    poll = select.poll()
    poll.register(fuse, select.POLLIN)
    if not poll.poll(_milliseconds_until(deadline)):
        raise OperationError("the kernel sent no FUSE_INIT: check dmesg")
    try:
        return os.read(fuse, _LARGEST_INIT)
    except OSError as error:
        raise OperationError(f"cannot read from /dev/fuse: {error.strerror}") from None


def _negotiate(
    worker: WorkerProcess, request: bytes, *, posix_acl: bool, stack_depth: int, deadline: float
) -> bytes:
    """Gives FUSE_INIT to the worker's libfuse; its reply, amended, for the kernel. Raises
    OperationError if the worker fails or says nothing sensible before ``deadline``."""
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


def _with_last_words(error: str, config: Config, state_dir: int) -> str:
    words = "" if config.foreground else last_log_line(state_dir, WORKER_LOG, config.user)
    words = printable(words)
    said = f" (its last words: {words})" if words else ""
    return f"cannot serve {config.source}: {error}{said}"


def _milliseconds_until(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000))
