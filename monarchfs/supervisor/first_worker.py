"""The first worker of a mount: started, and waited for until it serves."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from contextlib import ExitStack

from monarchfs.fuse.protocol import ProtocolError, amend_init_reply
from monarchfs.supervisor.directories import WORKER_LOG, last_log_line
from monarchfs.supervisor.launch import WorkerProcess
from monarchfs.supervisor.messages import Failed, MalformedMessage, Ready, printable
from monarchfs.supervisor.mounted import Mounted
from monarchfs.types import OperationError

log = logging.getLogger(__name__)

_LARGEST_INIT = 1 << 18
"""What is read from /dev/fuse at once: the kernel wants room for a full request."""


def serving_worker(
    mounted: Mounted,
    deadline: float,
    undo: ExitStack,
    *,
    restarts: int = 0,
    init_answered: bool = False,
) -> tuple[WorkerProcess, int]:
    """A worker that serves, and how many were before it; ``undo`` ends it. Raises OperationError.

    If the first one dies of a signal that a damaged index causes, there is a second one, which
    checks the index, and can do without. ``init_answered``: the first one has answered FUSE_INIT.
    """
    worker = mounted.start_worker(restarts=restarts)
    undo.callback(worker.stop)
    try:
        reply = _negotiate(worker, mounted, deadline)
        if not init_answered:
            os.write(mounted.fuse, reply)
            init_answered = True
            mounted.backing.try_passthrough()
        worker.channel.send({"do": "serve", "backing_ids": mounted.backing.most})
        while not _expect_alive(worker, deadline):
            continue
        return worker, restarts
    except (OperationError, OSError) as error:
        # An OSError is the kernel's refusal of the reply.
        message = _with_last_words(str(error), mounted)
    if worker.crashed:
        mounted.mark_suspect()
        worker.stop()
    if restarts or not worker.crashed:
        raise OperationError(message)
    log.warning("%s: starting another one", message)
    return serving_worker(mounted, deadline, undo, restarts=1, init_answered=init_answered)


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


def _negotiate(worker: WorkerProcess, mounted: Mounted, deadline: float) -> bytes:
    """Gives FUSE_INIT to the worker's libfuse; its reply, amended, for the kernel. Raises
    OperationError if the worker fails or says nothing sensible before ``deadline``."""
    request, acl = mounted.handover.init_request, mounted.config.allow_other
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
        depth = mounted.handover.stack_depth
        return amend_init_reply(request, reply, posix_acl=acl, stack_depth=depth)
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


def _with_last_words(error: str, mounted: Mounted) -> str:
    config, words = mounted.config, ""
    if not config.foreground:
        state = mounted.handover.descriptors.state
        words = printable(last_log_line(state, WORKER_LOG, config.user))
    said = f" (its last words: {words})" if words else ""
    return f"cannot serve {config.source}: {error}{said}"


def _milliseconds_until(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000))
