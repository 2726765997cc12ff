"""The exporter of one worker: the listening socket, the page, and what is measured for it alone."""

from __future__ import annotations

import os
import socket
from time import perf_counter_ns
from typing import TYPE_CHECKING

import trio

from monarchfs.exporter.http import serve
from monarchfs.exporter.text import CONTENT_TYPE, exposition
from monarchfs.exporter.values import values_now
from monarchfs.metrics import NS

if TYPE_CHECKING:
    from monarchfs.worker import Worker


class Exporter:
    """Constant: the worker, and the listening socket, which the supervisor owns too."""

    def __init__(self, worker: Worker, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._worker = worker
        self._listener = socket.socket(fileno=descriptor)
        self._one_at_a_time = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Answer until the supervisor shuts the socket down."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._measure_delay)
            await serve(self._listener, self._page, CONTENT_TYPE)
            nursery.cancel_scope.cancel()

    async def _page(self) -> bytes:
        values = values_now(self._worker)
        return await trio.to_thread.run_sync(
            exposition, values, limiter=self._one_at_a_time, abandon_on_cancel=True
        )

    async def _measure_delay(self) -> None:
        delay = self._worker.metrics.event_loop_delay
        while True:
            due = perf_counter_ns() + NS
            await trio.sleep(1)
            delay.observe(max(0, perf_counter_ns() - due))
