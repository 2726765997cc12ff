"""A tier in trouble is never the reader's trouble: right bytes, an error counted, nothing left."""

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio
import trio.testing

from monarchfs.cache import writer
from monarchfs.cache.reasons import Cause
from monarchfs.fs.files import FileHandle
from tests.support.faults import FaultyFiles, disk_is_full
from tests.support.mirror import MIB, Area, Mirror, content, until
from tests.support.on_disk import own_files

SMALL, LARGE = content(50_000, 1), content(3 * MIB + 5, 2)
DATA = {"small": SMALL, "large": LARGE}


@pytest.fixture
def files(area: Area) -> Area:
    for name, data in DATA.items():
        area.write(name, data)
    return area


@asynccontextmanager
async def begun(files: Area) -> AsyncIterator[tuple[Mirror, FileHandle]]:
    """The large file is open, of which its beginning is there, and nothing copies the rest."""
    async with files.mounted(copies=False) as mirror:
        handle = await mirror.open("large")
        await reads(mirror, handle, 0, 10)
        await mirror.idle()
        yield mirror, handle


async def reads(mirror: Mirror, handle: FileHandle, offset: int, size: int) -> None:
    assert await mirror.read(handle, offset, size) == LARGE[offset : offset + size]


async def is_resident(mirror: Mirror, ino: int) -> None:
    await until(lambda: mirror.residency.state(ino) == "resident", "the new copy")


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
async def test_a_copy_not_written(files: Area, name: str, call: str, after: int, code: int) -> None:
    async with files.mount() as mirror:
        mirror.tier.faults.fail(call, code, after=after)
        assert await mirror.read_file(name, 300_000) == DATA[name]
        await mirror.settled()
        assert mirror.metrics.tier_errors > 0
        assert mirror.metrics.copies_failed == 1
        ino = await mirror.ino(name)
        assert mirror.residency.state(ino) == "remote"
        assert os.strerror(code) in mirror.reason(ino)
        # Out of service: nobody else runs into it, and nothing is read twice.
        errors = mirror.metrics.tier_errors
        assert await mirror.read_file(name, 300_000) == DATA[name]
        assert mirror.metrics.tier_errors == errors
        assert "no tier" in mirror.reason(ino)
        # The tier is well again: the next one who opens the file gets it copied.
        await mirror.mend()
        await mirror.copied(name)
        assert mirror.metrics.copies_failed == 1


async def test_a_part_that_cannot_be_removed_is_removed_by_the_next_mount(files: Area) -> None:
    async with files.mount(sound=False) as mirror:
        mirror.tier.faults.fail("write", errno.EIO, after=2)
        mirror.tier.faults.fail("remove_part", errno.EIO)
        assert await mirror.read_file("large", 100_000) == LARGE
        await mirror.idle()
        assert mirror.copier.jobs.files == {}
        assert len(parts(mirror)) == 1
        assert mirror.used() > 0, "it counts while it lies there"
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


@pytest.mark.parametrize(
    ("fault", "then"),
    [
        ("EIO", "remote"),
        ("EACCES", "resident"),
        ("EMFILE", "resident"),
        ("lost", "resident"),
        ("truncated", "resident"),
        ("grown", "resident"),
        ("directory", "remote"),
        ("link", "remote"),
    ],
)
async def test_a_replica_that_cannot_be_opened(files: Area, fault: str, then: str) -> None:
    """A disk that fails takes nothing new, not even the same file, before it was probed. That no
    descriptors are left is not the replica's fault. What is not ours is not touched, even if it is
    in the way."""
    async with files.mounted() as mirror:
        ino = await mirror.copied("large")
        (path,) = own_files(files.tier(1))
        match fault:
            case "EIO" | "EACCES" | "EMFILE":
                times = 2 if fault == "EMFILE" else 1
                mirror.tier.faults.fail("open_replica", getattr(errno, fault), times=times)
            case "truncated" | "grown":
                os.truncate(path, len(LARGE) + (1 if fault == "grown" else -1))
            case _:
                path.unlink()
        if fault == "directory":
            path.mkdir()
        elif fault == "link":
            path.symlink_to(files.source / "large")
        assert await mirror.read_file("large", 1 * MIB) == LARGE
        await mirror.idle()
        metrics = mirror.metrics
        if fault == "EMFILE":
            assert (metrics.replicas_lost, metrics.copies_completed) == (0, 1)
        else:
            assert (metrics.tier_errors if fault.startswith("E") else metrics.replicas_lost) == 1
        assert mirror.bytes_read("large") == len(LARGE)
        assert mirror.residency.state(ino) == then
        if fault == "directory":
            path.rmdir()
        elif fault == "link":
            path.unlink()
        await mirror.mend()
        await mirror.copied("large")


async def test_an_open_replica_that_fails_hands_its_readers_over(files: Area) -> None:
    async with files.mounted() as mirror:
        ino = await mirror.copied("large")
        *handles, late = [await mirror.open("large") for _ in range(4)]
        cannot_be_read(mirror.tier.path)
        async with trio.open_nursery() as nursery:
            for number, handle in enumerate(handles):
                nursery.start_soon(reads, mirror, handle, number * MIB, 200_000)
                nursery.start_soon(reads, mirror, handle, number * MIB, 200_000)
        assert mirror.metrics.tier_errors > 0
        assert mirror.residency.state(ino) == "remote"
        # A copy is made while those that were handed over are still open.
        assert await mirror.read_file("large") == LARGE
        await is_resident(mirror, ino)
        for handle in handles:
            await reads(mirror, handle, 100, 10)
            handle.release()
        await until(lambda: not mirror.copier.jobs.files, "the new copy to be closed")
        # The failure of the old one leaves the new one alone.
        await reads(mirror, late, 0, 10)
        late.release()
        await mirror.settled()
        assert mirror.residency.state(ino) == "resident"


