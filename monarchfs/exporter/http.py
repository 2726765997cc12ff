"""``GET /metrics``: the page of a mount, or of a node."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from monarchfs.system import http_server
from monarchfs.system.http_server import HttpRequest, HttpResponse

PATH = "/metrics"


async def serve(
    listener: socket.socket, page: Callable[[], Awaitable[bytes]], content_type: str
) -> None:
    """Answer with what ``page`` gives until ``listener`` (already listening) is shut down."""

    async def answer(request: HttpRequest) -> HttpResponse:
        if request.path != PATH:
            return HttpResponse(b"The metrics are at /metrics\n", HTTPStatus.NOT_FOUND)
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(
                b"Use GET\n", HTTPStatus.METHOD_NOT_ALLOWED, headers="Allow: GET, HEAD\r\n"
            )
        return HttpResponse(await page(), content_type=content_type)

    await http_server.serve(listener, answer)
