"""Room: who goes when a tier is full, who never goes, and that it is never more than full."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio
import trio.testing

from monarchfs.store.files import replica_path
from monarchfs.system.memory import MemoryHeadroom
from monarchfs.types import EvictionPolicy, FreshnessMode, Replica
from tests.support.faults import FaultyTier
from tests.support.mirror import ALL_ROOM, KIB, MIB, Area, Mirror, content, until

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


async def states(mirror: Mirror) -> dict[str, str]:
    return {str(n): mirror.residency.state(await mirror.ino(str(n))) for n in range(8)}


async def resident(mirror: Mirror) -> set[str]:
    return {name for name, state in (await states(mirror)).items() if state == "resident"}


async def read_all(mirror: Mirror, names: str) -> None:
    for name in names:
        assert await mirror.read_file(name) == content(SIZE, int(name))
        await mirror.idle()


def damage(tier: FaultyTier, record: Replica | None, offset: int) -> None:
    """Others wrote over three bytes of a replica."""
    assert record is not None
    path = Path(tier.path) / replica_path(record.name, record.checksum)
    if record.segment:
        path = Path(tier.path) / "segments" / f"{record.segment:016x}"
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(record.offset + offset)
        file.write(b"\0\0\0")


def blocks(mirror: Mirror) -> int:
    """Of what the fast tier holds, without the lists of what that is."""
    files = Path(mirror.tier.path).rglob("*")
    return sum(f.stat().st_blocks for f in files if f.is_file() and f.suffix != ".list") * 512


async def test_keep_keeps(files: Area) -> None:
    async with files.mount([ROOM]) as mirror:
        await read_all(mirror, "01234567")
        assert await resident(mirror) == set("0123")
        assert "no room" in mirror.reason(await mirror.ino("4"))
        await mirror.settled()


async def test_what_goes_for_a_batch_goes_together_and_what_stays_costs_one_file_its_room(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount([ROOM], eviction=EvictionPolicy.LRU) as mirror:
        await read_all(mirror, "0123")
        inos = [await mirror.ino(str(number)) for number in range(4)]
        dropped: list[list[int]] = []
        drop, try_remove = mirror.index.drop_replicas, mirror.cache.readers.try_remove

        def dropping(going: list[int]) -> None:
            dropped.append(going)
            drop(going)

        monkeypatch.setattr(mirror.index, "drop_replicas", dropping)
        monkeypatch.setattr(
            mirror.cache.readers, "try_remove", lambda ino: ino != inos[1] and try_remove(ino)
        )
        nodes = [await mirror.node(name) for name in "456"]
        places = mirror.cache.reserve_each(nodes, evicts=True)
        assert dropped == [[inos[0], inos[2]], [inos[3]]], "the last file is asked for anew"
        wanted = [
            (place, content(SIZE, number))
            for number, place in enumerate(places, 4)
            if place is not None
        ]
        assert await mirror.cache.write_each(wanted) == [True] * 3
        assert await resident(mirror) == set("1456")
        await mirror.settled()


async def test_lru_evicts_what_was_read_longest_ago(files: Area) -> None:
    async with files.mount([ROOM], eviction=EvictionPolicy.LRU) as mirror:
        await read_all(mirror, "0123")
        await read_all(mirror, "0")
        await read_all(mirror, "45")
        assert await resident(mirror) == set("0345")
        assert mirror.metrics.evictions_policy == 2
        assert "evicted" in mirror.reason(await mirror.ino("1"))
        await mirror.settled()


async def test_sieve_evicts_what_was_read_once(files: Area) -> None:
    async with files.mount([ROOM], eviction=EvictionPolicy.SIEVE) as mirror:
        await read_all(mirror, "0123")
        await read_all(mirror, "02")
        await read_all(mirror, "45")
        assert await resident(mirror) == set("0245")
        await mirror.settled()


async def test_weighted_keeps_what_is_read_more_often(files: Area) -> None:
    async with files.mount([ROOM], eviction=EvictionPolicy.WEIGHTED) as mirror:
        await read_all(mirror, "0123")
        await read_all(mirror, "12345676543210")
        assert await resident(mirror) == set("0123")
        await read_all(mirror, "770770770770770")
        assert {"0", "7"} < await resident(mirror)
        assert mirror.metrics.evictions_policy == 1
        await mirror.settled()


async def test_given_weights_say_what_stays_and_what_lies_in_the_faster_tier(files: Area) -> None:
    """Whatever they are changed to meanwhile, each byte is right (``read_all`` compares them)."""
    async with files.mount([ROOM, ROOM], eviction=EvictionPolicy.WEIGHTED) as mirror:
        inos = [await mirror.ino(str(number)) for number in range(8)]
        fast, slow = mirror.cache.tiers
        mirror.cache.weigh([(inos[n], 8.0 - n) for n in range(8)], replace=False)
        await read_all(mirror, "01234567" * 2)
        assert await resident(mirror) == set("01234567")
        mirror.cache.weigh([(inos[n], float(n)) for n in range(8)], replace=False)
        ledgers = [mirror.cache.placement.ledger(tier) for tier in mirror.cache.tiers]
        for _ in range(3):
            await read_all(mirror, "7654")
            await until(lambda: not any(one.copies for one in ledgers), "moves")
        # Some had to go, so that others could change places.
        assert await resident(mirror) >= set("4567")
        await read_all(mirror, "0123")
        await mirror.settled()
        for n in range(8):
            record = mirror.cache.state(inos[n])
            assert record is not None
            assert record.tier == (fast if n >= 4 else slow), n


@pytest.mark.parametrize("eviction", [EvictionPolicy.LRU, EvictionPolicy.WEIGHTED])
async def test_nothing_moves_to_where_the_one_that_should_go_stays(
    files: Area, monkeypatch: pytest.MonkeyPatch, eviction: EvictionPolicy
) -> None:
    async with files.mount([ROOM, ROOM], eviction=eviction) as mirror:
        weights = (2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 9.0)
        inos = [await mirror.ino(str(number)) for number in range(8)]
        mirror.cache.weigh(list(zip(inos, weights, strict=True)), replace=False)
        await read_all(mirror, "01234567")
        refused: list[int] = []
        monkeypatch.setattr(mirror.cache.readers, "try_remove", refused.append)
        await read_all(mirror, "777")
        assert refused
        await mirror.settled()
        for tier in mirror.cache.tiers:
            ledger = mirror.cache.placement.ledger(tier)
            assert (ledger.copies, ledger.used_bytes <= ledger.capacity_bytes) == (0, True)
        assert await resident(mirror) == set("01234567")


async def test_the_order_outlives_a_mount_as_far_as_it_is_known(files: Area) -> None:
    async with files.mount([ROOM], eviction=EvictionPolicy.LRU) as mirror:
        await read_all(mirror, "0123")
    async with files.mount([ROOM], eviction=EvictionPolicy.LRU) as mirror:
        await read_all(mirror, "1")
        await read_all(mirror, "456")
        assert await resident(mirror) == set("1456")
        await mirror.settled()


async def test_what_a_scan_finds_evicts_nothing(files: Area) -> None:
    async with files.mount([ROOM], eviction=EvictionPolicy.LRU) as mirror:
        await read_all(mirror, "0123")
        for name in "4567":
            await mirror.want(name)
        await mirror.idle()
        assert await resident(mirror) == set("0123")


async def test_open_and_pinned_replicas_stay(files: Area) -> None:
    async with files.mount([ROOM], eviction=EvictionPolicy.LRU) as mirror:
        await read_all(mirror, "0123")
        handle = await mirror.open("0")
        mirror.cache.index.pin(await mirror.ino("1"))
        await read_all(mirror, "4567")
        assert await resident(mirror) == set("0167")
        assert await mirror.read(handle, 5, 100) == content(SIZE, 0)[5:105]
        handle.release()
        mirror.cache.index.unpin(await mirror.ino("1"))
        await read_all(mirror, "2345")
        assert await resident(mirror) == set("2345")
        await mirror.settled()


async def test_a_pinned_directory_keeps_what_is_below_it(area: Area) -> None:
    area.write("kept/deep/a", content(SIZE, 1))
    for number in range(5):
        area.write(str(number), content(SIZE, number))
    async with area.mount([ROOM], eviction=EvictionPolicy.LRU) as mirror:
        await mirror.copied("kept/deep/a")
        mirror.cache.index.pin(await mirror.ino("kept"))
        await read_all(mirror, "01234")
        assert mirror.residency.state(await mirror.ino("kept/deep/a")) == "resident"
        await mirror.settled()


@pytest.mark.parametrize("eviction", list(EvictionPolicy))
async def test_outdated_versions_go_first(files: Area, eviction: EvictionPolicy) -> None:
    async with files.mount([ROOM], eviction=eviction, mode=FreshnessMode.OPEN) as mirror:
        await files.settled()
        await read_all(mirror, "0123")
        files.write("3", content(SIZE, 33))
        await files.settled()
        assert await mirror.read_file("3") == content(SIZE, 33)
        await mirror.idle()
        assert await resident(mirror) == set("0123"), "the old version made room for the new one"
        assert mirror.metrics.evictions_outdated == 1
        assert mirror.metrics.evictions_policy == 0
        await mirror.settled()


async def test_a_copy_waits_until_its_room_is_there(files: Area) -> None:
    """Readers do not wait, and the tier holds no more than it may at any moment."""
    async with files.mount([ROOM], eviction=EvictionPolicy.LRU) as mirror:
        await read_all(mirror, "0123")
        full = blocks(mirror)
        gate = mirror.tier.faults.gate("remove")
        assert await mirror.read_file("4") == content(SIZE, 4)
        await gate.arrived()
        await trio.testing.wait_all_tasks_blocked()
        assert blocks(mirror) == full
        assert mirror.residency.state(await mirror.ino("4")) == "copying"
        assert mirror.residency.state(await mirror.ino("0")) == "remote"
        gate.open()
        await mirror.idle()
        assert await resident(mirror) == set("1234")
        await mirror.settled()


async def test_an_evicted_file_that_is_wanted_again_before_it_is_gone(files: Area) -> None:
    async with files.mount([ROOM], eviction=EvictionPolicy.LRU) as mirror:
        await read_all(mirror, "0123")
        gate = mirror.tier.faults.gate("remove")
        await mirror.read_file("4")
        await gate.arrived()
        assert await mirror.read_file("0") == content(SIZE, 0)
        gate.open()
        await mirror.idle()
        assert "0" in await resident(mirror)
        assert await mirror.read_file("0") == content(SIZE, 0)
        await mirror.settled()


async def test_a_removed_file_counts_until_who_has_it_open_closes_it(files: Area) -> None:
    async with files.mount([ROOM], shares=False) as mirror:
        await read_all(mirror, "01")
        ledger = mirror.placement.ledger(mirror.tier.id)
        used = ledger.usage[0]
        handle = await mirror.open("0")
        assert mirror.cache.drop(handle.ino, "for the test")
        await mirror.idle()
        assert blocks(mirror) < ledger.usage[0] == used, "unlinked, it keeps its blocks"
        assert await mirror.read(handle, 0, SIZE) == content(SIZE, 0)
        handle.release()
        await mirror.idle()
        assert blocks(mirror) == ledger.usage[0] < used
        await mirror.settled()


async def test_a_replica_that_cannot_be_removed_counts_until_it_is_gone(files: Area) -> None:
    async with files.mount([ROOM], eviction=EvictionPolicy.LRU) as mirror:
        await read_all(mirror, "0123")
        used = mirror.placement.ledger(mirror.tier.id).usage[0]
        mirror.tier.faults.fail("remove", errno.EIO)
        assert await mirror.read_file("4") == content(SIZE, 4)
        await mirror.idle()
        assert mirror.placement.ledger(mirror.tier.id).usage[0] == used == blocks(mirror)
        assert mirror.residency.state(await mirror.ino("4")) == "remote"
        await mirror.mend()
        await mirror.idle()
        assert mirror.placement.ledger(mirror.tier.id).usage[0] == blocks(mirror) < used
        await mirror.copied("4")
        await mirror.settled()


@pytest.mark.parametrize("shares", [True, False])
async def test_an_eviction_that_was_cut_off_is_finished_by_the_next_mount(
    files: Area, shares: bool
) -> None:
    async with files.mount(
        [ROOM], eviction=EvictionPolicy.LRU, shares=shares, sound=False
    ) as mirror:
        await read_all(mirror, "0123")
        ino = await mirror.ino("0")
        record = mirror.record(ino)
        assert record is not None
        # What a crash between the commit and the unlink leaves.
        mirror.index.drop_replica(ino)
    async with files.mount([ROOM], eviction=EvictionPolicy.LRU, shares=shares) as mirror:
        used = mirror.placement.ledger(mirror.tier.id).usage[0]
        await until(lambda: blocks(mirror) == used, "its room")
        mirror.check_books()
        assert await resident(mirror) == set("123")
        assert mirror.index.journal() == []


async def test_a_smaller_capacity_is_kept_even_by_keep(files: Area) -> None:
    async with files.mount([ROOM]) as mirror:
        await read_all(mirror, "0123")
    async with files.mount([ROOM // 2]) as mirror:
        await mirror.idle()
        assert len(await resident(mirror)) == 2
        assert mirror.metrics.evictions_pressure == 2
        assert blocks(mirror) <= ROOM // 2
        await mirror.settled()


class Memory:
    """How much of it is left, as a test says."""

    def __init__(self, available: int) -> None:
        self.available = available

    def __call__(self) -> MemoryHeadroom:
        return MemoryHeadroom(self.available, 1 << 30, "the test")


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tier is in memory, whatever it lies on."""
    monkeypatch.setattr("monarchfs.store.tier.on_disk.is_in_memory", lambda fd: True)


