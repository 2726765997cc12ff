"""Files that change or fail in the source: what an open, an open file and a new open show, in each
mode; only the source's own errors reach a reader, and no replica is ever a mixture of versions."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from monarchfs.fs import files as files_module
from monarchfs.fs.files import FileHandle
from monarchfs.fuse import notify, session
from monarchfs.fuse.notify import Notifier
from monarchfs.metadata.find import Finder
from monarchfs.metadata.freshness import UNSETTLED_SECONDS
from monarchfs.metadata.tree import Missing
from monarchfs.prefetch.fill import Fill
from monarchfs.prefetch.named_files import NamedFiles
from monarchfs.types import ROOT_INO, Data, FreshnessMode
from tests.support.faults import close_directories
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, asked, entry, names, stale
from tests.support.mirror import KIB, MIB, Area, Mirror, content, until

OLD, NEW = content(3 * MIB, 1), content(3 * MIB, 2)


def in_place(path: Path) -> None:
    """With the times put back as far as that goes."""
    st = path.stat()
    with path.open("r+b") as file:
        file.write(NEW)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(NEW)
    other.rename(path)


def truncated(path: Path) -> None:
    os.truncate(path, MIB // 2 + 7)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


Change = Callable[[Path], None]
CHANGES: list[Change] = [in_place, replaced, truncated, grown, moved, Path.unlink]


async def show(mirror: Mirror, handle: FileHandle) -> bytes:
    """What read(2) gives of an open file, by the kernel's rule that nothing is read beyond the size
    that getattr tells."""
    size = (await mirror.files.attributes(handle.ino)).node.stat.size
    data = b""
    while len(data) < size:
        piece = await mirror.read(handle, len(data), min(1 << 20, size - len(data)))
        assert piece, "zeros would be made of it"
        data += piece
    return data


changing = pytest.mark.parametrize("mode", [TTL, OPEN])


@changing
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("local", ["remote", "partial", "resident"])
async def test_a_new_open_shows_what_the_source_has(
    area: Area, hours: Hours, mode: FreshnessMode, change: Change, local: str
) -> None:
    """Who has it open, and all of it is local, stays with one version."""
    path = area.source / "f"
    area.write("f", OLD)
    await area.settled()
    async with area.mounted(mode=mode, ttl=60, copies=local == "resident") as mirror:
        old = await mirror.ino("f")
        if local == "resident":
            await mirror.copied("f")
            holder = await mirror.open("f")
        elif local == "partial":
            handle = await mirror.open("f")
            assert await mirror.read(handle, MIB, 100) == OLD[MIB : MIB + 100]
            await mirror.idle()
            handle.release()
        change(path)
        hours.pass_by(61 if mode is TTL else 0)
        if change in (moved, Path.unlink):
            assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"f"), Missing)
            with stale():
                await mirror.files.open(old)
        else:
            assert await mirror.ino("f") != old
            assert await mirror.read_file("f") == path.read_bytes()
            await mirror.idle()
            assert await mirror.read_file("f") == path.read_bytes()
        assert old in mirror.kernel.pages + mirror.kernel.attributes
        if local == "resident":
            assert await show(mirror, holder) == OLD
            assert old not in mirror.kernel.pages, "they are of the same version"
            holder.release()


@changing
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("who", ["the tree", "a read", "fstat"])
async def test_what_is_open_and_partly_local_shows_the_source_as_it_is(
    area: Area, hours: Hours, mode: FreshnessMode, change: Change, who: str
) -> None:
    area.write("f", OLD)
    await area.settled()
    async with area.mounted(mode=mode, ttl=60, copies=False) as mirror:
        handle = await mirror.open("f")
        assert await mirror.read(handle, MIB, 100_000) == OLD[MIB : MIB + 100_000]
        await mirror.idle()
        assert mirror.residency.state(handle.ino) == "copying", "some of it is there"
        with (area.source / "f").open("rb") as direct:
            change(area.source / "f")
            hours.pass_by(61 if mode is TTL else 0)
            hours.pass_by(1.5)
            if who == "the tree":
                await mirror.tree.names.lookup(ROOT_INO, b"f")
            elif who == "a read":
                await mirror.read(handle, 2 * MIB, 100)
            assert await show(mirror, handle) == direct.read()
        assert handle.ino in mirror.kernel.pages
        # Once for what was noticed, not once for each read.
        told = len(mirror.kernel.pages)
        await mirror.read(handle, 0, 4096)
        assert len(mirror.kernel.pages) == told
        handle.release()


@pytest.mark.parametrize("change", ["read", "after_read"], ids=["before", "after"])
async def test_a_read_under_way_is_answered_from_one_version(
    area: Area, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Its first part is local. The file changes before, or after, the rest was read."""
    area.write("f", OLD)
    async with area.mounted(mode=IMMUTABLE, copies=False) as mirror:
        handle = await mirror.open("f")
        await mirror.read(handle, 0, 128 << 10)
        await mirror.idle()
        nonresident = mirror.copier.files.get(handle.ino)
        assert isinstance(nonresident, Fill)
        real, begun = nonresident._piece, trio.Event()

        async def piece(offset: int, end: int) -> Data:
            data = await real(offset, end)
            begun.set()
            return data

        monkeypatch.setattr(nonresident, "_piece", piece)
        gate = mirror.posix.faults.gate(change)
        got: list[bytes] = []

        async def read() -> None:
            got.append(await mirror.read(handle, 0, 3 * MIB))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await gate.arrived()
            await begun.wait()
            in_place(area.source / "f")
            mirror.files.invalidation.noticed(handle.ino)
            nonresident.copy.outdated()
            gate.open()
        assert got[0] in (OLD, NEW)
        assert await mirror.read(handle, 0, 3 * MIB) == NEW
        handle.release()


