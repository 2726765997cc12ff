"""Copies that are not complete, and what of all replicas outlives a mount and a reboot."""

from __future__ import annotations

import errno
from pathlib import Path

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
        record = mirror.record(ino)
        assert record is not None
        assert record.state is ReplicaState.PARTIAL
        assert record.present.count(1) == 1
        assert mirror.residency.state(ino) == "partial"
        assert mirror.residency.tier(ino) == mirror.tier.path
        await read_at(mirror, 3 * MIB + 10)
        assert mirror.bytes_read("large") == CHUNK_BYTES
        await read_at(mirror, 4 * MIB)
        await mirror.settled()
        assert mirror.bytes_read("large") == 2 * CHUNK_BYTES


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
    async with files.mount() as again:
        ino = await again.ino("large")
        replica = again.record(ino)
        assert replica is not None
        assert replica.state is ReplicaState.PARTIAL
        there = replica.present.count(1) * CHUNK_BYTES
        assert there > 0
        await again.want("large")
        await again.settled()
        assert again.residency.state(ino) == "resident"
        # The last chunk, of which the file has 5 bytes, may be among those that were there.
        assert len(LARGE) - there <= again.bytes_read("large") < len(LARGE) - there + CHUNK_BYTES
        assert await again.read_file("large", 100_000) == LARGE
        whole = again.record(ino)
        assert whole is not None
        assert again.tier.verify_complete(whole), "its checksum is not that of its bytes"
        await again.settled()
    if not closed:
        handle.release()


async def test_the_end_of_the_mount_comes_with_the_last_close(files: Area) -> None:
    async with files.mount(copies=False) as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, 2 * MIB, 10)
        await mirror.idle()
        handle.release()
        mirror.nursery.cancel_scope.cancel()
    async with files.mount(copies=False) as again:
        await read_at(again, 2 * MIB)
        assert again.bytes_read("large") == 0
        await again.settled()


async def test_a_file_that_lacked_only_its_last_step_is_finished_unread(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount() as mirror:
        begun = trio.Event()

        async def finish(reservation: Reservation) -> bool:
            begun.set()
            await trio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(mirror.cache, "finish", finish)
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
        record = mirror.record(ino)
        assert record is not None
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
        assert roomy.residency.state(await roomy.ino("large")) == "resident"
        assert roomy.bytes_read("large") <= len(LARGE) - kept


async def test_where_there_is_no_room_exactly_what_is_asked_for_is_read(files: Area) -> None:
    async with files.mount([100 * KIB]) as mirror:
        handle = await mirror.open("large")
        for offset, size in ((5, 100), (3 * MIB, 4096), (len(LARGE) - 10, 4096)):
            data = await mirror.read(handle, offset, size)
            assert data == LARGE[offset : offset + size]
        assert mirror.bytes_read("large") == 100 + 4096 + 10
        assert mirror.metrics.copies_refused > 0
        assert mirror.reason(handle.ino).startswith("no room")
        handle.release()
        await mirror.settled()


async def test_later_and_smaller_files_still_get_their_chance(files: Area) -> None:
    files.write("small", content(1000))
    async with files.mount([300 * KIB], partial_min_bytes=1 << 40) as mirror:
        await mirror.read_file("large")
        await mirror.copied("small")
        assert mirror.residency.state(await mirror.ino("large")) == "remote"
        await mirror.settled()


async def test_a_partial_replica_of_a_version_that_is_gone(files: Area) -> None:
    async with files.mount(copies=False) as mirror:
        await read_at(mirror, 3 * MIB)
        old = await mirror.ino("large")
    other = files.write("large", content(5 * MIB + 5, 9))
    async with files.mount() as again:
        assert await again.read_file("large", 300_000) == other
        await again.settled()
        assert await again.ino("large") != old


# Resident ones, and reboots.


def sizes(area: Area, count: int) -> list[str]:
    names = [f"f{number}" for number in range(count)]
    for number, name in enumerate(names):
        area.write(name, content(10_000 + number, number))
    return names


async def test_replicas_outlive_a_mount(area: Area) -> None:
    names = sizes(area, 5)
    async with area.mount() as mirror:
        inos = [await mirror.copied(name) for name in names]
        await mirror.cache.sync()
        used = mirror.cache.usage.report()[0]["used_bytes"]
    async with area.mount() as again:
        assert again.cache.usage.report()[0]["used_bytes"] == used
        for number, name in enumerate(names):
            assert await again.read_file(name) == content(10_000 + number, number)
            assert await again.ino(name) == inos[number]
        assert again.posix.reads == []
        await again.settled()


def stop_marking(mirror: Mirror) -> None:
    """As if the machine went down now: nothing is synced at the end of this mount."""
    del mirror.cache._durability._unsynced[1][:]


async def test_a_reboot_costs_what_was_not_synced(area: Area) -> None:
    synced, late = sizes(area, 4)[:2], ["f2", "f3"]
    area.write("large", LARGE)
    async with area.mount() as mirror:
        for name in synced:
            await mirror.copied(name)
        await mirror.cache.sync()
        for name in late:
            await mirror.copied(name)
        stop_marking(mirror)
    async with area.mount(boot_id=b"second boot") as again:
        await again.idle()
        again.check_books()
        states = {name: again.residency.state(await again.ino(name)) for name in synced + late}
        assert states == {"f0": "resident", "f1": "resident", "f2": "remote", "f3": "remote"}
        for name in late:
            await again.copied(name)
        await again.settled()
    async with area.mount(boot_id=b"third boot") as third:
        await third.idle()
        assert third.residency.state(await third.ino("f2")) == "resident"


async def test_a_reboot_costs_parts(files: Area) -> None:
    async with files.mount(copies=False) as mirror:
        await read_at(mirror, 3 * MIB)
    async with files.mount(boot_id=b"second boot") as again:
        await again.idle()
        again.check_books()
        assert again.residency.state(await again.ino("large")) == "remote"


async def test_what_no_record_knows_is_removed(files: Area) -> None:
    """A crash left a part, and, of a machine that went down, a file whose record was lost."""
    async with files.mount(sound=False) as mirror:
        ino = await mirror.copied("large")
        record = mirror.record(ino)
        assert record is not None
        mirror.index.drop_replica(ino)
        mirror.index.file_gone(record.tier, record.name)
        (Path(mirror.tier.path) / "parts" / record.name.hex()).write_bytes(b"left over")
    async with files.mount(boot_id=b"second boot") as again:
        await again.idle()
        again.check_books()
        await again.copied("large")


async def test_a_sync_that_fails_or_is_cancelled_is_made_up_for(area: Area) -> None:
    sizes(area, 3)
    async with area.mount() as mirror:
        inos = [await mirror.copied("f0")]
        mirror.tier.faults.fail("sync", errno.EIO, times=1)
        await mirror.cache.sync()
        assert not any(durable(mirror, ino) for ino in inos)
        await mirror.mend()
        inos.append(await mirror.copied("f1"))
        gate = mirror.tier.faults.gate("sync")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.cache.sync)
            await gate.arrived()
            inos.append(await mirror.copied("f2"))
            nursery.cancel_scope.cancel()
        gate.open()
        assert not any(durable(mirror, ino) for ino in inos)
        await mirror.cache.sync()
        assert all(durable(mirror, ino) for ino in inos)


