"""Messages between supervisor and worker: JSON objects and descriptors over SOCK_SEQPACKET."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MESSAGE_BYTES = 256 << 10
MOST_DESCRIPTORS = 32


class Channel:
    """The supervisor's end. Never blocks longer than the timeout that is given; what a worker
    says is not trusted to be well-formed."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
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

    def receive(
        self, timeout: float, descriptors: list[int] | None = None
    ) -> dict[str, Any] | None:
        """The next message; None if the worker closed its end. Raises TimeoutError, or ValueError
        for what is no message.

        What came with it is closed, or, with a list, put there for the caller to close, also where
        this raises."""
        self._socket.settimeout(max(timeout, 0.001))
        try:
            content, came, _, _ = socket.recv_fds(
                self._socket, MESSAGE_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return None
        if descriptors is not None:
            descriptors += came
        else:
            close_all(came)
        if not content:
            return None
        try:
            message = json.loads(content)
        except RecursionError:
            raise ValueError("a worker's message is too deep") from None
        if not isinstance(message, dict):
            raise ValueError("a worker's message must be a JSON object")
        return message

    def close(self) -> None:
        self._socket.close()


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def encode(message: Mapping[str, Any]) -> bytes:
    """As short as can be: nothing is escaped that json.loads understands as it is."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogatepass")
