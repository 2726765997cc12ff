"""Sources that nodes share."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.layers.conftest import pytest_pyfunc_call as pytest_pyfunc_call
from tests.peers.nodes import FILES, write_source
from tests.support.mounting import Bench

MiB = 1 << 20
LARGE = [2 * MiB, 2 * MiB, 3 * MiB, 3 * MiB, 4 * MiB, 5 * MiB + 1, 9 * MiB, 66 * MiB + 12345]


def small(count: int) -> list[int]:
    rng = random.Random(3)
    return [rng.randint(1, 60_000) for _ in range(count)]


@pytest.fixture
def source(work: Bench) -> Path:
    return write_source(work.path / "small", small(FILES))


@pytest.fixture
def large(work: Bench) -> Path:
    path = write_source(work.path / "large", [*LARGE, 0])
    (with_holes,) = path.rglob(f"{len(LARGE):04d}")
    with open(with_holes, "r+b") as file:
        file.truncate(30 * MiB)
        os.pwrite(file.fileno(), random.Random(4).randbytes(3 * MiB), 11 * MiB)
    os.utime(with_holes, (1.6e9, 1.6e9))
    return path


@pytest.fixture
def mixed(work: Bench) -> Path:
    return write_source(work.path / "mixed", [*small(FILES // 2), *LARGE])
