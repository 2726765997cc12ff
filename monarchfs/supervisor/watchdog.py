"""Looks whether the worker that serves hangs: reads what ``vital_signs`` decides on."""

from __future__ import annotations

from monarchfs.supervisor.launch import WorkerProcess
from monarchfs.supervisor.restart_policy import WorkerLife
from monarchfs.supervisor.startup import Mounted
from monarchfs.supervisor.vital_signs import Signs, VitalSigns

LOOK_SECONDS = 0.5
SILENT_LOOK_SECONDS = 0.25


class Watchdog:
    """Of one worker, since it began to serve. Constant: the worker, the mount, what was answered
    before. Changing: its vital signs; how long it was silent before it was found to hang."""

    def __init__(self, worker: WorkerProcess, mounted: Mounted, now: float) -> None:
        self._worker = worker
        self._mounted = mounted
        self._vital_signs = VitalSigns(now)
        self._began = now
        self._answered_before = mounted.vitals()[1]

    @property
    def pause_seconds(self) -> float:
        """When to look again."""
        return SILENT_LOOK_SECONDS if self._vital_signs.silent_seconds else LOOK_SECONDS

    def check(self, now: float) -> str | None:
        """Why the worker seems to hang, in words for a log; None if it does not."""
        beats, _answered, stuck_since = self._mounted.vitals()
        signs = Signs(beats, self._mounted.waiting(), stuck_since)
        if beats == self._vital_signs.beats:
            # Only now, because it takes a file of /proc for each thread.
            signs = signs._replace(activity=self._worker.activity())
        why = self._vital_signs.check(signs, now)
        if why is not None:
            # What it did not do at the end was no life.
            self._began += self._vital_signs.silent_seconds
        return why

    def life(self, now: float) -> WorkerLife:
        """What the worker's life was, now that it has ended."""
        answered = self._mounted.vitals()[1] != self._answered_before
        waited = bool(self._mounted.waiting())
        return WorkerLife(now - self._began, answered, waited, self._worker.was_killed)
