"""Connections to the control socket, while their requests are being read."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from monarchfs.control import messages, peers

log = logging.getLogger(__name__)

MOST_CLIENTS = 64
_REQUEST_SECONDS = 2.0
_REPLY_SECONDS = 1.0


@dataclass(slots=True)
class Client:
    """A connection whose request is still being read."""

    connection: socket.socket
    deadline: float
    received: bytes = b""


class Clients:
    """Constant: the listening socket, whose mount it is, the loop's selector, who answers.
    Changing: the connections whose request is still being read."""

    def __init__(
        self,
        listener: socket.socket,
        uid: int,
        selector: selectors.BaseSelector,
        answer: Callable[[socket.socket, bytes], None],
    ) -> None:
        """``answer`` gets each connection with its request, and closes it."""
        self._listener = listener
        self._uid = uid
        self._selector = selector
        self._answer = answer
        self._clients: dict[int, Client] = {}
        selector.register(listener, selectors.EVENT_READ, self._on_connection)

    @property
    def deadlines(self) -> list[float]:
        """When ``tick`` has somebody to send away."""
        return [client.deadline for client in self._clients.values()]

    def tick(self, now: float) -> None:
        for client in [c for c in self._clients.values() if c.deadline <= now]:
            self._refuse(client, "no request came in time")

    def close(self) -> None:
        for client in list(self._clients.values()):
            self._forget(client)
            client.connection.close()

    def _on_connection(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if not peers.may_ask(connection, self._uid):
            reply(connection, messages.encode_error("this mount belongs to another user"))
            return
        if len(self._clients) >= MOST_CLIENTS:
            # Those that say nothing must not keep out those that do.
            self._refuse(next(iter(self._clients.values())), "too many requests at once")
        connection.setblocking(False)
        client = Client(connection, time.monotonic() + _REQUEST_SECONDS)
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ, partial(self._on_client, client))
        self._on_client(client)

    def _on_client(self, client: Client) -> None:
        if self._clients.get(client.connection.fileno()) is not client:
            return  # dropped meanwhile
        try:
            part = client.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        client.received += part
        line, newline, _ = client.received.partition(b"\n")
        if len(line) > messages.MOST_REQUEST_BYTES:
            self._refuse(client, "the request is too long")
        elif newline:
            self._forget(client)
            self._answer(client.connection, line)
        elif not part:
            self._forget(client)
            client.connection.close()

    def _refuse(self, client: Client, why: str) -> None:
        self._forget(client)
        reply(client.connection, messages.encode_error(why))

    def _forget(self, client: Client) -> None:
        self._selector.unregister(client.connection)
        del self._clients[client.connection.fileno()]


def reply(connection: socket.socket, line: bytes) -> None:
    """Sends a short reply and closes; a client that does not read loses it."""
    connection.settimeout(_REPLY_SECONDS)
    try:
        with connection:
            connection.sendall(line)
    except OSError as error:
        log.debug("a client left without its reply: %s", error)
