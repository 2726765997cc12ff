"""DLIO and the loaders: shapes, command line, small real runs, and figures of their epochs."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench import dlio, loaders
from bench.arms import COLD, DIRECT, LOCAL, WARM
from bench.frameworks import ENVIRONMENT, program, run_program
from bench.job import Epoch, Job, Program
from bench.pfs import Counts
from bench.report import Result
from tests.support.mounting import wait_for

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
