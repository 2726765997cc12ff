"""The command ``order``: a list of files behind a request, as long as it may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from monarchfs.control import messages
from monarchfs.prefetch.window import MOST_NAME_BYTES, Window
from monarchfs.types import OperationError

SECONDS = 60.0
"""A client that needs longer for its list is sent away."""


class Announcing:
    """Constant: the window, None in safe mode."""

    def __init__(self, window: Window | None) -> None:
        self._window = window

    async def answer(self, request: Mapping[str, Any], stream: trio.SocketStream) -> dict[str, Any]:
        """Ask for the list, read it to its end, and announce it; the result. Raises
        OperationError."""
        name = request.get("stream", "")
        if not isinstance(name, str) or len(name) > messages.MOST_NAME_BYTES:
            raise OperationError("'stream' must be a short string")
        if self._window is None:
            raise OperationError("this mount is in safe mode: see monarchfs status")
        await stream.send_all(messages.encode_progress({"ready": True}))
        names = bytearray()
        with trio.move_on_after(SECONDS) as scope:
            async for part in stream:
                names += part
                if len(names) > MOST_NAME_BYTES:
                    raise OperationError(f"the list is longer than {MOST_NAME_BYTES >> 20} MiB")
        if scope.cancelled_caught:
            raise OperationError(f"the list did not end within {SECONDS:g} s")
        self._window.announce(name, bytes(names))
        return {"files": names.strip(b"\0").count(b"\0") + bool(names)}
