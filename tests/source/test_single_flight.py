"""Single flight."""

from __future__ import annotations

import errno
import traceback

import pytest
import trio
import trio.testing

from monarchfs.source import SingleFlight
from monarchfs.types import MonarchError, SourceChanged
from tests.source.tools import soon


async def test_callers_with_one_key_share_one_run(nursery: trio.Nursery) -> None:
    runs = []
    flights = SingleFlight(nursery)
    gate = trio.Event()

    async def fn() -> int:
        runs.append(True)
        await gate.wait()
        return len(runs)

    results = []

    async def caller(key: object) -> None:
        results.append(await flights.run_once(key, fn))

    async with trio.open_nursery() as callers:
        with trio.CancelScope() as killed:
            async with trio.open_nursery() as doomed:
                doomed.start_soon(caller, "a")
                await trio.testing.wait_all_tasks_blocked()
                killed.cancel()
        for _ in range(3):
            callers.start_soon(caller, "a")
        await trio.testing.wait_all_tasks_blocked()
        assert (len(runs), len(flights)) == (1, 1)
        gate.set()
    assert results == [1, 1, 1]
    assert len(flights) == 0
    assert await flights.run_once("a", fn) == 2


class Awkward(MonarchError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "bad", "name"), SourceChanged("changed"), Awkward(1, 2)]
)
async def test_every_caller_gets_the_error_in_its_own_raise(
    error: Exception, nursery: trio.Nursery
) -> None:
    flights = SingleFlight(nursery)
    depths = []
    seen = []

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise error

    async def caller() -> None:
        try:
            await flights.run_once("key", fail)
        except type(error) as caught:
            depths.append(len(traceback.extract_tb(caught.__traceback__)))
            seen.append(caught)

    async with trio.open_nursery() as callers:
        for _ in range(10):
            callers.start_soon(caller)
    assert len(seen) == 10
    assert len(set(depths)) == 1
    assert {str(caught) for caught in seen} == {str(error)}
    if isinstance(error, OSError):
        assert len({id(caught) for caught in seen}) == 10
        assert {getattr(caught, "errno", None) for caught in seen} == {errno.EIO}


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


async def test_a_bug_in_a_run_that_nobody_waits_for_is_logged(
    caplog: pytest.LogCaptureFixture, nursery: trio.Nursery
) -> None:
    flights = SingleFlight(nursery)
    gate = trio.Event()

    async def fn() -> None:
        await gate.wait()
        raise ZeroDivisionError

    with trio.move_on_after(0.01):
        await flights.run_once("key", fn)
    gate.set()
    await soon(lambda: len(flights) == 0)
    assert "'key' failed" in caplog.text
