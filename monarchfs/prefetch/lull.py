"""Since when nothing is left to copy, for reports of jobs."""

from __future__ import annotations

import time

from monarchfs.prefetch.copier import Copier
from monarchfs.prefetch.scan import Scan

_NS = 1_000_000_000


class Lull:
    """Constant: what it watches, when the mount was made. Changing: the last time at which copying
    ran dry (None before the first)."""

    def __init__(self, copier: Copier, scan: Scan, mount_ns: int) -> None:
        self._copier = copier
        self._scan = scan
        self._mount_ns = mount_ns
        self._since: float | None = None
        copier.observers.append(self._ended)
        scan.on_end = lambda: self._ended(0)

    @property
    def since_uptime_seconds(self) -> float | None:
        """Seconds from the mount until nothing was left to copy; None while something is, and where
        nothing ever was."""
        return None if self._busy else self._since

    @property
    def _busy(self) -> bool:
        return bool(self._copier.active or len(self._copier.queue) or self._scan.running)

    def _ended(self, _ino: int) -> None:
        if not self._busy:
            self._since = round((time.time_ns() - self._mount_ns) / _NS, 3)
