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
from tests.support.mirror import MIB, Area, Mirror, content, until

SIZE = 5_000


@pytest.fixture(autouse=True)
def _ten_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MANY", 10)


def files(area: Area, directory: str, count: int, size: int = SIZE) -> list[str]:
    names = [f"{directory}/{number:03d}" for number in range(count)]
    for number, name in enumerate(names):
        area.write(name, content(size, number))
    return names


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


async def read(mirror: Mirror, name: str) -> bytes:
    """What is being read is answered from that by the C part; here it is waited for."""
    ino = await mirror.ino(name)
    await until(lambda: not mirror.copier.jobs.copying(ino), f"{name} to be stored")
    return await mirror.read_file(name)


def resident(mirror: Mirror) -> int:
    return sum(totals.resident for totals in mirror.index.tier_totals().values())


async def test_as_many_again_of_the_same_directory(area: Area) -> None:
    names, others = files(area, "train", 60), files(area, "val", 30)
    async with area.mount() as mirror, copying_ahead(mirror):
        for name in names[:10]:
            await mirror.read_file(name)
        await until(lambda: resident(mirror) == 20, "as many again to be copied")
        await mirror.idle()
        for _ in range(5):
            await trio.sleep(ahead.LOOK_SECONDS)
        await mirror.settled()
        assert resident(mirror) == 20
        assert [mirror.bytes_read(name) for name in others] == [0] * len(others)
        # What is opened of it says that more is of use.
        for name in names[10:30]:
            assert await read(mirror, name) == (area.source / name).read_bytes()
        await until(lambda: resident(mirror) >= 50, "more to be copied")
        for name in names[30:]:
            await read(mirror, name)
        await until(lambda: resident(mirror) == 60, "all to be there")
        await mirror.settled()
        assert [mirror.bytes_read(name) for name in names] == [SIZE] * len(names)


async def test_nothing_after_a_few_opens_or_where_files_are_large(area: Area) -> None:
    few, large = files(area, "few", 30), files(area, "large", 14, MIB + 1)
    async with area.mount() as mirror, copying_ahead(mirror) as found:
        for name in (*few[:9], *large[:11]):
            await mirror.read_file(name)
        for _ in range(5):
            await trio.sleep(ahead.LOOK_SECONDS)
        await mirror.settled()
        assert resident(mirror) == 20
        assert found.names == 0
        assert found.allowance.opened_files == 9


async def test_what_others_than_python_have_opened_counts(area: Area) -> None:
    names = files(area, "train", 60)
    opened: set[int] = set()
    async with area.mount() as mirror, copying_ahead(mirror, opened.__contains__) as found:
        for name in names[:10]:
            await mirror.read_file(name)
        await until(lambda: resident(mirror) == 20, "as many again to be copied")
        opened |= set(found.allowance.waiting)
        await until(lambda: resident(mirror) == 40, "more to be copied")
        assert len(found.allowance.waiting) == 20
        await mirror.settled()


async def test_half_of_the_room_is_left_to_what_is_opened(area: Area) -> None:
    names = files(area, "train", 60, 40_000)
    async with area.mount([30 * 40_960]) as mirror, copying_ahead(mirror):
        for name in names[:12]:
            await mirror.read_file(name)
        await until(lambda: resident(mirror) > 12, "some to be copied ahead")
        for _ in range(5):
            await trio.sleep(ahead.LOOK_SECONDS)
        await mirror.idle()
        assert resident(mirror) < 28
        for name in names[12:]:
            assert await mirror.read_file(name) == (area.source / name).read_bytes()
        await mirror.settled()


async def test_names_are_looked_up_also_where_there_is_no_room(area: Area) -> None:
    names = files(area, "train", 60)
    async with area.mount([5 * 8192]) as mirror, copying_ahead(mirror):
        for name in names[:20]:
            await mirror.read_file(name)
        directory = await mirror.ino("train")

        def all_known() -> bool:
            known = mirror.tree.known.lookup
            return all(known(directory, os.path.basename(name).encode()) for name in names)

        await until(all_known, "the others to be looked up")
        assert [mirror.bytes_read(name) for name in names[20:]] == [0] * 40
        await mirror.settled()


async def test_a_directory_whose_names_cannot_be_looked_up_costs_nobody_anything(
    area: Area,
) -> None:
    names = files(area, "train", 60)
    async with area.mount() as mirror, copying_ahead(mirror):
        mirror.posix.faults.fail("found_each", errno.EACCES)
        for name in names[:20]:
            assert await mirror.read_file(name) == (area.source / name).read_bytes()
        for _ in range(5):
            await trio.sleep(ahead.LOOK_SECONDS)
        await mirror.settled()
        assert resident(mirror) == 20
        mirror.end_faults()


async def test_files_that_go_while_they_are_copied_ahead(area: Area) -> None:
    names = files(area, "train", 40)
    async with area.mount() as mirror, copying_ahead(mirror):
        for name in names[20:]:
            os.unlink(area.source / name)
        for name in names[:20]:
            assert await mirror.read_file(name) == (area.source / name).read_bytes()
        await until(lambda: resident(mirror) == 20, "those that are there to be copied")
        await mirror.settled()
