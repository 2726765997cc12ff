"""Calls into the source: those that are stuck lend their slots, those that are cancelled leave
nothing open, and those that want the same share an answer."""

import errno
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import outcome
import pytest
import trio
import trio.testing

from monarchfs.source import source as source_module
from monarchfs.source.lanes import Call, LaneThreads, lend
from monarchfs.source.releases import FEW_THREADS, MOST_THREADS, Releases
from monarchfs.source.single_flight import SingleFlight
from monarchfs.source.source import Source
from monarchfs.types import Lane, MonarchError, SourceChanged
from tests.source.tools import open_descriptors, soon
from tests.support.faults import FaultySource
from tests.support.timing import wait_for

DEMAND, BACKGROUND = Lane.DEMAND, Lane.BACKGROUND


async def hang(source: Source, lane: Lane = DEMAND) -> None:
    """Where the test has a gate at ``access``."""
    await source.call(lane, source.posix.access, source.root, b"file", os.R_OK)


async def test_lanes_do_not_wait_for_others(hanging: FaultySource, nursery: trio.Nursery) -> None:
    source = Source(hanging, demand_threads=1, background_threads=1)
    gate = hanging.faults.gate("access")
    nursery.start_soon(hang, source, BACKGROUND)
    await gate.arrived()
    assert (await source.call(DEMAND, source.posix.stat, source.root, b"file")).size == 8


async def test_stuck_calls_lend_their_slots(hanging: FaultySource, nursery: trio.Nursery) -> None:
    source = Source(hanging, demand_threads=2, background_threads=1, stuck_seconds=0.05)
    await nursery.start(source.watch)
    gate = hanging.faults.gate("access")
    for _ in range(5):
        nursery.start_soon(hang, source)
    assert (await source.call(DEMAND, source.posix.stat, source.root, b"file")).size == 8
    await soon(lambda: source.counters.stuck == 5)
    assert source.demand.limiter.total_tokens == 7
    assert source.background.limiter.total_tokens == 1
    gate.open()
    await soon(lambda: source.counters.stuck == 0)
    assert source.demand.limiter.total_tokens == 2
    await soon(lambda: source.demand.limiter.borrowed_tokens == 0)


async def test_a_cancelled_call_is_stuck_until_its_thread_returns(
    hanging: FaultySource, nursery: trio.Nursery
) -> None:
    source = Source(hanging, demand_threads=1, stuck_seconds=0.05)
    await nursery.start(source.watch)
    gate = hanging.faults.gate("access")
    with trio.move_on_after(0.01) as scope:
        await hang(source)
    assert scope.cancelled_caught
    await gate.arrived()
    assert (await source.call(DEMAND, source.posix.stat, source.root, b"file")).size == 8
    assert source.demand.limiter.borrowed_tokens == 1
    gate.open()
    await soon(lambda: source.demand.limiter.borrowed_tokens == 0)
    await soon(lambda: source.demand.limiter.total_tokens == 1)


def test_lending_is_bounded_and_serves_demand_first() -> None:
    releases = Releases()
    demand, background = (LaneThreads(DEMAND, 4, releases), LaneThreads(BACKGROUND, 2, releases))
    for lane, count in ((demand, 3), (background, 5)):
        for _ in range(count):
            lane.running[Call(lane, int, (), None, None)] = None
    young = Call(demand, int, (), None, None)
    young.started = time.monotonic()
    demand.running[young] = None
    assert lend((demand, background), 60, 5) == 8
    assert demand.limiter.total_tokens == 7
    assert background.limiter.total_tokens == 4
    assert lend((demand, background), 60, 2) == 8
    assert demand.limiter.total_tokens == 6
    assert background.limiter.total_tokens == 2
    demand.running.clear()
    background.running.clear()
    assert lend((demand, background), 60, 5) == 0
    assert (demand.limiter.total_tokens, background.limiter.total_tokens) == (4, 2)


async def test_responding_goes_by_a_deadline(hanging: FaultySource, nursery: trio.Nursery) -> None:
    source = Source(hanging, deadline=0.05)
    assert source.responding
    gate = hanging.faults.gate("access")
    nursery.start_soon(hang, source, BACKGROUND)
    await gate.arrived()
    nursery.start_soon(hang, source)
    await gate.arrived(2)
    await soon(lambda: not source.responding)
    # One dead storage target does not make all of the source dead.
    await source.call(DEMAND, source.posix.stat, source.root, b"file")
    assert source.responding
    await soon(lambda: not source.responding)
    gate.open()
    await soon(lambda: source.responding)


