"""Copies that are not complete, and what of all replicas outlives a mount and a reboot."""

from __future__ import annotations

import errno

import pytest
import trio

from monarchfs.cache.replicas import Reservation
from monarchfs.placement import placement
from monarchfs.prefetch.fetch import CHUNK_BYTES
from monarchfs.types import ReplicaState
from tests.support.faults import disk_is_full
from tests.support.mirror import KIB, MIB, Area, Mirror, content, until

LARGE = content(5 * MIB + 5, 2)


@pytest.fixture
def files(area: Area, monkeypatch: pytest.MonkeyPatch) -> Area:
    area.write("large", LARGE)
    monkeypatch.setattr(placement, "PARTIAL_ROOM_BYTES", 256 * KIB)
    return area


async def read_at(mirror: Mirror, offset: int, size: int = 1000) -> None:
    """Open, read one piece, close."""
    handle = await mirror.open("large")
    assert await mirror.read(handle, offset, size) == LARGE[offset : offset + size]
    handle.release()


async def test_what_was_read_is_suspended_at_close_and_not_read_again(files: Area) -> None:
    async with files.mount(copies=False) as mirror:
        await read_at(mirror, 3 * MIB)
        await mirror.settled()
        ino = await mirror.ino("large")
        record = mirror.replica(ino)
        assert (record.state, record.present.count(1)) == (ReplicaState.PARTIAL, 1)
        assert mirror.residency.state(ino) == "partial"
        assert mirror.residency.tier(ino) == mirror.tier.path
        await read_at(mirror, 3 * MIB + 10)
        assert mirror.bytes_read("large") == CHUNK_BYTES
        await read_at(mirror, 4 * MIB)
        await mirror.settled()
        assert mirror.bytes_read("large") == 2 * CHUNK_BYTES
    async with files.mount(boot_id=b"second boot") as again:
        await again.idle()
        again.check_books()
        assert again.residency.state(ino) == "remote", "a reboot costs parts"


async def test_a_file_that_is_opened_as_soon_as_it_was_closed_goes_on_being_copied(
    files: Area,
) -> None:
    """Without the loop running in between: what is suspended is suspended at once."""
    async with files.mount() as mirror:
        for turn in range(8):
            handle = await mirror.open("large")
            offset = turn * 600 * KIB
            assert await mirror.read(handle, offset, 5000) == LARGE[offset : offset + 5000]
            handle.release()
        await mirror.settled()
        assert mirror.residency.state(handle.ino) == "resident"
        assert mirror.bytes_read("large") == len(LARGE)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
async def test_a_copy_that_the_end_of_the_mount_interrupts_is_resumed(
    files: Area, closed: bool
) -> None:
    """Whether the last close and the end come together, or the file is still open then."""
    async with files.mount() as mirror:
        gate = mirror.posix.faults.gate("read")
        handle = await mirror.open("large")
        for _ in range(3):
            await gate.arrived()
            gate.release()
        await gate.arrived()
        await until(lambda: mirror.copier.jobs.copied_bytes([handle.ino]) > 0, "a first part")
        if closed:
            handle.release()
        mirror.nursery.cancel_scope.cancel()
    async with files.mounted() as again:
        ino = await again.ino("large")
        replica = again.replica(ino)
        there = replica.present.count(1) * CHUNK_BYTES
        assert (replica.state, there > 0) == (ReplicaState.PARTIAL, True)
        await again.want("large")
        await again.settled()
        assert again.residency.state(ino) == "resident"
        # The last chunk, of which the file has 5 bytes, may be among those that were there.
        assert len(LARGE) - there <= again.bytes_read("large") < len(LARGE) - there + CHUNK_BYTES
        assert await again.read_file("large", 100_000) == LARGE
        assert again.tier.verify_complete(again.replica(ino)), "its checksum is another one"
    if not closed:
        handle.release()


