"""A source that does not answer: what is known is served, where the mount promises that."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from monarchfs.metadata import attributes as attributes_module
from monarchfs.metadata import unanswered
from monarchfs.metadata.freshness import UNANSWERED_SECONDS
from monarchfs.metadata.tree import Entry
from monarchfs.metadata.unanswered import GRACE_SECONDS, PROBE_SECONDS
from monarchfs.source.posix import Found, FoundEach, _each
from monarchfs.types import ROOT_INO, DirRef, FreshnessMode, Lane
from tests.support.faults import Gate, disk_is_full
from tests.support.layouts import plain
from tests.support.lookups import IMMUTABLE, METADATA, OPEN, TTL, Hours, asked, entry, fails, names
from tests.support.mirror import Area, Mirror, until

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


@asynccontextmanager
async def known_a_ttl_ago(files: Area, hours: Hours) -> AsyncIterator[tuple[Mirror, int]]:
    """And the number of ``d``."""
    async with files.mount(mode=TTL, ttl=60, deadline=5) as mirror:
        ino = await see_everything(mirror)
        hours.pass_by(61)
        yield mirror, ino


@pytest.mark.parametrize("ask", ASKS)
async def test_what_is_known_is_served_when_the_deadline_is_over(
    files: Area, clock: MockClock, hours: Hours, ask: Ask
) -> None:
    async with known_a_ttl_ago(files, hours) as (mirror, ino):
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
            assert mirror.tree.known.attributes(ino) is None, "it is still to be asked for"
        gate.open()
        await until(lambda: not mirror.tree._asking.hanging, "the answer")
        # The answer that came late is the next one's.
        asked(mirror)
        assert await ask(mirror, ino) == ino
        assert asked(mirror) == 0
        assert mirror.metrics.stale_answers == 1


async def test_the_kernel_keeps_it_briefly(files: Area, clock: MockClock, hours: Hours) -> None:
    async with known_a_ttl_ago(files, hours) as (mirror, _):

        async def look_up() -> None:
            found = await entry(mirror, ROOT_INO, b"d")
            assert found.entry_timeout == found.attr_timeout == UNANSWERED_SECONDS

        gate = mirror.posix.faults.gate(*METADATA)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look_up)
            await gate.arrived()
            clock.jump(5.1)
        gate.open()


async def test_nobody_waits_twice_for_a_source_that_hangs(
    files: Area, clock: MockClock, hours: Hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with known_a_ttl_ago(files, hours) as (mirror, ino):
        gate = mirror.posix.faults.gate(*METADATA)
        monkeypatch.setattr(type(mirror.source), "responding", False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mirror.tree.attributes.get, ino)
            await gate.arrived()
            clock.jump(0.01)
        assert mirror.metrics.stale_answers == 1
        gate.open()
        await until(lambda: mirror.tree.known.attributes(ino) is not None, "the answer")


class Targets:
    """Of a source that has the files of ``layouts`` on these storage targets, and ``tells``. What
    lies on one in ``dead`` hangs until the gate is opened."""

    def __init__(self, mirror: Mirror, layouts: dict[str, list[int]], tells: bool) -> None:
        self.dead: set[int] = set()
        self.gate = mirror.posix.faults.gate("dead target")
        posix, found = mirror.posix, mirror.posix.found

        def find(directory: DirRef, name: bytes) -> Found:
            posix.faults.meet("asked")
            if self.dead.intersection(layouts.get(name.decode(), ())):
                posix.faults.meet("dead target")
            return found(directory, name)

        def getxattr(directory: DirRef, name: bytes, attribute: bytes) -> bytes:
            if (targets := layouts.get(name.decode())) is None:
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
            return plain(targets)

        def find_each(directory: DirRef, names: list[bytes], seconds: float) -> FoundEach:
            return _each(partial(find, directory), names, seconds)

        posix.found = find  # type: ignore[method-assign]
        posix.found_each = find_each  # type: ignore[assignment]
        posix.getxattr = getxattr  # type: ignore[method-assign]
        posix.has_layouts = tells
        self._calls = posix.faults.calls

    def asked(self) -> int:
        return self._calls.pop("asked", 0)


async def look_up_stale(
    mirror: Mirror, clock: MockClock, gate: Gate, name: str, seconds: float
) -> None:
    """Of a file that hangs: it is waited for so long, and not less."""
    stale = mirror.metrics.stale_answers
    async with trio.open_nursery() as nursery:
        nursery.start_soon(entry, mirror, ROOT_INO, name.encode())
        await gate.arrived(gate.waiting + 1)
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(seconds * 0.9)
        await trio.testing.wait_all_tasks_blocked()
        assert mirror.metrics.stale_answers == stale
        clock.jump(seconds * 0.2)
    assert mirror.metrics.stale_answers == stale + 1


@asynccontextmanager
async def a_ttl_ago(
    area: Area, hours: Hours, layouts: dict[str, list[int]], *, tells: bool = True
) -> AsyncIterator[tuple[Mirror, Targets]]:
    """A mount for which f0 to f9 were known to be as they are until a moment ago."""
    names = [f"f{number}" for number in range(10)]
    for name in names:
        area.write(name, b"x")
    hours.pass_by(5)
    async with area.mount(mode=TTL, ttl=60, deadline=5, copies=False) as mirror:
        targets = Targets(mirror, layouts, tells)
        for name in names:
            await mirror.node(name)
        hours.pass_by(61)
        yield mirror, targets


async def test_a_storage_target_that_hangs(area: Area, clock: MockClock, hours: Hours) -> None:
    layouts = {f"f{number}": [number % 3] for number in range(10)}
    layouts["f9"] = [1, 2]
    async with a_ttl_ago(area, hours, layouts) as (mirror, targets):
        targets.dead = {1}
        await look_up_stale(mirror, clock, targets.gate, "f1", 5)
        targets.asked()
        stale = mirror.metrics.stale_answers
        for _ in range(2):
            for name in ("f1", "f4", "f7", "f9"):
                await mirror.node(name)
                await mirror.tree.attributes.revalidated(await mirror.ino(name))
        assert targets.asked() == 0, "one call of the source waits, and no more are made"
        assert mirror.metrics.stale_answers > stale
        stale = mirror.metrics.stale_answers
        for name in ("f0", "f2", "f3", "f5"):
            await mirror.node(name)
        assert targets.asked() == 4
        assert mirror.metrics.stale_answers == stale, "the other targets answer"
        targets.dead.add(2)
        await look_up_stale(mirror, clock, targets.gate, "f8", 5)
        targets.dead.clear()
        targets.asked()
        targets.gate.open()
        await until(lambda: not mirror.tree._asking.hanging, "the answers")
        await mirror.node("f4")
        assert targets.asked() >= 1, "now, or with the names that were asked for meanwhile"
        assert mirror.metrics.stale_answers == stale + 1


async def test_a_target_is_found_to_be_back(area: Area, clock: MockClock, hours: Hours) -> None:
    layouts = {f"f{number}": [1] for number in range(10)}
    async with a_ttl_ago(area, hours, layouts) as (mirror, targets):
        targets.dead = {1}
        await look_up_stale(mirror, clock, targets.gate, "f1", 5)
        clock.jump(PROBE_SECONDS)
        await look_up_stale(mirror, clock, targets.gate, "f2", GRACE_SECONDS)
        targets.asked()
        clock.jump(PROBE_SECONDS)
        await mirror.node("f3")
        assert targets.asked() == 0, "each probe waits twice as long as the one before"
        targets.dead.clear()
        clock.jump(PROBE_SECONDS)
        stale = mirror.metrics.stale_answers
        await mirror.node("f3")
        await mirror.node("f4")
        assert targets.asked() == 2
        assert mirror.metrics.stale_answers == stale
        await mirror.node("f1")
        assert mirror.metrics.stale_answers == stale + 1, "its own call hangs"


@pytest.mark.parametrize("tells", [False, True])
async def test_what_hangs_for_an_unknown_reason_is_waited_for_once(
    area: Area,
    clock: MockClock,
    hours: Hours,
    monkeypatch: pytest.MonkeyPatch,
    tells: bool,
) -> None:
    """Of files that lie on two targets, either of which may be the one that hangs."""
    monkeypatch.setattr(unanswered, "MOST_UNEXPLAINED", 3)
    hung = {f"f{number}": [1, 2] for number in range(5)}
    async with a_ttl_ago(area, hours, hung, tells=tells) as (mirror, targets):
        targets.dead = {1}
        await look_up_stale(mirror, clock, targets.gate, "f0", 5)
        await mirror.node("f0")
        await mirror.node("f9")
        stale = mirror.metrics.stale_answers
        assert stale == 2, "what answers is asked"
        await look_up_stale(mirror, clock, targets.gate, "f1", GRACE_SECONDS)
        await look_up_stale(mirror, clock, targets.gate, "f2", GRACE_SECONDS)
        targets.asked()
        for name in ("f0", "f1", "f2", "f3", "f4", "f8"):
            await mirror.node(name)
        assert targets.asked() == 0, "so many threads may hang"
        targets.gate.open()
        await until(lambda: not mirror.tree._asking.hanging, "the answers")
        await mirror.node("f3")
        assert targets.asked() >= 1


@pytest.mark.parametrize(("mode", "name"), [(IMMUTABLE, b"a"), (OPEN, b"d")])
async def test_what_is_not_known_is_waited_for_and_open_waits_for_all(
    files: Area, clock: MockClock, mode: FreshnessMode, name: bytes
) -> None:
    async with files.mount(mode=mode, deadline=5) as mirror:
        if mode is OPEN:
            await see_everything(mirror)
        gate = mirror.posix.faults.gate(*METADATA)
        found: list[Entry] = []

        async def look_up() -> None:
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


@pytest.mark.parametrize("what", ["a name", "a listing"])
async def test_a_reader_does_not_wait_for_what_is_asked_for_nobody(files: Area, what: str) -> None:
    """That may wait for a thread, or ten seconds for a peer."""
    async with files.mount() as mirror:
        gate = mirror.posix.faults.gate(*METADATA)
        ask: Callable[[Lane], Awaitable[object]] = partial(mirror.tree.directories.open, ROOT_INO)
        if what == "a name":
            ask = partial(mirror.tree.names.lookup, ROOT_INO, b"a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, Lane.BACKGROUND)
            await gate.arrived()
            for lane in (Lane.DEMAND, Lane.DEMAND, Lane.BACKGROUND):
                nursery.start_soon(ask, lane)
            await until(lambda: gate.waiting == 2, "the source to be asked again")
            gate.open()


async def test_an_error_of_the_source_is_no_silence(files: Area, hours: Hours) -> None:
    async with known_a_ttl_ago(files, hours) as (mirror, ino):
        mirror.posix.faults.fail("found", errno.EIO, times=2)
        with fails(errno.EIO):
            await mirror.tree.attributes.get(ino)
        with fails(errno.EIO):
            await entry(mirror, ROOT_INO, b"d")
        assert (await mirror.tree.attributes.get(ino)).node.ino == ino


async def test_an_answer_that_cannot_be_recorded(
    files: Area, hours: Hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number must be in the index before the kernel hears of it; a known one is."""
    async with known_a_ttl_ago(files, hours) as (mirror, ino):
        monkeypatch.setattr(mirror.index.tree, "record_found_each", disk_is_full)
        assert (await entry(mirror, ROOT_INO, b"d")).node.ino == ino
        assert mirror.metrics.stale_answers == 1
        with fails(errno.EIO):
            await mirror.tree.names.lookup(ROOT_INO, b"a")


async def test_statfs_is_remembered(files: Area, clock: MockClock) -> None:
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
