"""Bounds of time that a busy machine keeps as well."""

from __future__ import annotations

import time
from pathlib import Path

_MOST_PATIENT = 6


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._began, self._waited = time.monotonic(), _waiting_seconds()

    def seconds(self) -> float:
        """How long that took, less the time in which programs of this machine waited for a
        processor (Documentation/accounting/psi.rst), but at least a sixth of it: what is bounded on
        an idle machine is bounded on a busy one too, and later."""
        elapsed = time.monotonic() - self._began
        return max(elapsed - (_waiting_seconds() - self._waited), elapsed / _MOST_PATIENT)

    def elapsed(self) -> float:
        """All of it, for what is to take some time."""
        return time.monotonic() - self._began


def _waiting_seconds() -> float:
    """Since the machine was started; 0.0 from a kernel that does not tell."""
    try:
        text = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return 0.0
    return int(text.split("total=")[1].split()[0]) / 1e6
