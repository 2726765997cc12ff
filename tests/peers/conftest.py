"""Sources that nodes share."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.peers.nodes import FILES, write_source
from tests.support.mounting import Bench

MiB = 1 << 20
LARGE = [2 * MiB, 5 * MiB + 1, 20 * MiB, 66 * MiB + 12345, 3 * MiB, 9 * MiB, 140 * MiB]


@pytest.fixture
def source(work: Bench) -> Path:
    """Small files in some directories."""
    rng = random.Random(3)
    return write_source(work.path / "small", [rng.randint(1, 60_000) for _ in range(FILES)])


@pytest.fixture
def large(work: Bench) -> Path:
    """Some large files, one with holes."""
    path = write_source(work.path / "large", [*LARGE, 0])
    with_holes = path / "class 0" / "x" / "0007"
    with open(with_holes, "r+b") as file:
        file.truncate(30 * MiB)
        os.pwrite(file.fileno(), random.Random(4).randbytes(3 * MiB), 11 * MiB)
    os.utime(with_holes, (1.6e9, 1.6e9))
    return path


@pytest.fixture(params=["source", "large"], ids=["small files", "large files"])
def either(request: pytest.FixtureRequest) -> Path:
    """A directory called ``small`` or ``large``, with such files."""
    path: Path = request.getfixturevalue(request.param)
    return path
