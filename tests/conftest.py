"""Fixtures shared by all tests, and what is said at their end."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import surroundings
from tests.support.fake_mounts import device_mode, no_own_device
from tests.support.golden import Golden
from tests.support.mounting import Bench, bench

pytest_plugins = ["tests.support.repeating"]

settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


BEFORE = pytest.StashKey[set[Path]]()
QUICK_FOLDERS = (
    "unit",
    "insight",
    "layers",
    "placement",
    "index",
    "source",
    "store",
    "model",
    "formats",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"only the tests of {', '.join(QUICK_FOLDERS)}, and those marked smoke",
    )
    parser.addoption("--slow", action="store_true", help="only those that --quick leaves out")
    parser.addoption(
        "--update-golden", action="store_true", help="write the files of tests/golden anew"
    )
    parser.addoption(
        "--record-scenarios", action="store_true", help="write tests/scenarios anew, as they go now"
    )


def in_quick_folder(path: Path) -> bool:
    tests = Path(__file__).parent
    return any(path.is_relative_to(tests / folder) for folder in QUICK_FOLDERS)


def is_quick(item: pytest.Item) -> bool:
    return in_quick_folder(item.path) or item.get_closest_marker("smoke") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which nothing is wanted is not imported."""
    if not collection_path.match("test_*.py"):
        return None
    if config.getoption("--slow") and in_quick_folder(collection_path):
        return True
    if config.getoption("--quick") and not in_quick_folder(collection_path):
        return "smoke" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--quick``: leave out what needs minutes. With ``--slow``: the others."""
    for option, wanted in (("--quick", True), ("--slow", False)):
        if config.getoption(option):
            config.hook.pytest_deselected(items=[i for i in items if is_quick(i) is not wanted])
            items[:] = [item for item in items if is_quick(item) is wanted]


def pytest_configure(config: pytest.Config) -> None:
    surroundings.heed_signals()
    no_own_device()
    settings.load_profile("busy machine")
    config.stash[BEFORE] = users_directories()


def users_directories() -> set[Path]:
    """Where commands of users without a session keep their sockets (`config.places`)."""
    return set(Path("/tmp").glob("monarchfs-[0-9]*"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """What commands of other users leave behind, empty, goes; not while others run tests."""
    if not hasattr(config, "workerinput"):
        before = config.stash[BEFORE]
        for left in users_directories() - before:
            for path in (left / "run", left):
                with suppress(OSError):  # somebody else's run began meanwhile
                    path.rmdir()


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
def golden(pytestconfig: pytest.Config) -> Golden:
    """``golden(name, text)``: the text is that of a file in tests/golden."""
    return Golden(pytestconfig.getoption("--update-golden"))


@pytest.fixture
def work() -> Iterator[Bench]:
    """A directory with real mounts, all ended afterwards."""
    with bench() as opened:
        yield opened


@pytest.fixture
def open_device() -> Iterator[None]:
    """/dev/fuse as on most machines: everybody may open it."""
    with device_mode(0o666):
        yield
