"""Reads of a large file that its owners have and this node has no room for: a few units of it, in
memory, from other nodes."""

from __future__ import annotations

from collections import OrderedDict

import trio

from monarchfs.core.units import Unit
from monarchfs.prefetch.copy import Copy
from monarchfs.prefetch.spans import FileSpans
from monarchfs.types import Data

UNIT_BYTES = 1 << 20
AHEAD_UNITS = 2
"""So many are read ahead of a sequential reader."""

MOST_UNITS = 5
"""So many are kept in memory: readers of one file may be at different places."""


class PassingReads:
    """Constant: the file, and what other nodes have of it (``spans``). Changing: the units read
    last, by number, the newest last, each with an event of its end; ``_last``, the number of the
    one that was read last."""

    def __init__(self, copy: Copy, spans: FileSpans, nursery: trio.Nursery) -> None:
        self._copy = copy
        self._spans = spans
        self._nursery = nursery
        self._units: OrderedDict[int, tuple[Unit, trio.Event]] = OrderedDict()
        self._last = -1

    async def read(self, offset: int, end: int) -> Data | None:
        """At least one byte of [offset, end), from its start; None if its owner does not give it,
        or if this node owns it. Raises nothing but Cancelled."""
        number = offset // UNIT_BYTES
        if not self._spans.elsewhere(offset):
            return None
        unit, done = self._begin(number)
        if self._last in (number - 1, number):
            for ahead in range(number + 1, number + 1 + AHEAD_UNITS):
                start = ahead * UNIT_BYTES
                if start < self._copy.size and self._spans.elsewhere(start):
                    self._begin(ahead)
        self._last = number
        await done.wait()
        return unit.peek(offset, min(end, unit.end)) or None

    def _begin(self, number: int) -> tuple[Unit, trio.Event]:
        passing = self._units.get(number)
        if passing is None:
            start = number * UNIT_BYTES
            unit = self._copy.make_unit(start, min(start + UNIT_BYTES, self._copy.size))
            passing = self._units[number] = unit, trio.Event()
            self._nursery.start_soon(self._read, *passing)
            if len(self._units) > MOST_UNITS:
                self._units.popitem(last=False)
        self._units.move_to_end(number)
        return passing

    async def _read(self, unit: Unit, done: trio.Event) -> None:
        unit.stop()
        try:
            await self._spans.read(unit, ahead=True)
        finally:
            unit.finish()
            done.set()
