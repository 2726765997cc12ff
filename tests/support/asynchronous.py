"""Tests that are coroutines: the conftest of a folder takes the hook and the fixtures from here."""

import inspect

import pytest
import trio
import trio.testing


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Each in its own trio run, by its ``clock`` if it takes one."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def main() -> None:
        if "nursery" not in arguments:
            await test(**arguments)
            return
        async with trio.open_nursery() as nursery:
            await test(**{**arguments, "nursery": nursery})
            nursery.cancel_scope.cancel()

    clock = arguments.get("clock")
    assert clock is None or isinstance(clock, trio.testing.MockClock)
    trio.run(main, clock=clock)
    return True


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """It stands still until the test moves it."""
    return trio.testing.MockClock()


@pytest.fixture
def nursery() -> None:
    """One that is cancelled at the end of the test."""
