"""Jobs of MONARCH's experiment, of DLIO and of the loaders: their data, and all ways to it."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench import arms, dlio, loaders, shards
from bench.frameworks import ENVIRONMENT, program, run_program
from bench.harness import MIB, drop_caches
from bench.job import THREADS, Job, Program
from bench.pfs import INSTANT, ParallelFileSystem
from tests.support.mounting import requires_fuse, requires_root


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> shards.Shards:
    return shards.generate(tmp_path_factory.mktemp("records") / "small", 5 * MIB, MIB)


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
    def read(reached: arms.Reached) -> str:
        """In a process of its own: a mount that hangs must not stop the tests."""
        command = ["sh", "-c", 'cd "$0" && sha256sum *.tfrecord', str(reached.path)]
        return subprocess.check_output(command, text=True, timeout=60)

    seen = set[str]()
    with ParallelFileSystem(dataset.root, tmp_path / "pfs", INSTANT) as pfs:
        for arm in (
            arms.DIRECT,
            arms.LOCAL,
            arms.COPIED,
            arms.FRAMEWORK_CACHE,
            arms.COLD,
            arms.WARM,
        ):
            with (
                arms.place_for(tmp_path, arm) as place,
                arm.reach(pfs, place, capacity=2 * dataset.file_bytes) as reached,
            ):
                drop_caches()
                before = pfs.counts()
                seen.add(read(reached))
                if isinstance(reached, arms.ReachedMount):
                    reached.mount.wait_idle()
                read_bytes = (pfs.counts() - before).read_bytes
                seen.add(read(reached))
                if arm in (arms.DIRECT, arms.FRAMEWORK_CACHE):
                    # The kernel's read-ahead may come twice, where the machine is short of memory.
                    assert read_bytes >= dataset.file_bytes, arm.name
                else:
                    assert read_bytes == (dataset.file_bytes if arm is arms.COLD else 0), arm.name
            assert not place.exists()
    assert len(seen) == 1


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
