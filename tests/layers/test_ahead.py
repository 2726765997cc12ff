"""Small files are copied ahead of a reader that opens many of them; others are not."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from monarchfs.prefetch import ahead
from monarchfs.prefetch.ahead import Ahead
from tests.support.mirror import MIB, Area, Mirror, until

SIZE = 5_000


@pytest.fixture(autouse=True)
def _ten_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MANY", 10)


@asynccontextmanager
async def copying_ahead(
    mirror: Mirror, seen: Callable[[int], bool] = lambda _ino: False
) -> AsyncIterator[Ahead]:
    found = Ahead(mirror.tree, mirror.cache, mirror.copier.jobs, seen)
    mirror.files._on_open = found.opened
    mirror.start_copying()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.run)
        yield found
        nursery.cancel_scope.cancel()


async def read_each(mirror: Mirror, names: list[str]) -> None:
    """What is being read is answered from that by the C part; here it is waited for."""
    for name in names:
        ino = await mirror.ino(name)
        await until(lambda: not mirror.copier.jobs.copying(ino), "it to be stored")  # noqa: B023
        assert await mirror.read_file(name) == (mirror.area.source / name).read_bytes()


async def looked_again() -> None:
    for _ in range(5):
        await trio.sleep(ahead.LOOK_SECONDS)


def resident(mirror: Mirror) -> int:
    return sum(totals.resident for totals in mirror.index.replicas.tier_totals().values())


async def test_as_many_again_of_the_same_directory(area: Area) -> None:
    names, others = area.write_files(60, SIZE, "train/"), area.write_files(30, SIZE, "val/")
    async with area.mount() as mirror, copying_ahead(mirror):
        await read_each(mirror, names[:10])
        await until(lambda: resident(mirror) == 20, "as many again to be copied")
        await mirror.idle()
        await looked_again()
        await mirror.settled()
        assert resident(mirror) == 20
        assert [mirror.bytes_read(name) for name in others] == [0] * len(others)
        # What is opened of it says that more is of use.
        await read_each(mirror, names[10:30])
        await until(lambda: resident(mirror) >= 50, "more to be copied")
        await read_each(mirror, names[30:])
        await until(lambda: resident(mirror) == 60, "all to be there")
        await mirror.settled()
        assert [mirror.bytes_read(name) for name in names] == [SIZE] * len(names)


async def test_nothing_after_a_few_opens_or_where_files_are_large(area: Area) -> None:
    few, large = area.write_files(30, SIZE, "few/"), area.write_files(14, MIB + 1, "large/")
    async with area.mount() as mirror, copying_ahead(mirror) as found:
        await read_each(mirror, few[:9] + large[:11])
        await looked_again()
        await mirror.settled()
        assert resident(mirror) == 20
        assert found.names == 0
        assert found.allowance.opened_files == 9


async def test_what_others_than_python_have_opened_counts(area: Area) -> None:
    names = area.write_files(60, SIZE, "train/")
    opened: set[int] = set()
    async with area.mounted() as mirror, copying_ahead(mirror, opened.__contains__) as found:
        await read_each(mirror, names[:10])
        await until(lambda: resident(mirror) == 20, "as many again to be copied")
        opened |= set(found.allowance.waiting)
        await until(lambda: resident(mirror) == 40, "more to be copied")
        assert len(found.allowance.waiting) == 20


async def test_half_of_the_room_is_left_to_what_is_opened(area: Area) -> None:
    names = area.write_files(60, 40_000, "train/")
    async with area.mounted([30 * 40_960]) as mirror, copying_ahead(mirror):
        await read_each(mirror, names[:12])
        await until(lambda: resident(mirror) > 12, "some to be copied ahead")
        await looked_again()
        await mirror.idle()
        assert resident(mirror) < 28
        await read_each(mirror, names[12:])


async def test_names_are_looked_up_also_where_there_is_no_room(area: Area) -> None:
    names = area.write_files(60, SIZE, "train/")
    async with area.mounted([5 * 8192]) as mirror, copying_ahead(mirror):
        await read_each(mirror, names[:20])
        directory, known = await mirror.ino("train"), mirror.tree.known.lookup
        short = [os.path.basename(name).encode() for name in names]
        await until(lambda: all(known(directory, name) for name in short), "the others")
        assert [mirror.bytes_read(name) for name in names[20:]] == [0] * 40


@pytest.mark.parametrize("why", ["they cannot be looked up", "they are gone"])
async def test_files_that_cannot_be_copied_ahead_cost_nobody_anything(area: Area, why: str) -> None:
    names = area.write_files(40, SIZE, "train/")
    async with area.mount() as mirror, copying_ahead(mirror):
        if why == "they are gone":
            for name in names[20:]:
                os.unlink(area.source / name)
        else:
            mirror.posix.faults.fail("found_each", errno.EACCES)
        await read_each(mirror, names[:20])
        await looked_again()
        await mirror.settled()
        assert resident(mirror) == 20
