"""A pytest plugin: what failed by a limit of time alone is run once more, alone, and named.

With ``--repeat-late`` a run whose only failures are ``Late`` (or trio's TooSlowError) ends well if
these tests pass one after the other in a new process. They are listed as unstable, with their first
messages. All other failures stand, and so does any error at a test's end: a wrong byte, a crash, a
sanitizer's report, a leak or a hang (pytest-timeout) is never repeated.
"""

import subprocess
import sys
from collections.abc import Generator

import pytest
import trio

from tests.support.timing import Late

MOST_REPEATED = 10
"""More than these have another cause than a busy machine."""

_MARK = "late"
_unstable = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--repeat-late",
        action="store_true",
        help="run once more, alone, what failed by a limit of time; fail if it does so again",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.when != "teardown" and call.excinfo is not None:
        error = call.excinfo.value
        if isinstance(error, (Late, trio.TooSlowError)):
            first, _, _ = str(error).partition("\n")
            report.user_properties.append((_MARK, first or type(error).__name__))
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    # A process of pytest-xdist reports to the one that started it.
    if not config.getoption("--repeat-late") or hasattr(config, "workerinput") or not reporter:
        return
    failures = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
    late = {
        report.nodeid: words
        for report in failures
        for mark, words in getattr(report, "user_properties", ())
        if mark == _MARK
    }
    only_late = session.exitstatus == pytest.ExitCode.TESTS_FAILED and len(late) == len(failures)
    if only_late and 0 < len(late) <= MOST_REPEATED and _pass_alone(config, list(late)):
        session.exitstatus = pytest.ExitCode.OK
        config.stash[_unstable] = late


def _pass_alone(config: pytest.Config, tests: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    return subprocess.run([*command, "--", *tests], cwd=config.rootpath).returncode == 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if unstable := terminalreporter.config.stash.get(_unstable, None):
        terminalreporter.section("unstable: failed by a limit of time, passed when run alone")
        for test, words in unstable.items():
            terminalreporter.write_line(f"{test}: {words}")
