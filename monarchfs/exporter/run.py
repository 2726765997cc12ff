"""The exporter of one worker: the listening socket and the page."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import trio

from monarchfs.exporter.http import serve
from monarchfs.exporter.text import CONTENT_TYPE, exposition
from monarchfs.exporter.values import values_now
from monarchfs.threads import run_sync

if TYPE_CHECKING:
    from monarchfs.status import Observed


class Exporter:
    """Constant: the worker, and the listening socket, which the supervisor owns too."""

    def __init__(self, worker: Observed, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._worker = worker
        self._listener = socket.socket(fileno=descriptor)
        self._one_at_a_time = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Answer until the supervisor shuts the socket down."""
        await serve(self._listener, self._page, CONTENT_TYPE)

    async def _page(self) -> bytes:
        values = values_now(self._worker)
        return await run_sync(
            exposition, values, limiter=self._one_at_a_time, abandon_on_cancel=True
        )
