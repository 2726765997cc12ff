"""Threads for the source: one limit per lane, and slots lent while calls are stuck.

A call into a parallel file system can hang for hours when one of its servers does. Such a call
keeps its thread, but after a while its slot is lent to the next one, so that the limit counts
calls that move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Generic, TypeVar

import trio

from monarchfs.metrics import DURATION_BOUNDS_NS, ErrorCounts, Histogram
from monarchfs.source.releases import Releases
from monarchfs.types import Lane

T = TypeVar("T")


OPERATIONS = {
    "stat": "stat",
    "found": "stat",
    "found_each": "stat",
    "fstat": "stat",
    "next": "list",
    "readlink": "readlink",
    "opened_each": "open",
    "open": "open",
    "open_directory": "open",
    "lists_all": "stat",
    "read": "read",
    "read_for_reader": "read",
    "read_once": "read",
    "read_unit": "read",
    "close": "close",
    "getxattr": "xattr",
    "listxattr": "xattr",
    "listxattr_each": "xattr",
    "access": "access",
    "statvfs": "statfs",
    "touch": "touch",
    "layout": "xattr",
}
"""How the functions of PosixSource are counted, by their names; ``next`` is a listing's."""

OTHER = "other"
BACKGROUND_PURPOSES = {
    "xattr": "prefetch",
    "open": "prefetch",
    "read": "prefetch",
    "close": "prefetch",
    "stat": "scan",
    "list": "scan",
    "touch": "touch",
    OTHER: "scan",
}


def kind_of(lane: Lane, function: str) -> tuple[str, str]:
    """(purpose, operation) of a call of a function of PosixSource. The purpose is ``demand``
    (somebody waits), ``prefetch`` (copying ahead of the readers), ``scan`` (names and
    attributes that nobody waits for) or ``touch`` (for access times)."""
    operation = OPERATIONS.get(function, OTHER)
    if lane is Lane.DEMAND:
        return "demand", operation
    if operation not in BACKGROUND_PURPOSES:
        operation = OTHER
    return BACKGROUND_PURPOSES[operation], operation


@dataclass(slots=True)
class CallCounts:
    """Calls of one kind for one purpose: the number made (one that asks for several names counts as
    several), and the durations of those that were waited for to the end."""

    operations: int = 0
    durations: Histogram = field(default_factory=lambda: Histogram(DURATION_BOUNDS_NS[2:]))


def _no_calls() -> dict[tuple[str, str], CallCounts]:
    kinds = {kind_of(lane, function) for lane in Lane for function in (*OPERATIONS, OTHER)}
    return {kind: CallCounts() for kind in sorted(kinds)}


@dataclass(slots=True)
class SourceCounters:
    """What was asked of the source. Changed in the event loop only.

    ``operations`` counts calls when they are made. ``seconds`` is the time that they spent in the
    source, of those that were waited for to the end. ``errors`` counts failures that concern the
    source, not the file. ``stuck`` is a gauge. ``calls`` has the same by (purpose, operation),
    ``errors_by`` by errno.
    """

    operations: int = 0
    read_bytes: int = 0
    demand_read_bytes: int = 0
    prefetch_read_bytes: int = 0
    errors: int = 0
    stuck: int = field(default=0, metadata={"kept": False})
    seconds: float = 0.0
    calls: dict[tuple[str, str], CallCounts] = field(default_factory=_no_calls)
    errors_by: ErrorCounts = field(default_factory=ErrorCounts)

    def of(self, lane: Lane, function: str) -> CallCounts:
        """The counts for a function of PosixSource, by its name."""
        return self.calls[kind_of(lane, function)]


class LaneThreads:
    """The limit of one lane and the calls that are in the source now.

    Constant: ``lane``, ``slots``, ``releases``. ``limiter`` has ``slots`` tokens plus those lent.
    ``running`` (oldest first; a dict for its order) and ``returned``, the time.monotonic() of the
    last return, are changed by the threads, each in one step under the interpreter's lock.
    """

    __slots__ = ("lane", "limiter", "releases", "returned", "running", "slots")

    def __init__(self, lane: Lane, slots: int, releases: Releases) -> None:
        self.lane = lane
        self.releases = releases
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

    def oldest_seconds(self) -> float:
        """How long the oldest call has been in the source; 0 for none."""
        for call in list(self.running):
            return time.monotonic() - call.started
        return 0.0

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


@dataclass(eq=False, slots=True)
class Call(Generic[T]):
    """One call of ``fn(*args)``; the object itself is what the thread runs.

    Constant: all but ``started`` (time.monotonic()) and ``seconds``, which the thread sets, and the
    state with its result. ``dispose`` gets the result of a call whose caller was cancelled
    meanwhile; ``skipped`` is called if such a call never began. Either runs in a thread, may
    block, and may fail with OSError unheard.
    """

    lane: LaneThreads
    fn: Callable[..., T]
    args: tuple[Any, ...]
    dispose: Callable[[T], object] | None
    skipped: Callable[[], object] | None
    started: float = 0.0
    seconds: float = 0.0
    state: _State = _State.WAITING
    result: T | None = None

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
            self.lane.releases.soon(self.skipped)
        elif state is _State.DONE and self.dispose is not None:
            assert self.result is not None
            self.lane.releases.soon(partial(self.dispose, self.result))
