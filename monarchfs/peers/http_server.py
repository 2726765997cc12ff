"""HTTP/1.1 on a listening socket, with h11: as much as metrics and peers need.

Clients may be slow, or hostile: a connection gets a few seconds for each request and a bounded
number of bytes; few are served at once, and the others wait in the kernel's queue.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import h11
import trio

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
MAX_HEAD_BYTES = 8 << 10
REQUEST_SECONDS = 5.0
PAUSE_SECONDS = 0.1
"""After an accept that failed for want of descriptors or memory."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """``path`` and ``query`` as they came, not decoded."""

    method: str
    path: str
    query: str
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """``headers``: beside those that every response has."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain"
    headers: Sequence[tuple[str, str]] = ()


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class Limits:
    """What a client may take. ``seconds``: for a request to arrive and for its answer to be taken,
    each; ``idle_seconds``: between two requests of a connection."""

    def __init__(
        self,
        *,
        connections: int = MAX_CONNECTIONS,
        body_bytes: int = 0,
        seconds: float = REQUEST_SECONDS,
        idle_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self.connections = connections
        self.body_bytes = body_bytes
        self.seconds = seconds
        self.idle_seconds = idle_seconds


async def serve(listener: socket.socket, handler: Handler, limits: Limits) -> None:
    """Answer until ``listener`` (in the state of listening) is shut down.

    An error of ``handler`` is logged, and becomes status 500.
    """
    free = trio.Semaphore(limits.connections)
    accepting = trio.socket.from_stdlib_socket(listener)

    async def converse(connection: trio.socket.SocketType) -> None:
        try:
            # The client may be gone at any time.
            with connection, suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await _Conversation(trio.SocketStream(connection), handler, limits).run()
        finally:
            free.release()

    async with trio.open_nursery() as nursery:
        while True:
            await free.acquire()
            try:
                connection, _address = await accepting.accept()
            except OSError as exc:
                free.release()
                if exc.errno == errno.EINVAL:  # shut down: accept(2)
                    return
                if exc.errno != errno.ECONNABORTED:
                    log.warning("cannot take a connection: %s", exc)
                    await trio.sleep(PAUSE_SECONDS)
                continue
            nursery.start_soon(converse, connection)


class _TooLarge(Exception):
    """The body of a request is longer than it may be."""


class _Conversation:
    """One connection, request by request."""

    def __init__(self, stream: trio.SocketStream, handler: Handler, limits: Limits) -> None:
        self._stream = stream
        self._handler = handler
        self._limits = limits
        self._state = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def run(self) -> None:
        while True:
            with trio.move_on_after(self._limits.idle_seconds) as waiting:
                try:
                    request = await self._read()
                except h11.RemoteProtocolError as exc:
                    await self._refuse(exc.error_status_hint, str(exc))
                    return
                except _TooLarge:
                    await self._refuse(413, "the body is too long")
                    return
            if waiting.cancelled_caught or request is None:
                return
            try:
                response = await self._handler(request)
            except Exception:  # a bug, and no reason for the mount to end
                log.exception("%s %s", request.method, request.path)
                response = HttpResponse(b"See the log of the worker\n", 500)
            with trio.move_on_after(self._limits.seconds) as sending:
                await self._send(response, head_only=request.method == "HEAD")
            if sending.cancelled_caught or self._state.our_state is not h11.DONE:
                return
            if self._state.their_state is not h11.DONE:
                return
            self._state.start_next_cycle()

    async def _read(self) -> HttpRequest | None:
        """The next request; None at the end of the connection."""
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = self._state.next_event()
            if event is h11.NEED_DATA:
                self._state.receive_data(await self._stream.receive_some(64 << 10))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._limits.body_bytes:
                    raise _TooLarge
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                path, _, query = head.target.decode("ascii").partition("?")
                return HttpRequest(head.method.decode("ascii"), path, query, bytes(body))
            else:  # closed, or cut off
                return None

    async def _refuse(self, status: int, why: str) -> None:
        if self._state.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = HttpResponse(f"{why}\n".encode(), status, headers=[("Connection", "close")])
            with trio.move_on_after(self._limits.seconds):
                await self._send(response, head_only=False)

    async def _send(self, response: HttpResponse, *, head_only: bool) -> None:
        head = h11.Response(
            status_code=response.status,
            headers=[
                ("Content-Type", response.content_type),
                ("Content-Length", str(len(response.body))),
                *response.headers,
            ],
        )
        data = self._state.send(head) or b""
        if not head_only:
            data += self._state.send(h11.Data(response.body)) or b""
        data += self._state.send(h11.EndOfMessage()) or b""
        await self._stream.send_all(data)