async def test_a_replica_that_fails_under_a_file_that_was_copied_while_open(files: Area) -> None:
    async with files.mounted() as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, 0, 10)
        await is_resident(mirror, handle.ino)
        await mirror.idle()
        cannot_be_read(mirror.tier.path)
        for _ in range(2):
            await reads(mirror, handle, 77, 300_000)
        assert mirror.metrics.tier_errors == 1
        assert mirror.residency.state(handle.ino) == "remote"
        # The next who opens it gets another copy made, in which the first one shares.
        second = await mirror.open("large")
        await is_resident(mirror, handle.ino)
        await mirror.idle()
        mirror.posix.reads.clear()
        await reads(mirror, handle, 0, 100_000)
        assert mirror.posix.reads == []
        second.release()
        handle.release()


@pytest.mark.parametrize("name", ["small", "large"])
async def test_a_copy_that_is_given_up_in_its_last_step(files: Area, name: str) -> None:
    """It ends once: as one that was given up."""
    async with files.mount() as mirror:
        gate = mirror.tier.faults.gate("write_whole", "finish_part")
        handle = await mirror.open(name)
        await gate.arrived()
        mirror.copier.jobs.files[handle.ino].copy.give_up(Cause.FAILED, "for the test")
        await trio.testing.wait_all_tasks_blocked()
        assert mirror.copier.jobs.files[handle.ino].copy.reservation is not None
        gate.open()
        await mirror.idle()
        assert mirror.metrics.copies_completed == 0
        assert mirror.metrics.tier_errors == 0
        assert mirror.residency.state(handle.ino) == "remote"
        mirror.check_books()
        handle.release()
        await mirror.settled()
        await mirror.copied(name)


@pytest.mark.parametrize("how", ["truncated", "not opened"])
async def test_a_part_at_rest_that_was_lost_is_begun_anew(files: Area, how: str) -> None:
    """Nothing of what its record says may be believed of the new one."""
    async with begun(files) as (mirror, handle):
        handle.release()
        await mirror.settled()
        (part,) = parts(mirror)
        if how == "truncated":
            os.truncate(part, 1)
        else:
            mirror.tier.faults.fail("open_part", errno.EIO, times=1)
        handle = await mirror.open("large")
        # What was missing in the old part makes a file of the new one; then what was there.
        for offset in (2 * MIB, 0, 2 * MIB):
            await reads(mirror, handle, offset, 70_000)
            await mirror.idle()
        assert mirror.metrics.tier_errors == 1
        handle.release()
        await mirror.settled()
        assert mirror.metrics.copies_failed == 0


async def test_no_descriptors_left_for_a_suspended_part(files: Area) -> None:
    async with begun(files) as (mirror, handle):
        handle.release()
        await mirror.settled()
        mirror.tier.faults.fail("open_part", errno.EMFILE, times=1)
        handle = await mirror.open("large")
        await reads(mirror, handle, 0, 10)
        handle.release()
        await mirror.settled()
        assert mirror.residency.state(handle.ino) == "partial"


@pytest.mark.parametrize("at_the_end", [False, True])
async def test_a_part_that_cannot_be_suspended_is_given_up(
    files: Area, monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    """When its file is closed, or at the end of the mount."""
    broken = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    async with files.mount(copies=False) as mirror:
        handle = await mirror.open("large")
        await reads(mirror, handle, 0, 10)
        await mirror.idle()
        monkeypatch.setattr(FaultyFiles, "allocated", broken)
        if not at_the_end:
            handle.release()
            await mirror.settled()
    assert mirror.metrics.tier_errors == 1
    monkeypatch.undo()
    if at_the_end:
        handle.release()
    async with files.mount() as again:
        assert again.residency.state(handle.ino) == "remote"
        await again.copied("large")


async def test_a_tier_whose_room_is_unknown(files: Area, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("name", "shares"), [("small", True), ("small", False), ("large", True)])
async def test_an_index_that_cannot_be_written(
    files: Area, name: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount(shares=shares) as mirror:
        ino = await mirror.ino(name)
        with monkeypatch.context() as patch:
            patch.setattr(mirror.index.replicas, "put_replica", disk_is_full)
            patch.setattr(mirror.index.replicas, "put_replicas", disk_is_full)
            assert await mirror.read_file(name) == DATA[name]
            await mirror.settled()
            assert mirror.residency.state(ino) == "remote"
            assert mirror.metrics.copies_failed == 1
            assert mirror.metrics.copies_completed == 0
        await mirror.copied(name)


async def test_a_slow_tier_slows_no_reader(files: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the tier is bounded; more is answered and not kept."""
    monkeypatch.setattr(writer, "MOST_UNWRITTEN_BYTES", 256 * 1024)
    async with files.mount() as mirror:
        gate = mirror.tier.faults.gate("write")
        handle = await mirror.open("large")
        for offset in range(0, len(LARGE), 400_000):
            assert await mirror.read(handle, offset, 400_000) == LARGE[offset : offset + 400_000]
        assert mirror.metrics.chunks_dropped > 0
        assert mirror.cache.writer.backlog_bytes < 3 * MIB
        gate.open()
        handle.release()
        await mirror.settled()
        # What was dropped was fetched again, now that there is time.
        assert mirror.residency.state(handle.ino) == "resident"