async def test_a_file_opened_for_a_cancelled_caller_is_closed(hanging: FaultySource) -> None:
    source, gate = Source(hanging), hanging.faults.gate("after_open")
    before = open_descriptors()
    async with trio.open_nursery() as callers:
        callers.start_soon(source.open, source.root, b"file", DEMAND)
        await gate.arrived()
        callers.cancel_scope.cancel()
    assert open_descriptors() == before + 1
    gate.open()
    await soon(lambda: open_descriptors() == before)


async def test_a_thread_that_outlives_the_run_still_closes_its_file(
    hanging: FaultySource, nursery: trio.Nursery
) -> None:
    """The fixtures let it go on, and see that nothing is left open."""
    source = Source(hanging)
    fd, _ = await source.open(source.root, b"file", DEMAND)
    gate = hanging.faults.gate("after_open", "read")
    nursery.start_soon(source.open, source.root, b"file", DEMAND)
    nursery.start_soon(source.read, fd, 1, 10, DEMAND)
    await gate.arrived(2)
    source.close_soon(fd)


async def test_a_source_that_was_disconnected_is_asked_once_more(
    hanging: FaultySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For who waits for it, and where asking twice is the same as asking once."""
    source, faults = Source(hanging, reconnect_seconds=0.01), hanging.faults

    async def calls(lane: Lane, times: int, code: int = errno.EIO) -> tuple[int, int]:
        """How many calls, of which the first ones fail, and how it ended."""
        before = faults.calls.get("stat", 0)
        faults.fail("stat", code, times=times)
        try:
            await source.call(lane, hanging.stat, source.root, b"file")
            result = 0
        except OSError as error:
            result = error.errno or 0
        faults.end()
        return faults.calls["stat"] - before, result

    assert await calls(DEMAND, 1) == (2, 0)
    assert await calls(DEMAND, 1, errno.ENOTCONN) == (2, 0)
    assert await calls(DEMAND, 1, errno.EACCES) == (1, errno.EACCES)
    assert await calls(BACKGROUND, 1) == (1, errno.EIO)
    assert await calls(DEMAND, 9) == (2, errno.EIO)
    assert await calls(DEMAND, 1) == (1, errno.EIO)  # for a while
    assert source.counters.errors == 6
    monkeypatch.setattr(source_module, "ONE_MORE_TRY_EVERY_SECONDS", 0.0)
    source = Source(hanging, reconnect_seconds=0.0)
    for _ in range(2):
        assert await calls(DEMAND, 9) == (2, errno.EIO)
    faults.fail("list", errno.EIO, times=1)
    with pytest.raises(OSError, match="Input/output"):
        async with aclosing(source.list(source.root, DEMAND)) as batches:
            await batches.__anext__()


async def test_a_cancelled_listing_closes_it(hanging: FaultySource, nursery: trio.Nursery) -> None:
    source = Source(hanging, demand_threads=1)
    before = open_descriptors()
    async with aclosing(source.list(source.root, DEMAND, batch=1)) as batches:
        assert len(await batches.__anext__()) == 1
        assert open_descriptors() > before
        gate = hanging.faults.gate("access")
        nursery.start_soon(hang, source)
        await gate.arrived()
        with trio.move_on_after(0) as scope:
            await batches.__anext__()
        assert scope.cancelled_caught
        await soon(lambda: open_descriptors() == before)


def test_a_call_that_finished_as_its_caller_was_cancelled_is_disposed_of() -> None:
    lane = LaneThreads(DEMAND, 1, Releases())
    disposed: list[str] = []
    done = threading.Event()

    def dispose(result: str) -> None:
        disposed.append(result)
        done.set()

    call = Call(lane, str.upper, ("result",), dispose, None)
    assert call() == "RESULT"
    call.abandon()
    assert done.wait(10)
    assert disposed == ["RESULT"]

    never = Call(lane, disposed.append, ("ran",), None, done.clear)
    never.abandon()
    wait_for(lambda: not done.is_set(), "the turn to end")
    assert never() is None
    assert disposed == ["RESULT"]


async def test_a_listing_left_early_or_cancelled_closes_its_directory(
    root: Path, hanging: FaultySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(hanging)
    before = open_descriptors()
    async with aclosing(source.list(source.root, DEMAND, batch=1)) as batches:
        async for entries in batches:
            assert len(entries) == 1
            break
    await soon(lambda: open_descriptors() == before)

    gate, real_fsencode = hanging.faults.gate(), os.fsencode

    def slow_fsencode(name: str) -> bytes:
        gate.meet()
        return real_fsencode(name)

    monkeypatch.setattr(os, "fsencode", slow_fsencode)
    async with (
        aclosing(source.list(source.root, DEMAND)) as batches,
        trio.open_nursery() as callers,
    ):
        callers.start_soon(batches.__anext__)
        await gate.arrived()
        callers.cancel_scope.cancel()
    assert open_descriptors() > before
    gate.open()
    await soon(lambda: open_descriptors() == before)


class Fake:
    """Threads that are there once they are asked for, unless ``refuses``."""

    refuses = False

    def __call__(
        self, run: Callable[[], None], deliver: Callable[[outcome.Outcome[None]], None]
    ) -> None:
        if self.refuses:
            raise RuntimeError("can't start new thread")
        threading.Thread(target=lambda: deliver(outcome.capture(run)), daemon=True).start()


def test_few_threads_close_files_and_more_where_those_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    clock = SimpleNamespace(seconds=0.0)
    clock.monotonic = lambda: clock.seconds
    monkeypatch.setattr("monarchfs.source.releases.time", clock)
    done: list[int] = []  # list.append() is atomic
    releases = Releases(stuck_seconds=1.0, start_thread=Fake())

    def wait(number: int) -> None:
        assert hang.wait(30)
        done.append(number)

    for number in range(1000):
        releases.soon(partial(wait, number))
    assert releases.threads == FEW_THREADS
    for _ in range(2 * MOST_THREADS):
        clock.seconds += 1
        releases.go_on()
    assert (releases.threads, releases.pending) == (MOST_THREADS, 1000)
    hang.set()
    wait_for(lambda: not releases.pending, "all files to be closed")
    assert sorted(done) == list(range(1000))
    assert releases.threads == 0


def test_what_fails_is_logged_and_the_rest_is_done(caplog: pytest.LogCaptureFixture) -> None:
    start = Fake()
    releases = Releases(start_thread=start)
    start.refuses = True
    ends = os.pipe()
    releases.soon(lambda: os.close(ends[0]))
    releases.soon(lambda: os.close(-1))
    releases.soon(lambda: os.close(ends[1]))
    assert (releases.pending, releases.threads) == (3, 0)
    assert caplog.text.count("wait for a thread: can't start new thread") == 1
    start.refuses = False
    releases.go_on()
    wait_for(lambda: not releases.pending, "all files to be closed")
    assert "Bad file descriptor" in caplog.text
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


class Awkward(MonarchError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "bad", "name"), SourceChanged("changed"), Awkward(1, 2)]
)
async def test_every_caller_has_its_own_error(error: Exception, nursery: trio.Nursery) -> None:
    flights = SingleFlight(nursery)
    seen = []

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise error

    async def caller() -> None:
        with pytest.raises(type(error)) as caught:
            await flights.run_once("key", fail)
        seen.append(caught.value)

    async with trio.open_nursery() as callers:
        for _ in range(10):
            callers.start_soon(caller)
    assert [str(one) for one in seen] == [str(error)] * 10
    assert len({len(traceback.extract_tb(one.__traceback__)) for one in seen}) == 1
    if isinstance(error, OSError):
        assert len({id(one) for one in seen}) == 10
        assert {getattr(one, "errno", None) for one in seen} == {errno.EIO}


async def test_a_run_whose_nursery_is_cancelled_lands_with_an_error() -> None:
    async with trio.open_nursery() as callers, trio.open_nursery() as runs:
        flights = SingleFlight(runs)

        async def caller() -> None:
            with pytest.raises(OSError, match="not connected") as caught:
                await flights.run_once("key", trio.sleep_forever)
            assert caught.value.errno == errno.ENOTCONN

        callers.start_soon(caller)
        await trio.testing.wait_all_tasks_blocked()
        runs.cancel_scope.cancel()
