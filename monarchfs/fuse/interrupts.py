"""Requests that wait, so that the process behind one can be killed.

A process that waits for an answer of ours cannot die before it comes: SIGKILL leaves it in D state
(fs/fuse/dev.c, request_wait_answer), and Slurm drains nodes for that. The kernel tells us of the
signal with FUSE_INTERRUPT, once per request, whatever the signal was. A signal that does not kill
is none of a file system's business (reads of regular files are not interruptible on Lustre
either), so a request is given up, and answered EINTR, once the kernel has SIGKILL pending for its
thread: that is what every fatal signal becomes (kernel/signal.c, complete_signal).

Of a read with O_DIRECT the kernel says nothing: it sends it as an asynchronous one, and waits for
its end whatever happens (fs/fuse/file.c, fuse_direct_IO). So the process behind a request that has
been waiting for long is looked at unasked.

Some processes cannot be looked at: those of another PID namespace, and those that /proc hides
(hidepid). For their sake a request is given up some seconds after any signal, and never without.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
from dataclasses import dataclass

import trio

from monarchfs.fuse.handle_table import RESENT
from monarchfs.metrics import Metrics

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How soon a fatal signal is noticed that came after a harmless one."""

LONG_SECONDS = 1.0
"""So long a request waits before its process is looked at, and from one such look to the next."""

UNSEEN_SECONDS = 5.0
"""So long after a signal a request waits whose process cannot be seen."""

SIGKILL_BIT = 1 << (signal.SIGKILL - 1)


def dying(pid: int) -> bool | None:
    """Whether thread ``pid`` has a fatal signal pending, or is gone. None if it cannot be seen: 0
    is one of another PID namespace, and /proc may hide those of others, or deny them."""
    if pid == 0:
        return None
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            pending = [line for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
    except OSError:
        try:
            os.kill(pid, 0)
        except OSError as error:
            return True if error.errno == errno.ESRCH else None
        return None
    return any(int(line.split()[1], 16) & SIGKILL_BIT for line in pending)


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request, since when it waits, and the thread that does. ``signalled``: that may have got a
    signal that did not kill it. ``unseen_until``: how long it waits if that cannot be told."""

    scope: trio.CancelScope
    pid: int
    since: float
    signalled: bool = False
    unseen_until: float = math.inf


class Interrupts:
    """The waiting requests of one session, by their ``unique``. Changing: these;
    ``_any_signalled``, whether one of them may be."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: dict[int, _Waiting] = {}
        self._any_signalled = False
        self._news = trio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def begin(self, unique: int, pid: int) -> trio.CancelScope:
        """A request waits until ``end``. The scope in which it is to be answered; it is cancelled
        when the process that waits for it is killed."""
        waiting = _Waiting(trio.CancelScope(), pid, trio.current_time())
        self._waiting[unique] = waiting
        if unique & RESENT:
            # Its process may have got its signal while an earlier worker had it.
            self._look_again(waiting)
        return waiting.scope

    def end(self, unique: int) -> bool:
        """Whether it waited: one that the kernel sent again has ended with the other."""
        return self._waiting.pop(unique, None) is not None

    def _look_again(self, waiting: _Waiting) -> None:
        waiting.signalled = self._any_signalled = True
        self._news.set()

    def on_interrupt(self, unique: int) -> bool:
        """FUSE_INTERRUPT for a request; False if it does not wait here: it was answered already, or
        is still to come."""
        if unique not in self._waiting:
            # What came out of a journal the kernel knows as it was.
            unique |= RESENT
        if (waiting := self._waiting.get(unique)) is None:
            return False
        waiting.unseen_until = trio.current_time() + UNSEEN_SECONDS
        if not self._check(waiting):
            self._look_again(waiting)
        return True

    def _check(self, waiting: _Waiting) -> bool:
        """Give the request up if its process is dying; whether it is given up."""
        if not waiting.scope.cancel_called:
            dies = dying(waiting.pid)
            if dies or (dies is None and trio.current_time() >= waiting.unseen_until):
                self._metrics.interrupted_requests += 1
                waiting.scope.cancel()
        return waiting.scope.cancel_called

    async def watch(self) -> None:
        """Look again at requests whose process got a signal that did not kill it, and at those that
        wait for long, for ever."""
        looked = trio.current_time()
        while True:
            with trio.move_on_after(POLL_SECONDS if self._any_signalled else LONG_SECONDS):
                await self._news.wait()
            self._news = trio.Event()
            self._any_signalled = False
            for waiting in self._waiting.values():
                self._any_signalled |= waiting.signalled and not self._check(waiting)
            if trio.current_time() - looked >= LONG_SECONDS:
                await self._check_old()
                looked = trio.current_time()

    async def _check_old(self) -> None:
        before = trio.current_time() - LONG_SECONDS
        # In the order in which they came.
        for unique, waiting in list(self._waiting.items()):
            if waiting.since > before:
                return
            if unique in self._waiting:
                self._check(waiting)
            await trio.lowlevel.checkpoint()
