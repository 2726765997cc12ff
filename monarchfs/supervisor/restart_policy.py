"""What follows when a worker dies: another one, a pause, safe mode, or the end. Pure: no I/O.

A worker that did its work is replaced at once, however often. One that did none will probably die
again: so pauses follow, then safe mode, then the end, so that waiting processes get an error. After
a while in safe mode a normal worker is tried; if that fails, safe mode returns for longer.
"""

from __future__ import annotations

PAUSES_SECONDS = (0.0, 0.5, 2.0)
"""Before the first, second and third start after lives without any use; then comes safe mode."""

EARLY_SECONDS = 0.5
MOST_EARLY = 10
"""So many in a row that end so soon are a loop as well, whatever they answered: a request that
kills who takes it is among those that every successor gets."""

MOST_IN_SAFE_MODE = 3
LONG_LIFE_SECONDS = 60.0

RETRY_SECONDS = (60.0, 300.0, 1800.0)
"""How long the first, second and each later safe mode lasts before a whole worker is tried."""


KILLED_PAUSE_SECONDS = 0.25
"""Before the start that follows one that was killed before it was of any use, if the one before it
was as well."""


NOT_STARTED_SECONDS, LONGEST_NOT_STARTED_SECONDS = 0.5, 5.0
"""The first and the longest pause after a worker that could not be started. They double."""


class RestartPolicy:
    """Changing: the next pause of `not_started`; how many lives in a row were useless, or short;
    ``safe``, and how many ended so in safe mode; how often safe mode was left for a trial, and
    whether one is going on."""

    def __init__(self) -> None:
        self.replaced()

    def replaced(self) -> None:
        """A worker was replaced on purpose: earlier deaths do not count."""
        self._kills = 0
        self._start_pause = NOT_STARTED_SECONDS
        self._tries = 0
        self._on_trial = False
        self._leave_safe_mode()

    def tried(self) -> None:
        """A whole worker takes the place of the one in safe mode."""
        self._tries += 1
        self._on_trial = True
        self._leave_safe_mode()

    @property
    def retry_seconds(self) -> float:
        """How long safe mode lasts before the next try."""
        return RETRY_SECONDS[min(self._tries, len(RETRY_SECONDS) - 1)]

    def _leave_safe_mode(self) -> None:
        self.safe = False
        self._useless = self._early = self._in_safe_mode = 0

    def died(
        self, seconds: float | None, *, answered: bool, waited: bool, killed: bool = False
    ) -> float | None:
        """A worker ended that nobody asked to. How many seconds to wait before the next one starts,
        in safe mode if ``safe`` now; None: there is to be no other.

        ``seconds`` since it served, None if it never did; ``answered``: it answered a request;
        ``waited``: requests wait now; ``killed``: by SIGKILL, and not by us."""
        if seconds is not None:
            self._start_pause = NOT_STARTED_SECONDS
        if seconds is not None and seconds >= LONG_LIFE_SECONDS:
            self._useless = self._early = self._in_safe_mode = 0
            if not self.safe:
                self._tries, self._on_trial = 0, False
        useless = seconds is None or (waited and not answered)
        early = seconds is None or seconds < EARLY_SECONDS
        if killed:
            return self._killed(useless)
        self._kills = 0
        self._useless = self._useless + 1 if useless else 0
        self._early = self._early + 1 if early else 0
        if self.safe:
            self._in_safe_mode += useless or early
            if self._in_safe_mode >= MOST_IN_SAFE_MODE:
                return None
            return PAUSES_SECONDS[self._in_safe_mode]
        failed_again = self._on_trial and (useless or early)
        if failed_again or self._useless > len(PAUSES_SECONDS) or self._early >= MOST_EARLY:
            self.safe, self._on_trial = True, False
            return 0.0
        return PAUSES_SECONDS[self._useless - 1] if self._useless else 0.0

    def not_started(self) -> float:
        """No worker could be started, or it ended before it served, because a limit is reached.
        That says nothing about it either. How many seconds to wait before the next one starts."""
        pause = self._start_pause
        self._start_pause = min(2 * pause, LONGEST_NOT_STARTED_SECONDS)
        return pause

    def _killed(self, useless: bool) -> float:
        """A kill, by anybody or for want of memory, says nothing about the worker: it counts
        neither for a loop nor against one."""
        self._kills = self._kills + 1 if useless else 0
        return KILLED_PAUSE_SECONDS if self._kills > 1 else 0.0
