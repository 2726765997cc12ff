"""Opening files that are not local, have changed, or without a word to the mount; what
``--touch-source`` touches then."""

import errno
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from monarchfs.fuse.estale_retries import MOST_KEPT, SHARED_NS, EstaleRetries
from monarchfs.prefetch import touch as touch_module
from monarchfs.prefetch.touch import MOST_GIVEN_UP, Touch
from monarchfs.types import ROOT_INO
from tests.support.faults import close_directories
from tests.support.indexing import record_found
from tests.support.lookups import OPEN, TTL, Hours, entry, stale
from tests.support.mirror import KIB, Area, Mirror, content

SMALL = 100 * KIB


async def test_a_small_file_is_read_once_and_whole(area: Area) -> None:
    data = area.write("small", content(SMALL))
    async with area.mount() as mirror:
        ino = await mirror.ino("small")
        before = mirror.source.counters.operations
        gate = mirror.tier.faults.gate("write_whole")
        handle = await mirror.open_ino(ino)
        assert await mirror.read(handle, 5, 1000) == data[5:1005]
        assert mirror.bytes_read("small") == SMALL
        assert await mirror.read(handle, 0, SMALL) == data
        # Who reads waits for the source, not for the tier.
        await gate.arrived()
        gate.open()
        handle.release()
        await mirror.settled()
        assert mirror.source.counters.operations - before == 2
        assert mirror.posix.faults.calls["open"] == 1
        assert mirror.residency.state(ino) == "resident"


@pytest.mark.parametrize("change", [Area.write, Area.replace], ids=["in place", "replaced"])
async def test_the_second_try(files: Area, change: Callable[[Area, str, bytes], bytes]) -> None:
    """All of it, and fstat agrees; from then on it goes on as a plain file would."""
    async with files.mount(mode=OPEN) as mirror:
        ino = await mirror.ino("a")
        new = change(files, "a", content(20, 5))
        with stale():
            await mirror.files.open(ino)
        handle = await mirror.files.open(ino, again=True)
        assert handle.direct
        assert await mirror.read(handle, 0, 1 << 20) == new
        assert (await mirror.files.attributes(ino)).node.stat.size == len(new)
        assert mirror.kernel.attributes[-1] == ino
        # The number still stands for the old version: its next look-up gives another.
        assert await mirror.ino("a") != ino
        assert await mirror.read_file("a") == new
        files.write("a", b"second one")
        assert await mirror.read(handle, 0, 100) == b"second one"
        assert (await mirror.files.attributes(ino)).node.stat.size == 10
        files.replace("a", b"of another file")
        assert await mirror.read(handle, 0, 100) == b"second one"
        handle.release()
        await mirror.settled()
        assert mirror.record(ino) is None


async def test_a_version_that_is_all_local_is_opened_by_the_second_try(files: Area) -> None:
    """By a link in /proc/PID/fd, say: what is open there."""
    await files.settled()
    async with files.mounted(mode=OPEN) as mirror:
        ino = await mirror.copied("a")
        with_it = await mirror.open_ino(ino)
        files.replace("a", b"new")
        with stale():
            await mirror.files.open(ino)
        handle = await mirror.files.open(ino, again=True)
        assert not handle.direct
        assert await mirror.read(handle, 0, 100) == content(10)
        handle.release()
        with_it.release()


async def test_who_shares_a_number_with_a_late_open_gets_no_other_version(files: Area) -> None:
    """A number whose version comes back is not read from what was opened meanwhile."""
    async with files.mounted(mode=OPEN, copies=False) as mirror:
        ino = await mirror.ino("a")
        files.replace("a", b"new")
        handle = await mirror.files.open(ino, again=True)
        old = mirror.index.nodes.node(ino)
        assert old is not None
        record_found(mirror.index, ROOT_INO, b"a", old.stat, b"", time.time_ns())
        with stale():
            await mirror.files.open(ino)
        assert await mirror.read(handle, 0, 100) == b"new"
        handle.release()


