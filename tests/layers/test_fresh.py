"""Files that change in the source: what an open, an open file and a new open show, in each mode."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from monarchfs.fs import racy_opens
from monarchfs.fs.files import FileHandle
from monarchfs.fuse import notify
from monarchfs.fuse.notify import Notifier
from monarchfs.metadata.freshness import UNSETTLED_SECONDS
from monarchfs.metadata.tree import Missing
from monarchfs.prefetch.fill import Fill
from monarchfs.types import ROOT_INO, Data, FreshnessMode
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, asked, entry, names, stale
from tests.support.mirror import MIB, Area, Mirror, content, until
from tests.support.open_directories import close_directories

OLD, NEW = content(3 * MIB, 1), content(3 * MIB, 2)


def in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(NEW)


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


CHANGES = [in_place, replaced, truncated, grown, moved, Path.unlink]


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


def pass_promise(hours: Hours, mode: FreshnessMode) -> None:
    hours.pass_by(61 if mode is TTL else 0)


changing = pytest.mark.parametrize("mode", [TTL, OPEN])


@changing
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("local", ["remote", "partial", "resident"])
async def test_a_new_open_shows_what_the_source_has(
    area: Area, hours: Hours, mode: FreshnessMode, change: Callable[[Path], None], local: str
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
        pass_promise(hours, mode)
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
    area: Area, hours: Hours, mode: FreshnessMode, change: Callable[[Path], None], who: str
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
            pass_promise(hours, mode)
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


async def test_an_outdated_inode_that_nobody_has_open_is_looked_up_again(area: Area) -> None:
    area.write("f", b"old")
    async with area.mount(mode=IMMUTABLE) as mirror:
        old = await mirror.ino("f")
        assert mirror.files.known_attributes(old) is not None
        mirror.files.invalidation.noticed(old)
        assert mirror.files.known_attributes(old) is None
        with stale():
            await mirror.files.attributes(old)


@changing
async def test_fstat_below_a_directory_that_was_moved(
    area: Area, hours: Hours, mode: FreshnessMode
) -> None:
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


# The tick of a change.


@changing
async def test_what_was_just_written_is_believed_for_a_tick(
    area: Area, hours: Hours, mode: FreshnessMode
) -> None:
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


async def test_immutable_believes_the_times(area: Area, hours: Hours) -> None:
    area.write("f", b"1")
    async with area.mount(mode=IMMUTABLE) as mirror:
        handle = await mirror.open("f")
        assert handle.keep_cache
        handle.release()
        hours.pass_by(0.5)
        assert mirror.tree.known.lookup(ROOT_INO, b"f") is not None


@changing
async def test_pages_from_the_tick_of_a_change_are_not_kept(
    area: Area, hours: Hours, mode: FreshnessMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racy_opens, "KEPT", 2)
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


# Listings.


@changing
async def test_an_old_listing_is_confirmed_by_one_stat(
    files: Area, hours: Hours, mode: FreshnessMode
) -> None:
    await files.settled()
    async with files.mount(mode=mode, ttl=60) as mirror:
        d = await mirror.ino("d")
        first = await names(mirror, d)
        for _ in range(3):
            hours.pass_by(61)
            lists = mirror.index.listings.listing(d)
            asked(mirror)
            assert await names(mirror, d) == first
            assert asked(mirror) == 1
            assert mirror.index.listings.listing(d) == lists, "it was not read again"
        files.write("d/new", b"")
        hours.pass_by(61)
        assert set(await names(mirror, d)) == {*first, b"new"}


@changing
async def test_a_listing_from_the_tick_of_a_change_is_not_confirmed(
    files: Area, hours: Hours, mode: FreshnessMode
) -> None:
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


async def test_absent_names_are_confirmed_together(files: Area, hours: Hours) -> None:
    await files.settled()
    async with files.mount(mode=TTL, ttl=60) as mirror:
        d = await mirror.ino("d")
        await names(mirror, d)
        hours.pass_by(61)
        asked(mirror)
        for number in range(10):
            assert isinstance(await mirror.tree.names.lookup(d, b"no%d" % number), Missing)
        assert asked(mirror) == 1
        files.write("d/no3", b"now")
        hours.pass_by(61)
        assert (await entry(mirror, d, b"no3")).node.stat.size == 3
        assert isinstance(await mirror.tree.names.lookup(d, b"no4"), Missing)


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


# The kernel is told what to forget by threads, each thing once, and nobody's request waits.


class Told:
    """What the kernel was told; it takes its time while ``blocks`` is not set."""

    def __init__(self) -> None:
        self.inodes: list[tuple[int, bool]] = []
        self.entries: list[tuple[int, bytes]] = []
        self.blocks = threading.Event()
        self.notifier = Notifier(self._inode, self._entry)

    def _inode(self, ino: int, attributes_only: bool) -> None:
        assert self.blocks.wait(30)
        if ino == 13:
            raise OSError(errno.EIO, "refused")
        self.inodes.append((ino, attributes_only))

    def _entry(self, parent: int, name: bytes) -> None:
        self.entries.append((parent, name))


async def test_each_thing_once_and_pages_before_attributes() -> None:
    told = Told()
    told.blocks.set()
    notifier = told.notifier
    for _ in range(3):
        notifier.invalidate_inode(2, attributes_only=True)
        notifier.invalidate_inode(3)
        notifier.invalidate_inode(3, attributes_only=True)
        notifier.invalidate_entry(1, b"name")
    notifier.invalidate_inode(13)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notifier.run)
        await until(
            lambda: len(told.inodes) == 2 and bool(told.entries) and bool(notifier.failed),
            "the kernel to be told",
        )
        nursery.cancel_scope.cancel()
    assert sorted(told.inodes) == [(2, True), (3, False)]
    assert told.entries == [(1, b"name")]
    assert (notifier.failed, notifier.waiting) == (1, 0)


async def test_a_kernel_that_has_to_wait_holds_up_who_can_and_nobody_else() -> None:
    """Not the end either."""
    told = Told()
    notifier = told.notifier
    passed = trio.Event()

    async def refresh() -> None:
        await notifier.room()
        passed.set()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notifier.run)
            count = notify.MOST_WAITING + notify.THREADS + 5
            for ino in range(100, 100 + count):
                notifier.invalidate_inode(ino)  # as a request does: at once
            await trio.testing.wait_all_tasks_blocked()
            assert notifier.waiting == notify.MOST_WAITING + 5
            nursery.start_soon(refresh)
            nursery.start_soon(refresh)
            await trio.testing.wait_all_tasks_blocked()
            assert not passed.is_set()
            told.blocks.set()
            await passed.wait()
            await until(lambda: len(told.inodes) == count, "the kernel to be told")
            told.blocks.clear()
            notifier.invalidate_inode(5)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    told.blocks.set()
