"""A source that does not answer: what is known is served, where the mount promises that."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from monarchfs.fs import attributes as attributes_module
from monarchfs.fs.freshness import UNANSWERED_SECONDS
from monarchfs.fs.tree import Entry
from monarchfs.types import ROOT_INO
from tests.support.faults import disk_is_full
from tests.support.lookups import IMMUTABLE, METADATA, OPEN, TTL, Hours, asked, entry, names
from tests.support.mirror import Area, Mirror

Ask = Callable[[Mirror, int], Awaitable[object]]


async def ask_name(mirror: Mirror, ino: int) -> object:
    return (await entry(mirror, ROOT_INO, b"d")).node.ino


async def ask_attributes(mirror: Mirror, ino: int) -> object:
    return (await mirror.tree.attributes.get(ino)).node.ino


async def ask_revalidated(mirror: Mirror, ino: int) -> object:
    return (await mirror.tree.attributes.revalidated(ino)).ino


async def ask_listing(mirror: Mirror, ino: int) -> object:
    await mirror.tree.directories.open(ino)
    return ino


ASKS = [ask_name, ask_attributes, ask_revalidated, ask_listing]


async def see_everything(mirror: Mirror) -> int:
    ino = (await entry(mirror, ROOT_INO, b"d")).node.ino
    await names(mirror, ino)
    return ino


@pytest.mark.parametrize("ask", ASKS)
async def test_what_is_known_is_served_when_the_deadline_is_over(
    files: Area, clock: trio.testing.MockClock, hours: Hours, ask: Ask
) -> None:
    async with files.mount(mode=TTL, ttl=60, deadline=5) as mirror:
        ino = await see_everything(mirror)
        hours.pass_by(61)
        gate = mirror.posix.faults.gate(*METADATA)
        answers = []

        async def answer() -> None:
            answers.append(await ask(mirror, ino))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            await gate.arrived()
            clock.jump(4.9)
            await trio.testing.wait_all_tasks_blocked()
            assert answers == []
            clock.jump(0.2)
            await trio.testing.wait_all_tasks_blocked()
        assert answers == [ino]
        assert mirror.metrics.stale_answers == 1
        if ask is not ask_listing:
            known = mirror.tree.known.attributes(ino)
            assert known is None, "it is still to be asked for"
        gate.open()
        await mirror.idle()
        # The answer that came late is the next one's.
        asked(mirror)
        assert await ask(mirror, ino) == ino
        assert asked(mirror) == 0
        assert mirror.metrics.stale_answers == 1


async def test_the_kernel_keeps_what_was_served_stale_for_a_second(
    files: Area, clock: trio.testing.MockClock, hours: Hours
) -> None:
    async with files.mount(mode=TTL, ttl=60, deadline=5) as mirror:
        await see_everything(mirror)
        hours.pass_by(61)
        gate = mirror.posix.faults.gate(*METADATA)
        async with trio.open_nursery() as nursery:

            async def look_up() -> None:
                found = await entry(mirror, ROOT_INO, b"d")
                assert found.entry_timeout == found.attr_timeout == UNANSWERED_SECONDS

            nursery.start_soon(look_up)
            await gate.arrived()
            clock.jump(5.1)
        gate.open()


async def test_nobody_waits_twice_for_a_source_that_hangs(
    files: Area, clock: trio.testing.MockClock, hours: Hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with files.mount(mode=TTL, ttl=60, deadline=5) as mirror:
        ino = await see_everything(mirror)
        hours.pass_by(61)
        gate = mirror.posix.faults.gate(*METADATA)
        monkeypatch.setattr(type(mirror.source), "responding", False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.tree.attributes.get, ino)
            await gate.arrived()
            clock.jump(0.01)
        assert mirror.metrics.stale_answers == 1
        gate.open()
        await mirror.idle()
        assert mirror.tree.known.attributes(ino) is not None


async def test_what_is_not_known_is_waited_for_and_open_waits_for_all(
    files: Area, clock: trio.testing.MockClock
) -> None:
    for mode, name in ((IMMUTABLE, b"a"), (OPEN, b"d")):
        async with files.mount(mode=mode, deadline=5) as mirror:
            if mode is OPEN:
                await see_everything(mirror)
            gate = mirror.posix.faults.gate(*METADATA)
            found: list[Entry] = []

            async def look_up(
                mirror: Mirror = mirror, name: bytes = name, found: list[Entry] = found
            ) -> None:
                found.append(await entry(mirror, ROOT_INO, name))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(look_up)
                await gate.arrived()
                clock.jump(3600)
                await trio.testing.wait_all_tasks_blocked()
                assert found == []
                gate.open()
            assert len(found) == 1
            assert mirror.metrics.stale_answers == 0


async def test_an_error_of_the_source_is_no_silence(files: Area, hours: Hours) -> None:
    async with files.mount(mode=TTL, ttl=60) as mirror:
        ino = await see_everything(mirror)
        hours.pass_by(61)
        mirror.posix.faults.fail("found", errno.EIO, times=2)
        with pytest.raises(OSError, match="Input/output"):
            await mirror.tree.attributes.get(ino)
        with pytest.raises(OSError, match="Input/output"):
            await entry(mirror, ROOT_INO, b"d")
        assert (await mirror.tree.attributes.get(ino)).node.ino == ino


async def test_an_answer_that_cannot_be_recorded(
    files: Area, hours: Hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number must be in the index before the kernel hears of it; a known one is."""
    async with files.mount(mode=TTL, ttl=60) as mirror:
        ino = await see_everything(mirror)
        hours.pass_by(61)

        monkeypatch.setattr(mirror.index, "record_found_each", disk_is_full)
        assert (await entry(mirror, ROOT_INO, b"d")).node.ino == ino
        assert mirror.metrics.stale_answers == 1
        with pytest.raises(OSError, match="cannot be recorded") as raised:
            await mirror.tree.names.lookup(ROOT_INO, b"a")
        assert raised.value.errno == errno.EIO


async def test_statfs_is_remembered(files: Area, clock: trio.testing.MockClock) -> None:
    async with files.mount(mode=OPEN, deadline=5) as mirror:
        first = await mirror.tree.attributes.statfs()
        assert await mirror.tree.attributes.statfs() == first
        assert mirror.posix.faults.calls["statvfs"] == 1
        clock.jump(attributes_module.STATFS_SECONDS + 1)
        gate = mirror.posix.faults.gate("statvfs")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.tree.attributes.statfs)
            await gate.arrived()
            clock.jump(5.1)
        assert mirror.metrics.stale_answers == 1
        gate.open()
