"""Whether a worker hangs, from what it leaves in shared memory and what the kernel counts.

Pure: no I/O. The mount itself is never touched for it.
"""

from __future__ import annotations

from typing import NamedTuple

SILENT_SECONDS = 3.0
"""Without a beat while requests wait."""

DEAD_SILENT_SECONDS = 10.0
"""Without a beat, whether anybody waits or not."""

BUSY_SECONDS = 10.0
"""All threads that read the kernel's requests have been at one for longer."""

_LONGEST_STEP_SECONDS = 1.0
"""Who looks may have been stopped as well, with the worker or alone: a control group is frozen as
a whole, and its processes go on one by one. What passed then does not count."""


class Signs(NamedTuple):
    """``beats`` rises while the event loop turns; ``waiting`` requests, None if that cannot be
    seen; ``stuck_since`` changes whenever one of the threads takes a request, 0: one is free, or
    there are none."""

    beats: int
    waiting: int | None
    stuck_since: int = 0


class Pulse:
    """One worker's. Changing: its last beat, how long it has been silent, or stuck, by now."""

    def __init__(self, now: float) -> None:
        self.silent_seconds = 0.0
        self._stuck_seconds = 0.0
        self._beats: int | None = None
        self._stuck_since = 0
        self._looked = now

    def look(self, signs: Signs, now: float) -> str | None:
        """Why it is taken to hang, in words for a log; None if it is not."""
        step = min(now - self._looked, _LONGEST_STEP_SECONDS)
        self._looked = now
        if signs.beats == self._beats:
            self.silent_seconds += step
        else:
            self._beats, self.silent_seconds = signs.beats, 0.0
        if signs.stuck_since and signs.stuck_since == self._stuck_since:
            self._stuck_seconds += step
        else:
            self._stuck_since, self._stuck_seconds = signs.stuck_since, 0.0
        if self.silent_seconds >= DEAD_SILENT_SECONDS:
            return f"no sign of life for {self.silent_seconds:.1f} s"
        if self.silent_seconds >= SILENT_SECONDS and signs.waiting:
            return f"no sign of life for {self.silent_seconds:.1f} s, {signs.waiting} waiting"
        if self._stuck_seconds >= BUSY_SECONDS:
            return f"all its threads have been busy for {self._stuck_seconds:.1f} s"
        return None
