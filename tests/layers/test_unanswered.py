"""A source that does not answer: what is known is served, where the mount promises that."""

import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from monarchfs.metadata import attributes as attributes_module
from monarchfs.metadata import stale_on_timeout
from monarchfs.metadata.directories import LISTING_BATCH
from monarchfs.metadata.stale_on_timeout import GRACE_SECONDS, PROBE_SECONDS, Unanswered
from monarchfs.source.posix import Batches
from monarchfs.types import ROOT_INO, DirRef, Lane
from tests.support.faults import disk_is_full
from tests.support.lookups import METADATA, OPEN, TTL, Hours, asked, entry, fails, names
from tests.support.mirror import Area, Mirror, until


async def ask(mirror: Mirror, ino: int, what: str) -> int:
    """Who answers about ``d``; its number."""
    match what:
        case "a name":
            return (await entry(mirror, ROOT_INO, b"d")).node.ino
        case "attributes":
            return (await mirror.tree.attributes.get(ino)).node.ino
        case "attributes for an open":
            return (await mirror.tree.attributes.revalidated(ino)).ino
        case _:
            await mirror.tree.directories.open(ino)
            return ino


@asynccontextmanager
async def known_a_ttl_ago(files: Area, hours: Hours) -> AsyncIterator[tuple[Mirror, int]]:
    """And the number of ``d``."""
    async with files.mount(mode=TTL, ttl=60, deadline=5) as mirror:
        ino = await mirror.ino("d")
        await names(mirror, ino)
        hours.pass_by(61)
        yield mirror, ino


@pytest.mark.parametrize("what", ["a name", "attributes", "attributes for an open", "a listing"])
async def test_known_after_deadline(files: Area, clock: MockClock, hours: Hours, what: str) -> None:
    async with known_a_ttl_ago(files, hours) as (mirror, ino):
        gate = mirror.posix.faults.gate(*METADATA)
        answers = []

        async def answer() -> None:
            answers.append(await ask(mirror, ino, what))

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
        if what != "a listing":
            assert mirror.tree.known.attributes(ino) is None, "it is still to be asked for"
        gate.open()
        await until(lambda: not mirror.tree._asking.hanging, "the answer")
        # The answer that came late is the next one's.
        asked(mirror)
        assert await ask(mirror, ino, what) == ino
        assert asked(mirror) == 0
        assert mirror.metrics.stale_answers == 1


async def test_a_long_listing_is_no_silence(files: Area, clock: MockClock, hours: Hours) -> None:
    for number in range(LISTING_BATCH):
        files.write(f"d/{number}", b"")
    async with known_a_ttl_ago(files, hours) as (mirror, ino):
        files.write("d/new", b"")
        listed, token = mirror.posix.list, trio.lowlevel.current_trio_token()

        def slowly(directory: DirRef, batch: int) -> Batches:
            for entries in listed(directory, batch):
                token.run_sync_soon(clock.jump, 3)
                yield entries

        mirror.posix.list = slowly  # type: ignore[method-assign]
        assert b"new" in await names(mirror, ino)
        assert mirror.metrics.stale_answers == 0


async def test_how_long_others_have(clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as storage targets are known. tests/mount/test_hang.py has readers wait for some."""
    monkeypatch.setattr(stale_on_timeout, "MOST_UNEXPLAINED", 3)
    questions = Unanswered()
    assert questions.patience(("a",), [1], 5) == 5
    questions.add(("a",), [1])
    assert questions.patience(("a",), [1], 5) == questions.patience(("b",), [2, 1], 5) == 0
    assert questions.patience(("c",), [2], 5) == 5, "the other targets answer"
    # Each probe waits twice as long as the one before.
    for periods in (1, 2, 4):
        clock.jump(PROBE_SECONDS * (periods - 0.1))
        assert questions.patience(("b",), [1], 5) == 0
        clock.jump(PROBE_SECONDS * 0.2)
        assert questions.patience(("b",), [1], 5) == GRACE_SECONDS
    questions.alive([1])
    assert questions.patience(("b",), [1], 5) == GRACE_SECONDS
    assert questions.patience(("a",), [1], 5) == 0, "its own call hangs, nobody knows why"
    questions.answered(("a",))
    assert questions.patience(("b",), [1], 5) == 5
    # Nor is that known of what lies on two targets.
    for number, targets in enumerate(([1, 2], None, [1, 2])):
        assert not questions.full
        questions.add((number,), targets)
        assert questions.patience(("b",), [1], 5) == (GRACE_SECONDS if number < 2 else 0)
    questions.answered((0,))
    assert questions.patience(("b",), [1], 5) == GRACE_SECONDS


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
        mirror.posix.faults.fail("found", errno.EIO, times=3)
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
        monkeypatch.setattr(mirror.index.nodes, "record_found_each", disk_is_full)
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