async def test_a_file_that_lacked_only_its_last_step_is_finished_unread(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount() as mirror:
        begun = trio.Event()

        async def finish(reservation: Reservation) -> bool:
            begun.set()
            await trio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(mirror.cache.writer, "finish", finish)
        await mirror.want("large")
        await begun.wait()
        mirror.nursery.cancel_scope.cancel()
    async with files.mount() as again:
        ino = await again.ino("large")
        assert again.residency.state(ino) == "partial"
        await again.want("large")
        await again.settled()
        assert again.residency.state(ino) == "resident"
        assert again.posix.reads == []
        assert await again.read_file("large", 300_000) == LARGE


async def test_room_that_is_too_small_holds_a_part_and_more_room_the_rest(files: Area) -> None:
    room = 2 * MIB
    async with files.mount([room]) as mirror:
        assert await mirror.read_file("large", 300_000) == LARGE
        await mirror.settled()
        ino = await mirror.ino("large")
        record = mirror.replica(ino)
        kept = record.present.count(1) * CHUNK_BYTES
        assert room // 2 < kept <= room
        assert record.allocated_bytes <= room
        assert mirror.residency.state(ino) == "partial"
    async with files.mount([room]) as again:
        assert await again.read_file("large", 300_000) == LARGE
        await again.settled()
        assert again.bytes_read("large") <= len(LARGE) - kept
    async with files.mount([16 * MIB]) as roomy:
        await roomy.want("large")
        await roomy.settled()
        assert await roomy.state("large") == "resident"
        assert roomy.bytes_read("large") <= len(LARGE) - kept


async def test_where_there_is_no_room_exactly_what_is_asked_for_is_read(files: Area) -> None:
    async with files.mounted([100 * KIB]) as mirror:
        handle = await mirror.open("large")
        for offset, size in ((5, 100), (3 * MIB, 4096), (len(LARGE) - 10, 4096)):
            data = await mirror.read(handle, offset, size)
            assert data == LARGE[offset : offset + size]
        assert mirror.bytes_read("large") == 100 + 4096 + 10
        assert mirror.metrics.copies_refused > 0
        assert mirror.reason(handle.ino).startswith("no room")
        handle.release()


async def test_later_and_smaller_files_still_get_their_chance(files: Area) -> None:
    files.write("small", content(1000))
    async with files.mounted([300 * KIB], partial_min_bytes=1 << 40) as mirror:
        await mirror.read_file("large")
        await mirror.copied("small")
        assert await mirror.state("large") == "remote"


# What outlives a reboot.


def durable(mirror: Mirror, *inos: int) -> set[bool]:
    return {mirror.replica(ino).durable for ino in inos}


async def test_a_sync_that_fails_or_is_cancelled_is_made_up_for(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = area.write_files(3)
    async with area.mount(shares=False) as mirror:
        inos = [await mirror.copied(names[0])]
        mirror.tier.faults.fail("sync", errno.EIO, times=1)
        await mirror.cache.accounts.sync()
        assert durable(mirror, *inos) == {False}
        await mirror.mend()
        with monkeypatch.context() as patch:
            patch.setattr(mirror.index.replicas, "mark_durable", disk_is_full)
            patch.setattr(mirror.index.environment, "sync", disk_is_full)
            await mirror.cache.accounts.sync()
        inos.append(await mirror.copied(names[1]))
        gate = mirror.tier.faults.gate("sync")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.cache.accounts.sync)
            await gate.arrived()
            inos.append(await mirror.copied(names[2]))
            nursery.cancel_scope.cancel()
        gate.open()
        assert durable(mirror, *inos) == {False}
        await mirror.cache.accounts.sync()
        assert durable(mirror, *inos) == {True}
    async with area.mounted(boot_id=b"second boot") as again:
        await again.read_each(names)
        assert again.posix.reads == []


async def test_a_replica_made_during_a_sync_is_not_part_of_it(area: Area) -> None:
    """Also not where the inode had another replica when it began, or earlier."""
    names = area.write_files(3)
    async with area.mount() as mirror:
        first, third = await mirror.copied(names[0]), await mirror.copied(names[2])
        mirror.cache.accounts.drop(third, "for the test")
        gate = mirror.tier.faults.gate("sync")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.cache.accounts.sync)
            await gate.arrived()
            mirror.cache.accounts.drop(first, "for the test")
            inos = [await mirror.copied(name) for name in names]
            assert (inos[0], inos[2]) == (first, third)
            gate.open()
        assert durable(mirror, *inos) == {False}
        await mirror.cache.accounts.sync()
        assert durable(mirror, *inos) == {True}


async def test_what_a_tmpfs_holds_is_never_durable(files: Area) -> None:
    async with files.mount() as mirror:
        mirror.tier.memory_backed = True
        ino = await mirror.copied("large")
        await mirror.cache.accounts.sync()
        assert durable(mirror, ino) == {False}
        assert mirror.tier.faults.calls.get("sync", 0) == 0


async def test_a_file_of_a_tier_that_is_not_given_is_copied_again(area: Area) -> None:
    """The replica in the other tier goes once that is given again."""
    names = area.write_files(2)
    async with area.mount([64 * KIB, 1 * MIB]) as mirror:
        for name in names:
            await mirror.copied(name)
    async with area.mounted([1 * MIB]) as again:
        await again.copied(names[1])
    async with area.mounted([1 * MIB, 1 * MIB]) as third:
        await third.idle()
        assert third.index.replicas.journal() == []
