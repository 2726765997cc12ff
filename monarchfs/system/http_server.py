"""HTTP/1.1 on a listening socket: only what metrics and peers need of it (RFC 9112).

Clients may be slow or hostile: a connection gets a few seconds and a few kilobytes, few are served
at once, and the others wait in the kernel's queue. Each connection serves one request. The mount
only loses the time for the answers.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple

import trio

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 8
MOST_HEAD_BYTES = 8 << 10
CONNECTION_SECONDS = 5.0
PAUSE_SECONDS = 0.1
"""After an accept that failed for want of descriptors or memory."""


class HttpRequest(NamedTuple):
    """``path`` and ``query`` as they came, not decoded."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""


class HttpResponse(NamedTuple):
    """``headers``: further lines, each with its end."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain"
    headers: str = ""


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class _Refused(Exception):
    """What came is no request that is served."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.response = HttpResponse(f"{why}\n".encode(), status)


async def serve(
    listener: socket.socket,
    handler: Handler,
    *,
    connections: int = MOST_CONNECTIONS,
    most_body_bytes: int = 0,
) -> None:
    """Answer with what ``handler`` returns until ``listener`` (already listening) is shut down.

    An error of ``handler`` is logged and becomes status 500. ``connections``: that are served at
    once.
    """
    free = trio.Semaphore(connections)
    accepting = trio.socket.from_stdlib_socket(listener)

    async def serve_one(connection: trio.socket.SocketType) -> None:
        try:
            # The client may be gone at any time.
            with connection, suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                with trio.move_on_after(CONNECTION_SECONDS):
                    await answer(trio.SocketStream(connection), handler, most_body_bytes)
        finally:
            free.release()

    async with trio.open_nursery() as nursery:
        while True:
            await free.acquire()
            try:
                connection, _address = await accepting.accept()
            except OSError as exc:
                free.release()
                if exc.errno == errno.EINVAL:  # shut down by the supervisor: accept(2)
                    return
                if exc.errno != errno.ECONNABORTED:
                    log.warning("cannot take a connection: %s", exc)
                    await trio.sleep(PAUSE_SECONDS)
                continue
            nursery.start_soon(serve_one, connection)


async def answer(stream: trio.SocketStream, handler: Handler, most_body_bytes: int) -> None:
    """Serve the one request of a connection."""
    try:
        request = await _read(stream, most_body_bytes)
    except _Refused as refused:
        await _send(stream, refused.response)
        return
    try:
        response = await handler(request)
    except Exception:  # a bug, and no reason for the mount to end
        log.exception("%s", request.path)
        response = HttpResponse(b"See the log of the worker\n", HTTPStatus.INTERNAL_SERVER_ERROR)
    await _send(stream, response, head_only=request.method == "HEAD")


async def _read(stream: trio.SocketStream, most_body_bytes: int) -> HttpRequest:
    """The next request. Raises _Refused."""
    head, body = await _read_head(stream)
    line, *headers = head.decode("latin-1").split("\r\n")
    method, _, rest = line.partition(" ")
    target, _, version = rest.partition(" ")
    if not version.startswith("HTTP/1."):
        raise _Refused(HTTPStatus.BAD_REQUEST, "This is not HTTP/1.1")
    length = _body_length(headers)
    if length > most_body_bytes:
        raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is too long")
    while len(body) < length:
        part = await stream.receive_some(length - len(body))
        if not part:
            raise _Refused(HTTPStatus.BAD_REQUEST, "The body is cut off")
        body += part
    path, _, query = target.partition("?")
    return HttpRequest(method, path, query, bytes(body[:length]))


async def _read_head(stream: trio.SocketStream) -> tuple[bytes, bytearray]:
    """The request line and the headers, or as much as came; and what came behind them."""
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0 and len(data) <= MOST_HEAD_BYTES:
        part = await stream.receive_some(MOST_HEAD_BYTES)
        if not part:
            break
        data += part
    if end < 0 and len(data) > MOST_HEAD_BYTES:
        raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The request is too long")
    return (bytes(data), bytearray()) if end < 0 else (bytes(data[:end]), data[end + 4 :])


def _body_length(headers: list[str]) -> int:
    lengths = set()
    for header in headers:
        name, _, value = header.partition(":")
        if name.lower() == "transfer-encoding":
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "Say the length of the body")
        if name.lower() == "content-length":
            lengths.add(value.strip())
    length = lengths.pop() if lengths else "0"
    if lengths or not length.isascii() or not length.isdigit() or len(length) > 18:
        raise _Refused(HTTPStatus.BAD_REQUEST, "The length of the body is none")
    return int(length)


async def _send(
    stream: trio.SocketStream, response: HttpResponse, *, head_only: bool = False
) -> None:
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n{response.headers}"
        f"Content-Length: {len(response.body)}\r\nConnection: close\r\n\r\n"
    )
    await stream.send_all(head.encode() + (b"" if head_only else response.body))
    with suppress(trio.BrokenResourceError):
        await stream.send_eof()
