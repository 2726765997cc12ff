"""Workers that are loaded, and wait to take over."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from monarchfs.supervisor.launch import WorkerProcess
from monarchfs.supervisor.messages import Failed, MalformedMessage, WorkerLoaded
from monarchfs.supervisor.startup import WorkerOwner
from monarchfs.types import OperationError

log = logging.getLogger(__name__)

AHEAD_AFTER_SECONDS = 1.0
SOON_AFTER_SECONDS = 0.1
"""When the worker before has died as well: that may go on."""

_AGAIN_SECONDS = 60.0


class Candidate:
    """A loaded worker that may take over. While another one serves, it shows whether the installed
    program can be loaded and understands this one. Changing: ``loaded``; ``refused``, why it cannot
    take over."""

    def __init__(self, worker: WorkerProcess, owner: WorkerOwner, seconds: float) -> None:
        self.worker = worker
        self.loaded = False
        self.refused: str | None = None
        self._owner = owner
        self._until = time.monotonic() + seconds
        owner.watch(worker.channel, self._on_message)

    def tick(self, now: float) -> None:
        """See whether it ended, or says nothing in time."""
        if self.loaded or self.refused is not None:
            return
        if self.worker.is_gone():
            self.refused = f"it {self.worker.describe_end()}"
        elif now >= self._until:
            self.refused = "it said nothing in time"

    def unwatch(self) -> None:
        """Its messages are somebody else's from now on."""
        self._owner.unwatch(self.worker.channel)

    def drop(self) -> None:
        """End it; it has touched nothing yet."""
        self._owner.unwatch(self.worker.channel)
        self.worker.kill()
        self.worker.channel.close()
        self.worker.init.close()

    def _on_message(self) -> None:
        try:
            message = self.worker.channel.receive(0)
        except (TimeoutError, BlockingIOError):
            return
        except (OSError, MalformedMessage) as nonsense:
            self.refused = f"it speaks nonsense: {nonsense}"
            return
        match message:
            case WorkerLoaded():
                self._owner.unwatch(self.worker.channel)
                self.loaded = True
            case Failed(error):
                self.refused = error
            case None:
                self._owner.unwatch(self.worker.channel)  # the tick sees how it ended


class Replacement:
    """The worker that was asked to take the place of the one that serves.

    Changing: the candidate; who is told the outcome (``then``); whether it is a ``trial``, which is
    to end safe mode.
    """

    def __init__(self, reap: Callable[[WorkerProcess], None]) -> None:
        self.trial = False
        self._reap = reap
        self._candidate: Candidate | None = None
        self._then: Callable[[str | None], None] | None = None

    @property
    def under_way(self) -> bool:
        """Also until the new worker serves, or another one in its place."""
        return self._then is not None

    @property
    def loaded(self) -> bool:
        return self._candidate is not None and self._candidate.loaded

    def begin(self, candidate: Candidate, then: Callable[[str | None], None], trial: bool) -> None:
        """``then`` is called once, with None when it serves, or why not."""
        self._candidate, self._then, self.trial = candidate, then, trial

    def tick(self, now: float) -> bool:
        """Whether it can take over now; one that cannot is dropped, and the old one goes on."""
        if self._candidate is None:
            return False
        self._candidate.tick(now)
        refused = self._candidate.refused
        if refused is not None:
            log.error("the installed program cannot take over: %s", refused)
            self.drop()
            why = f"cannot take over, and the old one goes on: {refused}"
            self.answer(f"the installed program {why}")
        return self.loaded

    def take(self) -> WorkerProcess:
        """The worker, which is somebody else's from now on."""
        candidate, self._candidate = self._candidate, None
        assert candidate is not None
        candidate.unwatch()
        return candidate.worker

    def drop(self) -> None:
        """End it, if there is one."""
        candidate, self._candidate, self.trial = self._candidate, None, False
        if candidate is not None:
            candidate.drop()
            self._reap(candidate.worker)

    def answer(self, error: str | None) -> None:
        """Tell the outcome to who asked, once."""
        then, self._then = self._then, None
        if then is not None:
            then(error)


class Standby:
    """The next worker, loaded ahead, because loading takes most of a start. Changing: the worker,
    if there is one; when the next one is to be loaded."""

    def __init__(
        self, start: Callable[[], WorkerProcess], reap: Callable[[WorkerProcess], None]
    ) -> None:
        """``start`` raises OperationError; ``reap`` gets those that were killed."""
        self._start = start
        self._reap = reap
        self._candidate: Candidate | None = None
        self._at = 0.0

    @property
    def at(self) -> float:
        """When ``tick`` has one to load (time.monotonic())."""
        return self._at if self._candidate is None else math.inf

    def wanted_from(self, now: float, *, soon: bool) -> None:
        """A worker has begun to serve."""
        self._at = now + (SOON_AFTER_SECONDS if soon else AHEAD_AFTER_SECONDS)

    def tick(self, owner: WorkerOwner, now: float) -> None:
        """Load one, if it is time."""
        if self._candidate is not None:
            self._candidate.tick(now)
            if self._candidate.refused is None:
                return
            log.warning("no worker could be loaded ahead: %s", self._candidate.refused)
            if self._candidate.worker.was_killed:
                self._at = now + AHEAD_AFTER_SECONDS
            self.drop()
        if now >= self._at:
            self._at = now + _AGAIN_SECONDS
            try:
                self._candidate = Candidate(self._start(), owner, _AGAIN_SECONDS)
            except OperationError as error:
                log.warning("no worker could be loaded ahead: %s", error)

    def take(self) -> WorkerProcess | None:
        """The worker, if there is one, even if it is still being loaded: a new one would take
        longer."""
        candidate = self._candidate
        if candidate is None or candidate.refused is not None or candidate.worker.is_gone():
            self.drop()
            return None
        self._candidate = None
        candidate.unwatch()
        return candidate.worker

    def drop(self) -> WorkerProcess | None:
        """Kill it; which that was."""
        candidate, self._candidate = self._candidate, None
        if candidate is None:
            return None
        candidate.drop()
        self._reap(candidate.worker)
        return candidate.worker
