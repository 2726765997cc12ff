"""The TCP sockets on which metrics are served: a worker's, and the node's.

The supervisor makes a worker's before anything is mounted, and keeps it: a port that is taken is
noticed in time, and the next worker goes on with it.
"""

from __future__ import annotations

import contextlib
import os
import socket

from monarchfs.types import OperationError

LOOPBACK = "127.0.0.1"
_BACKLOG = 16


def listen_on(address: str, port: int, option: str) -> socket.socket:
    """A socket that listens on an IP address, which ``option`` chooses. Raises OperationError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Else connections of the last mount, in TIME_WAIT, would keep the port (ip(7)).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno or 0)
        shown = f"[{address}]" if ":" in address else address
        raise OperationError(
            f"cannot serve metrics on {shown}:{port}: {reason}: give another {option}"
        ) from None
    return listener


def stop_listening(listener: socket.socket) -> None:
    """Free the port, even if a worker that cannot die has the socket too. Idempotent."""
    with contextlib.suppress(OSError):  # closed before, or nobody listens any more
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
