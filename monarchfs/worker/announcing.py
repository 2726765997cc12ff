"""What jobs say of their files: the command ``order``, a list of files behind a request, as long as
it may be; and weights. Later workers of the mount are told what is kept of it."""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import trio

from monarchfs.cache.accounts import Accounts
from monarchfs.control import messages
from monarchfs.control.peers import peer_pid
from monarchfs.prefetch.window import MOST_NAME_BYTES, Window
from monarchfs.system.process_stat import start_ticks
from monarchfs.system.threads import run_sync
from monarchfs.types import EvictionPolicy, OperationError
from monarchfs.worker.kept_hints import KeptHints, KeptOrder

SECONDS = 60.0
"""A client that needs longer for its list is sent away."""

WEIGHED_AT_ONCE = 2000
"""So many kept weights are taken up without a checkpoint: some milliseconds."""


class Announcing:
    """Constant: the window, None in safe mode; what weighs files; what keeps all of it for later
    workers."""

    def __init__(self, window: Window | None, accounts: Accounts, said: KeptHints) -> None:
        self._window = window
        self._accounts = accounts
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
        if _has_left(stream.socket.fileno()):
            raise OperationError("who announced it left: its list may have an end too early")
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

    async def weigh(self, weights: Sequence[tuple[int, float]], *, replace: bool) -> None:
        """Users gave these files (number, weight) weights; ``replace``: others have none now."""
        async with self._one_at_a_time:
            self._accounts.weigh(weights, replace=replace)
            await run_sync(self._said.keep_weights, weights, replace)

    async def resume_weights(self) -> None:
        """As an earlier worker had them. There may be millions; in safe mode there are no tiers."""
        if self._accounts.eviction is not EvictionPolicy.WEIGHTED or not self._accounts.tiers:
            return
        async with self._one_at_a_time:
            if (weights := await run_sync(self._said.weights)) is None:
                return
            self._accounts.weigh([], replace=True)
            left = iter(weights.items())
            while part := list(islice(left, WEIGHED_AT_ONCE)):
                self._accounts.weigh(part, replace=False)
                await trio.lowlevel.checkpoint()


def _has_left(connection: int) -> bool:
    """Whether the other side is closed altogether, not only for writing (shutdown(2))."""
    waits = select.poll()
    waits.register(connection, 0)
    return bool(waits.poll(0))
