"""Whether a mount of a large real tree can be told from the tree: cold, warm, and under load."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from bench.harness import REPOSITORY, Mount, drop_caches
from bench.report import Result
from bench.task import Task
from tests.support import trees

READERS = 4
TREE = "/usr/share"
TIER_SIZE = "2G"


def read_at_random(source: str, mount: str, seed: int) -> None:
    """Compares files picked at random until standard input ends; prints how many, and how many
    were different. A reader process."""
    names = [
        name
        for name in trees.walk(os.fsencode(source))
        if os.path.isfile(path := os.path.join(os.fsencode(source), name))
        and not os.path.islink(path)
    ]
    rng = random.Random(seed)
    compared = wrong = 0
    os.set_blocking(0, False)
    print("ready", flush=True)
    while sys.stdin.buffer.read(1) is None:
        name = rng.choice(names)
        here = trees.content(os.path.join(os.fsencode(source), name))
        there = trees.content(os.path.join(os.fsencode(mount), name))
        compared += 1
        wrong += here != there
    print(compared, wrong)


def compare(source: Path, mount: Path, *, contents: bool = True) -> tuple[int, float]:
    """Number of differences, and seconds; prints the first ones."""
    started = time.perf_counter()
    found = trees.differences(source, mount, contents=contents)
    for difference in found[:10]:
        print(f"mirror: {difference}", file=sys.stderr)
    return len(found), time.perf_counter() - started


def compare_under_load(source: Path, mount: Path) -> tuple[int, float, int, int]:
    """Like `compare` of names and attributes, while four readers compare contents; then how many
    files they compared and found different."""
    readers = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.mirror", str(source), str(mount), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        for seed in range(READERS)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            reader.stdout.readline()
        differences, seconds = compare(source, mount, contents=False)
        counts = [reader.communicate()[0].split() for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    compared, wrong = (sum(int(count[index]) for count in counts) for index in (0, 1))
    return differences, seconds, compared, wrong


def run(task: Task) -> Result:
    place = task.place
    source = Path(os.environ.get("MIRROR_TREE", TREE)).resolve()
    names = sum(1 for _ in trees.walk(os.fsencode(source)))
    result = Result("mirror", f"{source}, {names:,} names, tier of {TIER_SIZE}")
    with Mount(source, place / "m", size=TIER_SIZE) as mount:
        cold, cold_seconds = compare(source, mount.path)
        if os.geteuid() == 0:
            os.sync()
            drop_caches()
        warm, warm_seconds = compare(source, mount.path)
        status = mount.wait_idle()
    with Mount(source, place / "loaded", size=TIER_SIZE) as mount:
        loaded, loaded_seconds, compared, wrong = compare_under_load(source, mount.path)
    result.figure("differences, cold", cold, "", at_most=0)
    result.figure("differences, warm", warm, "", at_most=0)
    result.figure(f"differences, cold, {READERS} readers beside it", loaded, "", at_most=0)
    result.figure("files that those readers compared", compared, "")
    result.figure("of them different", wrong, "", at_most=0)
    result.figure("files resident after the cold pass", status["files"]["resident"], "")
    for what, seconds in (("cold", cold_seconds), ("warm", warm_seconds), ("load", loaded_seconds)):
        result.figure(f"time of the comparison, {what}", seconds, "s")
    result.notes = [
        "compared are names, mode, links, owner, size, times, device, blocks, extended attributes,"
        " link targets, and all bytes of regular files; hard links by their inode numbers",
        "warm: once more, the kernel's caches dropped where this runs as root; with readers: an"
        " empty cache again, the readers compare the contents; default freshness",
        "another tree: MIRROR_TREE=/usr make bench ARGS=mirror",
    ]
    return result


if __name__ == "__main__":
    read_at_random(sys.argv[1], sys.argv[2], int(sys.argv[3]))
