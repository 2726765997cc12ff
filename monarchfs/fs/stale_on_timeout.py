"""Questions to the source: asked once for all callers that want the same, with a limited wait."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import trio

from monarchfs.fs.freshness import Freshness
from monarchfs.metrics import Metrics
from monarchfs.source.single_flight import SingleFlight
from monarchfs.source.source import Source
from monarchfs.types import FreshnessMode, IndexWriteError

log = logging.getLogger(__name__)

T = TypeVar("T")
Key = tuple[object, ...]


class StaleOnTimeout:
    """Constant: its parts. ``deadline``: seconds that a revalidation waits for the source where
    something is known that can be served instead."""

    def __init__(
        self,
        source: Source,
        freshness: Freshness,
        metrics: Metrics,
        nursery: trio.Nursery,
        deadline: float,
    ) -> None:
        self._source = source
        self._freshness = freshness
        self._metrics = metrics
        self._deadline = deadline
        self._flights: SingleFlight = SingleFlight(nursery)
        self._under_way: set[Key] = set()

    async def run_once(self, key: Key, fetch: Callable[[], Awaitable[T]]) -> T:
        """The answer of one call of ``fetch`` for all callers with the same ``key``. Raises what it
        raises."""
        if self._freshness.mode is not FreshnessMode.OPEN:
            return await self._flights.run_once(key, fetch)

        async def run() -> T:
            self._under_way.add(key)
            try:
                return await fetch()
            finally:
                self._under_way.discard(key)

        if key in self._under_way:
            # The source may have answered before the change that this caller has to see.
            with suppress(OSError, IndexWriteError):
                await self._flights.run_once(key, run)
        return await self._flights.run_once(key, run)

    async def ask(
        self,
        key: Key,
        fetch: Callable[[], Awaitable[T]],
        fallback: T | None,
        *,
        even_open: bool = False,
    ) -> T:
        """``run_once``; or ``fallback``, if the mount's promise allows that, where the source does
        not answer in time or the answer cannot be recorded. Raises OSError."""
        if fallback is None or not (self._freshness.serves_stale or even_open):
            try:
                return await self.run_once(key, fetch)
            except IndexWriteError as exc:
                raise OSError(errno.EIO, f"what was found cannot be recorded: {exc}") from exc
        # A source that is known to hang is asked all the same, because the answer serves later
        # callers; but this one does not wait for it.
        with trio.move_on_after(self._deadline if self._source.responding else 0.001):
            try:
                return await self.run_once(key, fetch)
            except IndexWriteError as exc:
                log.warning("what was found cannot be recorded: %s", exc)
        self._metrics.stale_answers += 1
        return fallback
