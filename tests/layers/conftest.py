"""Asynchronous tests, each in its own trio run; nothing is left open after any test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from monarchfs.cache import health
from tests.support.asynchronous import arguments_of
from tests.support.lookups import Hours
from tests.support.mirror import Area, content
from tests.support.processes import descriptors


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that takes ``clock`` runs by it."""
    arguments = arguments_of(pyfuncitem)
    if arguments is None:
        return None
    clock = arguments.get("clock")
    assert clock is None or isinstance(clock, trio.testing.MockClock)
    trio.run(partial(pyfuncitem.obj, **arguments), clock=clock)
    return True


@pytest.fixture
def clock() -> trio.testing.MockClock:
    """It stands still until the test moves it."""
    return trio.testing.MockClock()


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    made = Hours()
    monkeypatch.setattr(time, "time_ns", made.time_ns)
    return made


@pytest.fixture
def area(tmp_path: Path) -> Area:
    return Area(tmp_path)


@pytest.fixture
def files(area: Area) -> Area:
    """A few small files, for tests that do not bring their own."""
    area.write("a", content(10))
    area.write("d/b", content(20))
    area.write("d/c", content(30))
    return area


@pytest.fixture(autouse=True)
def probes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that failed is probed whenever the cache is looked after, not seconds later."""
    monkeypatch.setattr(health, "FIRST_PROBE_SECONDS", 0.0)
    monkeypatch.setattr(health, "LAST_PROBE_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before = descriptors()
    yield
    end = time.monotonic() + 5
    while (left := descriptors() - before) and time.monotonic() < end:
        time.sleep(0.002)  # threads close what belongs to the source
    assert not left
