"""Which questions the source does not answer, and how long others are waited for meanwhile."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection

import trio

log = logging.getLogger(__name__)

Key = tuple[object, ...]

GRACE_SECONDS = 0.05
"""Where something hangs and nobody knows why, a caller waits this long: enough for a server that is
well."""

PROBE_SECONDS = 10.0
"""After this time one file of a target that hangs is asked about, then after twice as long each
time: should the calls that hang never return, the target is found to be back all the same."""

MOST_UNEXPLAINED = 256
"""Calls that hang, each in a thread, and not because of a target: no more are made."""


class Unanswered:
    """Questions that were waited for in vain and are still being asked; each ends when it is
    answered. One about a file that lies on one storage target alone shows that this hangs. True if
    there are any.

    Changing: ``_questions``, each with its target (None: unknown); ``_counts``, how many a target
    has; ``_hanging``, targets with the time of the next probe and the seconds until the one after
    it.
    """

    def __init__(self) -> None:
        self._questions: dict[Key, int | None] = {}
        self._counts: Counter[int | None] = Counter()
        self._hanging: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._questions)

    def __contains__(self, key: Key) -> bool:
        return key in self._questions

    def add(self, key: Key, targets: Collection[int] | None) -> None:
        """A caller waited as long as it should; ``targets`` have the file, if it is one."""
        if key in self._questions:
            return
        target = next(iter(targets)) if targets and len(targets) == 1 else None
        self._questions[key] = target
        self._counts[target] += 1
        if target is not None and target not in self._hanging:
            log.warning("storage target %d of the source does not answer", target)
            self._hanging[target] = trio.current_time() + PROBE_SECONDS, 2 * PROBE_SECONDS

    def answered(self, key: Key) -> None:
        """Or it failed: the source said something."""
        if key not in self._questions:
            return
        target = self._questions.pop(key)
        self._counts[target] -= 1
        if target is not None:
            self.alive((target,))

    def alive(self, targets: Collection[int] | None) -> None:
        """A file on all of these was answered for."""
        for target in targets or ():
            if self._hanging.pop(target, None) is not None:
                log.info("storage target %d of the source answers", target)

    def patience(self, key: Key, targets: Collection[int] | None, deadline: float) -> float:
        """For how many seconds to wait for a question, at most ``deadline``; 0: do not ask."""
        if key in self._questions:
            return 0.0
        now = trio.current_time()
        for target in targets or ():
            if target in self._hanging:
                probe_at, pause = self._hanging[target]
                if now < probe_at:
                    return 0.0
                self._hanging[target] = now + pause, 2 * pause
                return min(GRACE_SECONDS, deadline)
        if not self._unexplained:
            return deadline
        return 0.0 if self.full else min(GRACE_SECONDS, deadline)

    @property
    def full(self) -> bool:
        """Whether so many calls hang that no more are made."""
        return self._unexplained >= MOST_UNEXPLAINED

    @property
    def _unexplained(self) -> int:
        return len(self) - sum(self._counts[target] for target in self._hanging)
