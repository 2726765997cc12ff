"""Whether a worker hangs, from what it leaves in shared memory and what the kernel tells of it.

Pure: no I/O. The mount itself is never touched for it.
"""

from __future__ import annotations

from typing import NamedTuple

SILENT_SECONDS = 3.0
"""Without a beat while requests wait."""

ASLEEP_SECONDS = 2.5
"""Without a beat, and all its threads sleep, unless it is known that nobody waits."""

DEAD_SILENT_SECONDS = 10.0
"""Without a beat, whatever else."""

STARVED_SECONDS = 60.0
"""Without a beat, also where it did not get the processor."""

BUSY_SECONDS = 10.0
"""All threads that read the kernel's requests have been at one for longer."""

_LONGEST_STEP_SECONDS = 1.0
"""Who looks may have been stopped as well, with the worker or alone: a control group is frozen as
a whole, and its processes go on one by one. What passed then does not count."""

_FAIR_SHARE = 0.5
"""Of the time; a thread that wants to run and gets less is not to blame."""


class Activity(NamedTuple):
    """``runs``: the thread with the event loop runs or wants to; ``cpu_seconds`` it got so far;
    ``rests``: no thread of the worker runs, wants to, or waits for a disk."""

    runs: bool
    cpu_seconds: float
    rests: bool


class VitalSigns:
    """One worker's, since it began to serve. Changing: ``beats``, the last ones; how long it has
    been silent though it got the processor (``silent_seconds``), starved of it, or stuck; how long
    all its threads have slept."""

    def __init__(self, now: float) -> None:
        self._began = now
        self.beats: int | None = None
        self.silent_seconds = 0.0
        self._starved_seconds = 0.0
        self._stuck_seconds = 0.0
        self._rested_seconds = 0.0
        self._cpu_seconds: float | None = None
        self._stuck_since = 0
        self._looked = now

    def check(
        self,
        now: float,
        beats: int,
        waiting: int | None,
        stuck_since: int = 0,
        activity: Activity | None = None,
    ) -> str | None:
        """Why it seems to hang, in words for a log; None if it does not.

        ``beats`` rises while the event loop turns; ``waiting`` requests, None if unknown;
        ``stuck_since`` changes whenever a thread takes a request, 0: one is free, or there are
        none. ``activity``: None while it beats, or if unknown."""
        step = min(now - self._looked, _LONGEST_STEP_SECONDS)
        self._looked = now
        self._listen(beats, activity, step)
        if stuck_since and stuck_since == self._stuck_since:
            self._stuck_seconds += step
        else:
            self._stuck_since, self._stuck_seconds = stuck_since, 0.0
        why = self._judge(waiting)
        if why is not None:
            self._began += self.silent_seconds  # what it did not do at the end was no life
        return why

    def lived_seconds(self, now: float) -> float:
        """For how long it served."""
        return now - self._began

    def _listen(self, beats: int, activity: Activity | None, step: float) -> None:
        if beats != self.beats:
            self.beats, self._cpu_seconds = beats, None
            self.silent_seconds = self._starved_seconds = self._rested_seconds = 0.0
            return
        if self._starved(activity, step):
            self._starved_seconds += step
        else:
            self.silent_seconds += step
        # It may have run on for a moment after its last beat.
        rests = activity is not None and activity.rests
        self._rested_seconds = self._rested_seconds + step if rests else 0.0
        self._cpu_seconds = None if activity is None else activity.cpu_seconds

    def _starved(self, activity: Activity | None, step: float) -> bool:
        """Whether it wanted to run and could not for most of the step."""
        if activity is None or not activity.runs:
            return False
        got = activity.cpu_seconds - (self._cpu_seconds or 0.0)
        return self._cpu_seconds is None or got < _FAIR_SHARE * step

    def _judge(self, waiting: int | None) -> str | None:
        silent = self.silent_seconds
        why = f"no sign of life for {silent:.1f} s"
        if silent >= DEAD_SILENT_SECONDS:
            return why
        if silent + self._starved_seconds >= STARVED_SECONDS:
            return f"{why}, and no processor for {self._starved_seconds:.1f} s"
        if silent >= SILENT_SECONDS and waiting:
            return f"{why}, {waiting} waiting"
        if self._rested_seconds >= ASLEEP_SECONDS and waiting != 0:
            return f"{why}, all its threads sleep"
        if self._stuck_seconds >= BUSY_SECONDS:
            return f"all its threads have been busy for {self._stuck_seconds:.1f} s"
        return None
