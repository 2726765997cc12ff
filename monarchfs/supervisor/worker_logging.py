"""Log lines that workers cause: few enough, with counts of what made no sense."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LINES_PER_SECOND = 0.2
LINES_AT_ONCE = 20
QUIET_SECONDS = 1.0
"""Without a refused line; then what was left out is counted."""


class Throttle:
    """A token bucket. Pure. Changing: how many lines are allowed now; ``left_out`` since the last
    one. Times never go back."""

    def __init__(self, per_second: float, at_once: int) -> None:
        self.left_out = 0
        self._per_second = per_second
        self._most = at_once
        self._tokens = float(at_once)
        self._at: float | None = None
        self._refused_at = -QUIET_SECONDS

    def take(self, now: float) -> bool:
        """Whether one more line may be said. A line that may not is counted."""
        if self._take(now):
            return True
        self.left_out += 1
        self._refused_at = now
        return False

    def take_for_count(self, now: float) -> bool:
        """Whether to say now how many lines were left out. While lines still come, the next of them
        that may be said brings the count: a count alone would take its turn."""
        is_quiet = now - self._refused_at >= QUIET_SECONDS
        return self.left_out > 0 and is_quiet and self._take(now)

    def _take(self, now: float) -> bool:
        if self._at is not None:
            gained = (now - self._at) * self._per_second
            self._tokens = min(float(self._most), self._tokens + gained)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class WorkerLogging:
    """Of one mount, for all of its workers. Changing: ``not_understood``, how many messages and
    values were dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.not_understood = 0
        self._clock = clock
        self._throttle = Throttle(LINES_PER_SECOND, LINES_AT_ONCE)

    def say(self, level: int, line: str) -> None:
        """A log line that a worker caused, unless there are too many. Its words are printable."""
        if self._throttle.take(self._clock()):
            self._count()
            log.log(level, "%s", line)

    def drop(self, why: str, count: int = 1) -> None:
        """Something was not understood."""
        self.not_understood += count
        self.say(logging.WARNING, f"the worker speaks nonsense: {why}")

    def tick(self) -> None:
        """Say how many lines were left out, once no more come."""
        if self._throttle.take_for_count(self._clock()):
            self._count()

    def _count(self) -> None:
        count, self._throttle.left_out = self._throttle.left_out, 0
        if count:
            log.warning("%d more lines about workers were left out", count)
