"""A tier whose reads take long stalls those who read from it, and nobody else."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support import surroundings, trees
from tests.support.mounting import Bench, requires_mounts, wait_for
from tests.support.reading import COMMAND, Reader

pytestmark = [*requires_mounts, surroundings.program("bindfs")]

THREADS, READERS = 10, 24
"""The threads that take requests from the kernel, and more than those."""


@pytest.fixture
def slow_tier(work: Bench) -> Iterator[Path]:
    """A directory whose files are read with 32 KiB/s in all, and written, opened and listed at
    once; of a type that is taken for local."""
    backing, tier = work.path / "tier-backing", work.path / "slow"
    backing.mkdir()
    tier.mkdir()
    words = ["bindfs", "-f", "--multithreaded", "--read-rate=32k", "-o", "subtype=exfat"]
    server = subprocess.Popen([*words, str(backing), str(tier)])
    try:
        wait_for(lambda: os.path.ismount(tier), "bindfs")
        yield tier
    finally:
        server.kill()
        server.wait(10)
        subprocess.run(["umount", "-l", str(tier)], check=False, capture_output=True)


def waiting(pid: int) -> int:
    """How many threads of a process wait for a page (D state)."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return sum(stat.read_text().rpartition(") ")[2][0] == "D" for stat in stats)


def test_reads_of_a_slow_tier_hold_up_no_metadata(work: Bench, slow_tier: Path) -> None:
    contents = {f"f{n}": trees.random_bytes(131072, n) for n in range(READERS)}
    source = trees.write_files(work.path / "source", contents | {f"m{n}": b"m" for n in range(100)})
    options = ("--freshness", "ttl=600", "--data-path", "relay", "--prefetch", "access")
    mount = work.mount(source, *options, tiers=[f"{slow_tier}=1G"])
    for name, content in contents.items():
        assert (mount.path / name).read_bytes() == content
    for n in range(100):
        os.stat(mount.path / f"m{n}")
    assert mount.wait_idle()["files"]["resident"] == READERS
    worker = mount.worker_pid()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    with closing(Reader(COMMAND)) as reader:
        reader.tell("read at once", str(mount.path), list(contents), "whole")
        readers = reader.process.pid
        wait_for(lambda: waiting(readers) >= THREADS, "the readers to wait")
        took = []
        for n in range(100):
            started = time.monotonic()
            assert os.stat(mount.path / f"m{n}").st_size == 1
            took.append(time.monotonic() - started)
        assert len(os.listdir(mount.path)) == READERS + 100
        assert max(took) < 1, f"{max(took):.1f} s for the slowest of {len(took)}"
        assert waiting(readers) >= THREADS, "the tier is not slow"
        assert mount.worker_pid() == worker
    assert mount.umount().returncode == 0
