"""Names, attributes and listings: asked of the source as often as the mount promises, no more."""

from __future__ import annotations

import errno

import pytest
import trio
import trio.testing

from monarchfs.metadata.freshness import FOREVER_SECONDS
from monarchfs.metadata.tree import Missing
from monarchfs.types import ROOT_INO, Lane
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, asked, entry, names
from tests.support.mirror import Area

# Freshness.


async def test_immutable_asks_once_and_never_again(files: Area, hours: Hours) -> None:
    async with files.mount(mode=IMMUTABLE) as mirror:
        asked(mirror)
        first = await entry(mirror, ROOT_INO, b"a")
        assert asked(mirror) == 1
        assert (first.entry_timeout, first.attr_timeout) == (FOREVER_SECONDS, FOREVER_SECONDS)
        hours.pass_by(1e6)
        files.write("a", b"other")
        assert await entry(mirror, ROOT_INO, b"a") == first
        assert await mirror.tree.attributes.get(first.node.ino) == first
        assert await mirror.tree.attributes.revalidated(first.node.ino) == first.node
        await names(mirror, ROOT_INO)
        asked(mirror)
        await names(mirror, ROOT_INO)
        assert asked(mirror) == 0


async def test_another_mount_asks_once_more(files: Area) -> None:
    async with files.mount(mode=IMMUTABLE) as mirror:
        old = await entry(mirror, ROOT_INO, b"a")
        await names(mirror, ROOT_INO)
    files.write("a", b"other")
    files.write("new", b"new")
    async with files.mount(mode=IMMUTABLE) as again:
        assert set(await names(again, ROOT_INO)) == {b"a", b"d", b"new"}
        assert (await entry(again, ROOT_INO, b"a")).node.ino != old.node.ino
        asked(again)
        await entry(again, ROOT_INO, b"a")
        assert asked(again) == 0


async def test_ttl_asks_again_when_it_is_over(files: Area, hours: Hours) -> None:
    hours.pass_by(1)  # they were not written just now
    async with files.mount(mode=TTL, ttl=60) as mirror:
        first = await entry(mirror, ROOT_INO, b"a")
        assert 59 < first.entry_timeout <= 60
        assert 59 < first.attr_timeout <= 60
        asked(mirror)
        hours.pass_by(50)
        later = await entry(mirror, ROOT_INO, b"a")
        assert 9 < later.entry_timeout <= 10
        assert asked(mirror) == 0
        hours.pass_by(11)
        assert (await entry(mirror, ROOT_INO, b"a")).node.ino == first.node.ino
        assert asked(mirror) == 1
        hours.pass_by(61)
        assert (await mirror.tree.attributes.get(first.node.ino)).node.ino == first.node.ino
        assert asked(mirror) == 1
        await mirror.tree.attributes.revalidated(first.node.ino)
        assert asked(mirror) == 0


async def test_open_asks_at_every_look_up_and_open(files: Area, hours: Hours) -> None:
    async with files.mount(mode=OPEN) as mirror:
        first = await entry(mirror, ROOT_INO, b"a")
        assert first.entry_timeout == 0
        asked(mirror)
        with hours.held():
            await entry(mirror, ROOT_INO, b"a")
            await mirror.tree.attributes.revalidated(first.node.ino)
            assert asked(mirror) == 2
            assert mirror.tree.known.attributes(first.node.ino) is not None
        hours.pass_by(1.5)
        assert mirror.tree.known.attributes(first.node.ino) is None
        files.write("d/new", b"")
        d = (await entry(mirror, ROOT_INO, b"d")).node.ino
        assert set(await names(mirror, d)) == {b"b", b"c", b"new"}


async def test_all_who_want_the_same_ask_once(files: Area) -> None:
    async with files.mount() as mirror:
        gate = mirror.posix.faults.gate("found")
        asked(mirror)
        found = []

        async def look_up() -> None:
            found.append(await entry(mirror, ROOT_INO, b"a"))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(look_up)
            await gate.arrived()
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
        assert asked(mirror) == 1
        assert len({e.node.ino for e in found}) == 1


# Names that do not exist.


async def test_a_missing_name(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        found = await mirror.tree.names.lookup(ROOT_INO, b"new")
        assert isinstance(found, Missing)
        assert 59 < found.timeout <= 60
        assert await mirror.tree.names.find(ROOT_INO, b"new", Lane.DEMAND) is None
        files.write("new", b"new")
        hours.pass_by(61)
        assert (await entry(mirror, ROOT_INO, b"new")).node.stat.size == 3


async def test_a_complete_listing_answers_for_what_is_not_in_it(files: Area, hours: Hours) -> None:
    hours.pass_by(1)
    async with files.mount(mode=TTL, ttl=60) as mirror:
        await names(mirror, ROOT_INO)
        asked(mirror)
        hours.pass_by(10)
        found = await mirror.tree.names.lookup(ROOT_INO, b"new")
        assert isinstance(found, Missing)
        assert 49 < found.timeout <= 50
        assert asked(mirror) == 0
        # But Lustre's root has this one, and lists it not.
        assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b".lustre"), Missing)
        assert asked(mirror) == 1
        files.write("new", b"new")
        hours.pass_by(51)
        await entry(mirror, ROOT_INO, b"new")
        assert asked(mirror) == 2, "the directory, which changed, and the name"


async def test_a_listing_that_broke_off_answers_for_nothing(files: Area) -> None:
    async with files.mount() as mirror:
        mirror.posix.faults.fail("stat", errno.EIO, times=1)
        with pytest.raises(OSError, match="Input/output"):
            await mirror.tree.directories.open(ROOT_INO)
        assert mirror.tree.known.lookup(ROOT_INO, b"new") is None
        await entry(mirror, ROOT_INO, b"a")
