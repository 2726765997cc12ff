"""Calls that may never return, made in a child process so that the caller goes on.

A system call on a hung file system sleeps uninterruptibly; neither signals nor threads help. So a
child makes it. One that does not answer in time is killed and never waited for: it ends when the
file system lets it.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

from monarchfs.system.inherited import close_all_but, drop_streams
from monarchfs.system.limits import explained, unmet
from monarchfs.types import MonarchError, OperationError, UsageError

_REPLY_BYTES = 1 << 16
_MOST_DESCRIPTORS = 8

Answer = tuple[Any, Sequence[int]]
"""What a call returns: something JSON can carry, and descriptors."""


Tell = Callable[[Any], None]
"""Tells the parent how far a call is; something JSON can carry. Raises OSError, which ends the
call, where there is no parent any more."""


def bounded_talk(
    call: Callable[[Tell], Any],
    *,
    silence: float,
    overdue: str,
    heard: Callable[[Any], None],
) -> Any:
    """As `bounded_call`, for a long call that reports its progress: ``heard`` gets that.

    Raises OperationError(``overdue``) if it says nothing for ``silence`` seconds. No descriptors
    are returned.
    """

    def told(theirs: socket.socket) -> Answer:
        def tell(progress: Any) -> None:
            theirs.send(json.dumps({"progress": progress}).encode())

        return call(tell), ()

    with _child(told, silence, overdue, ()) as ours:
        while "progress" in (message := _decoded(ours.recv(_REPLY_BYTES), overdue)):
            heard(message["progress"])
    raise_failure(message)
    return message["result"]


def bounded_call(
    call: Callable[[], Answer], *, timeout: float, overdue: str, keep: Sequence[int] = ()
) -> Answer:
    """Runs ``call`` in a child and returns its answer; the descriptors are ours then.

    The child has no descriptor of this process but those in ``keep``; 0 to 2 are /dev/null. A
    MonarchError of ``call`` is raised here, and OperationError(``overdue``) after ``timeout``
    seconds. For processes of one thread, because it forks.
    """
    with _child(lambda _theirs: call(), max(timeout, 0.001), overdue, keep) as ours:
        reply, descriptors, _, _ = socket.recv_fds(ours, _REPLY_BYTES, _MOST_DESCRIPTORS)
    # Not by MSG_CMSG_CLOEXEC, because socket.recv_fds ignores flags in many releases of Python.
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    answer = _decoded(reply, overdue)
    raise_failure(answer)
    return answer["result"], descriptors


def bounded_value(call: Callable[[], Any], *, timeout: float, overdue: str) -> Any:
    """As `bounded_call`, for a call that returns no descriptors: what it returned."""
    return bounded_call(lambda: (call(), ()), timeout=timeout, overdue=overdue)[0]


def answer_within(seconds: float, call: Callable[[], Any], *, otherwise: Any) -> Any:
    """What ``call`` returns in a child, without descriptors; ``otherwise`` if it fails or does not
    answer in time."""
    try:
        return bounded_value(call, timeout=seconds, overdue="")
    except MonarchError:
        return otherwise


def is_missing(path: str) -> bool:
    """Whether it is certain that there is nothing. Blocks as the file system does."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


@contextmanager
def _child(
    call: Callable[[socket.socket], Answer], patience: float, overdue: str, keep: Sequence[int]
) -> Iterator[socket.socket]:
    """Our end of the channel to a child that makes the call. Whatever is raised inside the block
    kills the child: what hangs is not waited for."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        # The hooks of os.fork() would swallow a KeyboardInterrupt.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pid = os.fork()
        except OSError:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            _answer_and_exit(lambda: call(theirs), theirs, keep)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            ours.settimeout(patience)
            yield ours
        except BaseException as error:
            os.kill(pid, signal.SIGKILL)
            if isinstance(error, TimeoutError):
                raise OperationError(overdue) from None
            raise
        os.waitpid(pid, 0)


def _decoded(reply: bytes, overdue: str) -> dict[str, Any]:
    if not reply:
        raise OperationError(f"{overdue} (the process that asked was killed)")
    try:
        answer: dict[str, Any] = json.loads(reply)
    except ValueError:
        raise OperationError("the answer is too long") from None
    return answer


def failure(error: Exception) -> dict[str, Any]:
    """What a child tells of the error that ended it, for `raise_failure`."""
    if isinstance(error, UsageError):
        return {"usage": str(error)}
    if isinstance(error, MonarchError):
        return {"error": str(error)}
    if isinstance(error, OSError):
        return {"error": explained(error)}
    return {"error": unmet(error) or f"unexpected {error!r}"}


def raise_failure(answer: Mapping[str, Any]) -> None:
    """UsageError or OperationError, if ``answer`` tells of a `failure`."""
    if "usage" in answer:
        raise UsageError(answer["usage"])
    if "error" in answer:
        raise OperationError(answer["error"])


def _answer_and_exit(
    call: Callable[[], Answer], channel: socket.socket, keep: Sequence[int]
) -> None:
    try:
        descriptors: Sequence[int] = ()
        try:
            _leave_parent_behind({channel.fileno(), *keep})
            result, descriptors = call()
            reply = {"result": result}
        except Exception as error:  # noqa: BLE001 - raised again in the parent, as text
            reply = failure(error)
        socket.send_fds(channel, [json.dumps(reply).encode()], descriptors)
    finally:
        os._exit(0)


def _leave_parent_behind(keep: Set[int]) -> None:
    """A stuck child must not hold its parent's locks, sockets or output pipes."""
    for wanted in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(wanted, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    drop_streams()
    close_all_but(keep)
