"""The lines that a user of PyTorch writes, with a real DataLoader of several processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mounting import REPOSITORY, Bench, requires_fuse, requires_root

FRAMEWORKS = REPOSITORY / ".venv-frameworks" / "bin" / "python"
FILES, SIZE, EPOCHS = 600, 20_000, 3

JOB = """
import json, sys
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from monarchfs import hints

files = json.loads(sys.stdin.readline())

class Files(Dataset):
    def __len__(self):
        return len(files)
    def __getitem__(self, number):
        with open(files[number], "rb") as file:
            data = file.read()
        return number if data == number.to_bytes(4, "big") * (len(data) // 4) else -1

def epochs(announced):
    torch.manual_seed(0)
    dataset = Files()
    sampler = RandomSampler(dataset)
    if announced:
        sampler = hints.announce(sampler, files)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler, num_workers=3)
    return [[int(n) for batch in loader for n in batch] for _ in range(int(sys.argv[1]))]

drawn = epochs(True)
print(json.dumps({"same": drawn == epochs(False), "drawn": drawn}))
"""


def with_torch() -> str:
    """An interpreter that has torch."""
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    python = os.environ.get("MONARCHFS_TEST_TORCH", str(FRAMEWORKS))
    found = Path(python).exists() and subprocess.run(
        [python, "-c", "import torch"], capture_output=True, check=False
    )
    if not found or found.returncode:
        pytest.skip("torch is not installed: run make frameworks")
    return python


@requires_root
@requires_fuse
def test_a_data_loader_reads_what_was_fetched_ahead(work: Bench) -> None:
    python = with_torch()
    source = work.path / "source"
    source.mkdir()
    for number in range(FILES):
        path = source / f"{number:04d}"
        path.write_bytes(number.to_bytes(4, "big") * (SIZE // 4))
        os.utime(path, (1e9, 1e9))
    mount = work.mount(source, "--freshness", "immutable", "--prefetch", "none")
    files = [str(mount.path / f"{number:04d}") for number in range(FILES)]
    done = subprocess.run(
        [python, "-c", JOB, str(EPOCHS)],
        input=json.dumps(files) + "\n",
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "monarchfs" not in done.stderr
    result = json.loads(done.stdout)
    assert result["same"]
    assert all(sorted(epoch) == list(range(FILES)) for epoch in result["drawn"])
    state = mount.status()["window"]
    assert state["files"] > 0
    assert state["hits"] > 0
