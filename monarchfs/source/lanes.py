"""Threads for the source: one limit per lane, and slots lent while calls are stuck.

A call into a parallel file system can hang for hours when one of its servers does. Such a call
keeps its thread, but after a while its slot is lent to the next one, so that the limit counts
calls that move.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Generic, TypeVar

import outcome
import trio

from monarchfs.types import Lane

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class SourceCounters:
    """What was asked of the source. Changed in the event loop only.

    ``operations`` counts calls when they are made; ``seconds`` sums the time they spent in the
    source, of those that somebody still waited for; ``errors`` are calls that failed in a way that
    says something about the source, not about the file asked for; ``stuck`` is a gauge.
    """

    operations: int = 0
    read_bytes: int = 0
    demand_read_bytes: int = 0
    prefetch_read_bytes: int = 0
    errors: int = 0
    stuck: int = 0
    seconds: float = 0.0


class LaneThreads:
    """The limit of one lane and the calls that are in the source now.

    Constant: ``lane``, ``slots``. ``limiter`` has ``slots`` tokens plus those lent. ``running``
    (oldest first; a dict for its order) and ``returned``, the time.monotonic() of the last return,
    are changed by the threads, each in one step under the interpreter's lock.
    """

    __slots__ = ("lane", "limiter", "returned", "running", "slots")

    def __init__(self, lane: Lane, slots: int) -> None:
        self.lane = lane
        self.slots = slots
        self.limiter = trio.CapacityLimiter(slots)
        self.running: dict[Call[Any], None] = {}
        self.returned = 0.0

    def stuck(self, since: float) -> int:
        """How many calls have been in the source since before ``since`` (time.monotonic())."""
        count = 0
        for call in list(self.running):
            if call.started > since:
                break
            count += 1
        return count

    def moving(self, stuck_seconds: float) -> bool:
        """Whether a call is in the source that has not been there for ``stuck_seconds``."""
        return len(self.running) > self.stuck(time.monotonic() - stuck_seconds)

    def hangs(self, deadline: float) -> bool:
        """A call has been out for longer than ``deadline`` seconds, and none came back within it.

        The second half keeps one dead storage target from making all of the source look dead.
        """
        limit = time.monotonic() - deadline
        return self.returned < limit and self.stuck(limit) > 0


def lend(lanes: Iterable[LaneThreads], stuck_seconds: float, max_lent: int) -> int:
    """Give each lane a slot more per stuck call, ``max_lent`` in all, the first lane first.

    Returns the number of stuck calls. A slot that is taken back while in use is gone once its call
    returns.
    """
    since = time.monotonic() - stuck_seconds
    total = 0
    for lane in lanes:
        stuck = lane.stuck(since)
        lent = min(stuck, max_lent)
        max_lent -= lent
        total += stuck
        if lane.limiter.total_tokens != lane.slots + lent:
            lane.limiter.total_tokens = lane.slots + lent
    return total


class _State(Enum):
    WAITING = auto()
    RUNNING = auto()
    DONE = auto()
    ABANDONED = auto()


# Guards the state of every call. Held for an assignment or two, never around a call of the source.
_state_lock = threading.Lock()


class Call(Generic[T]):
    """One call of ``fn(*args)``; the object itself is what the thread runs.

    Constant: all but ``started`` (time.monotonic()) and ``seconds``, which the thread sets, and the
    state with its result. ``dispose`` gets the result of a call whose caller was cancelled
    meanwhile; ``skipped`` is called if such a call never began. Either runs in a thread, may
    block, and may fail with OSError unheard.
    """

    __slots__ = (
        "args",
        "dispose",
        "fn",
        "lane",
        "result",
        "seconds",
        "skipped",
        "started",
        "state",
    )

    def __init__(
        self,
        lane: LaneThreads,
        fn: Callable[..., T],
        args: tuple[Any, ...],
        dispose: Callable[[T], object] | None,
        skipped: Callable[[], object] | None,
    ) -> None:
        self.lane = lane
        self.fn = fn
        self.args = args
        self.dispose = dispose
        self.skipped = skipped
        self.started = 0.0
        self.seconds = 0.0
        self.state = _State.WAITING
        self.result: T | None = None

    def __call__(self) -> T | None:
        """Run, in the thread. The result is None only if nobody is there to see it."""
        with _state_lock:
            if self.state is _State.ABANDONED:
                return None
            self.state = _State.RUNNING
        running = self.lane.running
        self.started = time.monotonic()
        running[self] = None
        try:
            result = self.fn(*self.args)
        finally:
            del running[self]
            now = time.monotonic()
            self.lane.returned = now
            self.seconds = now - self.started
        with _state_lock:
            abandoned = self.state is _State.ABANDONED
            self.state = _State.DONE
            self.result = result
        if abandoned and self.dispose is not None:
            self.dispose(result)
        return result

    def abandon(self) -> None:
        """The caller was cancelled: whatever the call holds is released. Does not block."""
        with _state_lock:
            state = self.state
            self.state = _State.ABANDONED
        if state is _State.WAITING and self.skipped is not None:
            in_thread(self.skipped)
        elif state is _State.DONE and self.dispose is not None:
            assert self.result is not None
            in_thread(partial(self.dispose, self.result))


def in_thread(fn: Callable[[], object]) -> None:
    """Run ``fn`` in some thread, without a limit and without waiting; an error is only logged."""
    trio.lowlevel.start_thread_soon(fn, _log_error)


def _log_error(result: outcome.Outcome[object]) -> None:
    if isinstance(result, outcome.Error):
        logger.warning("Releasing a resource of the source failed", exc_info=result.error)
