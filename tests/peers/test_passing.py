"""Large files that are read from their owners, and not kept."""

from __future__ import annotations

from typing import Any

import trio
import trio.testing

from monarchfs.prefetch.passing import AHEAD_UNITS, MOST_UNITS, UNIT_BYTES, PassingReads

SIZE = 20 * UNIT_BYTES - 5


class FakeUnit:
    """``bytes_there``: how many the owner gives."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.bytes_there = 0
        self.finished = False

    def stop(self) -> None:
        assert not self.bytes_there

    def finish(self) -> None:
        self.finished = True

    def peek(self, offset: int, end: int) -> bytes:
        assert self.finished
        assert self.start <= offset < end <= self.end
        return bytes(max(0, min(end, self.start + self.bytes_there) - offset))


class Spans:
    """The owner gives each unit at once, ``gives`` bytes of it; ``own``: offsets from which on this
    node owns the file."""

    def __init__(self) -> None:
        self.gives = UNIT_BYTES
        self.own = SIZE
        self.read_from: list[int] = []

    def elsewhere(self, offset: int) -> bool:
        return offset < self.own

    async def read(self, unit: Any, *, ahead: bool) -> None:
        assert ahead
        self.read_from.append(unit.start // UNIT_BYTES)
        unit.bytes_there = min(self.gives, unit.end - unit.start)
        await trio.lowlevel.checkpoint()


def passing(spans: Spans, nursery: trio.Nursery) -> PassingReads:
    given: Any = spans
    make: Any = FakeUnit
    return PassingReads(given, SIZE, make, nursery)


async def test_each_unit_is_fetched_once_however_it_is_read() -> None:
    spans = Spans()
    async with trio.open_nursery() as nursery:
        reads = passing(spans, nursery)
        at = 0
        while at < SIZE:
            piece = await reads.read(at, min(at + 100_000, SIZE))
            assert piece
            at += len(piece)
        assert at == SIZE
    assert sorted(spans.read_from) == list(range(20))


async def test_readers_at_different_places_fetch_nothing_ahead_and_little_is_kept() -> None:
    spans = Spans()
    async with trio.open_nursery() as nursery:
        reads = passing(spans, nursery)
        for number in (3, 9, 6, 12):
            assert await reads.read(number * UNIT_BYTES, number * UNIT_BYTES + 10) == bytes(10)
        assert spans.read_from == [3, 9, 6, 12]
        await reads.read(13 * UNIT_BYTES, 13 * UNIT_BYTES + 10)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(spans.read_from[4:]) == [13 + n for n in range(AHEAD_UNITS + 1)]
        assert len(reads._units) == MOST_UNITS


async def test_what_the_owner_does_not_give_is_not_made_up() -> None:
    spans = Spans()
    spans.gives = 1000
    spans.own = 4 * UNIT_BYTES
    async with trio.open_nursery() as nursery:
        reads = passing(spans, nursery)
        assert await reads.read(0, 5000) == bytes(1000)
        assert await reads.read(1000, 5000) is None
        assert await reads.read(4 * UNIT_BYTES, 4 * UNIT_BYTES + 10) is None
        assert await reads.read(3 * UNIT_BYTES, 3 * UNIT_BYTES + 10) == bytes(10)
        assert await reads.read(3 * UNIT_BYTES + 500, 3 * UNIT_BYTES + 510) == bytes(10)
        await trio.testing.wait_all_tasks_blocked()
    assert max(spans.read_from) == 3
