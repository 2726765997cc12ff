"""What several tests on real mounts begin with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faking import Area, area
from tests.mounting import Bench, FaultySource


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
