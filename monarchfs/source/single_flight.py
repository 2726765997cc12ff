"""Single flight: callers who want the same thing at the same time share one run of it."""

from __future__ import annotations

import copy
import errno
import logging
import os
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import trio

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Flight(Generic[T]):
    landed: trio.Event = field(default_factory=trio.Event)
    waiting: int = 0
    value: T | None = None
    error: Exception | None = None


class SingleFlight:
    """Runs that are under way, by key. Belongs to one trio run.

    A run lives in the nursery given here, so that a caller who is cancelled (a reader that was
    killed) does not end it for the others. It must not produce a resource: with every caller
    gone, nobody would release it.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._flights: dict[Hashable, _Flight[Any]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    async def run_once(self, key: Hashable, fn: Callable[[], Awaitable[T]]) -> T:
        """The result of the run under way for ``key``, or else of a new run of ``fn``.

        Raises what the run raised, each caller an exception of its own; ENOTCONN if the nursery was
        cancelled under it.
        """
        # No checkpoint between the look-up and the insertion.
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            self._nursery.start_soon(self._run, key, flight, fn)
        flight.waiting += 1
        try:
            await flight.landed.wait()
        finally:
            flight.waiting -= 1
        if flight.error is not None:
            raise _own(flight.error) from flight.error
        return cast(T, flight.value)

    async def _run(self, key: Hashable, flight: _Flight[T], fn: Callable[[], Awaitable[T]]) -> None:
        # What a caller sees if neither a value nor an error comes: the nursery was cancelled.
        flight.error = OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        try:
            flight.value = await fn()
            flight.error = None
        except Exception as error:  # every kind: it is raised again, in the callers
            flight.error = error
            if not flight.waiting and not isinstance(error, OSError):
                logger.exception("A run for %r failed after all its callers had gone", key)
        finally:
            del self._flights[key]
            flight.landed.set()


def _own(error: Exception) -> Exception:
    """A copy to raise, since raising one object many times grows its traceback each time."""
    try:
        own = copy.copy(error)
    except TypeError:
        # Its constructor takes other arguments than it keeps.
        return error.with_traceback(None)
    return own if type(own) is type(error) else error.with_traceback(None)
