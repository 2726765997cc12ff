"""Requests that wait, so that the process behind one can be killed.

A process that waits for an answer of ours cannot die before it comes: SIGKILL leaves it in D state
(fs/fuse/dev.c, request_wait_answer), and Slurm drains nodes for that. The kernel tells us of the
signal with FUSE_INTERRUPT, once per request, whatever the signal was. A signal that does not kill
is none of a file system's business (reads of regular files are not interruptible on Lustre
either), so a request is given up, and answered EINTR, once the kernel has SIGKILL pending for its
thread: that is what every fatal signal becomes (kernel/signal.c, complete_signal).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from monarchfs.fuse.slots import RESENT
from monarchfs.metrics import Metrics

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How soon a fatal signal is noticed that came after a harmless one."""

SIGKILL_BIT = 1 << (signal.SIGKILL - 1)


def dying(pid: int) -> bool:
    """Whether thread ``pid`` has a fatal signal pending, or is gone. True for 0: a process that
    this PID namespace cannot see, whose waiting could not be ended otherwise."""
    if pid == 0:
        return True
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            pending = [line for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return any(int(line.split()[1], 16) & SIGKILL_BIT for line in pending)


class Interrupts:
    """The waiting requests of one session, by their ``unique``."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: dict[int, tuple[trio.CancelScope, int]] = {}
        self._signalled: set[int] = set()
        self._news = trio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def guard(self, unique: int, pid: int) -> Iterator[trio.CancelScope]:
        """What runs inside is cancelled when the process that waits for it is killed; look at
        ``cancelled_caught`` afterwards."""
        with trio.CancelScope() as scope:
            if unique:  # 0: the C part is missing, and no interrupt will ever be heard of
                self._waiting[unique] = (scope, pid)
                if unique & RESENT:
                    # Its process may have got its signal while an earlier worker had it.
                    self._signalled.add(unique)
                    self._news.set()
            try:
                yield scope
            finally:
                self._waiting.pop(unique, None)
                self._signalled.discard(unique)

    def on_interrupt(self, unique: int) -> bool:
        """FUSE_INTERRUPT for a request; False if it does not wait here: it was answered already, or
        is still to come."""
        waiting = self._waiting.get(unique)
        if waiting is None:
            # What came out of a journal the kernel knows as it was.
            unique |= RESENT
            waiting = self._waiting.get(unique)
        if waiting is None:
            return False
        scope, pid = waiting
        if dying(pid):
            self._metrics.interrupted_requests += 1
            scope.cancel()
        else:
            self._signalled.add(unique)
            self._news.set()
        return True

    async def watch(self) -> None:
        """Look again at requests whose process got a signal that did not kill it, for ever."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._signalled:
                for unique in list(self._signalled):
                    self._signalled.discard(unique)
                    self.on_interrupt(unique)
                await trio.sleep(POLL_SECONDS)
