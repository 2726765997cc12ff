"""Messages between supervisor and worker: JSON objects over SOCK_SEQPACKET. Descriptors pass only
from the supervisor to the worker (docs/SECURITY.md)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from monarchfs.supervisor.messages import MalformedMessage, Message, parse
from monarchfs.supervisor.worker_logging import WorkerLogging

MESSAGE_BYTES = 256 << 10

_SO_PASSRIGHTS = 83
"""Linux 6.16: whether a socket takes descriptors (include/uapi/asm-generic/socket.h)."""


def refuse_descriptors(end: socket.socket) -> None:
    """Whoever sends a descriptor to this socket, or to a listener's connections, gets EPERM from
    now on.

    The last close of a descriptor can wait for whoever serves its file. Before Linux 6.16
    descriptors cannot be refused; there recvmsg(2) closes those for which it has no room before
    this process sees them, which blocks on few file systems.
    """
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


class WorkerChannel:
    """The supervisor's end. Never blocks longer than the timeout that is given."""

    def __init__(self, end: socket.socket, worker_log: WorkerLogging) -> None:
        self.closed_at: float | None = None
        """When the worker was found to have closed its end."""
        self._socket = end
        self._worker_log = worker_log
        refuse_descriptors(end)
        # A request that came with a connection can be 64 KiB of text; numbers in it can be longer
        # when they are written again.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Whether the message could be sent at once: not to a worker that is dead or stuck."""
        try:
            self._socket.setblocking(False)
            socket.send_fds(self._socket, [encode(message)], descriptors)
        except OSError:
            return False
        return True

    def receive(self, timeout: float) -> Message | None:
        """The next message; None if the worker closed its end. Raises TimeoutError, or
        MalformedMessage for what is no message, which has been counted and logged."""
        self._socket.settimeout(max(timeout, 0.001))
        try:
            content, _, flags, _ = self._socket.recvmsg(MESSAGE_BYTES)
        except ConnectionResetError:
            content, flags = b"", 0
        if not content and not flags & socket.MSG_CTRUNC:
            self.closed_at = time.monotonic()
            return None
        try:
            if flags & socket.MSG_CTRUNC:
                raise MalformedMessage("it sends descriptors")
            if flags & socket.MSG_TRUNC:
                raise MalformedMessage(f"it says more than {MESSAGE_BYTES} bytes at once")
            return parse(content)
        except MalformedMessage as malformed:
            self._worker_log.drop(str(malformed))
            raise

    def close(self) -> None:
        self._socket.close()


def encode(message: Mapping[str, Any]) -> bytes:
    """As short as can be: nothing is escaped that json.loads understands as it is."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogatepass")
