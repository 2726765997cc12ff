"""Running the supervisor in the background: the parent stays until the mount answers or fails."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from functools import partial

from monarchfs.system.bounded import failure, raise_failure
from monarchfs.system.inherited import close_all_but, drop_streams
from monarchfs.types import MonarchError, OperationError

log = logging.getLogger(__name__)

Report = Callable[[bool], None]
"""Called once by the supervisor with True, when the mount answers; before, with False, while that
takes long but goes on. Raises OperationError if who waits for that is gone."""

_GONE_SECONDS = 5.0


def ending_signals() -> list[signal.Signals]:
    """The signals that end a supervisor in the orderly way. One that was ignored when this process
    began stays ignored, as nohup(1) wants it; SIGTERM never is."""
    terminal = (signal.SIGINT, signal.SIGHUP)
    heeded = [number for number in terminal if signal.getsignal(number) is not signal.SIG_IGN]
    return [signal.SIGTERM, *heeded]


def run_in_background(
    run: Callable[[Report], int], *, timeout: float, overdue: str, keep: Collection[int] = ()
) -> int:
    """Runs ``run(report)`` in a daemon; returns its process number when it has called ``report``.
    The daemon has no descriptor of this process but 0 to 2 and those in ``keep``.

    A MonarchError that ``run`` raises earlier is raised here. ``timeout`` seconds after it began or
    last reported, the daemon is killed, not waited for (it may hang in the kernel), and
    OperationError(``overdue``) raised.
    KeyboardInterrupt ends the daemon. For processes of one thread, because it forks.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if pid == 0:
        _become_daemon(run, writing, keep)
    os.close(writing)
    try:
        message = _read(reading, timeout)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        raise OperationError(overdue) from None
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        _wait(pid)
        raise KeyboardInterrupt("interrupted: nothing was mounted") from None
    finally:
        os.close(reading)
    if message == {"ok": True}:
        return pid
    _wait(pid)
    raise_failure(message)
    raise OperationError("the daemon was killed while it started")


def _become_daemon(run: Callable[[Report], int], pipe: int, keep: Collection[int]) -> None:
    """The child. Never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir("/")
        # The caller's descriptors (a lock of a batch script, say) must not live as long as we do.
        close_all_but({pipe, *keep})
        code = run(partial(_report, pipe))
    except Exception as error:
        if not isinstance(error, (MonarchError, OSError)):
            log.exception("unexpected error")
        _tell(pipe, failure(error))
    finally:
        os._exit(code)


def _report(pipe: int, answers: bool) -> None:
    """Tells the parent, and lets go of the terminal before the last time: a caller who waits for
    the end of our output must not wait longer."""
    if answers:
        drop_streams()
    try:
        os.write(pipe, json.dumps({"ok": True}).encode() if answers else b" ")
    except BrokenPipeError:
        raise OperationError("the process that asked for the mount is gone") from None
    if answers:
        os.close(pipe)


def _tell(pipe: int, message: dict[str, object]) -> None:
    try:
        os.write(pipe, json.dumps(message).encode())
    except OSError as error:
        # The parent is gone, or was told already.
        log.error("cannot report %s: %s", message, error.strerror)


def _read(pipe: int, timeout: float) -> dict[str, str | bool] | dict[str, str]:
    content = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(timeout * 1000):
        part = os.read(pipe, 1 << 16)
        content += part.lstrip()
        if not part:
            return dict(json.loads(content)) if content else {}
    raise TimeoutError


def _wait(pid: int) -> None:
    """Waits a little for the daemon's end, which is near unless it hangs."""
    deadline = time.monotonic() + _GONE_SECONDS
    while time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
