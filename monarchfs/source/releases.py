"""Closing what was opened of the source, in few threads.

close(2) of a network file system may ask a server, and hang with it. No caller waits for that, so
there is a queue. What cannot be closed now, because no thread can be started or all hang, waits in
the queue and is never forgotten.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import outcome
import trio

logger = logging.getLogger(__name__)

FEW_THREADS = 4
MOST_THREADS = 64
"""The limit where others hang."""

Release = Callable[[], object]
StartThread = Callable[[Callable[[], None], Callable[[outcome.Outcome[None]], None]], None]


class Releases:
    """Thread-safe; nothing blocks but the functions that are given, in threads of their own.

    Changing: what waits; since when each thread has been at what it does (time.monotonic());
    whether the last thread that was wanted could not be started.
    """

    def __init__(
        self,
        *,
        stuck_seconds: float = 1.0,
        start_thread: StartThread = trio.lowlevel.start_thread_soon,
    ) -> None:
        """A thread that is in one call for ``stuck_seconds`` hangs. ``start_thread`` raises
        RuntimeError where no thread can be started."""
        self._stuck_seconds = stuck_seconds
        self._start_thread = start_thread
        self._lock = threading.Lock()
        self._waiting: deque[Release] = deque()
        self._since: dict[object, float] = {}
        self._refused = False

    @property
    def pending(self) -> int:
        """The number of releases that are not done yet."""
        return len(self._waiting) + len(self._since)

    @property
    def threads(self) -> int:
        return len(self._since)

    def soon(self, release: Release) -> None:
        """Call it once, in a thread; an error is only logged."""
        with self._lock:
            self._waiting.append(release)
        self.go_on()

    def go_on(self) -> None:
        """Start another thread if one is needed and can be had. To be called now and then."""
        with self._lock:
            before = time.monotonic() - self._stuck_seconds
            stuck = sum(since <= before for since in self._since.values())
            most = min(FEW_THREADS + stuck, MOST_THREADS)
            if not self._waiting or len(self._since) >= most:
                return
            key = object()
            self._since[key] = time.monotonic()
        try:
            self._start_thread(lambda: self._run(key), _raise)
        except RuntimeError as error:
            with self._lock:
                del self._since[key]
                waiting, refused, self._refused = len(self._waiting), self._refused, True
            if not refused:
                logger.warning("%d releases of the source wait for a thread: %s", waiting, error)
        else:
            self._refused = False

    def _run(self, key: object) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    del self._since[key]
                    return
                release = self._waiting.popleft()
                self._since[key] = time.monotonic()
            try:
                release()
            except Exception:  # whatever it is, the next ones are not to stay behind for it
                logger.warning("Releasing a resource of the source failed", exc_info=True)


def _raise(result: outcome.Outcome[None]) -> None:
    result.unwrap()
