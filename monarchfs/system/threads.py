"""Blocking calls in threads: ``run_sync`` is trio's, for a process that may get no more threads.

At a limit of processes (pthread_create(3), EAGAIN) trio's fails, though the source could answer. So
the call waits until a thread of an earlier call is free, or another one can be started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import outcome
import trio

log = logging.getLogger(__name__)

T = TypeVar("T")

_REFUSED = "can't start new thread"
_AGAIN_SECONDS = 0.1


class RunSync(Protocol):
    """``run_sync``, and what takes its place."""

    async def __call__(
        self,
        sync_fn: Callable[..., T],
        *args: Any,
        abandon_on_cancel: bool = False,
        limiter: trio.CapacityLimiter | None = None,
    ) -> T: ...


class ThreadQueue:
    """Calls that no thread could be started for, in their order. On the event loop."""

    def __init__(self) -> None:
        self._waiting = trio.lowlevel.ParkingLot()
        self._told = False

    async def run(self, run_sync: RunSync, sync_fn: Callable[..., T], *args: Any, **how: Any) -> T:
        """``run_sync(sync_fn, *args, **how)``, as soon as there is a thread for it. ``run_sync``
        raises RuntimeError where there is none."""
        if self._waiting:
            await self._turn()
        while True:
            result = await outcome.acapture(run_sync, sync_fn, *args, **how)
            error = result.error if isinstance(result, outcome.Error) else None
            if not isinstance(error, RuntimeError) or str(error) != _REFUSED:
                self._waiting.unpark()  # its thread is free
                return result.unwrap()
            if not self._told:
                log.warning("calls wait for threads: %s: see the limit of processes", error)
            self._told = True
            await self._turn()

    async def _turn(self) -> None:
        with trio.move_on_after(_AGAIN_SECONDS):
            await self._waiting.park()


_queue = ThreadQueue()


async def run_sync(
    sync_fn: Callable[..., T],
    *args: Any,
    abandon_on_cancel: bool = False,
    limiter: trio.CapacityLimiter | None = None,
) -> T:
    """As ``trio.to_thread.run_sync``; see above."""
    return await _queue.run(
        trio.to_thread.run_sync,
        sync_fn,
        *args,
        abandon_on_cancel=abandon_on_cancel,
        limiter=limiter,
    )
