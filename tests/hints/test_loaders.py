"""The lines that users of loaders write, with the real loaders on a real mount.

The source is slow, and a tier has room for half of the files. Most of the others are in the window
when a loader opens them, and nothing is read twice.
"""

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from monarchfs.prefetch.order import FIRST_BYTES
from tests.hints import jobs
from tests.support.mounting import REPOSITORY, Bench, requires_mounts
from tests.support.programs import execute

pytestmark = requires_mounts

FRAMEWORKS = REPOSITORY / ".venv-frameworks" / "bin" / "python"
FILES, SIZE, EPOCHS = 600, 40_000, 4
OF_A_SHARD = 6
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def python_with(module: str) -> str:
    python = os.environ.get("MONARCHFS_TEST_FRAMEWORKS", str(FRAMEWORKS))
    code = f"import importlib.util as u; u.find_spec({module!r}).name"
    found = Path(python).exists() and subprocess.run(
        [python, "-c", code], capture_output=True, check=False
    )
    if not found or found.returncode:
        pytest.skip(f"{module} is not installed: run make frameworks")
    return python


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (SIZE // 4)


def write_files(root: Path) -> None:
    for number in range(FILES):
        (root / f"{number:04d}").write_bytes(content(number))


def write_shards(root: Path) -> None:
    for first in range(0, FILES, OF_A_SHARD):
        with tarfile.open(root / f"{first:04d}.tar", "w") as shard:
            for number in range(first, first + OF_A_SHARD):
                entry = tarfile.TarInfo(f"{number:04d}.bin")
                entry.size = SIZE
                shard.addfile(entry, io.BytesIO(content(number)))


def run_job(work: Bench, module: str, code: str) -> tuple[list[list[int]], dict[str, Any], int]:
    """The job for an epoch without a mount, where hints do nothing, and then on a mount of a slow
    source: what was read in each epoch, the mount's status at the end, the bytes of the source."""
    python = python_with(module)
    backing = work.path / "backing"
    backing.mkdir()
    (write_shards if code is jobs.SHARDS else write_files)(backing)
    for path in backing.iterdir():
        os.utime(path, (1e9, 1e9))
    names = sorted(path.name for path in backing.iterdir())
    allocated = sum(path.stat().st_blocks * 512 for path in backing.iterdir())
    source = work.faulty_source(backing)
    source.wait_old()
    source.faults(delay=0.004, delayed=["open"])
    mount = work.mount(source.path, "--freshness", "immutable", tier=str(allocated // 2))
    plain, mounted = ([str(root / name) for name in names] for root in (backing, mount.path))
    done = execute(
        [python, "-c", jobs.PRELUDE + jobs.COMMON[module] + code + jobs.MAIN],
        input=json.dumps([SIZE, plain, mounted, EPOCHS]) + "\n",
        timeout=200,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert "monarchfs:" not in done.stderr
    without, on_mount = json.loads(done.stdout.splitlines()[-1])
    assert (len(without), len(on_mount)) == (1, EPOCHS)
    size = sum((backing / name).stat().st_size for name in names)
    return without + on_mount, mount.wait_idle(), size


@pytest.mark.parametrize(
    ("module", "job"),
    [
        pytest.param("torch", jobs.SAMPLER, id="torch-sampler"),
        pytest.param("torch", jobs.DISTRIBUTED, id="torch-distributed"),
        pytest.param("torch", jobs.ITERABLE, id="torch-iterable"),
        pytest.param("tensorflow", jobs.MAP, id="tfdata-map"),
        pytest.param("tensorflow", jobs.INTERLEAVE, id="tfdata-interleave"),
        pytest.param("webdataset", jobs.SHARDS, id="webdataset"),
        pytest.param("nvidia.dali", jobs.READER, id="dali-reader"),
        pytest.param("nvidia.dali", jobs.FILE_READ, id="dali-file-read"),
    ],
)
def test_a_loader_reads_what_was_fetched_ahead(work: Bench, module: str, job: str) -> None:
    epochs, status, size = run_job(work, module, job)
    assert all(sorted(epoch) == list(range(FILES)) for epoch in epochs)
    window, files = status["window"], status["files"]
    known = len(list((work.path / "backing").iterdir()))
    missing = 1 - files["resident"] / known
    assert 0.4 < missing < 0.6
    assert window["hits"] >= 0.6 * EPOCHS * missing * known
    assert (window["orders_given_up"], window["orders_learned"]) == (0, 0)
    read = status["source_io"]["read_bytes"] - window["wasted_bytes"] - window["used_bytes"]
    assert read <= 1.02 * (1 + (EPOCHS - 1) * missing) * size
    # A list may arrive after its first files were opened. They are fetched in vain, up to that.
    assert window["wasted_bytes"] <= EPOCHS * FIRST_BYTES


def test_the_order_of_a_reader_that_shuffles_is_learned(work: Bench) -> None:
    """DALI shuffles the list once and for all; in each epoch it shuffles only what it has read."""
    epochs, status, _ = run_job(work, "nvidia.dali", jobs.SHUFFLING_READER)
    # Its buffer holds some files of an epoch back, and gives them in the next one.
    assert {number for epoch in epochs for number in epoch} == set(range(FILES))
    assert status["window"]["orders_learned"] == 1
    missing = FILES - status["files"]["resident"]
    assert status["window"]["hits"] >= 0.6 * (EPOCHS - 1) * missing
