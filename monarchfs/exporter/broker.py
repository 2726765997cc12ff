"""The two processes of the node's exporter, and their messages.

The first looks for mounts, connects to them and asks, and does nothing else: it has root's rights,
so it reads nothing that a user wrote. Its child has given up every privilege: it gets connections
from which it can only read, reads the answers and serves them.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from monarchfs.config import User
from monarchfs.exporter.discovery import DiscoveredMount, Discovery, Roots
from monarchfs.supervisor.identity import become
from monarchfs.system.privileges import drop_capabilities

log = logging.getLogger(__name__)

_NUMBER_BYTES = 32
MESSAGE_BYTES = 64 << 10
"""The longest message: a mount with as many jobs as are told of."""


def run_apart(roots: Roots, user: User | None, child: Callable[[socket.socket], int]) -> int:
    """Runs ``child`` as ``user`` (None: as this user, without privileges), and answers on its
    socket which mounts there are until it ends; its exit code.

    For processes of one thread, because it forks. Raises OSError. If this process ends first, the
    child sees its socket closed, and ends too.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # A Ctrl-C is for the parent: without it the child ends.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if pid == 0:
        ours.close()
        _live(theirs, user, child)
    theirs.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with ours:
        _answer_all(ours, roots)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _live(
    channel: socket.socket, user: User | None, child: Callable[[socket.socket], int]
) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if user is not None:
            become(user)
        drop_capabilities()
        code = child(channel)
    except Exception:
        log.exception("the exporter failed")
    finally:
        os._exit(code)


def _answer_all(channel: socket.socket, roots: Roots) -> None:
    try:
        while number := channel.recv(_NUMBER_BYTES):
            look = Discovery(roots)
            for mount in look.mounts():
                try:
                    _send(channel, int(number), mount)
                finally:
                    mount.close()
            channel.send(_encoded(int(number), {"left_off": look.left_off}))
    except (BrokenPipeError, ConnectionResetError):
        return  # it has ended: its exit code says how


def _send(channel: socket.socket, number: int, mount: DiscoveredMount) -> None:
    message = {"stem": mount.stem, "owner": mount.owner_uid, "full": mount.full, "jobs": mount.jobs}
    descriptors = [mount.registration]
    if mount.connection is not None:
        descriptors.append(mount.connection)
    socket.send_fds(channel, [_encoded(number, message)], descriptors)


def _encoded(number: int, message: dict[str, Any]) -> bytes:
    return json.dumps({"look": number, **message}).encode()


def ask(channel: socket.socket, number: int) -> None:
    """In the child: begins look ``number``. Raises OSError; BlockingIOError if the parent is far
    behind."""
    channel.send(b"%d" % number)


def receive(channel: socket.socket) -> tuple[int, DiscoveredMount | int] | None:
    """In the child: of which look something came, and what: a mount or, once the look is over, how
    many mounts were more than the limits; None when the parent is gone. Raises BlockingIOError if
    nothing came, on a socket that does not block."""
    data, descriptors, _flags, _address = socket.recv_fds(
        channel, MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC
    )
    if not data:
        return None
    message = json.loads(data)
    if not descriptors:
        return message["look"], int(message["left_off"])
    registration, *connection = descriptors
    return message["look"], DiscoveredMount(
        message["stem"],
        message["owner"],
        registration,
        connection[0] if connection else None,
        message["full"],
        tuple(message["jobs"]),
    )