async def test_a_replica_made_during_a_sync_is_not_part_of_it(area: Area) -> None:
    """Also not where the inode had another replica when it began, or earlier."""
    sizes(area, 3)
    async with area.mount() as mirror:
        first, third = await mirror.copied("f0"), await mirror.copied("f2")
        mirror.cache.drop(third, "for the test")
        gate = mirror.tier.faults.gate("sync")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.cache.sync)
            await gate.arrived()
            mirror.cache.drop(first, "for the test")
            assert await mirror.copied("f0") == first
            second = await mirror.copied("f1")
            assert await mirror.copied("f2") == third
            gate.open()
        assert not any(durable(mirror, ino) for ino in (first, second, third))
        await mirror.cache.sync()
        assert all(durable(mirror, ino) for ino in (first, second, third))


async def test_a_sync_whose_marks_cannot_be_written_is_made_up_for(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes(area, 1)
    async with area.mount() as mirror:
        ino = await mirror.copied("f0")

        with monkeypatch.context() as patch:
            patch.setattr(mirror.index, "mark_durable", disk_is_full)
            patch.setattr(mirror.index, "sync", disk_is_full)
            await mirror.cache.sync()
        assert not durable(mirror, ino)
        await mirror.cache.sync()
        assert durable(mirror, ino)


def durable(mirror: Mirror, ino: int) -> bool:
    record = mirror.record(ino)
    assert record is not None
    return record.durable


async def test_what_a_tmpfs_holds_is_never_durable(area: Area) -> None:
    sizes(area, 1)
    async with area.mount() as mirror:
        mirror.tier.memory_backed = True
        ino = await mirror.copied("f0")
        await mirror.cache.sync()
        assert not durable(mirror, ino)
        assert mirror.tier.faults.calls.get("sync", 0) == 0


async def test_a_file_of_a_tier_that_is_not_given_is_copied_again(area: Area) -> None:
    """The replica in the other tier goes once that is given again."""
    sizes(area, 2)
    async with area.mount([64 * KIB, 1 * MIB]) as mirror:
        for name in ("f0", "f1"):
            await mirror.copied(name)
    async with area.mount([1 * MIB]) as again:
        await again.copied("f1")
        await again.settled()
    async with area.mount([1 * MIB, 1 * MIB]) as third:
        await third.idle()
        assert third.index.journal() == []
        await third.settled()
