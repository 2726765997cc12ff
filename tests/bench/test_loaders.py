"""The loaders' jobs over small datasets, and how their epochs become figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import loaders
from bench.arms import COLD, DIRECT, LOCAL, WARM
from bench.frameworks import ENVIRONMENT, run_program
from bench.job import Epoch, Job, Program
from bench.pfs import Counts
from bench.report import Result

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
    assert (first.samples, first.bytes, first.checksum) == (
        second.samples,
        second.bytes,
        second.checksum,
    )
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
