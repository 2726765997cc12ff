"""Jobs of MONARCH's experiment, of DLIO and of the loaders: data, memory, runs, figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import dlio, loaders, shards
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
from bench.frameworks import ENVIRONMENT, program, run_program
from bench.harness import MIB, Unusable, drop_caches
from bench.job import THREADS, Epoch, Job, Program
from bench.memory import MemoryLimit, disk
from bench.monarch_rows import Case, first_epoch_rows, rows
from bench.monarch_runs import Measured, Run
from bench.pfs import INSTANT, Counts, ParallelFileSystem
from bench.report import Result, Row
from tests.support.mounting import requires_fuse, requires_root, wait_for
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


# DLIO and the loaders


TINY = replace(
    dlio.UNET3D,
    files=6,
    record_bytes=1024,
    record_deviation=0,
    resized_bytes=0,
    batch=2,
    compute_seconds=0.01,
    readers=1,
)

requires_dlio = pytest.mark.skipif(
    not (ENVIRONMENT / "bin" / "dlio_benchmark").exists(), reason="needs DLIO: make frameworks"
)


@pytest.mark.parametrize("name", dlio.SHAPES)
def test_a_smaller_shape_asks_as_much_of_the_storage(name: str) -> None:
    published, shape = dlio.SHAPES[name]
    assert shape.demand == pytest.approx(published.demand, rel=1e-3)
    assert 400e6 < shape.dataset_bytes < 600e6 < published.dataset_bytes
    assert shape.files * shape.samples_per_file >= 10 * shape.batch, "too few steps for a mean"
    assert shape.record_deviation / shape.record_bytes == pytest.approx(
        published.record_deviation / published.record_bytes
    )
    for field in ("config", "format", "readers", "shuffled"):
        assert getattr(shape, field) == getattr(published, field)


def test_an_epoch_is_told_of_once_it_is_logged(tmp_path: Path) -> None:
    log = tmp_path / "dlio.log"
    begun: list[int] = []
    expected: list[int] = []
    with dlio.at_epochs(log, begun.append, pause=0.001):
        for number in (1, 2):
            with log.open("a") as file:
                file.write(f"[INFO] now Starting epoch {number}: 3 steps expected [x.py:1]\n")
                file.write("[INFO] now Starting block 1\n")
            expected.append(number)
            wait_for(lambda: begun == expected, "the epoch to be told of")
    assert begun == [1, 2]


@requires_dlio
def test_a_real_run(tmp_path: Path) -> None:
    try:
        subprocess.run([program("python"), "-c", "import mpi4py.MPI"], check=True)
    except subprocess.CalledProcessError:
        pytest.skip("needs MPI that can be loaded: rm -r .venv-frameworks; make frameworks")
    data = tmp_path / "data"
    dlio.generate(TINY, data, tmp_path)
    assert len(list((data / "train").glob("*.npz"))) == TINY.files
    words = dlio.overrides(TINY, data, tmp_path / "out", generate=False, epochs=2)
    begun: list[int] = []
    with dlio.at_epochs(tmp_path / "out" / "dlio.log", begun.append):
        run_program([program("dlio_benchmark"), *words], tmp_path / "log")
    epochs = dlio.read_summary(tmp_path / "out" / "summary.json")
    assert begun == [1, 2]
    assert len(epochs) == 2
    assert all(0 < epoch.utilisation <= 100 for epoch in epochs)
    assert all(epoch.samples_per_second > 0 for epoch in epochs)
    stats = json.loads((tmp_path / "out" / "per_epoch_stats.json").read_text())
    assert list(stats) == ["1", "2"]


requires_frameworks = pytest.mark.skipif(
    not (ENVIRONMENT / "bin" / "python").exists(), reason="needs the frameworks: make frameworks"
)


@requires_frameworks
@pytest.mark.parametrize("loader", loaders.LOADERS, ids=lambda loader: loader.name)
def test_every_epoch_reads_all_of_it(tmp_path: Path, loader: Program) -> None:
    data = tmp_path / "data"
    size = 4_000_000
    command = [loader.python(), "-m", loader.module, "generate", str(data), str(size)]
    run_program(command, tmp_path / "log")
    with Job(loader, ["train", data], tmp_path / "errors") as job:
        first, second = job.epoch(1), job.epoch(2)
    for field in ("samples", "bytes", "checksum"):
        assert getattr(first, field) == getattr(second, field)
    assert 0.9 * size < first.bytes <= size + 20_000


def timed(seconds: float, read: int = 0, checksum: int = 7) -> loaders.Timed:
    epoch = Epoch(seconds, 0.0, samples=3, bytes=300, checksum=checksum)
    return loaders.Timed(epoch, Counts(read=1, read_bytes=read), daemon_seconds=0.5)


def test_other_bytes_are_an_error() -> None:
    loaders.check([timed(1), timed(2)])
    with pytest.raises(ValueError, match="differ"):
        loaders.check([timed(1), timed(2, checksum=8)])


def test_figures() -> None:
    result = Result("loaders", "test")
    rounds = {
        DIRECT.name: [[timed(4, 300), timed(4, 300), timed(6, 300)]] * 2,
        LOCAL.name: [[timed(1), timed(1), timed(1)]] * 2,
        COLD.name: [[timed(5, 300), timed(1), timed(2)]] * 2,
        WARM.name: [[timed(1), timed(1), timed(1)]] * 2,
    }
    loaders.tell(result, "x", rounds, 300)
    rows = {(row.what, row.arm, row.against): row for row in result.rows}
    cold = COLD.name
    first = rows["x: epoch 1", cold, DIRECT.name]
    assert first.ratio == pytest.approx(5 / 4)
    assert first.holds is False
    assert "1.00 s from local storage" in first.why
    assert "0.50 s of processor time" in first.why
    later = rows["x: epochs 2 to 3", cold, DIRECT.name]
    assert later.ratio == pytest.approx(1.5 / 5)
    assert rows["x: epochs 2 to 3", cold, LOCAL.name].ratio == pytest.approx(1.5)
    read = [row.value for row in result.rows if row.what.startswith("x: read") and row.arm == cold]
    assert read == [1.0, 0.0]
    assert {series.name for series in result.series} == set(rounds)
