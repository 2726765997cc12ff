"""Reads of a large file that its owners have and this node has no room for: a few units of it, in
memory, from other nodes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import trio

from monarchfs.core.units import Unit
from monarchfs.prefetch.copy import Copy
from monarchfs.prefetch.spans import FileSpans
from monarchfs.types import Data

UNIT_BYTES = 1 << 20
AHEAD_UNITS = 2
"""So many are read ahead of a sequential reader."""

MOST_UNITS = 128
"""So many are kept in memory, of all files: half of what may wait there for a slow tier, which
these count as, too."""

IDLE_SECONDS = 1.0
"""Where there are so many, what was used since is not given up to read ahead."""


@dataclass(eq=False, slots=True)
class _Passing:
    unit: Unit
    done: trio.Event
    used: float


class PassingReads:
    """Constant: the file, and what other nodes have of it (``spans``). Changing: the units in
    memory, by file and number, those used last at the end; ``_last``, the number of the one that
    was read last."""

    _units: ClassVar[OrderedDict[tuple[PassingReads, int], _Passing]] = OrderedDict()

    def __init__(self, copy: Copy, spans: FileSpans, nursery: trio.Nursery) -> None:
        self._copy = copy
        self._spans = spans
        self._nursery = nursery
        self._last = -1

    async def read(self, offset: int, end: int) -> Data | None:
        """At least one byte of [offset, end), from its start; None if its owner does not give it,
        or if this node owns it. Raises nothing but Cancelled."""
        number = offset // UNIT_BYTES
        if not self._spans.elsewhere(offset):
            return None
        passing = self._begin(number)
        if self._last in (number - 1, number):
            # Reads may overtake each other a little.
            self._units.pop((self, number - 2), None)
            for ahead in range(number + 1, number + 1 + AHEAD_UNITS):
                start = ahead * UNIT_BYTES
                if start < self._copy.size and self._spans.elsewhere(start) and self._may_go_ahead:
                    self._begin(ahead)
        self._last = number
        await passing.done.wait()
        piece = passing.unit.peek(offset, min(end, passing.unit.end))
        if not piece and self._units.get((self, number)) is passing:
            del self._units[self, number]  # its owner may have it the next time
        return piece or None

    def close(self) -> None:
        """Nobody has the file open any more."""
        for key in [key for key in self._units if key[0] is self]:
            del self._units[key]

    @property
    def _may_go_ahead(self) -> bool:
        if len(self._units) < MOST_UNITS:
            return True
        return next(iter(self._units.values())).used < trio.current_time() - IDLE_SECONDS

    def _begin(self, number: int) -> _Passing:
        passing = self._units.get((self, number))
        now = trio.current_time()
        if passing is None:
            start = number * UNIT_BYTES
            unit = self._copy.make_unit(start, min(start + UNIT_BYTES, self._copy.size))
            passing = self._units[self, number] = _Passing(unit, trio.Event(), now)
            self._nursery.start_soon(self._read, unit, passing.done)
            if len(self._units) > MOST_UNITS:
                self._units.popitem(last=False)
        passing.used = now
        self._units.move_to_end((self, number))
        return passing

    async def _read(self, unit: Unit, done: trio.Event) -> None:
        unit.stop()
        try:
            await self._spans.read(unit, ahead=True)
        finally:
            unit.finish()
            done.set()