@changing
async def test_fstat_below_a_moved_directory(area: Area, hours: Hours, mode: FreshnessMode) -> None:
    area.write("d/f", OLD)
    async with area.mounted(mode=mode, ttl=60) as mirror:
        handle = await mirror.open("d/f")
        (area.source / "d").rename(area.source / "away")
        close_directories(mirror.posix)
        hours.pass_by(61)
        assert (await mirror.files.attributes(handle.ino)).node.stat.size == len(OLD)
        assert await show(mirror, handle) == OLD
        handle.release()
        assert await mirror.read_file("away/f") == OLD


@changing
async def test_what_is_new_holds_for_a_tick(area: Area, hours: Hours, mode: FreshnessMode) -> None:
    async with area.mount(mode=mode, ttl=60) as mirror:
        with hours.held():
            area.write("f", b"1")
            found = await entry(mirror, ROOT_INO, b"f")
        assert found.entry_timeout <= UNSETTLED_SECONDS
        assert found.attr_timeout <= UNSETTLED_SECONDS
        hours.pass_by(0.5)
        assert mirror.tree.known.lookup(ROOT_INO, b"f") is None
        assert mirror.tree.known.attributes(found.node.ino) is None
        assert mirror.tree.known.node(found.node.ino) is None
        again = await entry(mirror, ROOT_INO, b"f")
        assert again.node.ino == found.node.ino
        assert again.attr_timeout > UNSETTLED_SECONDS
        assert (mirror.tree.known.lookup(ROOT_INO, b"f") is None) == (mode is OPEN)


@changing
async def test_pages_from_the_tick_of_a_change_are_not_kept(
    area: Area, hours: Hours, mode: FreshnessMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "RACY_OPENS_KEPT", 2)
    async with area.mount(mode=mode, ttl=60) as mirror:

        async def keeps(name: str) -> bool:
            handle = await mirror.open(name)
            handle.release()
            return handle.keep_cache

        with hours.held():
            for name in ("f", "g", "h"):
                area.write(name, b"1")
                assert not await keeps(name)
        hours.pass_by(0.5)
        assert [await keeps(name) for name in ("g", "h")] == [False, False]
        assert [await keeps(name) for name in ("g", "h")] == [True, True]
        # More than can be remembered: never kept, rather than once too often.
        assert [await keeps("f"), await keeps("f")] == [False, False]
        area.write("late", b"1")
        hours.pass_by(61)
        assert await keeps("late")


@changing
async def test_a_listing_in_a_changes_tick(files: Area, hours: Hours, mode: FreshnessMode) -> None:
    async with files.mount(mode=mode, ttl=60) as mirror:
        for number in range(5):
            with hours.held():
                files.write(f"e{number}/early", b"")
                ino = await mirror.ino(f"e{number}")
                assert set(await names(mirror, ino)) == {b"early"}
            files.write(f"e{number}/late", b"")
            await files.settled()
            # Long before the promise of ttl is over.
            assert set(await names(mirror, ino)) == {b"early", b"late"}


