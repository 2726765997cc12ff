"""Only the source's own errors reach a reader, and no two versions are ever mixed in a replica."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.support.faults import Gate
from tests.support.lookups import stale
from tests.support.mirror import KIB, MIB, Area, content

SMALL, LARGE, OTHER = content(50_000, 1), content(3 * MIB + 5, 2), content(3 * MIB + 5, 3)


@pytest.fixture
def files(area: Area) -> Area:
    area.write("small", SMALL)
    area.write("large", LARGE)
    return area


async def test_all_who_wait_get_the_sources_error_and_the_next_reads_on(files: Area) -> None:
    async with files.mounted(copies=False) as mirror:
        handles = [await mirror.open("large") for _ in range(3)]
        gate = mirror.posix.faults.gate("read")
        mirror.posix.faults.fail("read", errno.EIO, times=1)
        errors = []

        async def read(number: int) -> None:
            with pytest.raises(OSError, match="Input/output") as raised:
                await mirror.read(handles[number], 2 * MIB + number, 1000)
            errors.append(raised.value.errno)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(read, number)
            await gate.arrived()
            await trio.testing.wait_all_tasks_blocked()
            assert gate.waiting == 1, "one read of the source for all three"
            gate.open()
        assert errors == [errno.EIO] * 3
        assert await mirror.read(handles[0], 7, 1000) == LARGE[7:1007]
        assert mirror.metrics.tier_errors == 0
        for handle in handles:
            handle.release()


async def test_a_file_that_may_not_be_read_is_not_copied(files: Area) -> None:
    async with files.mount() as mirror:
        files.write("empty", b"")
        mirror.posix.faults.fail("open", errno.EACCES)
        for name in ("small", "large", "empty"):
            await mirror.want(name)
            await mirror.settled()
            assert "Permission denied" in mirror.reason(await mirror.ino(name))
        assert mirror.metrics.copies_failed == 3


def replace(path: Path) -> None:
    (path.parent / "new").write_bytes(OTHER)
    (path.parent / "new").rename(path)


def truncate(path: Path) -> None:
    os.truncate(path, 1 * MIB + 7)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path: Path) -> None:
    """In place, with the times put back as far as that goes."""
    st = path.stat()
    with path.open("r+b") as file:
        file.write(OTHER)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


Change = Callable[[Path], None]
CHANGES: list[Change] = [replace, truncate, grow, rewrite]


@pytest.mark.parametrize("change", CHANGES)
async def test_a_file_that_changes_while_it_is_copied(files: Area, change: Change) -> None:
    path = files.source / "large"
    async with files.mounted() as mirror:
        ino = await mirror.ino("large")
        gate = mirror.posix.faults.gate("read")
        await mirror.want("large")
        await gate.arrived(1)
        gate.release()
        await gate.arrived(1)  # something of the old version is there
        change(path)
        gate.open()
        await mirror.settled()
        assert mirror.metrics.copies_outdated == 1
        assert mirror.metrics.copies_completed == 0
        assert mirror.residency.state(ino) == "remote"
        with stale():
            await mirror.open_ino(ino)
        # The kernel looks the name up again, and opens what it finds.
        new = await mirror.copied("large")
        assert new != ino
        assert await mirror.read_file("large") == path.read_bytes()


@pytest.mark.parametrize("change", CHANGES)
async def test_a_file_that_changes_while_it_is_read(files: Area, change: Change) -> None:
    """An open file goes on as it would in the source itself."""
    path = files.source / "large"
    async with files.mounted() as mirror:
        gate = mirror.posix.faults.gate("read")
        handle = await mirror.open("large")
        with path.open("rb", buffering=0) as direct:
            change(path)
            gate.open()
            for offset in (0, 2 * MIB, 1 * MIB - 5, 3 * MIB):
                expected = os.pread(direct.fileno(), 100_000, offset)
                assert await mirror.read(handle, offset, 100_000) == expected
        await mirror.idle()
        assert mirror.metrics.copies_outdated == 1
        assert mirror.residency.state(handle.ino) == "remote"
        handle.release()
        assert await mirror.read_file("large") == path.read_bytes()


async def test_an_error_of_the_source_that_passes_spoils_no_copy(files: Area) -> None:
    """Of a file somebody reads, which goes on where it was."""
    async with files.mounted(copies=False) as mirror:
        handle = await mirror.open("large")
        await mirror.read(handle, 0, 1000)
        await mirror.idle()
        mirror.posix.faults.fail("read", errno.EIO, times=1)
        with pytest.raises(OSError, match="Input/output"):
            await mirror.read(handle, 2 * MIB + 300 * KIB, 1000)
        await mirror.idle()
        mirror.start_copying()
        mirror.copier.jobs.opened(handle.ino)
        await mirror.idle()
        assert mirror.residency.state(handle.ino) == "resident"
        assert mirror.bytes_read("large") == len(LARGE)
        handle.release()


# Readers that are killed.


async def killed(work: Callable[[], Awaitable[object]], at: Gate) -> None:
    """Who does this, once one waits there."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        await at.arrived()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_reader_that_is_killed_disturbs_nobody(files: Area, keeps: bool) -> None:
    async with files.mount(copies=False, keeps=keeps) as mirror:
        gate = mirror.posix.faults.gate("read")
        first, second = await mirror.open("large"), await mirror.open("large")
        results: list[bytes] = []

        async def read(which: int) -> None:
            results.append(await mirror.read((first, second)[which], 100, 5000))

        async with trio.open_nursery() as other:
            await killed(partial(read, 0), gate)
            first.release()  # while its read is still in the source
            other.start_soon(read, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert results == []
            gate.open()
        assert results == [LARGE[100:5100]]
        second.release()
        await mirror.settled()
        if keeps:
            assert mirror.bytes_read("large") <= 128 * KIB * 3
            assert mirror.residency.state(first.ino) == "partial"


async def test_a_handle_that_moves_to_the_source_when_it_is_killed(files: Area) -> None:
    async with files.mounted() as mirror:
        await mirror.copied("large")
        handle = await mirror.open("large")
        gate = mirror.posix.faults.gate("open")

        async def broken_read() -> None:
            os.close(handle._replica.fd)  # type: ignore[union-attr]
            handle._replica.fd = os.open("/", os.O_RDONLY)  # type: ignore[union-attr]
            await mirror.read(handle, 0, 10)

        await killed(broken_read, gate)
        gate.open()
        assert await mirror.read(handle, 0, 10) == LARGE[:10]
        handle.release()
