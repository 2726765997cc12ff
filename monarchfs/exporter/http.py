"""``GET /metrics``: the page of a mount, or of a node."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

import trio

from monarchfs.exporter.text import CONTENT_TYPE, exposition
from monarchfs.metrics.names import FAMILIES, Values
from monarchfs.system import http_server
from monarchfs.system.http_server import HttpRequest, HttpResponse
from monarchfs.system.threads import run_sync

PATH = "/metrics"


async def serve(listener: socket.socket, page: Callable[[], Awaitable[bytes]]) -> None:
    """Answer with what ``page`` gives until ``listener`` (already listening) is shut down."""

    async def answer(request: HttpRequest) -> HttpResponse:
        if request.path != PATH:
            return HttpResponse(b"The metrics are at /metrics\n", HTTPStatus.NOT_FOUND)
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(
                b"Use GET\n", HTTPStatus.METHOD_NOT_ALLOWED, headers="Allow: GET, HEAD\r\n"
            )
        return HttpResponse(await page(), content_type=CONTENT_TYPE)

    await http_server.serve(listener, answer)


class Exporter:
    """The page of one worker. Constant: what gives the values, and the listening socket, which the
    supervisor owns too."""

    def __init__(self, values: Callable[[], Values], descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._values = values
        self._listener = socket.socket(fileno=descriptor)
        self._one_at_a_time = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Answer until the supervisor shuts the socket down."""
        await serve(self._listener, self._page)

    async def _page(self) -> bytes:
        now = self._values()
        page = partial(exposition, {family: now[family] for family in FAMILIES}, process=True)
        return await run_sync(page, limiter=self._one_at_a_time, abandon_on_cancel=True)
