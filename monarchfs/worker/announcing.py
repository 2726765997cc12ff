"""The command ``order``: a list of files behind a request, as long as it may be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import trio

from monarchfs.control import messages
from monarchfs.control.peers import peer_pid
from monarchfs.prefetch.window import MOST_NAME_BYTES, Window
from monarchfs.types import OperationError

SECONDS = 60.0
"""A client that needs longer for its list is sent away."""


class Announcing:
    """Constant: the window, None in safe mode; who waits for exits. Changing: by pid, the processes
    that announced something and have not exited (``_alive``)."""

    def __init__(self, window: Window | None, nursery: trio.Nursery) -> None:
        self._window = window
        self._nursery = nursery
        self._alive: dict[int, trio.Event] = {}

    async def answer(self, request: Mapping[str, Any], stream: trio.SocketStream) -> dict[str, Any]:
        """Ask for the list, read it to its end, and announce it; the result. Raises
        OperationError."""
        name = request.get("stream", "")
        if not isinstance(name, str) or len(name) > messages.MOST_NAME_BYTES:
            raise OperationError("'stream' must be a short string")
        if self._window is None:
            raise OperationError("this mount is in safe mode: see monarchfs status")
        exited = self._exit_of(peer_pid(stream.socket))
        await stream.send_all(messages.encode_progress({"ready": True}))
        names = bytearray()
        with trio.move_on_after(SECONDS) as scope:
            async for part in stream:
                names += part
                if len(names) > MOST_NAME_BYTES:
                    raise OperationError(f"the list is longer than {MOST_NAME_BYTES >> 20} MiB")
        if scope.cancelled_caught:
            raise OperationError(f"the list did not end within {SECONDS:g} s")
        self._window.announce(name, bytes(names), exited)
        return {"files": names.strip(b"\0").count(b"\0") + bool(names)}

    def _exit_of(self, pid: int) -> Callable[[], bool]:
        """What tells whether the process has exited. It never does where that cannot be known: in
        another pid namespace, before Linux 5.3 (pidfd_open(2))."""
        if pid not in self._alive:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return lambda: True
            except OSError:  # EINVAL, for 0
                return lambda: False
            self._alive[pid] = trio.Event()
            self._nursery.start_soon(self._wait_for, pid, descriptor)
        return self._alive[pid].is_set

    async def _wait_for(self, pid: int, descriptor: int) -> None:
        try:
            await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)
            self._alive.pop(pid).set()
