"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mounting import Bench, bench


@pytest.fixture
def work() -> Iterator[Bench]:
    """A directory with real mounts, all ended afterwards."""
    with bench() as opened:
        yield opened
