"""Threads for background work, at a low priority of CPU and I/O.

On Linux each thread has its own priorities (setpriority(2), "C library/kernel differences";
ioprio_set(2)). A worker lacks the privilege to raise them again, so these threads do nothing else.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import outcome
import trio

from monarchfs.system import libc
from monarchfs.system.threads import RunSync, ThreadQueue, run_sync

log = logging.getLogger(__name__)

T = TypeVar("T")
_Job = Callable[[], Callable[[], None]]
"""Does it, and returns what tells whoever waits for it."""

at_normal_priority: ContextVar[bool] = ContextVar("at_normal_priority", default=False)
"""Set in a task for whose work somebody may be waiting soon: it has everybody's priority."""

_IDLE_SECONDS = 10.0
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
"""The number of the system call (glibc has no function for it), by platform.machine()."""
_WHO_PROCESS = 1
_LOWEST_OF_BEST_EFFORT = 2 << 13 | 7


class LowPriorityThreads:
    """For one trio run. Constant: ``nice``. Changing: the threads, which end when they have been
    idle for a while; ``_idle``, where those that are idle wait for a job."""

    def __init__(self, nice: int) -> None:
        """``nice`` as of nice(1), above 0; with it goes the lowest I/O priority of the best-effort
        class, which is for all but what is idle."""
        self.nice = nice
        self._idle: list[SimpleQueue[_Job]] = []  # a list's methods are atomic
        self._queue = ThreadQueue()

    async def run_sync(
        self,
        sync_fn: Callable[..., T],
        *args: Any,
        abandon_on_cancel: bool = False,
        limiter: trio.CapacityLimiter | None = None,
    ) -> T:
        """As ``threads.run_sync``: the limiter's token is held until ``sync_fn`` returns, even if
        nobody waits any more. In a task ``at_normal_priority`` it is just that."""
        if at_normal_priority.get():
            return await run_sync(
                sync_fn, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter
            )
        return await self._queue.run(
            self._run_quietly, sync_fn, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter
        )

    async def _run_quietly(
        self,
        sync_fn: Callable[..., T],
        *args: Any,
        abandon_on_cancel: bool = False,
        limiter: trio.CapacityLimiter | None = None,
    ) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        if limiter is None:
            limiter = trio.to_thread.current_default_thread_limiter()
        borrower, limits = object(), limiter
        await limits.acquire_on_behalf_of(borrower)
        token, task = trio.lowlevel.current_trio_token(), trio.lowlevel.current_task()
        waits = True

        def finish(result: outcome.Outcome[T]) -> None:
            limits.release_on_behalf_of(borrower)
            if waits:
                trio.lowlevel.reschedule(task, result)

        def job() -> Callable[[], None]:
            return partial(deliver, outcome.capture(sync_fn, *args))

        def deliver(result: outcome.Outcome[T]) -> None:
            try:
                token.run_sync_soon(finish, result)
            except trio.RunFinishedError:
                return  # and with it whoever could have waited

        def abort(_raise: Callable[[], object]) -> trio.lowlevel.Abort:
            nonlocal waits
            if not abandon_on_cancel:
                return trio.lowlevel.Abort.FAILED
            waits = False
            return trio.lowlevel.Abort.SUCCEEDED

        try:
            self._start(job)
        except BaseException:
            limits.release_on_behalf_of(borrower)
            raise
        result: T = await trio.lowlevel.wait_task_rescheduled(abort)
        return result

    def _start(self, job: _Job) -> None:
        try:
            jobs = self._idle.pop()
        except IndexError:
            thread = threading.Thread(
                target=self._serve, args=(job,), name="low priority", daemon=True
            )
            thread.start()
        else:
            jobs.put(job)

    def _serve(self, job: _Job) -> None:
        lower_this_thread(self.nice)
        # This thread's own. Where several threads wait in one SimpleQueue, CPython's get(timeout=…)
        # may wait without end (Modules/_queuemodule.c: what is left of the time becomes negative
        # where another thread took what it was woken for).
        jobs = SimpleQueue[_Job]()
        while True:
            deliver = job()
            # First, so that who gets the result finds this thread free.
            self._idle.append(jobs)
            deliver()
            try:
                job = jobs.get(timeout=_IDLE_SECONDS)
            except Empty:
                try:
                    self._idle.remove(jobs)
                except ValueError:
                    job = jobs.get()  # it is on its way
                else:
                    return


def lower_this_thread(nice: int) -> None:
    """Never raises a priority. If it fails, it only logs a line."""
    try:
        # 0 is the calling thread.
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
        number = _IOPRIO_SET.get(platform.machine())
        if number is not None:
            libc.call("syscall", number, _WHO_PROCESS, 0, _LOWEST_OF_BEST_EFFORT)
    except OSError as error:
        log.warning("copying keeps the priority of everything else: %s", error.strerror)


def run_sync_at(nice: int) -> RunSync:
    """What runs background functions: at a low priority, or (0) as any other."""
    return LowPriorityThreads(nice).run_sync if nice else run_sync
