"""Asynchronous tests, each in its own trio run; nothing is left open after any test."""

import time
from pathlib import Path

import pytest

from monarchfs.cache import tiers
from tests.support.asynchronous import clock as clock
from tests.support.asynchronous import pytest_pyfunc_call as pytest_pyfunc_call
from tests.support.lookups import Hours
from tests.support.mirror import Area, content
from tests.support.processes import nothing_left_open as nothing_left_open


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
    monkeypatch.setattr(tiers, "FIRST_PROBE_SECONDS", 0.0)
    monkeypatch.setattr(tiers, "LAST_PROBE_SECONDS", 0.0)
