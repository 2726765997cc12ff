"""Bounds of time that a busy machine keeps as well."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_SECONDS = 30.0
_MOST_PATIENT = 6


class Late(AssertionError):
    """A limit of time has passed: the test's fault, the product's, or that of a busy machine.

    ``tests/support/repeating.py`` runs such a test once more.
    """


class Stopwatch:
    def __init__(self) -> None:
        self._began, self._waited = time.monotonic(), _waiting_seconds()

    def seconds(self) -> float:
        """How long that took, less the time in which programs of this machine waited for a
        processor (Documentation/accounting/psi.rst), but at least a sixth of it: what is bounded on
        an idle machine is bounded on a busy one too, and later."""
        elapsed = time.monotonic() - self._began
        return max(elapsed - (_waiting_seconds() - self._waited), elapsed / _MOST_PATIENT)

    def check(self, limit_seconds: float, what: str = "") -> None:
        if (seconds := self.seconds()) >= limit_seconds:
            raise Late(f"{seconds:.1f} s, the limit is {limit_seconds:g} s{what and ': '}{what}")

    def elapsed(self) -> float:
        return time.monotonic() - self._began


def wait_for(condition: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> Any:
    """The first true value of ``condition``; raises Late after ``seconds``, or later where the
    machine is busy."""
    watch = Stopwatch()
    while not (value := condition()):
        watch.check(seconds, f"waited in vain for: {what}")
        time.sleep(0.005)
    return value


def _waiting_seconds() -> float:
    """Since the machine was started; 0.0 from a kernel that does not tell."""
    try:
        text = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return 0.0
    return int(text.split("total=")[1].split()[0]) / 1e6