async def test_attributes_for_the_second_try(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        old = (await entry(mirror, ROOT_INO, b"a")).node
        files.replace("a", b"another version")
        hours.pass_by(61)
        with stale():
            await mirror.files.attributes(old.ino)
        found = await mirror.files.attributes(old.ino, again=True)
        assert (found.node.ino, found.node.stat.size, found.attr_timeout) == (old.ino, 15, 0.0)
        (files.source / "a").unlink()
        hours.pass_by(61)
        for ask in (mirror.files.attributes, mirror.files.open):
            with pytest.raises(FileNotFoundError):
                await ask(old.ino, again=True)
        (files.source / "a").mkdir()
        hours.pass_by(61)
        # The kernel takes no other type for a number (fs/fuse/dir.c, fuse_do_getattr).
        with stale("something else"):
            await mirror.files.attributes(old.ino, again=True)
        with stale():
            await mirror.files.open(old.ino, again=True)


async def test_whose_try_is_the_second(files: Area, hours: Hours) -> None:
    def refuse(ino: int, thread: int) -> None:
        with stale("Stale"), refused.noting(ino, thread):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    async with files.mount(mode=OPEN) as mirror:
        refused = EstaleRetries(mirror.tree.known)
        node = await mirror.node("a")
        assert not refused.again(node.ino, 7)
        refuse(node.ino, 7)
        assert [refused.again(node.ino, thread) for thread in (7, 8)] == [True, False]
        # Another number: if it was asked for since, or by somebody a moment before.
        other = await mirror.node("d/b")
        assert refused.again(other.ino, 7)
        long_ago_ns = node.fetched_ns - 2 * SHARED_NS
        record_found(mirror.index, other.parent, other.name, other.stat, b"", long_ago_ns)
        assert not refused.again(other.ino, 7)
        # It is over with any other answer, but for attributes: an open may follow.
        with refused.noting(node.ino, 7, last=False):
            pass
        assert refused.again(node.ino, 7)
        with refused.noting(node.ino, 7):
            pass
        assert not refused.again(node.ino, 7)
        for thread in range(MOST_KEPT + 1):
            refuse(node.ino, thread)
        assert [refused.again(node.ino, thread) for thread in (0, 1)] == [False, True]
        # Threads of the C part may have answered its second try.
        hours.pass_by(61)
        assert not refused.again(node.ino, 1)
        # Who works in a directory asks for it without its name.
        refuse(other.parent, 1)
        assert not refused.again(other.parent, 1)


# Where the kernel opens files without asking: a read that finds nothing at the end of a name has
# the kernel forget it.


async def read(mirror: Mirror, ino: int) -> bytes:
    """What a READ without a handle gets."""
    handle = mirror.files.first_read(ino)
    try:
        return bytes(await handle.read(0, 1000))
    finally:
        handle.release()


@pytest.mark.parametrize("what", ["the file", "a directory above it"])
async def test_a_name_that_stands_for_another_file(area: Area, what: str) -> None:
    """All of the way is forgotten with its first name."""
    path = "above/below/a"
    area.write(path, content(20, 1))
    async with area.mounted(keeps=False) as mirror:
        mirror.files.opens_known = mirror.files.invalidation._opens_known = False
        ino, parent = await mirror.ino(path), await mirror.ino("above/below")
        if what == "the file":
            area.replace(path, content(30, 2))
        else:
            (area.source / "above").rename(area.source / "away")
            area.write(path, content(30, 2))
            close_directories(mirror.posix)
        with stale():
            await read(mirror, ino)
        if what == "the file":
            assert mirror.kernel.entries == [(parent, b"a")]
        else:
            assert (ROOT_INO, b"above") in mirror.kernel.entries
        assert await read(mirror, await mirror.ino(path)) == content(30, 2)


async def test_where_opens_are_known_they_say(files: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    async with files.mounted(keeps=False) as mirror:
        expired: list[int] = []
        monkeypatch.setattr(mirror.cache.readers, "expire", expired.append)
        ino = await mirror.ino("a")
        files.replace("a", content(30, 2))
        with stale():
            await read(mirror, ino)
        assert mirror.kernel.entries == []
        assert set(expired) == {ino}, "threads would go on opening it"


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch_module, "FASTEST_SECONDS", 0.0001)


FILES = ("a", "d/b", "d/c")


@asynccontextmanager
async def resident(area: Area, *names: str) -> AsyncIterator[tuple[Mirror, Touch]]:
    """A mount that has copied these files, which nobody has opened since."""
    async with area.mount() as mirror:
        for name in names:
            await mirror.copied(name)
        touch = Touch(mirror.source, mirror.cache, mirror.metrics, mirror.tree.known, 0.001)
        mirror.files._touch = touch
        yield mirror, touch


def touches(mirror: Mirror) -> tuple[int, int]:
    """Completed, and failed."""
    return mirror.metrics.touches_completed, mirror.metrics.touches_failed


async def test_what_was_opened_locally_is_touched_once(files: Area) -> None:
    async with resident(files, *FILES) as (mirror, touch):
        await mirror.read_file("d/b")
        await mirror.read_file("d/b")
        before = mirror.posix.faults.calls["open"]
        await touch.round()
        await touch.round()
        assert mirror.posix.faults.calls["open"] == before + 1
        assert touches(mirror) == (1, 0)
        assert mirror.source.counters.read_bytes == 60, "a touch is not reading"
    async with resident(files) as (mirror, touch):
        handle = await mirror.open("a")
        await mirror.idle()
        for _ in range(3):
            await touch.round()
        assert touches(mirror) == (3, 0)
        handle.release()
        await touch.round()
        assert touches(mirror) == (3, 0)


async def test_too_many_to_remember(files: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch_module, "MOST_REMEMBERED", 1)
    async with resident(files, *FILES) as (mirror, touch):
        await mirror.read_file("a")
        await mirror.read_file("d/b")
        assert len(touch.used) == 1
        await touch.round()
        await touch.round()
        assert touches(mirror) == (3, 0)


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "an error"])
async def test_what_fails_is_counted_and_no_reason_to_stop(files: Area, gone: bool) -> None:
    async with resident(files, *FILES) as (mirror, touch):
        for name in FILES:
            await mirror.read_file(name)
        if gone:
            (files.source / "d/b").unlink()
        else:
            mirror.posix.faults.fail("open", errno.EIO, times=1)
        await touch.round()
        assert touches(mirror) == (2, 1)
        assert not touch.used


async def test_a_hanging_source_is_left_alone(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    names = area.write_files(MOST_GIVEN_UP + 4, 10)
    async with resident(area, *names) as (mirror, touch):
        for name in names:
            await mirror.read_file(name)
        gate = mirror.posix.faults.gate("open")
        with monkeypatch.context() as hurried:
            hurried.setattr(touch_module, "PATIENCE_SECONDS", 0.05)
            await touch.round()
        # On a busy machine some were given up before a thread began with them.
        assert mirror.metrics.touches_failed == MOST_GIVEN_UP >= gate.waiting
        assert len(touch.used) == len(names)
        gate.open()
        await touch.round()
        assert mirror.metrics.touches_completed == len(names)
