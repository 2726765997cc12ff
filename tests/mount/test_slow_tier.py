"""A tier whose reads take long stalls those who read from it, and nobody else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import surroundings
from tests.support.mounting import Bench, requires_mounts, wait_for
from tests.support.scenario import playing
from tests.support.timing import Stopwatch

pytestmark = [*requires_mounts, surroundings.program("bindfs")]


@contextmanager
def slow(directory: Path) -> Iterator[None]:
    """Its files are read with 32 KiB/s in all, and written, opened and listed at once; of a type
    that is taken for local."""
    backing = directory.with_name("slowed")
    backing.mkdir()
    directory.mkdir()
    words = ["bindfs", "-f", "--multithreaded", "--read-rate=32k", "-o", "subtype=exfat"]
    server = subprocess.Popen([*words, str(backing), str(directory)])
    try:
        wait_for(lambda: os.path.ismount(directory), "bindfs")
        yield
    finally:
        server.kill()
        server.wait(10)
        subprocess.run(["umount", "-l", str(directory)], check=False, capture_output=True)


def test_reads_of_a_slow_tier_hold_up_no_metadata(work: Bench) -> None:
    """More read than there are threads that take requests from the kernel, which are ten."""
    with slow(work.path / "tier1"), playing(work) as scenario:
        scenario.play("""
file f{0..23} 131072; file m{0..99} 1
mount --freshness ttl=600 --data-path relay --prefetch access
read f*; size m*; until files.resident = 24
drop_caches; begin_at_once readers f*; stuck readers 10
""")
        for number in range(100):
            watch = Stopwatch()
            scenario.play(f"size m{number}")
            watch.check(1, "a stat was held up")
        scenario.play("list; stuck readers 10; until worker.restarts = 0")
        scenario.play("kill readers; umount")
