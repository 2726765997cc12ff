"""Room: who goes when a tier is full, who never goes, and that it is never more than full."""

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio
import trio.testing

from monarchfs.cache.scrub import Scrub
from monarchfs.cache.store.files import replica_path
from monarchfs.fuse import session
from monarchfs.fuse.relay import Relay
from monarchfs.system.memory import MemoryHeadroom
from monarchfs.types import EvictionPolicy, Replica
from tests.support.faults import FaultyTier, disk_is_full
from tests.support.mirror import ALL_ROOM, KIB, MIB, Area, Mirror, content, until
from tests.support.on_disk import Place, spoil

KEEP, LRU = EvictionPolicy.KEEP, EvictionPolicy.LRU
SIEVE, WEIGHTED = EvictionPolicy.SIEVE, EvictionPolicy.WEIGHTED
SIZE = 100_000
ROOM = 4 * 112 * KIB
"""For four of the files, each of which is reserved a block more than it takes."""


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarchfs.cache.tiers.SPACE_MAX_AGE_SECONDS", 0.0)


@pytest.fixture
def files(area: Area) -> Area:
    for number in range(8):
        area.write(str(number), content(SIZE, number))
    return area


async def resident(mirror: Mirror) -> set[str]:
    states = mirror.states([await mirror.ino(str(number)) for number in range(8)])
    return {str(number) for number, state in enumerate(states) if state == "resident"}


async def read_all(mirror: Mirror, names: str) -> None:
    for name in names:
        assert await mirror.read_file(name) == content(SIZE, int(name))
        await mirror.idle()


def damage(tier: FaultyTier, record: Replica, offset: int) -> None:
    """Others wrote over a byte of a replica."""
    own, segment = replica_path(record.name, record.checksum), f"segments/{record.segment:016x}"
    spoil(Place(Path(tier.path, segment if record.segment else own), record.offset), offset)


def blocks(mirror: Mirror) -> int:
    """Of what the fast tier holds, without the lists of what that is."""
    files = Path(mirror.tier.path).rglob("*")
    return sum(f.stat().st_blocks for f in files if f.is_file() and f.suffix != ".list") * 512


@pytest.mark.parametrize(
    ("eviction", "read", "stay", "why"),
    [
        (KEEP, "01234567", "0123", "no room"),
        (LRU, "0123045", "0345", "evicted"),
        (SIEVE, "01230245", "0245", "evicted"),
        (WEIGHTED, "012312345676543210", "0123", "no room"),
    ],
)
async def test_who_goes(
    files: Area, eviction: EvictionPolicy, read: str, stay: str, why: str
) -> None:
    """None; what was read longest ago; what was read once; what is read less often."""
    async with files.mounted([ROOM], eviction=eviction) as mirror:
        await read_all(mirror, read)
        assert await resident(mirror) == set(stay)
        assert mirror.metrics.evictions_policy == (2 if why == "evicted" else 0)
        assert why in mirror.reason(await mirror.ino(min(set(read) - set(stay))))


async def test_the_order_outlives_a_mount_as_far_as_it_is_known(files: Area) -> None:
    async with files.mount([ROOM], eviction=LRU) as mirror:
        await read_all(mirror, "0123")
    async with files.mounted([ROOM], eviction=LRU) as mirror:
        await read_all(mirror, "1")
        await read_all(mirror, "456")
        assert await resident(mirror) == set("1456")


async def test_open_and_pinned_replicas_stay(files: Area) -> None:
    async with files.mounted([ROOM], eviction=LRU) as mirror:
        await read_all(mirror, "0123")
        handle = await mirror.open("0")
        mirror.cache.index.pins.pin(await mirror.ino("1"))
        await read_all(mirror, "4567")
        assert await resident(mirror) == set("0167")
        assert await mirror.read(handle, 5, 100) == content(SIZE, 0)[5:105]
        handle.release()
        mirror.cache.index.pins.unpin(await mirror.ino("1"))
        await read_all(mirror, "2345")
        assert await resident(mirror) == set("2345")


