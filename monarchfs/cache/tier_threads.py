"""The threads that read and write tiers, apart from the source's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from monarchfs.system.threads import RunSync, run_sync

T = TypeVar("T")


class TierThreads:
    """Constant: how many run at once."""

    def __init__(self, count: int, behind: RunSync = run_sync) -> None:
        """``behind`` runs what no reader waits for; if that is at a lower priority, readers do not
        wait for its threads either, which have a limit of their own."""
        self.limiter = trio.CapacityLimiter(count)
        self._behind = behind
        apart = behind is not run_sync
        self._limiter_behind = trio.CapacityLimiter(count) if apart else self.limiter
        self._writing = trio.CapacityLimiter(count)

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """Run a call that no reader waits for."""
        return await self._behind(fn, *args, limiter=self._limiter_behind)

    async def run_now(self, fn: Callable[..., T], *args: object) -> T:
        """Run a call that a reader waits for, not behind copies."""
        return await run_sync(fn, *args, limiter=self.limiter)

    async def write(self, fn: Callable[..., T], *args: object) -> T:
        """Run a call that may wait for the source a little, so that it delays no others."""
        return await self._behind(fn, *args, limiter=self._writing)
