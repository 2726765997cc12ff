"""What a crash, a reboot or a lost index leaves, and what the next mount makes of it."""

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import trio

from monarchfs.cache import reconciliation
from monarchfs.cache.index import set_aside
from monarchfs.cache.index.replicas import Replicas
from monarchfs.cache.reconciliation import Reconciliation
from monarchfs.cache.store.replica_files import ReplicaFiles
from monarchfs.cache.tier_comparison import MissingFile
from monarchfs.cache.tiers import Outage
from monarchfs.prefetch.fetch import CHUNK_BYTES
from monarchfs.types import ReplicaState, TierFile
from tests.layers.whole import WholeReaders
from tests.support.faults import FaultyFiles, Gate
from tests.support.mirror import ALL_ROOM, MIB, Area, Mirror, content, until
from tests.support.on_disk import own_files

SMALL, LARGE = content(50_000, 1), content(3 * MIB + 5, 2)


@pytest.fixture
def files(area: Area) -> Area:
    area.write("small", SMALL)
    area.write("large", LARGE)
    area.write("other", content(9_000, 3))
    return area


def fail(*_: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


async def read_both(mirror: Mirror) -> None:
    assert await mirror.read_file("small") == SMALL
    assert await mirror.read_file("large") == LARGE
    await mirror.idle()


async def test_after_a_reboot_what_was_not_synced_is_gone(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount() as mirror:
        await mirror.copied("small")
        await mirror.cache.accounts.sync()
        monkeypatch.setattr(mirror.tier, "sync", fail)
        await mirror.copied("large")
        (path,) = own_files(files.tier(1))
    path.write_bytes(bytes(len(LARGE)))
    async with files.mounted(boot_id=b"second boot") as mirror:
        # Its bytes are not believed, not even before the tier was looked at.
        await read_both(mirror)
        assert mirror.bytes_read("small") == 0
        await mirror.copied("large")


@pytest.mark.parametrize("looked_at", [False, True])
async def test_what_a_power_cut_takes_although_its_record_says_that_it_was_synced(
    files: Area, monkeypatch: pytest.MonkeyPatch, looked_at: bool
) -> None:
    """The disk may have an index from before they were evicted: the one was copied anew since,
    under its name, and the range of the other was punched."""
    async with files.mount(sound=False) as mirror:
        inos = [await mirror.copied(name) for name in ("small", "large")]
        await mirror.cache.accounts.sync()
        small = mirror.replica(inos[0])
        assert small.segment
        assert mirror.replica(inos[1]).durable
        mirror.tier.segments.punch(small.segment, [(small.offset, small.allocated_bytes)])
        (path,) = own_files(files.tier(1))
        path.chmod(0o600)
        path.write_bytes(bytes(len(LARGE)))
    if not looked_at:
        monkeypatch.setattr(Reconciliation, "_reconcile", fail)
    served: list[int | None] = []
    monkeypatch.setattr(WholeReaders, "serve", lambda _self, _tier, fd: served.append(fd))
    forgotten: list[int] = []
    monkeypatch.setattr(WholeReaders, "invalidate", lambda _self, ino: forgotten.append(ino))
    async with files.mount(boot_id=b"second boot", sound=looked_at) as mirror:
        if looked_at:
            await mirror.idle()
            assert mirror.metrics.replicas_lost == 2
            assert sorted(forgotten) == sorted(inos)
            assert await mirror.state("large") == "remote"
        assert await mirror.read_file("small") == SMALL
        assert await mirror.read_file("large") == LARGE
        assert mirror.bytes_read("small") == len(SMALL)
        assert set(served) == {None, *([mirror.tier.dir_fd] if looked_at else [])}
        assert served[0] is None, "threads of the C part do not look"


async def test_many_small_copies_are_looked_at_in_turns(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ranges(list[tuple[int, int]]):
        __iter__ = None  # type: ignore[assignment]

    class Turns(trio.abc.Instrument):
        count = 0

        def after_io_wait(self, timeout: float) -> None:
            self.count += 1

    monkeypatch.setattr(reconciliation, "BATCH", 1)
    look = reconciliation._data_ranges
    monkeypatch.setattr(reconciliation, "_data_ranges", lambda *of: Ranges(look(*of)))
    async with files.mounted() as mirror:
        await mirror.copied("small")
        await mirror.copied("other")
        await mirror.cache.accounts.sync()
    async with files.mounted(boot_id=b"second boot") as mirror:
        await mirror.idle()
        assert await mirror.state("small") == "resident"
    set_aside(str(files.state))
    trio.lowlevel.add_instrument(turns := Turns())
    record, recorded = Replicas.record_found_files, set[int]()

    def noted(*of: Any) -> list[int]:
        recorded.add(turns.count)
        return record(*of)

    monkeypatch.setattr(Replicas, "record_found_files", noted)
    async with files.mounted() as mirror:
        await mirror.idle()
    assert len(recorded) == 2


async def test_what_a_file_occupies_is_looked_at_once_it_is_on_the_disk(files: Area) -> None:
    """Its extents may take blocks that the file system did not count before."""
    async with files.mounted() as mirror:
        await mirror.copied("large")
        (path,) = own_files(files.tier(1))
        before = path.stat().st_blocks * 512
        room = ("--keep-size", "--offset", str(4 * MIB), "--length", "8192")
        await trio.run_process(["fallocate", *room, str(path)])
        more = path.stat().st_blocks * 512 - before
        assert more >= 8192
        used = mirror.used()
        await mirror.cache.accounts.sync()
        assert mirror.used() == used + more


async def test_another_version_is_not_taken_over_and_makes_room(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount() as mirror:
        await read_both(mirror)
        await mirror.cache.accounts.sync()
    set_aside(str(files.state))
    files.write("large", content(len(LARGE), 77))
    async with files.mounted([4 * MIB]) as mirror:
        await mirror.idle()
        stored = Mock(wraps=mirror.cache.readers.stored)
        monkeypatch.setattr(mirror.cache.readers, "stored", stored)
        assert await mirror.read_file("small") == SMALL
        assert mirror.metrics.replicas_adopted == stored.call_count == 1
        await mirror.copied("large")
        assert mirror.metrics.evictions_outdated == 1


@pytest.mark.parametrize(("shares", "boot_id"), [(True, b"first boot"), (False, b"second boot")])
async def test_a_tier_that_was_lost_is_told_in_one_line(
    area: Area, caplog: pytest.LogCaptureFixture, shares: bool, boot_id: bytes
) -> None:
    """As a tier in memory is by a reboot, and any by an epilogue script that cleans up. The files
    are opened while it is being looked at."""
    names = area.write_files(200, 1_000)
    async with area.mount(shares=shares) as mirror:
        for name in names:
            await mirror.read_file(name)
        await mirror.idle()
    for path in area.tier(1).iterdir():
        shutil.rmtree(path)
    caplog.clear()
    async with area.mounted(shares=shares, boot_id=boot_id) as mirror:
        for name in names:
            await mirror.read_file(name)
        await mirror.idle()
        assert mirror.metrics.replicas_lost == len(names)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "not there" in line or "gone" in line] == [
        f"tier {area.tier(1)} was looked at: {len(names)} copies are not there any more"
    ]


async def test_what_a_reader_missed_first_is_not_lost_twice_nor_its_new_copy(files: Area) -> None:
    async with files.mounted([ALL_ROOM, ALL_ROOM]) as mirror:
        ino = await mirror.copied("other")
        record = mirror.replica(ino)
        # Between the comparison and what is done about it: the reader, and the copy.
        mirror.cache.accounts.drop(ino, "its replica was lost")
        await mirror.idle()
        mirror.cache.accounts.all_tiers.begin_outage(
            mirror.tier.id, Outage.RECONCILIATION, "looked at"
        )
        await mirror.copied("other")
        await mirror.cache.accounts.reconciliation._mend(mirror.tier, [MissingFile(ino, record)])
        assert mirror.replica(ino).tier == mirror.tiers[1].id
        assert mirror.metrics.replicas_lost == 0
        mirror.cache.accounts.all_tiers.end_outage(mirror.tier.id, Outage.RECONCILIATION)


async def test_progress_of_a_large_copy_survives_a_crash(files: Area) -> None:
    """What was complete is synced by the next worker."""
    async with files.mount(copies=False, sound=False) as mirror:
        small = await mirror.copied("small")
        handle = await mirror.open("large")
        await mirror.read(handle, MIB, CHUNK_BYTES)
        await mirror.idle()
        mirror.copier.jobs.files[handle.ino].copy.checkpoint()
        await mirror.read(handle, 2 * MIB, CHUNK_BYTES)
        await mirror.idle()
        assert mirror.replica(handle.ino).state is ReplicaState.PARTIAL
        crashed = shutil.copytree(files.state, files.path / "crashed")
        handle.release()
    shutil.rmtree(files.state)
    crashed.rename(files.state)
    async with files.mounted() as mirror:
        mirror.check_books()
        handle = await mirror.open("large")
        mirror.posix.reads.clear()
        assert await mirror.read(handle, MIB + 5, 900) == LARGE[MIB + 5 : MIB + 905]
        assert mirror.posix.reads == []
        handle.release()
        await mirror.copied("large")
        await mirror.cache.accounts.sync()
        assert mirror.replica(small).durable


async def test_parts_at_rest_are_left_where_the_tier_is_looked_at(files: Area) -> None:
    async with files.mount(copies=False, sound=False) as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, MIB, CHUNK_BYTES)
        handle.release()
        await mirror.idle()
        mirror.index.meta.put(b"stock:1", b"")
        (Path(mirror.tier.path) / "parts" / ("d" * 32)).write_bytes(b"left over")
    async with files.mounted(copies=False) as mirror:
        await mirror.idle()
        handle = await mirror.open("large")
        assert await mirror.read(handle, MIB, 1000) == LARGE[MIB : MIB + 1000]
        assert mirror.posix.reads == []
        handle.release()


@pytest.mark.parametrize("another", [False, True])
async def test_what_comes_and_goes_while_a_tier_is_looked_at(
    files: Area, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """Once because ``another`` directory has taken the place of the tier's; once in vain first."""
    async with files.mounted(copies=False) as mirror:
        stuck, dropped = await mirror.copied("other"), await mirror.copied("small")
        handles = [await mirror.open(name) for name in ("small", "large")[: 1 + another]]
        await mirror.read(handles[-1], 0, 10)
        await mirror.idle()
        mirror.cache.accounts.drop(dropped, "its replica was lost")
        mirror.tier.faults.fail("remove", errno.EIO, times=1)
        assert mirror.cache.evict(stuck)
        await mirror.idle()
        if another:
            shutil.rmtree(mirror.tier.path)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(FaultyFiles, "complete", fail)
                mirror.cache.accounts.reconciliation.begin_tier(mirror.tier)
                await mirror.idle()
        await mirror.mend()
        for handle in handles:
            handle.release()
        await mirror.mend()
        for name in ("other", "small"):
            await mirror.copied(name)


async def test_a_directory_that_comes_while_another_one_is_looked_at(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount(sound=False) as mirror:
        looked: list[object] = []

        def complete(files: FaultyFiles, _fan_out: int) -> list[TierFile]:
            looked.append(files)
            if len(looked) == 7:
                shutil.rmtree(mirror.tier.path)
                assert mirror.tier.find_again()
            return []

        monkeypatch.setattr(FaultyFiles, "complete", complete)
        mirror.cache.accounts.reconciliation.begin_tier(mirror.tier)
        await mirror.idle()
        assert looked[256:] == [mirror.tier.files] * 256


TWO_TIERS = (100_000, ALL_ROOM)


async def unsynced_in_two_tiers(files: Area, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FaultyFiles, "mark_synced", fail)
    async with files.mount(TWO_TIERS, shares=False) as mirror:
        for name in ("small", "large", "other"):
            await mirror.copied(name)
        assert {record.tier for _ino, record in mirror.index.replicas.all()} == {1, 2}


async def test_no_tier_counts_the_reconciliation_of_another_is_about_to_drop(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records that a reboot ended are dropped for all tiers at once."""
    await unsynced_in_two_tiers(files, monkeypatch)
    gate = Gate()

    def slow(files: FaultyFiles, name: bytes) -> None:
        gate.meet()
        ReplicaFiles.discard(files, name)

    monkeypatch.setattr(FaultyFiles, "discard", slow)
    async with files.mounted(TWO_TIERS, shares=False, boot_id=b"second boot") as mirror:
        await gate.arrived()
        # The other tier waits: nothing can be awaited but that it had the time.
        end = time.monotonic() + 0.2
        running = mirror.cache.accounts.reconciliation.running
        await until(lambda: time.monotonic() > end or len(running) < 2, "the other")
        gate.open()
        await mirror.settled()
        assert [mirror.used(0), mirror.used(1)] == [0, 0]


async def test_a_tier_that_was_left_out_after_a_reboot_is_looked_at_later(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    await unsynced_in_two_tiers(files, monkeypatch)
    async with files.mount(TWO_TIERS[:1], boot_id=b"second boot") as mirror:
        await mirror.idle()
    async with files.mounted(TWO_TIERS, boot_id=b"second boot"):
        pass


async def test_a_tier_is_counted_although_another_one_does_not_give_up_what_a_reboot_took(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    await unsynced_in_two_tiers(files, monkeypatch)

    def failing(files: FaultyFiles, name: bytes) -> None:
        if files._remarks._path.endswith("tier1"):
            fail()
        ReplicaFiles.discard(files, name)

    monkeypatch.setattr(FaultyFiles, "discard", failing)
    after: dict[str, Any] = {"shares": False, "boot_id": b"second boot"}
    async with files.mount(TWO_TIERS, **after, sound=False) as mirror:
        await mirror.idle()
        assert mirror.cache.accounts.all_tiers.out_of_service(1)
        assert mirror.used(1) == 0
        await mirror.copied("large")
    monkeypatch.undo()
    async with files.mounted(TWO_TIERS, **after) as mirror:
        await mirror.copied("small")
