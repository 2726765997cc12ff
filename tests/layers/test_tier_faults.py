"""A tier in trouble is never the reader's trouble: right bytes, an error counted, nothing left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio
import trio.testing

from monarchfs.cache import groups
from monarchfs.cache.reasons import Cause
from monarchfs.types import Node
from tests.support.faults import disk_is_full
from tests.support.mirror import ALL_ROOM, MIB, Area, Mirror, content, until

SMALL, LARGE = content(50_000, 1), content(3 * MIB + 5, 2)


@pytest.fixture
def files(area: Area) -> Area:
    area.write("small", SMALL)
    area.write("large", LARGE)
    return area


def replica_path(mirror: Mirror, node: Node) -> Path:
    record = mirror.record(node.ino)
    assert record is not None
    name = record.name.hex()
    return Path(mirror.tier.path, name[:2], f"{name}.{record.checksum:016x}")


def parts(mirror: Mirror) -> list[Path]:
    return list(Path(mirror.tier.path, "parts").iterdir())


def cannot_be_read(tier_path: str) -> list[int]:
    """Turn each descriptor of a replica into one of a directory: reading it is EISDIR."""
    turned = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue
        if target.startswith(tier_path + "/") and os.path.isfile(target):
            directory = os.open("/", os.O_RDONLY)
            os.dup2(directory, int(entry), inheritable=False)
            os.close(directory)
            turned.append(int(entry))
    assert turned
    return turned


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize(
    ("name", "call", "after"),
    [
        ("small", "write_whole", 0),
        ("large", "create_part", 0),
        ("large", "write", 0),
        ("large", "write", 3),
        ("large", "finish_part", 0),
    ],
)
async def test_a_copy_that_cannot_be_written(
    files: Area, name: str, call: str, after: int, code: int
) -> None:
    data = {"small": SMALL, "large": LARGE}[name]
    async with files.mount() as mirror:
        mirror.tier.faults.fail(call, code, after=after)
        assert await mirror.read_file(name, 300_000) == data
        await mirror.settled()
        assert mirror.metrics.tier_errors > 0
        assert mirror.metrics.copies_failed == 1
        ino = await mirror.ino(name)
        assert mirror.residency.state(ino) == "remote"
        assert os.strerror(code) in mirror.reason(ino)
        # Out of service: nobody else runs into it, and nothing is read twice.
        errors = mirror.metrics.tier_errors
        assert await mirror.read_file(name, 300_000) == data
        assert mirror.metrics.tier_errors == errors
        assert "no tier" in mirror.reason(ino)
        # The tier is well again: the next one who opens the file gets it copied.
        await mirror.mend()
        await mirror.copied(name)
        assert mirror.metrics.copies_failed == 1


@pytest.mark.parametrize(("call", "after"), [("create_part", 0), ("write", 2)])
async def test_a_file_too_large_for_the_tier_is_refused_alone(
    files: Area, call: str, after: int
) -> None:
    """EFBIG: ulimit -f, or more than a file of that file system may have (ext4: 16 TiB)."""
    async with files.mount() as mirror:
        mirror.tier.faults.fail(call, errno.EFBIG, after=after)
        assert await mirror.read_file("large", 300_000) == LARGE
        await mirror.settled()
        large = await mirror.ino("large")
        assert mirror.residency.state(large) == "remote"
        assert "File too large" in mirror.reason(large)
        assert mirror.cache.usage.room_for(0)[1][0].out_of_service is None
        small = await mirror.copied("small")
        assert mirror.residency.state(small) == "resident"


async def test_a_part_that_cannot_be_removed_is_removed_by_the_next_mount(files: Area) -> None:
    async with files.mount(sound=False) as mirror:
        mirror.tier.faults.fail("write", errno.EIO, after=2)
        mirror.tier.faults.fail("remove_part", errno.EIO)
        assert await mirror.read_file("large", 100_000) == LARGE
        await mirror.idle()
        assert mirror.copier.jobs.files == {}
        assert len(parts(mirror)) == 1
        assert mirror.placement.ledger(mirror.tier.id).usage[0] > 0, "it counts while it lies there"
    async with files.mount() as mirror:
        assert parts(mirror) == []
        await mirror.copied("large")


async def test_a_small_file_whose_part_is_in_the_way(files: Area) -> None:
    async with files.mount(shares=False) as mirror:
        node = await mirror.node("small")
        os.close(mirror.tier.files.create_part(node.stat.version.replica_name, 7))
        await mirror.copied("small")
        await mirror.settled()
        assert mirror.metrics.tier_errors == 0


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
async def test_a_replica_that_cannot_be_opened_is_dropped(files: Area, code: int) -> None:
    async with files.mount(copies=False) as mirror:
        mirror.start_copying()
        ino = await mirror.copied("large")
        mirror.tier.faults.fail("open_replica", code, times=1)
        assert await mirror.read_file("large") == LARGE
        await mirror.settled()
        assert mirror.metrics.tier_errors == 1
        # A disk that fails takes nothing new, not even the same file, before it was probed.
        assert mirror.residency.state(ino) == ("remote" if code == errno.EIO else "resident")
        assert mirror.bytes_read("large") == len(LARGE)
        await mirror.mend()
        await mirror.copied("large")


async def test_no_descriptors_left_is_not_the_replicas_fault(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.copied("large")
        mirror.tier.faults.fail("open_replica", errno.EMFILE, times=2)
        handle = await mirror.open("large")
        assert await mirror.read(handle, 5, 1000) == LARGE[5:1005]
        handle.release()
        await mirror.settled()
        assert mirror.residency.state(ino) == "resident"
        assert mirror.bytes_read("large") == 1000
        assert await mirror.read_file("large") == LARGE
        assert mirror.bytes_read("large") == 1000


@pytest.mark.parametrize("damage", ["lost", "truncated", "grown", "directory", "link"])
async def test_a_replica_that_is_not_there_any_more(files: Area, damage: str) -> None:
    async with files.mount() as mirror:
        ino = await mirror.copied("large")
        path = replica_path(mirror, await mirror.node("large"))
        if damage == "truncated":
            os.truncate(path, len(LARGE) - 1)
        elif damage == "grown":
            os.truncate(path, len(LARGE) + 1)
        else:
            path.unlink()
        if damage == "link":
            path.symlink_to(files.source / "large")
        elif damage == "directory":
            path.mkdir()
        assert await mirror.read_file("large", 1 * MIB) == LARGE
        await mirror.idle()
        assert mirror.metrics.replicas_lost == 1
        assert mirror.bytes_read("large") == len(LARGE)
        if damage in ("directory", "link"):
            # What is not ours is not touched, even if it is in the way.
            assert mirror.residency.state(ino) == "remote"
            assert path in list(path.parent.iterdir())
            if damage == "directory":
                path.rmdir()
            else:
                path.unlink()
            await mirror.copied("large")
        await mirror.settled()
        assert mirror.residency.state(ino) == "resident"


async def test_an_open_replica_that_fails_hands_its_readers_over(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.copied("large")
        handles = [await mirror.open("large") for _ in range(3)]
        cannot_be_read(mirror.tier.path)
        got = {}

        async def read(number: int) -> None:
            got[number] = await mirror.read(handles[number], number * MIB, 200_000)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(read, number)
                nursery.start_soon(read, number)
        assert got == {n: LARGE[n * MIB : n * MIB + 200_000] for n in range(3)}
        assert mirror.metrics.tier_errors > 0
        assert mirror.residency.state(ino) == "remote"
        # A copy is made while those that were handed over are still open.
        assert await mirror.read_file("large") == LARGE
        await until(lambda: mirror.residency.state(ino) == "resident", "the new copy")
        for handle in handles:
            assert await mirror.read(handle, 100, 10) == LARGE[100:110]
            handle.release()
        await mirror.settled()
        assert mirror.residency.state(ino) == "resident"


async def test_the_late_failure_of_an_old_replica_leaves_the_new_one_alone(files: Area) -> None:
    async with files.mount() as mirror:
        ino = await mirror.copied("large")
        late, early = await mirror.open("large"), await mirror.open("large")
        cannot_be_read(mirror.tier.path)
        assert await mirror.read(early, 0, 10) == LARGE[:10]
        early.release()
        assert await mirror.read_file("large") == LARGE
        await until(lambda: mirror.residency.state(ino) == "resident", "the new copy")
        await until(lambda: not mirror.copier.jobs.files, "the new copy to be closed")
        assert await mirror.read(late, 0, 10) == LARGE[:10]
        late.release()
        await mirror.settled()
        assert mirror.residency.state(ino) == "resident"


async def test_a_replica_that_fails_under_a_file_that_was_copied_while_open(files: Area) -> None:
    async with files.mount() as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, 0, 10)
        await until(lambda: mirror.residency.state(handle.ino) == "resident", "the copy")
        await mirror.idle()
        cannot_be_read(mirror.tier.path)
        for _ in range(2):
            assert await mirror.read(handle, 77, 300_000) == LARGE[77:300_077]
        assert mirror.metrics.tier_errors == 1
        assert mirror.residency.state(handle.ino) == "remote"
        # The next who opens it gets another copy made, in which the first one shares.
        second = await mirror.open("large")
        await until(lambda: mirror.residency.state(handle.ino) == "resident", "the copy")
        await mirror.idle()
        mirror.posix.reads.clear()
        assert await mirror.read(handle, 0, 100_000) == LARGE[:100_000]
        assert mirror.posix.reads == []
        second.release()
        handle.release()
        await mirror.settled()


async def test_a_part_that_cannot_be_read(files: Area) -> None:
    async with files.mount(copies=False) as mirror:
        handle = await mirror.open("large")
        assert await mirror.read(handle, 2 * MIB, 10) == LARGE[2 * MIB : 2 * MIB + 10]
        await mirror.idle()
        cannot_be_read(mirror.tier.path)
        assert await mirror.read(handle, 2 * MIB + 5, 900) == LARGE[2 * MIB + 5 : 2 * MIB + 905]
        await mirror.idle()
        assert mirror.metrics.tier_errors == 1
        assert mirror.metrics.copies_failed == 1
        assert mirror.residency.state(handle.ino) == "remote"
        assert "could not be read" in mirror.reason(handle.ino)
        handle.release()
        await mirror.settled()


@pytest.mark.parametrize("name", ["small", "large"])
async def test_a_copy_that_is_given_up_in_its_last_step(files: Area, name: str) -> None:
    """It ends once: as one that was given up."""
    async with files.mount() as mirror:
        gate = mirror.tier.faults.gate("write_whole", "finish_part")
        handle = await mirror.open(name)
        await gate.arrived()
        mirror.copier.jobs.files[handle.ino].give_up(Cause.FAILED, "for the test")
        await trio.testing.wait_all_tasks_blocked()
        assert mirror.copier.jobs.files[handle.ino].reservation is not None
        gate.open()
        await mirror.idle()
        assert mirror.metrics.copies_completed == 0
        assert mirror.metrics.tier_errors == 0
        assert mirror.residency.state(handle.ino) == "remote"
        mirror.check_books()
        handle.release()
        await mirror.settled()
        await mirror.copied(name)


async def test_a_part_that_cannot_be_read_in_its_last_step(files: Area) -> None:
    async with files.mount() as mirror:
        gate = mirror.tier.faults.gate("finish_part")
        handle = await mirror.open("large")
        await gate.arrived()
        cannot_be_read(mirror.tier.path)
        assert await mirror.read(handle, 20, 1000) == LARGE[20:1020]
        await trio.testing.wait_all_tasks_blocked()
        gate.open()
        await mirror.idle()
        assert mirror.metrics.copies_failed == 1
        mirror.check_books()
        handle.release()
        await mirror.settled()


@pytest.mark.parametrize("call", ["truncate", "open_part"])
async def test_a_part_at_rest_that_was_lost_is_begun_anew(files: Area, call: str) -> None:
    """Nothing of what its record says may be believed of the new one."""
    async with files.mount(copies=False) as mirror:
        handle = await mirror.open("large")
        assert await mirror.read(handle, 0, 10) == LARGE[:10]
        handle.release()
        await mirror.settled()
        (part,) = parts(mirror)
        if call == "truncate":
            os.truncate(part, 1)
        else:
            mirror.tier.faults.fail(call, errno.EIO, times=1)
        mirror.posix.reads.clear()
        handle = await mirror.open("large")
        # What was missing in the old part makes a file of the new one; then what was there.
        for offset in (2 * MIB, 0, 2 * MIB):
            assert await mirror.read(handle, offset, 70_000) == LARGE[offset : offset + 70_000]
            await mirror.idle()
        assert mirror.metrics.tier_errors == 1
        handle.release()
        await mirror.settled()
        assert mirror.metrics.copies_failed == 0


async def test_no_descriptors_left_for_a_suspended_part(files: Area) -> None:
    async with files.mount(copies=False) as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, 0, 10)
        handle.release()
        await mirror.settled()
        mirror.tier.faults.fail("open_part", errno.EMFILE, times=1)
        handle = await mirror.open("large")
        assert await mirror.read(handle, 0, 10) == LARGE[:10]
        handle.release()
        await mirror.settled()
        assert mirror.residency.state(handle.ino) == "partial"


async def test_a_part_that_cannot_be_suspended_is_given_up(files: Area) -> None:
    async with files.mount(copies=False) as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, 0, 10)
        await mirror.idle()
        mirror.tier.faults.fail("allocated", errno.EIO)
        handle.release()
        await mirror.settled()
        assert mirror.residency.state(handle.ino) == "remote"
        assert mirror.metrics.tier_errors == 1


async def test_the_same_at_the_end_of_the_mount(files: Area) -> None:
    async with files.mount(copies=False) as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, 0, 10)
        await mirror.idle()
        real = mirror.tier.files.allocated

        def broken(fd: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        mirror.tier.files.allocated = broken  # type: ignore[method-assign]
        mirror.nursery.cancel_scope.cancel()
    assert mirror.metrics.tier_errors == 1
    mirror.tier.files.allocated = real  # type: ignore[method-assign]
    handle.release()
    async with files.mount() as again:
        assert again.residency.state(handle.ino) == "remote"
        await again.copied("large")


async def test_a_tier_whose_room_is_unknown_takes_nothing_until_it_is(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarchfs.cache.tiers.SPACE_MAX_AGE_SECONDS", 0.0)
    async with files.mount() as mirror:
        mirror.tier.faults.fail("space", errno.EIO)
        for _ in range(3):
            assert await mirror.read_file("large") == LARGE
        await mirror.settled()
        assert mirror.metrics.tier_errors == 1, "once, not with every file"
        assert mirror.metrics.copies_refused > 0
        assert "no tier" in mirror.reason(await mirror.ino("large"))
        await mirror.mend()
        await mirror.copied("large")


async def test_a_failed_tier_leaves_the_other_one_to_take_files(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarchfs.cache.tiers.SPACE_MAX_AGE_SECONDS", 0.0)
    async with files.mount([ALL_ROOM, ALL_ROOM]) as mirror:
        mirror.tiers[0].faults.fail("space", errno.EIO)
        ino = await mirror.copied("large")
        assert mirror.residency.tier(ino) == mirror.tiers[1].path


@pytest.mark.parametrize(("name", "shares"), [("small", True), ("small", False), ("large", True)])
async def test_an_index_that_cannot_be_written(
    files: Area, name: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"small": SMALL, "large": LARGE}[name]
    async with files.mount(shares=shares) as mirror:
        ino = await mirror.ino(name)

        with monkeypatch.context() as patch:
            patch.setattr(mirror.index, "put_replica", disk_is_full)
            patch.setattr(mirror.index, "put_replicas", disk_is_full)
            assert await mirror.read_file(name) == data
            await mirror.settled()
            assert mirror.residency.state(ino) == "remote"
            assert mirror.metrics.copies_failed == 1
            assert mirror.metrics.copies_completed == 0
        await mirror.copied(name)
        assert mirror.residency.state(ino) == "resident"


async def test_a_slow_tier_slows_no_reader_and_collects_no_memory(
    files: Area, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the tier is bounded; more is answered and not kept."""
    monkeypatch.setattr(groups, "MOST_UNWRITTEN_BYTES", 256 * 1024)
    async with files.mount() as mirror:
        gate = mirror.tier.faults.gate("write")
        handle = await mirror.open("large")
        for offset in range(0, len(LARGE), 400_000):
            data = await mirror.read(handle, offset, 400_000)
            assert data == LARGE[offset : offset + 400_000]
        assert mirror.metrics.chunks_dropped > 0
        assert mirror.cache.backlog_bytes < 3 * MIB
        gate.open()
        handle.release()
        await mirror.settled()
        # What was dropped was fetched again, now that there is time.
        assert mirror.residency.state(handle.ino) == "resident"
