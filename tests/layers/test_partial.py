"""Copies that are not complete, of files with holes too, and what outlives a mount and a reboot."""

import errno
import random
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio

from monarchfs.cache.placement import placement
from monarchfs.cache.replicas import Reservation
from monarchfs.cache.store.checksum import combine, digests
from monarchfs.prefetch.fetch import CHUNK_BYTES
from monarchfs.types import ReplicaState, SourceStat
from tests.support.faults import disk_is_full
from tests.support.mirror import KIB, MIB, Area, Mirror, content, until
from tests.support.on_disk import places, spoil
from tests.support.runner import allocated_bytes

LARGE = content(5 * MIB + 5, 2)


@pytest.fixture
def files(area: Area, monkeypatch: pytest.MonkeyPatch) -> Area:
    area.write("large", LARGE)
    monkeypatch.setattr(placement, "PARTIAL_ROOM_BYTES", 256 * KIB)
    return area


async def test_a_file_that_is_opened_as_soon_as_it_was_closed_goes_on_being_copied(
    files: Area,
) -> None:
    """Without the loop running in between: what is suspended is suspended at once."""
    async with files.mount() as mirror:
        for turn in range(8):
            handle = await mirror.open("large")
            start, end = turn * 600 * KIB, turn * 600 * KIB + CHUNK_BYTES
            assert await mirror.read(handle, start, CHUNK_BYTES) == LARGE[start:end]
            handle.release()
        await mirror.settled()
        assert mirror.residency.state(handle.ino) == "resident"
        assert mirror.bytes_read("large") == len(LARGE)


@pytest.mark.parametrize(
    ("reads", "brought"),
    [
        ([(MIB, 4096)], 4096),
        ([(MIB, 4096), (MIB + 9 * KIB, 4096), (MIB, 4096)], 4096 + CHUNK_BYTES),  # there again
        ([(MIB, 4096), (MIB + 4096, 4096)], 4096 + CHUNK_BYTES),  # on
        ([(MIB, 40 * KIB)], CHUNK_BYTES),
        ([(0, 4096)], CHUNK_BYTES),  # perhaps a header
    ],
)
async def test_a_small_read_at_random_brings_what_it_asks_for(
    files: Area, reads: list[tuple[int, int]], brought: int
) -> None:
    async with files.mounted(copies=False) as mirror:
        handle = await mirror.open("large")
        for offset, size in reads:
            assert await mirror.read(handle, offset, size) == LARGE[offset : offset + size]
            await mirror.idle()
        assert mirror.bytes_read("large") == brought
        handle.release()


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
        assert mirror.cache.usage.report()[0]["used_bytes"] != 0, "it is on the disk"
        if closed:
            handle.release()
        mirror.nursery.cancel_scope.cancel()
    async with files.mounted() as again:
        ino = await again.ino("large")
        there = again.index.replicas.present_bytes(ino)
        assert (again.replica(ino).state, there > 0) == (ReplicaState.PARTIAL, True)
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


async def test_where_there_is_no_room_exactly_what_is_asked_for_is_read(files: Area) -> None:
    async with files.mounted([100 * KIB]) as mirror:
        handle = await mirror.open("large")
        for offset, size in ((5, 100), (3 * MIB, 4096), (len(LARGE) - 10, 4096)):
            assert await mirror.read(handle, offset, size) == LARGE[offset : offset + size]
        assert mirror.bytes_read("large") == 100 + 4096 + 10
        assert mirror.metrics.copies_refused > 0
        assert mirror.reason(handle.ino).startswith("no room")
        handle.release()


def durable(mirror: Mirror, *inos: int) -> set[bool]:
    return {mirror.replica(ino).durable for ino in inos}


