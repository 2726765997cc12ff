"""Jobs of MONARCH's experiment, of DLIO and of the loaders: their data, and all ways to it."""

from __future__ import annotations

import json
import subprocess
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
from bench.job import THREADS, Job, Program
from bench.pfs import INSTANT, ParallelFileSystem
from tests.support.mounting import requires_fuse, requires_root, wait_for

# Reads a file to its end for each line it gets.


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
