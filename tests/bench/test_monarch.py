"""MONARCH's experiment: its data, its jobs, its little memory, and what it makes of the runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import shards
from bench.arms import (
    COLD,
    COPIED,
    DIRECT,
    FRAMEWORK_CACHE,
    LOCAL,
    WARM,
    Reached,
    ReachedMount,
    place_for,
)
from bench.harness import MIB, Unusable, drop_caches, wait_for
from bench.job import THREADS, Epoch, Job
from bench.memory import MemoryLimit, disk
from bench.monarch_rows import Case, first_epoch_rows, rows
from bench.monarch_runs import Measured, Run
from bench.pfs import INSTANT, Counts, ParallelFileSystem
from bench.report import Result, Row
from tests.support.mounting import requires_fuse, requires_root
from tests.support.programs import Running, execute

# Reads a file to its end for each line it gets.
READER = "import sys\nfor _ in sys.stdin: open(sys.argv[1], 'rb').read(); print('read', flush=True)"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> shards.Shards:
    root = tmp_path_factory.mktemp("records") / "small"
    return shards.generate(root, 5 * MIB, MIB)


def test_a_job_reads_every_byte_in_each_epoch(dataset: shards.Shards, tmp_path: Path) -> None:
    arguments = [dataset.root, "--readers", 2, "--batch", 7, "--shuffle", 10, "--compute", 0.001]
    with Job(THREADS, arguments, tmp_path / "errors") as job:
        found = [job.epoch(1), job.epoch(2)]
        pid = job.pid
    for epoch in found:
        assert (epoch.samples, epoch.bytes) == (dataset.samples, dataset.payload_bytes)
        assert epoch.checksum == dataset.checksum
        batches = dataset.samples // 7
        assert epoch.seconds >= epoch.waited_seconds + 0.001 * batches
    assert not Path(f"/proc/{pid}").exists()


def test_a_group_keeps_few_pages() -> None:
    try:
        with MemoryLimit("test") as limit, disk(96 * MIB, "test") as point:
            read_with_few_pages(limit, point / "file")
    except Unusable as error:
        pytest.skip(str(error))
    left = [path for path in (limit.path, point, point.with_suffix(".disk")) if path.exists()]
    used = execute(["losetup", "--all"], check=True).stdout
    assert (left, point.stem in used) == ([], False)


def read_with_few_pages(limit: MemoryLimit, file: Path) -> None:
    file.write_bytes(os.urandom(64 * MIB))
    os.sync()
    drop_caches()
    command = [sys.executable, "-c", READER, str(file)]
    with Running(command) as reader:
        limit.add([reader.pid])
        # The reader holds all of the file in memory of its own, which comes on top.
        limit.hold(100 * MIB)
        for _epoch in range(2):
            reader.tell("")
            assert reader.line() == "read\n"
            assert limit.file_bytes() <= 100 * MIB
        assert limit.file_bytes() >= 16 * MIB
        limit.hold(8 * MIB)
        assert limit.file_bytes() <= 9 * MIB
        reader.stdin.close()
    wait_for(lambda: limit.own_bytes() < MIB, "the group to be empty")


@requires_fuse
@requires_root
def test_every_arm_shows_the_same_bytes(dataset: shards.Shards, tmp_path: Path) -> None:
    def read(reached: Reached) -> str:
        """In a process of its own: a mount that hangs must not stop the tests."""
        command = ["sh", "-c", 'cd "$0" && sha256sum *.tfrecord', str(reached.path)]
        return subprocess.check_output(command, text=True, timeout=60)

    seen = {}
    with ParallelFileSystem(dataset.root, tmp_path / "pfs", INSTANT) as pfs:
        for arm in (DIRECT, LOCAL, COPIED, FRAMEWORK_CACHE, COLD, WARM):
            with (
                place_for(tmp_path, arm) as place,
                arm.reach(pfs, place, capacity=2 * dataset.file_bytes) as reached,
            ):
                drop_caches()
                before = pfs.counts()
                first = read(reached)
                if isinstance(reached, ReachedMount):
                    reached.mount.wait_idle()
                asked = pfs.counts() - before
                assert read(reached) == first
                again = pfs.counts() - before - asked
                seen[arm.name] = first
                if arm in (DIRECT, FRAMEWORK_CACHE):
                    # The kernel's read-ahead may come twice, where the machine is short of memory.
                    assert asked.read_bytes >= dataset.file_bytes, arm.name
                else:
                    expected = dataset.file_bytes if arm is COLD else 0
                    assert asked.read_bytes == expected, arm.name
                if isinstance(reached, ReachedMount):
                    assert again.read_bytes == again.open == 0
                    assert reached.pids
                    served = reached.mount.status()["served"]
                    assert served["local_file_bytes"] >= served["source_file_bytes"]
                assert isinstance(reached, ReachedMount) == (arm in (COLD, WARM))
            assert not place.exists()
        for arm in (LOCAL, COPIED, FRAMEWORK_CACHE):
            with place_for(tmp_path, arm) as place, pytest.raises(Unusable, match="does not fit"):
                arm.reach(pfs, place, capacity=dataset.file_bytes - 1).__enter__()
    assert len(set(seen.values())) == 1


def run_of(*epochs: tuple[float, int]) -> Run:
    measured = [
        Measured(Epoch(took, 0.0, 1, 1, 1), Counts(open=size // 100, read_bytes=size), 0.1, 0.2)
        for took, size in epochs
    ]
    return Run(0.5, measured)


def row(result: Result, what: str, arm: str, unit: str) -> Row:
    found = [r for r in result.rows if r.what.endswith(what) and r.arm == arm and r.unit == unit]
    assert len(found) == 1, [r.what for r in found]
    return found[0]


def test_goals_are_judged_by_pairs() -> None:
    runs = {
        DIRECT.name: [run_of(*[(10 * slow, 1000)] * 3) for slow in (1, 2)],
        LOCAL.name: [run_of(*[(2 * slow, 0)] * 3) for slow in (1, 2)],
        COLD.name: [run_of((10.4 * slow, 1000), *[(2 * slow, 0)] * 2) for slow in (1, 2)],
        WARM.name: [run_of((2 * slow, 0), *[(3 * slow, 0)] * 2) for slow in (1, 2)],
    }
    result = Result("monarch", "")
    rows(result, Case("job", True, 1000), runs)
    first = row(result, "epoch 1", COLD.name, "s")
    assert first.ratio == pytest.approx(1.04)
    assert first.holds is True
    assert row(result, "epoch 2 and on", COLD.name, "s").holds is True
    assert row(result, "epoch 2 and on", WARM.name, "s").holds is False
    assert row(result, "epoch 1, bytes read", COLD.name, "x data").holds is True
    assert {series.name for series in result.series} == set(runs)


def test_what_does_not_fit_is_judged_by_what_is_still_read() -> None:
    runs = {
        DIRECT.name: [run_of(*[(10, 1000)] * 3)],
        COLD.name: [run_of((10.6, 1020), (5, 450), (5, 450))],
    }
    result = Result("monarch", "")
    rows(result, Case("job", False, 1000), runs)
    first = row(result, "epoch 1", COLD.name, "s")
    assert first.holds is False
    assert "20% idle" in first.why
    assert row(result, "epoch 1, bytes read", COLD.name, "x data").holds is False
    still = row(result, "epoch 2 and on, bytes read", COLD.name, "B")
    assert still.ratio == pytest.approx(0.45)
    assert still.holds is True
    result = Result("monarch", "")
    for share in (0.1, 0.25):
        first_epoch_rows(result, "busy", share, 1000, runs)
    (series,) = result.series
    assert [p.x for p in series.points] == pytest.approx([10, 25])
    assert [p.y for p in series.points] == pytest.approx([1.06, 1.06])
