"""What the calibration finds where the answer is known on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.calibrate import WEATHER_SEED, left_by, measure_counters
from bench.kernelparts import delayed_mirror
from bench.pfs import PROFILES, ParallelFileSystem
from bench.probes import Data
from bench.report import Result
from bench.task import Task
from tests.support import surroundings
from tests.support.mounting import fuse_mounts, processes_about, requires_fuse, requires_root


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert fuse_mounts(str(tmp_path)) == []
    assert processes_about(str(tmp_path)) == []


@requires_root
@requires_fuse
@surroundings.program("strace")
@surroundings.program("gcc")
def test_the_counters_say_what_strace_saw(place: Path) -> None:
    (place / "data").mkdir()
    data = Data(place / "data", 8 << 20, 30)
    result = Result("calibrate", "")
    with ParallelFileSystem(data.root, place / "pfs", PROFILES["fast"]) as pfs:
        measure_counters(Task(place), result, pfs, data, place)
    assert len(result.rows) == 5
    assert [(row.what, row.value) for row in result.rows if not row.holds] == []
    assert not any(row.what.endswith("of 0") for row in result.rows), result.rows


@requires_root
@requires_fuse
@surroundings.program("bindfs")
@surroundings.program("strace")
def test_a_delayed_mirror_leaves_nothing(place: Path) -> None:
    (place / "data").mkdir()
    with delayed_mirror(place / "data", place / "mirror", 0.001, 0.001) as mirror:
        assert fuse_mounts(str(place)) == [str(mirror)]


def test_what_the_noise_leaves_is_the_bandwidth_less_the_shares() -> None:
    noisy = replace(PROFILES["crowded"], bandwidth=100.0, noise_period=2.0)
    first, second = noisy.share(WEATHER_SEED, 0.0), noisy.share(WEATHER_SEED, 2.0)
    assert left_by(noisy, 3.0) == pytest.approx(200 * (1 - first) + 100 * (1 - second))
    assert left_by(noisy.quiet(), 3.0) == pytest.approx(300)
