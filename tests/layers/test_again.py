"""Opening, and looking at, what changes between the kernel's two tries."""

from __future__ import annotations

import errno
import os
import time

import pytest

from monarchfs.fuse.estale_retries import MOST_KEPT, SHARED_NS, EstaleRetries
from monarchfs.types import ROOT_INO
from tests.support.indexing import record_found
from tests.support.lookups import OPEN, TTL, Hours, entry
from tests.support.mirror import Area, Mirror, content


def replace(area: Area, name: str, data: bytes) -> None:
    area.write("other", data)
    (area.source / "other").rename(area.source / name)


async def late(mirror: Mirror, ino: int, data: bytes) -> None:
    """What the second try opens shows what the source has now, all of it, and so does fstat."""
    handle = await mirror.files.open(ino, again=True)
    assert handle.direct
    assert await mirror.read(handle, 0, 1 << 20) == data
    assert (await mirror.files.attributes(ino)).node.stat.size == len(data)
    assert mirror.kernel.attributes[-1] == ino
    handle.release()


@pytest.mark.parametrize("how", ["in place", "replaced"])
async def test_the_second_try_opens_what_is_there_now(files: Area, how: str) -> None:
    async with files.mount(mode=OPEN) as mirror:
        ino = await mirror.ino("a")
        new = content(20, 5)
        (files.write if how == "in place" else lambda n, d: replace(files, n, d))("a", new)
        with pytest.raises(OSError, match="another version") as raised:
            await mirror.files.open(ino)
        assert raised.value.errno == errno.ESTALE
        await late(mirror, ino, new)
        # The number still stands for the old version: its next look-up gives another.
        assert await mirror.ino("a") != ino
        assert await mirror.read_file("a") == new
        await mirror.settled()
        assert mirror.record(ino) is None


async def test_it_goes_on_as_a_plain_file_would(files: Area) -> None:
    async with files.mount(mode=OPEN) as mirror:
        ino = await mirror.ino("a")
        files.write("a", b"first")
        handle = await mirror.files.open(ino, again=True)
        assert await mirror.read(handle, 0, 100) == b"first"
        files.write("a", b"second one")
        assert await mirror.read(handle, 0, 100) == b"second one"
        assert (await mirror.files.attributes(ino)).node.stat.size == 10
        replace(files, "a", b"of another file")
        assert await mirror.read(handle, 0, 100) == b"second one"
        handle.release()
        await mirror.settled()


async def test_a_version_that_is_all_local_is_opened_by_the_second_try(files: Area) -> None:
    """By a link in /proc/PID/fd, say: what is open there."""
    await files.settled()
    async with files.mount(mode=OPEN) as mirror:
        ino = await mirror.copied("a")
        with_it = await mirror.open_ino(ino)
        replace(files, "a", b"new")
        with pytest.raises(OSError, match="another version"):
            await mirror.files.open(ino)
        handle = await mirror.files.open(ino, again=True)
        assert not handle.direct
        assert await mirror.read(handle, 0, 100) == content(10)
        handle.release()
        with_it.release()
        await mirror.settled()


async def test_who_shares_a_number_with_a_late_open_gets_no_other_version(files: Area) -> None:
    """A number whose version comes back is not read from what was opened meanwhile."""
    async with files.mount(mode=OPEN, copies=False) as mirror:
        ino = await mirror.ino("a")
        replace(files, "a", b"new")
        handle = await mirror.files.open(ino, again=True)
        old = mirror.index.node(ino)
        assert old is not None
        record_found(mirror.index, ROOT_INO, b"a", old.stat, b"", time.time_ns())
        with pytest.raises(OSError, match="another version") as raised:
            await mirror.files.open(ino)
        assert raised.value.errno == errno.ESTALE
        assert await mirror.read(handle, 0, 100) == b"new"
        handle.release()
        await mirror.settled()


async def test_what_is_gone_or_refused_is_said_as_the_source_says_it(files: Area) -> None:
    async with files.mount(mode=OPEN) as mirror:
        ino = await mirror.ino("a")
        (files.source / "a").unlink()
        with pytest.raises(FileNotFoundError):
            await mirror.files.open(ino, again=True)
        with pytest.raises(FileNotFoundError):
            await mirror.files.attributes(ino, again=True)
        await mirror.settled()


async def test_attributes_for_the_second_try(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        old = (await entry(mirror, ROOT_INO, b"a")).node
        replace(files, "a", b"another version")
        hours.pass_by(61)
        with pytest.raises(OSError, match="another version") as raised:
            await mirror.files.attributes(old.ino)
        assert raised.value.errno == errno.ESTALE
        found = await mirror.files.attributes(old.ino, again=True)
        assert (found.node.ino, found.node.stat.size, found.attr_timeout) == (old.ino, 15, 0.0)
        (files.source / "a").unlink()
        (files.source / "a").mkdir()
        hours.pass_by(61)
        # The kernel takes no other type for a number (fs/fuse/dir.c, fuse_do_getattr).
        with pytest.raises(OSError, match="something else") as raised:
            await mirror.files.attributes(old.ino, again=True)
        assert raised.value.errno == errno.ESTALE


async def test_whose_try_is_the_second(files: Area) -> None:
    def refuse(ino: int, thread: int) -> None:
        with pytest.raises(OSError, match="Stale"), refused.noting(ino, thread):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    async with files.mount(mode=OPEN) as mirror:
        refused = EstaleRetries(mirror.tree.known.asked_ns)
        node = await mirror.node("a")
        assert not refused.again(node.ino, 7)
        refuse(node.ino, 7)
        assert refused.again(node.ino, 7)
        assert not refused.again(node.ino, 8)
        # Another number: if it was asked for since, or by somebody a moment before.
        other = await mirror.node("d/b")
        assert refused.again(other.ino, 7)
        record_found(
            mirror.index, other.parent, other.name, other.stat, b"", node.fetched_ns - 2 * SHARED_NS
        )
        assert not refused.again(other.ino, 7)
        # It is over with any other answer.
        with refused.noting(node.ino, 7):
            pass
        assert not refused.again(node.ino, 7)
        for thread in range(MOST_KEPT + 1):
            refuse(node.ino, thread)
        assert not refused.again(node.ino, 0)
        assert refused.again(node.ino, 1)
