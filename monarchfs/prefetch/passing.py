"""Reads of a large file that its owners have and this node has no room for: a few units of it, in
memory, from other nodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from monarchfs.core.units import Unit
from monarchfs.prefetch.spans import FileSpans
from monarchfs.types import Data

UNIT_BYTES = 1 << 20
AHEAD_UNITS = 2
"""So many are read ahead of a sequential reader."""

MOST_UNITS = 5
"""So many are kept in memory: readers of one file may be at different places."""


@dataclass(eq=False, slots=True)
class _Passing:
    unit: Unit
    done: trio.Event = field(default_factory=trio.Event)


class PassingReads:
    """Constant: ``spans``, what other nodes have of the file; its size. Changing: the units read
    last, by number, the newest last; ``_last``, the number of the one that was read last."""

    def __init__(
        self,
        spans: FileSpans,
        size: int,
        make_unit: Callable[[int, int], Unit],
        nursery: trio.Nursery,
    ) -> None:
        """``make_unit`` makes a unit of the bytes from here to there."""
        self._spans = spans
        self._size = size
        self._make_unit = make_unit
        self._nursery = nursery
        self._units: OrderedDict[int, _Passing] = OrderedDict()
        self._last = -1

    async def read(self, offset: int, end: int) -> Data | None:
        """At least one byte of [offset, end), from its start; None if its owner does not give it,
        or if this node owns it. Raises nothing but Cancelled."""
        number = offset // UNIT_BYTES
        if not self._spans.elsewhere(offset):
            return None
        passing = self._begin(number)
        if self._last in (number - 1, number):
            for ahead in range(number + 1, number + 1 + AHEAD_UNITS):
                if ahead * UNIT_BYTES < self._size and self._spans.elsewhere(ahead * UNIT_BYTES):
                    self._begin(ahead)
        self._last = number
        await passing.done.wait()
        return passing.unit.peek(offset, min(end, passing.unit.end)) or None

    def _begin(self, number: int) -> _Passing:
        passing = self._units.get(number)
        if passing is None:
            start = number * UNIT_BYTES
            unit = self._make_unit(start, min(start + UNIT_BYTES, self._size))
            passing = self._units[number] = _Passing(unit)
            self._nursery.start_soon(self._read, passing)
            if len(self._units) > MOST_UNITS:
                self._units.popitem(last=False)
        self._units.move_to_end(number)
        return passing

    async def _read(self, passing: _Passing) -> None:
        passing.unit.stop()
        try:
            await self._spans.read(passing.unit, ahead=True)
        finally:
            passing.unit.finish()
            passing.done.set()
