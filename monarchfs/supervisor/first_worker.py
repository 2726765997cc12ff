"""The first worker of a mount: started, and waited for until it serves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from monarchfs.config import Config
from monarchfs.supervisor.backing import BackingFiles
from monarchfs.supervisor.launch import (
    Descriptors,
    WorkerProcess,
    await_ready,
    negotiate,
    start_worker,
)
from monarchfs.supervisor.messages import printable
from monarchfs.supervisor.startup import Start
from monarchfs.supervisor.storage import WORKER_LOG, last_log_line, mark_suspect, open_log
from monarchfs.supervisor.worker_logging import WorkerLogging
from monarchfs.types import OperationError


class Crashed(OperationError):
    """A worker died of a signal that a damaged index causes, before it was ready."""

    def __init__(self, message: str, *, init_answered: bool) -> None:
        super().__init__(message)
        self.init_answered = init_answered


def serving_worker(
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
    """A worker that serves; ``undo`` ends it. Raises Crashed or another OperationError.

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
            raise Crashed(message, init_answered=init_answered) from None
        raise OperationError(message) from None
    return worker


def launch_worker(
    config: Config,
    command: Sequence[str],
    descriptors: Descriptors,
    mount_ns: int,
    worker_log: WorkerLogging,
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
        return start(output, worker_log)
    # What the dead said is kept.
    stderr = open_log(descriptors.state, WORKER_LOG, config.user, truncate=not restarts)
    try:
        return start(stderr, worker_log)
    finally:
        os.close(stderr)


def _with_last_words(error: str, config: Config, state_dir: int) -> str:
    words = "" if config.foreground else last_log_line(state_dir, WORKER_LOG, config.user)
    words = printable(words)
    return f"cannot serve {config.source}: {error}" + (
        f" (its last words: {words})" if words else ""
    )
