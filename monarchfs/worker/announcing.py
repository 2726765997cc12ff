"""The command ``order``: a list of files behind a request, as long as it may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from monarchfs.control import messages
from monarchfs.control.peers import peer_pid
from monarchfs.prefetch.window import MOST_NAME_BYTES, Window
from monarchfs.system.process_stat import start_ticks
from monarchfs.system.threads import run_sync
from monarchfs.types import OperationError
from monarchfs.worker.kept_hints import KeptHints, KeptOrder

SECONDS = 60.0
"""A client that needs longer for its list is sent away."""


class Announcing:
    """Constant: the window, None in safe mode; what keeps orders for later workers."""

    def __init__(self, window: Window | None, said: KeptHints) -> None:
        self._window = window
        self._said = said
        self._one_at_a_time = trio.Lock()
        if window is not None:
            window.on_dropped.add(said.forget_order)

    async def answer(self, request: Mapping[str, Any], stream: trio.SocketStream) -> dict[str, Any]:
        """Ask for the list, read it to its end, and announce it; the result. Raises
        OperationError."""
        name = request.get("stream", "")
        if not isinstance(name, str) or len(name) > messages.MOST_NAME_BYTES:
            raise OperationError("'stream' must be a short string")
        window = self._window
        if window is None:
            raise OperationError("this mount is in safe mode: see monarchfs status")
        pid = peer_pid(stream.socket)
        ticks = start_ticks(pid)
        await stream.send_all(messages.encode_progress({"ready": True}))
        names = bytearray()
        with trio.move_on_after(SECONDS) as scope:
            async for part in stream:
                names += part
                if len(names) > MOST_NAME_BYTES:
                    raise OperationError(f"the list is longer than {MOST_NAME_BYTES >> 20} MiB")
        if scope.cancelled_caught:
            raise OperationError(f"the list did not end within {SECONDS:g} s")
        async with self._one_at_a_time:
            window.announce(name, bytes(names), pid, ticks)
            await run_sync(self._said.keep_order, KeptOrder(name, bytes(names), pid, ticks))
            if name not in window.orders:
                self._said.forget_order(name)
        return {"files": names.strip(b"\0").count(b"\0") + bool(names)}

    async def resume(self) -> None:
        """Announce what was announced to an earlier worker. Its readers may be anywhere in it."""
        if self._window is None:
            return
        async with self._one_at_a_time:
            for order in await run_sync(self._said.orders):
                self._window.announce(
                    order.stream, order.names, order.pid, order.start_ticks, begun=True
                )
                # That has dropped it first.
                await run_sync(self._said.keep_order, order)
