"""One line on a terminal that says how far a long command is; nothing elsewhere."""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager

_EVERY_SECONDS = 0.1
_CLEAR = "\r\033[K"


class Progress(AbstractContextManager["Progress"]):
    """A context manager; the line is gone when it ends. ``clear`` it before other output."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = False
        self._next = 0.0

    def __exit__(self, *_raised: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Puts ``text`` in place of what is there, a few times a second at most."""
        now = time.monotonic()
        if not self._terminal or now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        print(_CLEAR + text[: width - 1], end="", file=sys.stderr, flush=True)
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
            self._shown = False
            self._next = 0.0


def bar(done: int, of: int, width: int = 24) -> str:
    """How much of it, drawn: ``[######------]  50%``."""
    share = min(1.0, done / of) if of > 0 else 1.0
    filled = int(share * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] {100 * share:3.0f}%"
