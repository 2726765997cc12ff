"""When a copy that failed in the source, or whose file was too young, is tried again."""

from __future__ import annotations

import errno
from collections.abc import Callable

import trio

from monarchfs.prefetch.queue import Priority

RETRY_SECONDS = (1.0, 5.0, 25.0)
"""When a copy that failed in the source is tried again."""

TRANSIENT = {errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.EMFILE, errno.ENOTCONN}


class Retries:
    """Changing: how often each failed in a row, and when those that wait have their turn. By inode
    number. Changed on the event loop."""

    def __init__(self, nursery: trio.Nursery, again: Callable[[int, Priority], None]) -> None:
        """``again`` is called when it is time."""
        self._nursery = nursery
        self._again = again
        # `due_in` is also asked on threads of the data path, where trio has no time.
        self._clock = trio.lowlevel.current_clock()
        self._attempts: dict[int, int] = {}
        self._at: dict[int, float] = {}

    def __contains__(self, ino: int) -> bool:
        return ino in self._at

    def due_in(self, ino: int) -> float | None:
        """Seconds until it is tried again; None: it is not."""
        at = self._at.get(ino)
        return None if at is None else max(0.0, at - self._clock.current_time())

    def after_failure(self, ino: int, priority: Priority, code: int | None) -> bool:
        """The source failed with this errno; whether it will be tried again."""
        attempt = self._attempts.pop(ino, 0)
        if code not in TRANSIENT or attempt >= len(RETRY_SECONDS):
            return False
        self._attempts[ino] = attempt + 1
        self.later(ino, priority, RETRY_SECONDS[attempt])
        return True

    def forget_failures(self, ino: int) -> None:
        """All of it was fetched."""
        self._attempts.pop(ino, None)

    def later(self, ino: int, priority: Priority, seconds: float) -> None:
        self._at[ino] = self._clock.current_time() + seconds
        self._nursery.start_soon(self._wait, ino, priority, seconds)

    async def _wait(self, ino: int, priority: Priority, seconds: float) -> None:
        await trio.sleep(seconds)
        self._at.pop(ino, None)
        self._again(ino, priority)
