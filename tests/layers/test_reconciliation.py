"""What a crash, a reboot or a lost index leaves, and what the next mount makes of it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
import trio

from monarchfs.cache.tier_comparison import MissingFile
from monarchfs.cache.tiers import Outage
from monarchfs.index import set_aside
from monarchfs.store.replica_files import ReplicaFiles
from monarchfs.types import ReplicaState
from tests.support.faults import FaultyFiles, Gate
from tests.support.mirror import ALL_ROOM, MIB, Area, Mirror, content, until

SMALL, LARGE = content(50_000, 1), content(3 * MIB + 5, 2)


@pytest.fixture
def files(area: Area) -> Area:
    area.write("small", SMALL)
    area.write("large", LARGE)
    area.write("other", content(9_000, 3))
    return area


async def read_both(mirror: Mirror) -> None:
    assert await mirror.read_file("small") == SMALL
    assert await mirror.read_file("large") == LARGE
    await mirror.idle()


def complete(mirror: Mirror, pattern: str = "??/*") -> list[Path]:
    return sorted(Path(mirror.tier.path).glob(pattern))


async def test_after_a_reboot_what_was_synced_counts(files: Area) -> None:
    async with files.mount() as mirror:
        await read_both(mirror)
        await mirror.cache.sync()
    async with files.mount(boot_id=b"second boot") as mirror:
        await mirror.idle()
        await read_both(mirror)
        assert mirror.posix.reads == []
        await mirror.settled()


async def test_after_a_reboot_what_was_not_synced_is_gone(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount() as mirror:
        await mirror.copied("small")
        await mirror.cache.sync()
        monkeypatch.setattr(mirror.tier, "sync", lambda: os.stat("/there is no such file"))
        await mirror.copied("large")
        left = complete(mirror)
    for path in left:
        if path.stat().st_size == len(LARGE):
            path.write_bytes(bytes(len(LARGE)))
    async with files.mount(boot_id=b"second boot") as mirror:
        # Its bytes are not believed, not even before the tier was looked at.
        await read_both(mirror)
        await mirror.idle()
        assert mirror.bytes_read("small") == 0
        await mirror.copied("large")
        await mirror.settled()


async def test_what_a_file_occupies_is_looked_at_once_it_is_on_the_disk(files: Area) -> None:
    """Its extents may take blocks that the file system did not count before."""
    async with files.mount() as mirror:
        await mirror.copied("large")
        (path,) = (path for path in complete(mirror) if path.stat().st_size == len(LARGE))
        before = path.stat().st_blocks * 512
        room = ("--keep-size", "--offset", str(4 * MIB), "--length", "8192")
        await trio.run_process(["fallocate", *room, str(path)])
        more = path.stat().st_blocks * 512 - before
        assert more >= 8192
        used = mirror.cache.placement.ledger(mirror.tier.id).used_bytes
        await mirror.cache.sync()
        assert mirror.cache.placement.ledger(mirror.tier.id).used_bytes == used + more
        await mirror.settled()


async def test_a_reboot_that_lost_the_record_of_a_file(files: Area) -> None:
    """It is not counted, so the tier takes nothing before it was found; then it is removed."""
    async with files.mount(sound=False) as mirror:
        await read_both(mirror)
        await mirror.cache.sync()
        ino = await mirror.ino("large")
        record = mirror.record(ino)
        assert record is not None
        mirror.index.drop_replica(ino)
        mirror.index.file_gone(record.tier, record.name)
        (path,) = (path for path in complete(mirror) if record.name.hex() in path.name)
        path.chmod(0o600)
    async with files.mount(boot_id=b"second boot") as mirror:
        await mirror.idle()
        assert not path.exists()
        await read_both(mirror)
        await mirror.settled()


async def test_a_new_index_takes_over_what_lies_there(files: Area) -> None:
    async with files.mount() as mirror:
        await read_both(mirror)
        await mirror.cache.sync()
        made = {
            path.stat().st_mtime_ns
            for path in complete(mirror) + complete(mirror, "segments/*.list")
        }
        assert len(made) == 2
    set_aside(str(files.state))
    async with files.mount() as mirror:
        await mirror.idle()
        totals = mirror.index.tier_totals()[mirror.tier.id]
        assert (totals.found, totals.resident) == (2, 0)
        assert (
            mirror.placement.ledger(mirror.tier.id).usage[0] == totals.allocated_bytes > len(LARGE)
        )
        await read_both(mirror)
        assert mirror.posix.reads == []
        assert mirror.metrics.replicas_adopted == 2
        assert mirror.index.tier_totals()[mirror.tier.id].resident == 2
        nodes = [await mirror.node(name) for name in ("small", "large")]
        # When they were made is told, too.
        assert {mirror.reasons.of(node).since_ns for node in nodes} == made
        await mirror.settled()


async def test_another_version_is_not_taken_over(files: Area) -> None:
    async with files.mount() as mirror:
        await read_both(mirror)
        await mirror.cache.sync()
    set_aside(str(files.state))
    files.write("large", content(len(LARGE), 77))
    async with files.mount() as mirror:
        await mirror.idle()
        assert await mirror.read_file("large") == content(len(LARGE), 77)
        assert await mirror.read_file("small") == SMALL
        await mirror.idle()
        assert mirror.metrics.replicas_adopted == 1
        await mirror.settled()


async def test_what_nobody_claims_makes_room(files: Area) -> None:
    async with files.mount() as mirror:
        await read_both(mirror)
        await mirror.cache.sync()
    set_aside(str(files.state))
    files.write("large", content(len(LARGE), 77))
    async with files.mount([4 * MIB]) as mirror:
        await mirror.idle()
        await mirror.copied("large")
        assert mirror.metrics.evictions_outdated in (1, 2), "the other file may go first"
        await mirror.settled()


async def test_files_that_are_not_replicas_are_neither_counted_nor_removed(files: Area) -> None:
    async with files.mount() as mirror:
        await read_both(mirror)
        await mirror.cache.sync()
    tier = files.tier(1)
    fan_out = next(path for path in tier.iterdir() if len(path.name) == 2)
    name = "0" * 30 + "ab" + "." + "1" * 16
    outside = files.path / "outside"
    outside.write_text("precious")
    planted = [fan_out / "README", tier / "notes", fan_out / f"{fan_out.name}{name[2:]}"]
    planted[0].write_text("not ours")
    planted[1].write_text("not ours")
    planted[2].symlink_to(outside)
    (tier / "parts" / ("c" * 32)).symlink_to(outside)
    set_aside(str(files.state))
    async with files.mount(sound=False) as mirror:
        await mirror.idle()
        assert mirror.index.tier_totals()[mirror.tier.id].found == 2
        await read_both(mirror)
        assert mirror.posix.reads == []
    assert outside.read_text() == "precious"
    assert all(map(os.path.lexists, planted))


async def test_a_tier_that_somebody_emptied(files: Area) -> None:
    async with files.mount() as mirror:
        await read_both(mirror)
    tier = files.tier(1)
    for path in tier.iterdir():
        shutil.rmtree(path)
    async with files.mount(boot_id=b"second boot") as mirror:
        await mirror.idle()
        assert mirror.placement.ledger(mirror.tier.id).usage[0] == 0
        await read_both(mirror)
        await mirror.settled()


@pytest.mark.parametrize("shares", [True, False])
async def test_a_tier_that_was_lost_is_told_in_one_line(
    area: Area, caplog: pytest.LogCaptureFixture, shares: bool
) -> None:
    """As a tier in memory is by a reboot; the files are opened while it is being looked at."""
    names = [f"n{number}" for number in range(200)]
    for name in names:
        area.write(name, content(1_000, len(name)))
    async with area.mount(shares=shares) as mirror:
        for name in names:
            await mirror.read_file(name)
        await mirror.idle()
        root = Path(mirror.tier.path)
        lost = {path.parent for path in complete(mirror, "*/*")}
    for path in lost:
        shutil.rmtree(path)
    caplog.clear()
    async with area.mount(shares=shares) as mirror:
        for name in names:
            await mirror.read_file(name)
        await mirror.idle()
        assert mirror.metrics.replicas_lost == len(names)
        await mirror.settled()
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "not there" in line or "gone" in line] == [
        f"tier {root} was looked at: {len(names)} copies are not there any more"
    ]


async def test_what_a_reader_missed_first_is_neither_lost_twice_nor_is_its_new_copy(
    files: Area,
) -> None:
    async with files.mount([ALL_ROOM, ALL_ROOM]) as mirror:
        ino = await mirror.copied("other")
        record = mirror.record(ino)
        assert record is not None
        # Between the comparison and what is done about it: the reader, and the copy.
        mirror.cache.drop(ino, "its replica was lost")
        await mirror.idle()
        mirror.cache._tiers.begin_outage(
            mirror.tier.id, Outage.RECONCILIATION, "it is being looked at"
        )
        await mirror.copied("other")
        await mirror.cache._reconciliation._mend(mirror.tier, [MissingFile(ino, record)])
        again = mirror.record(ino)
        assert again is not None
        assert again.tier == mirror.tiers[1].id
        assert mirror.metrics.replicas_lost == 0
        mirror.cache._tiers.end_outage(mirror.tier.id, Outage.RECONCILIATION)
        await mirror.settled()


async def test_a_copy_that_a_crash_cut_off_leaves_nothing(files: Area) -> None:
    async with files.mount(sound=False) as mirror:
        node = await mirror.node("large")
        name = node.stat.version.replica_name
        # What a crash leaves between the rename and the commit.
        mirror.index.begin_copy(node.ino, mirror.tier.id, name)
        mirror.tier.files.write_whole(name, LARGE)
        other = await mirror.node("other")
        name = other.stat.version.replica_name
        mirror.index.begin_copy(other.ino, mirror.tier.id, name)
        os.close(mirror.tier.files.create_part(name, 9_000))
    async with files.mount() as mirror:
        assert complete(mirror) == []
        assert mirror.index.journal() == []
        mirror.check_books()
        await read_both(mirror)


async def test_progress_of_a_large_copy_survives_a_crash(files: Area) -> None:
    async with files.mount(copies=False, sound=False) as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, MIB, 1000)
        await mirror.idle()
        fill = mirror.copier.jobs.files[handle.ino]
        fill.checkpoint()
        await mirror.read(handle, 2 * MIB, 10)
        await mirror.idle()
        record = mirror.record(handle.ino)
        assert record is not None
        assert record.state is ReplicaState.PARTIAL
        crashed = shutil.copytree(files.state, files.path / "crashed")
        handle.release()
    shutil.rmtree(files.state)
    crashed.rename(files.state)
    async with files.mount() as mirror:
        mirror.check_books()
        handle = await mirror.open("large")
        mirror.posix.reads.clear()
        assert await mirror.read(handle, MIB + 5, 900) == LARGE[MIB + 5 : MIB + 905]
        assert mirror.posix.reads == []
        handle.release()
        await mirror.copied("large")
        await mirror.settled()


async def test_a_tier_that_is_left_out_keeps_what_it_has(files: Area) -> None:
    async with files.mount([ALL_ROOM, ALL_ROOM]) as mirror:
        await read_both(mirror)
    async with files.mount([]) as mirror:
        await read_both(mirror)
        assert mirror.residency.state(await mirror.ino("small")) != "copying"
    async with files.mount([ALL_ROOM, ALL_ROOM]) as mirror:
        await read_both(mirror)
        assert mirror.posix.reads == []
        await mirror.settled()


async def test_parts_at_rest_are_left_where_the_tier_is_looked_at(files: Area) -> None:
    async with files.mount(copies=False, sound=False) as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, MIB, 1000)
        handle.release()
        await mirror.idle()
        mirror.index.meta_put(b"stock:1", b"")
        (Path(mirror.tier.path) / "parts" / ("d" * 32)).write_bytes(b"left over")
    async with files.mount(copies=False) as mirror:
        await mirror.idle()
        handle = await mirror.open("large")
        assert await mirror.read(handle, MIB, 1000) == LARGE[MIB : MIB + 1000]
        assert mirror.posix.reads == []
        handle.release()
        await mirror.settled()


async def test_no_tier_counts_the_reconciliation_of_another_is_about_to_drop(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records that a reboot ended are dropped for all tiers at once."""
    async with files.mount([100_000, ALL_ROOM], shares=False) as mirror:
        monkeypatch.setattr(
            FaultyFiles, "mark_synced", lambda *_: os.stat("/there is no such file")
        )
        await mirror.copied("small")
        await mirror.copied("large")
        await mirror.copied("other")
        assert {record.tier for _ino, record in mirror.index.replicas()} == {1, 2}
    gate = Gate()

    def slow(files: FaultyFiles, name: bytes) -> None:
        gate.meet()
        ReplicaFiles.discard(files, name)

    monkeypatch.setattr(FaultyFiles, "discard", slow)
    async with files.mount([100_000, ALL_ROOM], shares=False, boot_id=b"second boot") as mirror:
        await gate.arrived()
        # The other tier waits: nothing can be awaited but that it had the time.
        end = time.monotonic() + 0.2
        await until(
            lambda: time.monotonic() > end or len(mirror.cache._reconciliation.running) < 2,
            "the other",
        )
        gate.open()
        await mirror.settled()
        assert [mirror.placement.ledger(tier.id).usage[0] for tier in mirror.tiers] == [0, 0]


async def test_a_tier_is_counted_although_another_one_does_not_give_up_what_a_reboot_took(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount([100_000, ALL_ROOM], shares=False) as mirror:
        monkeypatch.setattr(
            FaultyFiles, "mark_synced", lambda *_: os.stat("/there is no such file")
        )
        await mirror.copied("small")
        await mirror.copied("large")

    def failing(files: FaultyFiles, name: bytes) -> None:
        if files._remarks._path.endswith("tier1"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        ReplicaFiles.discard(files, name)

    monkeypatch.setattr(FaultyFiles, "discard", failing)
    async with files.mount(
        [100_000, ALL_ROOM], shares=False, boot_id=b"second boot", sound=False
    ) as mirror:
        await mirror.idle()
        assert mirror.cache._tiers.out_of_service(1)
        assert mirror.placement.ledger(2).usage[0] == 0
        await mirror.copied("large")
    monkeypatch.undo()
    async with files.mount([100_000, ALL_ROOM], shares=False, boot_id=b"second boot") as mirror:
        await mirror.copied("small")
        await mirror.settled()
