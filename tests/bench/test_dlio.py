"""DLIO's shapes, made smaller; its command line; what it leaves behind, from a real run."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench import dlio
from bench.frameworks import ENVIRONMENT, program, run_program
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
    not (ENVIRONMENT / "bin" / "dlio_benchmark").exists(),
    reason="needs DLIO: make frameworks",
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
    same = ("config", "format", "readers", "shuffled")
    assert [getattr(shape, field) for field in same] == [getattr(published, f) for f in same]


def test_time_follows_the_batch() -> None:
    small = dlio.scaled(dlio.RESNET50, files=4, samples=10, record=2, batch=8)
    assert (small.files, small.samples_per_file, small.batch) == (4, 125, 50)
    assert small.compute_seconds == pytest.approx(dlio.RESNET50.compute_seconds / 16)


def test_overrides_name_each_setting_once(tmp_path: Path) -> None:
    words = dlio.overrides(TINY, tmp_path / "data", tmp_path / "out", generate=True, epochs=3)
    settings = dict(word.lstrip("+").split("=", 1) for word in words)
    assert len(settings) == len(words)
    assert settings["workload"] == "unet3d_v100"
    assert settings["workload.workflow.generate_data"] == "True"
    assert settings["workload.workflow.train"] == "False"
    assert settings["workload.dataset.record_length"] == "1024"
    assert settings["workload.dataset.data_folder"] == str(tmp_path / "data")
    assert settings["workload.train.epochs"] == "3"


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