@pytest.mark.usefixtures("in_memory")
async def test_a_tier_in_memory_gives_back_what_others_need(files: Area) -> None:
    memory = Memory(1 << 30)
    async with files.mount([ALL_ROOM], headroom=memory) as mirror:
        await read_all(mirror, "0123")
        # A tenth of the limit stays free; two files too many are there now.
        memory.available = (1 << 30) // 10 - 2 * SIZE
        await mirror.cache.maintain()
        await mirror.idle()
        assert len(await resident(mirror)) <= 2
        assert mirror.metrics.evictions_pressure >= 2
        await read_all(mirror, "01234567")
        assert len(await resident(mirror)) <= 2, "nothing new comes while memory is short"
        memory.available = 1 << 30
        await read_all(mirror, "01234567")
        assert len(await resident(mirror)) == 8
        await mirror.settled()


@pytest.mark.parametrize("shares", [True, False])
async def test_a_replica_that_was_found_corrupt_is_read_from_the_source(
    files: Area, shares: bool
) -> None:
    async with files.mount(shares=shares) as mirror:
        ino = await mirror.copied("0")
        forgotten: list[int] = []
        mirror.cache._forget_pages = forgotten.append
        handle = await mirror.open("0")
        damage(mirror.tier, mirror.record(ino), 70_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.cache.scrub, 1 << 40)
            await until(lambda: mirror.metrics.replicas_corrupt == 1, "the scrub to find it")
            nursery.cancel_scope.cancel()
        assert forgotten == [ino]
        assert await mirror.read(handle, 69_990, 100) == content(SIZE, 0)[69_990:70_090]
        handle.release()
        assert await mirror.read_file("0") == content(SIZE, 0)
        await mirror.idle()
        await mirror.settled()


