"""``GET /metrics`` on a listening socket: only the HTTP/1.1 that this needs (RFC 9112).

Clients may be slow or hostile: a connection gets a few seconds and a few kilobytes, few are served
at once, and the others wait in the kernel's queue. The mount only loses the time for the answers.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 8
MOST_HEAD_BYTES = 8 << 10
CONNECTION_SECONDS = 5.0
PAUSE_SECONDS = 0.1
"""After an accept that failed for want of descriptors or memory."""

PATH = b"/metrics"


async def serve(
    listener: socket.socket, page: Callable[[], Awaitable[bytes]], content_type: str
) -> None:
    """Answer with what ``page`` gives until ``listener`` (already listening) is shut down. An error
    of ``page`` is logged and becomes status 500."""
    free = trio.Semaphore(MOST_CONNECTIONS)
    accepting = trio.socket.from_stdlib_socket(listener)

    async def answer(connection: trio.socket.SocketType) -> None:
        try:
            # The client may be gone at any time.
            with connection, suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                with trio.move_on_after(CONNECTION_SECONDS):
                    await _answer(trio.SocketStream(connection), page, content_type)
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
                    log.warning("metrics: cannot take a connection: %s", exc)
                    await trio.sleep(PAUSE_SECONDS)
                continue
            nursery.start_soon(answer, connection)


async def _answer(
    stream: trio.SocketStream, page: Callable[[], Awaitable[bytes]], content_type: str
) -> None:
    head = await _read_head(stream)
    if head is None:
        await _send(stream, "431 Request Header Fields Too Large", b"The request is too long\n")
        return
    method, _, rest = head.partition(b" ")
    target, _, version = rest.split(b"\r\n", 1)[0].partition(b" ")
    if not version.startswith(b"HTTP/1."):
        await _send(stream, "400 Bad Request", b"This is not HTTP/1.1\n")
    elif target.partition(b"?")[0] != PATH:
        await _send(stream, "404 Not Found", b"The metrics are at /metrics\n")
    elif method not in (b"GET", b"HEAD"):
        await _send(stream, "405 Method Not Allowed", b"Use GET\n", "Allow: GET, HEAD\r\n")
    else:
        try:
            body = await page()
        except Exception:  # a bug, and no reason for the mount to end
            log.exception("metrics")
            await _send(stream, "500 Internal Server Error", b"See the log of the worker\n")
            return
        kind = f"Content-Type: {content_type}\r\n"
        await _send(stream, "200 OK", body, kind, head_only=method == b"HEAD")


async def _read_head(stream: trio.SocketStream) -> bytes | None:
    """The request line and the headers, or as much as came; None if they are too long."""
    head = b""
    while b"\r\n\r\n" not in head:
        part = await stream.receive_some(MOST_HEAD_BYTES)
        head += part
        if not part:
            break
        if len(head) > MOST_HEAD_BYTES:
            return None
    return head


async def _send(
    stream: trio.SocketStream,
    status: str,
    body: bytes,
    headers: str = "Content-Type: text/plain\r\n",
    *,
    head_only: bool = False,
) -> None:
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    await stream.send_all(head.encode() + (b"" if head_only else body))
    with suppress(trio.BrokenResourceError):
        await stream.send_eof()
