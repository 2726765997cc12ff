"""The exporter of one worker: the listening socket and the page."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import trio

from monarchfs.exporter.http import serve
from monarchfs.exporter.samples import Values
from monarchfs.exporter.text import CONTENT_TYPE, exposition
from monarchfs.system.threads import run_sync


class Exporter:
    """Constant: what gives the values, and the listening socket, which the supervisor owns too."""

    def __init__(self, values: Callable[[], Values], descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._values = values
        self._listener = socket.socket(fileno=descriptor)
        self._one_at_a_time = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Answer until the supervisor shuts the socket down."""
        await serve(self._listener, self._page, CONTENT_TYPE)

    async def _page(self) -> bytes:
        return await run_sync(
            exposition, self._values(), limiter=self._one_at_a_time, abandon_on_cancel=True
        )
