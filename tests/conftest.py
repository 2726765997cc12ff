"""Fixtures shared by all tests, and what is said at their end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests import surroundings
from tests.mounting import Bench, bench

settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_configure() -> None:
    surroundings.heed_signals()
    settings.load_profile("busy machine")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [
        (report.nodeid.partition("::")[0], report.longrepr[2].removeprefix("Skipped: "))
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple)
    ]
    outcomes = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    total = sum(len(terminalreporter.getreports(outcome)) for outcome in outcomes)
    lines = list(surroundings.not_tested(skipped, total))
    if lines:
        terminalreporter.section("not tested")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def work() -> Iterator[Bench]:
    """A directory with real mounts, all ended afterwards."""
    with bench() as opened:
        yield opened