async def test_a_sync_that_fails_or_is_cancelled_is_made_up_for(
    area: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have lost what the first was to write, although the next one succeeds."""
    *names, lost = area.write_files(4)
    async with area.mount(shares=False) as mirror:
        inos = [await mirror.copied(names[0])]
        bad = await mirror.copied(lost)
        mirror.tier.faults.fail("sync", errno.EIO, times=1)
        await mirror.cache.accounts.sync()
        assert durable(mirror, *inos) == {False}
        await mirror.mend()
        (place,) = places(area.tier(1), (area.source / lost).read_bytes())
        spoil(place)
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
        assert (mirror.record(bad), mirror.metrics.replicas_corrupt) == (None, 1)
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


# Files with holes: their copies reserve and use about their blocks, never more than there is.


SIZE = 64 * MIB
DATA = content(300 * KIB, 5)


def make_sparse(area: Area, name: str, pieces: list[tuple[int, bytes]], size: int = SIZE) -> bytes:
    """A file with ``pieces`` at their offsets; its bytes."""
    path = area.source / name
    with path.open("wb") as opened:
        opened.truncate(size)
        for offset, data in pieces:
            opened.seek(offset)
            opened.write(data)
    return path.read_bytes()


def watch_capacity(mirror: Mirror, capacity: int) -> None:
    """After each write the tier holds no more."""

    def look() -> None:
        assert allocated_bytes(Path(mirror.tier.path)) <= capacity

    mirror.tier.faults.before("after_write", look)


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source says of each large file that it occupies next to nothing."""
    few = property(lambda stat: min(stat.size, 64 * KIB))
    monkeypatch.setattr(SourceStat, "occupied_bytes", few)


async def test_holes_are_not_read(area: Area) -> None:
    """Of a file of a terabyte, the blocks around what it has."""
    size, far = 1 << 40, (1 << 39) + 5
    path = area.source / "f"
    with path.open("wb") as opened:
        opened.truncate(size)
        for at in (3 * MIB, far):
            opened.seek(at)
            opened.write(DATA[:4096])
    async with area.mounted([2 * MIB]) as mirror:
        watch_capacity(mirror, 2 * MIB)
        with trio.fail_after(30):
            await mirror.want("f")
            await mirror.idle()
        assert mirror.residency.state(await mirror.ino("f")) == "resident"
        assert sum(read.size for read in mirror.posix.reads) <= 4 * 256 * KIB
        assert allocated_bytes(Path(mirror.tier.path)) < MIB
        handle = await mirror.open("f")
        for at in (0, 3 * MIB, far, size - 4096):
            found = await mirror.read(handle, at, 4096)
            assert found == (DATA[:4096] if at in (3 * MIB, far) else bytes(4096))
        handle.release()


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_between_holes_is_copied(area: Area, seed: int) -> None:
    """Extents of any size, at any offset, in a file whose end may be a hole; its checksum is that
    of a copy made of all its bytes."""
    rng = random.Random(seed)
    size = rng.choice([20 * MIB, 20 * MIB + 1, 20 * MIB - 5000])
    pieces = [
        (rng.randrange(size - 400 * KIB), content(rng.choice([1, 5000, 300 * KIB]), n))
        for n in range(rng.randrange(12))
    ]
    data = make_sparse(area, "f", pieces, size)
    async with area.mounted([64 * MIB], copy_workers=rng.choice([1, 4])) as mirror:
        await mirror.want("f")
        await mirror.idle()
        assert mirror.replica(await mirror.ino("f")).checksum == combine(digests(data))
        assert await mirror.read_file("f") == data
        most = sum(len(piece) + 3 * 256 * KIB for _at, piece in pieces)
        assert sum(read.size for read in mirror.posix.reads) <= most


@pytest.mark.usefixtures("lying")
@pytest.mark.parametrize("opened", [True, False], ids=["opened", "scanned"])
async def test_and_ends_as_no_room_where_there_is_none(area: Area, opened: bool) -> None:
    data = area.write("f", content(9 * MIB + 5))
    async with area.mounted([4 * MIB]) as mirror:
        watch_capacity(mirror, 4 * MIB)
        if opened:
            assert await mirror.read_file("f", 300_000) == data
        else:
            await mirror.want("f")
        await mirror.idle()
        ino = await mirror.ino("f")
        record = mirror.replica(ino)
        assert record.state is ReplicaState.PARTIAL
        assert 2 * MIB <= record.allocated_bytes <= 4 * MIB
        assert "short" not in mirror.reason(ino).split("no room for the rest")[1]
        await mirror.settled()
        assert await mirror.read_file("f", 300_000) == data
    async with area.mount([16 * MIB]) as roomy:
        await roomy.want("f")
        await roomy.settled()
        assert roomy.residency.state(await roomy.ino("f")) == "resident"
        assert roomy.bytes_read("f") <= len(data) - 2 * MIB
        assert await roomy.read_file("f") == data


@pytest.mark.usefixtures("lying")
async def test_the_promise_holds_for_many_at_once(area: Area) -> None:
    for number in range(8):
        area.write(f"f{number}", content(2 * MIB, number))
    async with area.mounted([7 * MIB], copy_workers=8) as mirror:
        watch_capacity(mirror, 7 * MIB)
        for number in range(8):
            await mirror.want(f"f{number}")
        await mirror.idle()
        reasons = [mirror.reason(await mirror.ino(f"f{number}")) for number in range(8)]
        assert any(reason.startswith("no room") for reason in reasons), reasons


async def test_what_is_recorded_of_a_part_is_not_recorded_again(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a large file takes long to write."""
    async with files.mounted(copies=False) as mirror:
        put = Mock(wraps=mirror.index.replicas.put_replica)
        monkeypatch.setattr(mirror.index.replicas, "put_replica", put)
        for offset, records in ((0, 1), (0, 1), (MIB, 2)):
            handle = await mirror.open("large")
            data = LARGE[offset : offset + CHUNK_BYTES]
            assert await mirror.read(handle, offset, CHUNK_BYTES) == data
            await mirror.idle()
            mirror.copier.jobs.files[handle.ino].copy.checkpoint()
            handle.release()
            await mirror.settled()
            assert put.call_count == records
            assert mirror.index.replicas.journal() == []


async def test_a_suspended_replica_goes_on_in_as_little_room(area: Area) -> None:
    data = make_sparse(area, "f", [(0, DATA), (40 * MIB, DATA)])
    async with area.mount([MIB], copies=False) as mirror:
        handle = await mirror.open("f")
        assert await mirror.read(handle, 0, 1000) == data[:1000]
        assert await mirror.read(handle, 20 * MIB, 1000) == bytes(1000)
        handle.release()
        await mirror.settled()
        assert mirror.residency.state(await mirror.ino("f")) == "partial"
    async with area.mount([MIB]) as again:
        watch_capacity(again, MIB)
        await again.want("f")
        await again.settled()
        assert again.residency.state(await again.ino("f")) == "resident"
        assert await again.read_file("f") == data
