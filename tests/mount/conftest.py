"""What several tests on real mounts begin with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_mounts import NOBODY, Area, area, device_mode
from tests.support.mounting import Bench, FaultySource
from tests.support.processes import Processes


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def root_work(place: Path) -> Iterator[Area]:
    """Root's mounts with a worker that is a fake."""
    with area(place, None) as opened:
        yield opened


@pytest.fixture
def faulty(work: Bench) -> Iterator[FaultySource]:
    """A source that fails and hangs as it is told, without files. It works again at the end."""
    backing = work.path / "backing"
    backing.mkdir()
    source = work.faulty_source(backing)
    yield source
    if source.process.poll() is None:
        source.faults()


@pytest.fixture
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.close()


@pytest.fixture(params=[None, NOBODY], ids=["root", "user"])
def fake_area(place: Path, request: pytest.FixtureRequest) -> Iterator[Area]:
    """The mounts of root and of a user, with a worker that is a fake."""
    with device_mode(0o666), area(place, request.param) as opened:
        yield opened