async def test_an_open_is_not_answered_by_what_was_asked_before(files: Area) -> None:
    """``open`` means that the source is asked after the open has begun."""
    async with files.mount(mode=OPEN) as mirror:
        old = await mirror.ino("a")
        gate = mirror.posix.faults.gate("found")
        seen: list[int] = []

        async def look_up() -> None:
            seen.append((await entry(mirror, ROOT_INO, b"a")).node.ino)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(look_up)
            await gate.arrived()
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(3):
                nursery.start_soon(look_up)
            await trio.testing.wait_all_tasks_blocked()
            asked(mirror)
            gate.open()
        assert asked(mirror) == 1, "the second three share one question"
        assert seen == [old] * 6


async def test_a_kernel_that_has_to_wait_holds_up_who_can_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the end either. Of an inode, its pages count for more than its attributes."""
    told: list[tuple[int, object]] = []
    unblocked, passed = threading.Event(), trio.Event()

    def tell(ino: int, what: object) -> None:
        assert unblocked.wait(30)
        if ino == 13:
            raise OSError(errno.EIO, "refused")
        told.append((ino, what))

    for call in ("invalidate_inode", "invalidate_entry"):
        monkeypatch.setattr(session, call, tell)
    notifier = Notifier()

    async def refresh() -> None:
        await notifier.room()
        passed.set()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notifier.run)
            count = notify.MOST_WAITING + notify.THREADS
            for ino in range(100, 100 + count):
                notifier.invalidate_inode(ino)  # as a request does: at once
            for _ in range(3):
                notifier.invalidate_inode(2, attributes_only=True)
                notifier.invalidate_inode(3)
                notifier.invalidate_inode(3, attributes_only=True)
                notifier.invalidate_entry(1, b"name")
                notifier.invalidate_inode(13)
            await trio.testing.wait_all_tasks_blocked()
            assert notifier.waiting == notify.MOST_WAITING + 4
            nursery.start_soon(refresh)
            nursery.start_soon(refresh)
            await trio.testing.wait_all_tasks_blocked()
            assert not passed.is_set()
            unblocked.set()
            await passed.wait()
            await until(lambda: (len(told), notifier.failed) == (count + 3, 1), "all to be told")
            assert {(2, True), (3, False), (1, b"name")} <= set(told)
            unblocked.clear()
            notifier.invalidate_inode(5)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    unblocked.set()


async def test_a_file_that_may_not_be_read_is_not_copied(files: Area) -> None:
    files.write("large", OLD)
    files.write("empty", b"")
    async with files.mount() as mirror:
        mirror.posix.faults.fail("open", errno.EACCES)
        for name in ("a", "large", "empty"):
            await mirror.want(name)
            await mirror.settled()
            assert "Permission denied" in mirror.reason(await mirror.ino(name))
        assert mirror.metrics.copies_failed == 3


@pytest.mark.parametrize("change", CHANGES[:4])
async def test_a_file_that_changes_while_it_is_copied(area: Area, change: Change) -> None:
    area.write("f", OLD)
    path = area.source / "f"
    async with area.mounted() as mirror:
        ino = await mirror.ino("f")
        gate = mirror.posix.faults.gate("read")
        await mirror.want("f")
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
        assert await mirror.copied("f") != ino
        assert await mirror.read_file("f") == path.read_bytes()


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_reader_that_is_killed_disturbs_nobody(area: Area, keeps: bool) -> None:
    area.write("f", OLD)
    async with area.mount(copies=False, keeps=keeps) as mirror:
        gate = mirror.posix.faults.gate("read")
        first, second = await mirror.open("f"), await mirror.open("f")
        results: list[bytes] = []

        async def read(which: int) -> None:
            results.append(await mirror.read((first, second)[which], 100, 5000))

        async with trio.open_nursery() as other:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, 0)
                await gate.arrived()
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            first.release()  # while its read is still in the source
            other.start_soon(read, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert results == []
            gate.open()
        assert results == [OLD[100:5100]]
        second.release()
        await mirror.settled()
        if keeps:
            assert mirror.bytes_read("f") <= 128 * KIB * 3
            assert mirror.residency.state(first.ino) == "partial"


async def test_an_order_finds_the_files_of_a_directory_that_was_replaced(area: Area) -> None:
    area.write("d/file", b"old")
    async with area.mount(copies=False, mode=FreshnessMode.TTL, ttl=0.0) as mirror:
        named = NamedFiles(mirror.tree, Finder(mirror.tree, []))
        for size in (3, 5):
            (node,) = await named.nodes([b"d/file"])
            assert node is not None
            assert node.stat.size == size
            (area.source / "d").rename(area.source / f"before{size}")
            area.write("d/file", b"newer")
            close_directories(mirror.posix)
