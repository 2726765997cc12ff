"""The exporter's HTTP: what it answers, and what clients cannot do to it."""

import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from unittest.mock import AsyncMock

import pytest
import trio

from monarchfs.exporter import http
from monarchfs.supervisor.port import LOOPBACK, listen_on, stop_listening
from monarchfs.system import http_server
from tests.support.mounting import free_port

PAGE = b"monarchfs_x 1\n" * 5000
GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
ANSWERS = AsyncMock(return_value=PAGE)


@asynccontextmanager
async def served(get: Callable[[], Awaitable[bytes]] = ANSWERS) -> AsyncIterator[int]:
    """A server; the port where it listens. It has to end by itself once it is shut down."""
    listener = listen_on(LOOPBACK, free_port(), "--metrics-port")
    port = listener.getsockname()[1]
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            # A descriptor of its own, as the worker has one.
            own = socket.socket(fileno=socket.dup(listener.fileno()))
            nursery.start_soon(partial(http.serve, own, get))
            try:
                yield port
            finally:
                stop_listening(listener)
        own.close()


async def ask(port: int, request: bytes) -> bytes:
    """The whole answer; what a connection reset leaves of it."""
    answer = b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(request)
            async for part in stream:
                answer += part
    return answer


def status_of(answer: bytes) -> bytes:
    return answer.split(b" ", 2)[1] if answer else b""


async def test_a_page_is_served_whoever_leaves() -> None:
    async with served() as port:
        answer = await ask(port, GET)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert status_of(answer) == b"200"
        assert b"Content-Length: %d" % len(PAGE) in head
        assert body == PAGE
        assert (await ask(port, GET.replace(b"GET", b"HEAD"))).endswith(b"\r\n\r\n")
        assert status_of(await ask(port, GET.replace(b"metrics", b"metrics?a=b"))) == b"200"
        for request in (b"", b"GET /met", GET):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(request)
            # With unread data or without: a reset.
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            await stream.aclose()
        assert status_of(await ask(port, GET)) == b"200"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
    ],
)
async def test_other_requests_are_refused(request_bytes: bytes, status: bytes) -> None:
    async with served() as port:
        assert status_of(await ask(port, request_bytes)) == status
        assert status_of(await ask(port, GET)) == b"200"


async def test_a_request_that_never_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 60)  # for its length, not for its time

    async with served() as port:
        # The reset may overtake the answer: it is the end that counts.
        answer = await ask(port, b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 200_000)
        assert status_of(answer) in (b"431", b"")
        assert status_of(await ask(port, GET)) == b"200"
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 0.2)
    large = AsyncMock(return_value=b"x" * (64 << 20))  # more than the socket's buffers take
    async with served(large) as port, trio.open_nursery() as nursery:
        silent = [
            await trio.open_tcp_stream("127.0.0.1", port)
            for _ in range(2 * http_server.MOST_CONNECTIONS)
        ]
        for stream in silent[::2]:
            await stream.send_all(GET)
        # All are dropped, those that waited for a place too, and then it is our turn.
        assert status_of(await ask(port, b"GET /x HTTP/1.1\r\n\r\n")) == b"404"
        for stream in silent:
            nursery.start_soon(stream.aclose)


async def test_no_more_are_served_at_once_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = most = 0

    async def slow() -> bytes:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await trio.sleep(0.01)
        at_once -= 1
        return b""

    async with served(slow) as port, trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(ask, port, GET)
    assert most == http_server.MOST_CONNECTIONS


@pytest.mark.parametrize(
    ("request_bytes", "status", "body"),
    [
        (b"POST /a?b=c HTTP/1.0\r\nContent-Length: 4\r\n\r\nwhat", b"200", b"POST /a b=c what"),
        (b"POST /a HTTP/1.1\r\ncontent-LENGTH:0\r\n\r\nwhat", b"200", b"POST /a  "),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nwhat", b"200", b"POST /a  wha"),
        (b"POST /a HTTP/1.1\r\nContent-Length: 5\r\n\r\nwhat?", b"413", b"The body is too long\n"),
        (b"POST /a HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400", None),
        (b"POST /a HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", b"400", None),
        (b"POST /a HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"400", None),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"411", None),
        (b"POST /a HTTP/1.1\r\nContent-Length: 4\r\n\r\nwh", b"400", b"The body is cut off\n"),
    ],
)
async def test_a_body_has_a_limit(request_bytes: bytes, status: bytes, body: bytes | None) -> None:
    async def echo(request: http_server.HttpRequest) -> http_server.HttpResponse:
        words = f"{request.method} {request.path} {request.query} ".encode()
        return http_server.HttpResponse(words + request.body)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(request_bytes)
        ours.shutdown(socket.SHUT_WR)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        await http_server.answer(stream, echo, most_body_bytes=4)
        answer = ours.recv(65536)
    assert status_of(answer) == status
    assert body is None or answer.endswith(b"\r\n\r\n" + body)


async def test_an_error_of_ours_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with served(AsyncMock(side_effect=ZeroDivisionError)) as port:
        for _ in range(2):
            assert status_of(await ask(port, GET)) == b"500"
    assert "ZeroDivisionError" in caplog.text


async def test_out_of_descriptors_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PAUSE_SECONDS", 0.01)
    failures = [OSError(errno.EMFILE, "full"), ConnectionAbortedError(errno.ECONNABORTED, "gone")]
    really = trio.socket.from_stdlib_socket

    class Failing:
        def __init__(self, listener: socket.socket) -> None:
            self.listener = really(listener)

        async def accept(self) -> object:
            if failures:
                raise failures.pop()
            return await self.listener.accept()

    monkeypatch.setattr(trio.socket, "from_stdlib_socket", Failing)

    async with served() as port:
        assert status_of(await ask(port, GET)) == b"200"
    assert not failures
