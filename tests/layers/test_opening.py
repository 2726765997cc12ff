"""Opening a file that is not local, by Python: a small one is read whole by its first read."""

from __future__ import annotations

import errno
import os

import pytest
import trio
import trio.testing

from tests.support.mirror import KIB, MIB, Area, Mirror, content

SMALL = 100 * KIB


def operations(mirror: Mirror) -> int:
    return mirror.source.counters.operations


async def test_a_small_file_is_read_once_and_whole(area: Area) -> None:
    data = area.write("small", content(SMALL))
    async with area.mount() as mirror:
        ino = await mirror.ino("small")
        before = operations(mirror)
        handle = await mirror.open_ino(ino)
        assert await mirror.read(handle, 5, 1000) == data[5:1005]
        assert mirror.bytes_read("small") == SMALL
        assert await mirror.read(handle, 0, SMALL) == data
        handle.release()
        await mirror.settled()
        assert operations(mirror) - before == 2
        assert mirror.posix.faults.calls["open"] == 1
        assert mirror.residency.state(ino) == "resident"


async def test_it_is_read_before_it_is_written(area: Area) -> None:
    """Who reads waits for the source, not for the tier."""
    data = area.write("small", content(SMALL))
    async with area.mount() as mirror:
        gate = mirror.tier.faults.gate("write_whole")
        handle = await mirror.open("small")
        assert await mirror.read(handle, 5, 1000) == data[5:1005]
        await gate.arrived()
        gate.open()
        handle.release()
        await mirror.settled()
        assert mirror.bytes_read("small") == SMALL


async def test_two_who_open_it_share_the_read(area: Area) -> None:
    data = area.write("small", content(SMALL))
    async with area.mount() as mirror:
        gate = mirror.posix.faults.gate("read")
        found: list[bytes] = []

        async def read_it() -> None:
            found.append(await mirror.read_file("small"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_it)
            nursery.start_soon(read_it)
            await gate.arrived()
            await trio.testing.wait_all_tasks_blocked()
            assert not found
            gate.open()
        assert found == [data, data]
        await mirror.settled()
        assert mirror.bytes_read("small") == SMALL


async def test_who_is_killed_meanwhile_leaves_no_trace(area: Area) -> None:
    area.write("small", content(SMALL))
    async with area.mount() as mirror:
        gate = mirror.posix.faults.gate("read")
        ino = await mirror.ino("small")
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mirror.read_file, "small")
                await gate.arrived()
                scope.cancel()
        gate.open()
        await mirror.settled()
        # What was fetched for it is kept all the same.
        assert mirror.residency.state(ino) == "resident"
        assert mirror.bytes_read("small") == SMALL


@pytest.mark.parametrize(("size", "tiers", "keeps"), [
    (3 * MIB, [1 << 30], True),
    (SMALL, [4 * KIB], True),
    (SMALL, [1 << 30], False),
    (0, [1 << 30], True),
])  # fmt: skip
async def test_others_are_opened_only(area: Area, size: int, tiers: list[int], keeps: bool) -> None:
    """Large ones, and those that find no room or are not to be copied."""
    data = area.write("other", content(size))
    async with area.mount(tiers, keeps=keeps, copies=False) as mirror:
        handle = await mirror.open("other")
        assert mirror.bytes_read("other") == 0
        assert await mirror.read(handle, 0, 1000) == data[:1000]
        handle.release()


async def test_a_file_that_may_not_be_read_says_so_when_opened(area: Area) -> None:
    area.write("small", content(SMALL))
    async with area.mount() as mirror:
        mirror.posix.faults.fail("open", errno.EACCES)
        with pytest.raises(PermissionError):
            await mirror.open("small")
        await mirror.settled()
        assert mirror.bytes_read("small") == 0


async def test_a_file_that_cannot_be_read_can_be_opened(area: Area) -> None:
    """As one of the source can; the error is the read's."""
    area.write("small", content(SMALL))
    async with area.mount(copies=False) as mirror:
        mirror.posix.faults.fail("read", errno.EIO)
        handle = await mirror.open("small")
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            await mirror.read(handle, 0, 1000)
        mirror.posix.faults.end()
        assert await mirror.read(handle, 0, 1000) == content(1000)
        handle.release()
        await mirror.settled()


async def test_a_file_that_was_replaced_is_stale(area: Area) -> None:
    area.write("small", content(SMALL))
    async with area.mount() as mirror:
        ino = await mirror.ino("small")
        area.write("other", content(SMALL, 2)[::-1])
        (area.source / "other").rename(area.source / "small")
        with pytest.raises(OSError, match="another version") as raised:
            await mirror.open_ino(ino)
        assert raised.value.errno == errno.ESTALE
        await mirror.settled()


async def test_a_tier_that_cannot_be_written_is_not_the_readers_trouble(area: Area) -> None:
    data = area.write("small", content(SMALL))
    async with area.mount() as mirror:
        mirror.tier.faults.fail("write_whole", errno.ENOSPC)
        handle = await mirror.open("small")
        assert await mirror.read(handle, 0, SMALL) == data
        await mirror.idle()
        assert await mirror.read(handle, 1000, 1000) == data[1000:2000]
        handle.release()