async def test_a_scrub_leaves_sound_replicas_alone(files: Area) -> None:
    async with files.mount() as mirror:
        await read_all(mirror, "0123")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.cache.scrub, 1 << 40)
            await until(lambda: mirror.metrics.scrubbed_bytes >= 4 * SIZE, "a round")
            nursery.cancel_scope.cancel()
        assert mirror.metrics.replicas_corrupt == 0
        assert await resident(mirror) == set("0123")


async def test_a_file_moves_up_once_there_is_room(files: Area) -> None:
    async with files.mount([ROOM // 4, ALL_ROOM]) as mirror:
        await read_all(mirror, "012")
        fast, slow = (tier.path for tier in mirror.tiers)
        inos = {name: await mirror.ino(name) for name in "012"}
        assert [mirror.residency.tier(inos[name]) for name in "012"] == [fast, slow, slow]
        assert mirror.cache.drop(inos["0"], "for the test")
        await mirror.idle()
        await read_all(mirror, "1")
        await until(lambda: mirror.metrics.replicas_moved == 1, "the move")
        await mirror.idle()
        assert mirror.residency.tier(inos["1"]) == fast
        mirror.posix.reads.clear()
        await read_all(mirror, "12")
        assert mirror.posix.reads == []
        await mirror.settled()


@pytest.mark.parametrize("shares", [True, False])
async def test_a_corrupt_replica_does_not_move(files: Area, shares: bool) -> None:
    async with files.mount([ROOM // 4, ALL_ROOM], shares=shares) as mirror:
        await read_all(mirror, "0123")
        ino = await mirror.ino("1")
        damage(mirror.tiers[1], mirror.record(ino), 50_000)
        mirror.cache.drop(await mirror.ino("0"), "for the test")
        await mirror.idle()
        handle = await mirror.open("1")
        handle.release()
        await until(lambda: mirror.metrics.replicas_corrupt == 1, "the move to fail")
        await mirror.idle()
        assert mirror.residency.state(ino) == "remote"
        await read_all(mirror, "1")
        await mirror.settled()


@pytest.mark.parametrize("shares", [True, False])
async def test_a_move_waits_until_the_replica_is_closed(files: Area, shares: bool) -> None:
    async with files.mount([ROOM // 4, 8 * MIB], shares=shares) as mirror:
        await read_all(mirror, "0123")
        mirror.cache.drop(await mirror.ino("0"), "for the test")
        await mirror.idle()
        handle = await mirror.open("1")
        await until(lambda: blocks(mirror) > SIZE, "the copy")
        assert mirror.residency.tier(handle.ino) == mirror.tiers[1].path
        journal = [tier for tier, _name in mirror.index.journal()]
        assert shares or mirror.tiers[0].id in journal, "a crash would leave it uncounted"
        assert await mirror.read(handle, 0, SIZE) == content(SIZE, 1)
        handle.release()
        await until(lambda: mirror.metrics.replicas_moved == 1, "the move")
        await mirror.idle()
        assert mirror.residency.tier(handle.ino) == mirror.tiers[0].path
        await mirror.settled()