async def test_what_is_about_to_open_stays(files: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    async with files.mounted([ROOM], eviction=LRU) as mirror:
        await read_all(mirror, "0123")
        stays = await mirror.ino("0")
        monkeypatch.setattr(mirror.cache.readers, "try_remove", lambda ino: ino != stays)
        await read_all(mirror, "45")
        assert await resident(mirror) == set("0345")


async def test_a_copy_waits_until_its_room_is_there(files: Area) -> None:
    """Readers do not wait, and the tier holds no more than it may at any moment. What is to go may
    be wanted again before it is gone."""
    async with files.mounted([ROOM], eviction=LRU) as mirror:
        await read_all(mirror, "0123")
        full = blocks(mirror)
        gate = mirror.tier.faults.gate("remove")
        assert await mirror.read_file("4") == content(SIZE, 4)
        await gate.arrived()
        await trio.testing.wait_all_tasks_blocked()
        assert blocks(mirror) == full
        assert await mirror.state("4") == "copying"
        assert await mirror.state("0") == "remote"
        assert await mirror.read_file("0") == content(SIZE, 0)
        gate.open()
        await mirror.idle()
        assert await resident(mirror) >= set("04")


async def test_a_removed_file_counts_until_who_has_it_open_closes_it(files: Area) -> None:
    async with files.mounted([ROOM], shares=False) as mirror:
        await read_all(mirror, "01")
        used = mirror.used()
        handle = await mirror.open("0")
        assert mirror.cache.accounts.drop(handle.ino, "for the test")
        await mirror.idle()
        assert blocks(mirror) < mirror.used() == used, "unlinked, it keeps its blocks"
        assert await mirror.read(handle, 0, SIZE) == content(SIZE, 0)
        handle.release()
        await mirror.idle()
        assert blocks(mirror) == mirror.used() < used


async def test_a_replica_that_cannot_be_removed_counts_until_it_is_gone(files: Area) -> None:
    async with files.mounted([ROOM], eviction=LRU) as mirror:
        await read_all(mirror, "0123")
        used = mirror.used()
        mirror.tier.faults.fail("remove", errno.EIO)
        assert await mirror.read_file("4") == content(SIZE, 4)
        await mirror.idle()
        assert mirror.used() == used == blocks(mirror)
        assert await mirror.state("4") == "remote"
        await mirror.mend()
        await mirror.idle()
        assert mirror.used() == blocks(mirror) < used
        await mirror.copied("4")


async def test_a_smaller_capacity_is_kept_even_by_keep(files: Area) -> None:
    async with files.mount([ROOM]) as mirror:
        await read_all(mirror, "0123")
    async with files.mounted([ROOM // 2]) as mirror:
        await mirror.idle()
        assert len(await resident(mirror)) == 2
        assert mirror.metrics.evictions_pressure == 2
        assert blocks(mirror) <= ROOM // 2


async def test_memory_returns_what_is_needed(files: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarchfs.cache.store.tier.on_disk.is_in_memory", lambda fd: True)
    available = 1 << 30
    async with files.mounted(
        headroom=lambda: MemoryHeadroom(available, 1 << 30, "a test")
    ) as mirror:
        await read_all(mirror, "0123")
        # A hundredth of the limit stays free; two files too many are there now.
        available = (1 << 30) // 100 - 2 * SIZE
        await mirror.cache.maintain()
        await mirror.idle()
        assert len(await resident(mirror)) <= 2
        assert mirror.metrics.evictions_pressure >= 2
        await read_all(mirror, "01234567")
        assert len(await resident(mirror)) <= 2, "nothing new comes while memory is short"
        available = 1 << 30
        await read_all(mirror, "01234567")
        assert len(await resident(mirror)) == 8


@pytest.mark.parametrize(
    ("shares", "how"),
    [(True, "damaged"), (False, "damaged"), (False, "frozen index"), (False, "unreadable")],
)
async def test_a_replica_that_was_found_corrupt_is_read_from_the_source(
    files: Area, monkeypatch: pytest.MonkeyPatch, shares: bool, how: str
) -> None:
    """Also where its record cannot be removed, and where only the disk says it."""
    async with files.mounted(shares=shares) as mirror:
        ino = await mirror.copied("0")
        if how == "frozen index":
            monkeypatch.setattr(mirror.index.replicas, "drop_replicas", disk_is_full)
        if how == "unreadable":
            failing = Mock(side_effect=OSError(errno.EIO, "EIO"))
            monkeypatch.setattr(mirror.tier, "verify_complete", failing)
        forgotten: list[int] = []
        mirror.cache.accounts.on_corrupt.add(forgotten.append)
        handle = await mirror.open("0")
        damage(mirror.tier, mirror.replica(ino), 70_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Scrub(mirror.cache.accounts, 1 << 40).run)
            await until(lambda: mirror.metrics.replicas_corrupt == 1, "the scrub to find it")
            nursery.cancel_scope.cancel()
        assert forgotten == [ino]
        assert await mirror.read(handle, 69_990, 100) == content(SIZE, 0)[69_990:70_090]
        handle.release()
        if how == "unreadable":
            await mirror.mend()
        assert await mirror.read_file("0") == content(SIZE, 0)
        await mirror.idle()
        assert await mirror.read_file("0") == content(SIZE, 0)
        assert mirror.cache.resident(await mirror.node("0")) == (how != "frozen index")
        relay = Relay(free_opens=False)
        relay._files, relay._tiers = mirror.files, {mirror.tier.id: 0}
        monkeypatch.setattr(session.hooks, "resident_put", Mock(return_value=True))
        assert relay.offer(ino) == (how != "frozen index")


async def test_threads_are_offered_files_until_they_take_no_more(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mounted() as mirror:
        await read_all(mirror, "012")
        relay = Relay(free_opens=False)
        relay._files, relay._tiers = mirror.files, {mirror.tier.id: 0}
        put = Mock(return_value=True)
        monkeypatch.setattr(session.hooks, "resident_put", put)
        monkeypatch.setattr(session.hooks, "resident_full", lambda: put.call_count == 2)
        await relay.walk()
        assert put.call_count == 2


@pytest.mark.parametrize("shares", [True, False])
async def test_a_corrupt_replica_does_not_move(files: Area, shares: bool) -> None:
    async with files.mounted([ROOM // 4, ALL_ROOM], shares=shares) as mirror:
        await read_all(mirror, "0123")
        ino = await mirror.ino("1")
        damage(mirror.tiers[1], mirror.replica(ino), 50_000)
        mirror.cache.accounts.drop(await mirror.ino("0"), "for the test")
        await mirror.idle()
        (await mirror.open("1")).release()
        await until(lambda: mirror.metrics.replicas_corrupt == 1, "the move to fail")
        await mirror.idle()
        assert mirror.residency.state(ino) == "remote"
        await read_all(mirror, "1")


async def test_a_replica_whose_move_loses_its_part_stays(files: Area) -> None:
    async with files.mounted([ROOM // 4, ALL_ROOM], shares=False) as mirror:
        await read_all(mirror, "01")
        mirror.cache.accounts.drop(await mirror.ino("0"), "for the test")
        await mirror.idle()
        parts = Path(mirror.tier.path, "parts")
        mirror.tier.faults.before("finish_part", lambda: next(parts.iterdir()).unlink())
        (await mirror.open("1")).release()
        await until(lambda: not mirror.cache.accounts.busy, "the move to fail")
        assert await mirror.state("1") == "resident"
        assert mirror.metrics.replicas_corrupt == 0


@pytest.mark.parametrize("shares", [True, False])
async def test_a_move_that_cannot_read_blames_what_it_reads(files: Area, shares: bool) -> None:
    async with files.mounted([ROOM // 4, ALL_ROOM], shares=shares) as mirror:
        await read_all(mirror, "0123")
        mirror.cache.accounts.drop(await mirror.ino("0"), "for the test")
        await mirror.idle()
        handle = await mirror.open("1")
        mirror.tiers[1].faults.fail("open_replica", errno.EIO)
        await until(lambda: mirror.metrics.tier_errors == 1, "the move to fail")
        handle.release()
        out = mirror.cache.accounts.all_tiers.out_of_service
        assert [out(tier.id) is None for tier in mirror.tiers] == [True, False]


@pytest.mark.parametrize("shares", [True, False])
async def test_a_move_waits_until_the_replica_is_closed(files: Area, shares: bool) -> None:
    """A file that is opened moves up once there is room."""
    async with files.mounted([ROOM // 4, 8 * MIB], shares=shares) as mirror:
        await read_all(mirror, "0123")
        fast, slow = (tier.path for tier in mirror.tiers)
        tiers = [mirror.residency.tier(await mirror.ino(name)) for name in "012"]
        assert tiers == [fast, slow, slow]
        mirror.cache.accounts.drop(await mirror.ino("0"), "for the test")
        await mirror.idle()
        handle = await mirror.open("1")
        await until(lambda: blocks(mirror) > SIZE, "the copy")
        assert mirror.residency.tier(handle.ino) == slow
        journal = [tier for tier, _name in mirror.index.replicas.journal()]
        assert shares or mirror.tiers[0].id in journal, "a crash would leave it uncounted"
        assert await mirror.read(handle, 0, SIZE) == content(SIZE, 1)
        handle.release()
        await until(lambda: mirror.metrics.replicas_moved == 1, "the move")
        await mirror.idle()
        assert mirror.residency.tier(handle.ino) == fast
        mirror.posix.reads.clear()
        await read_all(mirror, "12")
        assert mirror.posix.reads == []
