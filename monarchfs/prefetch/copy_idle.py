"""Since when nothing is left to copy, for reports of jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from monarchfs.metrics import NS
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.scan import Scan


class CopyIdle:
    """Constant: what it watches, when the mount was made. Changing: ``since``, the last time at
    which copying ran dry (None before the first); whether anything was copied after that."""

    KEPT = ("since",)

    def __init__(self, jobs: CopyJobs, scan: Scan, mount_ns: int) -> None:
        self._jobs = jobs
        self._scan = scan
        self._mount_ns = mount_ns
        self.since: float | None = None
        self._copied = False
        jobs.on_step.add(self._copy_ended)
        scan.on_end.add(self._check)

    @property
    def since_uptime_seconds(self) -> float | None:
        """Seconds from the mount until nothing was left to copy; None while something is, and where
        nothing ever was."""
        return None if self._busy else self.since

    @property
    def _busy(self) -> bool:
        return bool(self._jobs.active or len(self._jobs.queue) or self._scan.running)

    def _copy_ended(self, _inos: Sequence[int]) -> None:
        self._copied = True
        self._check()

    def _check(self) -> None:
        # A scan that finds all of it local, as that of a later worker, puts nothing off.
        if not self._busy and (self._copied or self.since is None):
            self.since = round((time.time_ns() - self._mount_ns) / NS, 3)
            self._copied = False
