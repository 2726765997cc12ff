"""The emulated parallel file system: right bytes, exact counts, and never faster than it says. A
machine under load is slower than told, so that only lower bounds of time are tested;
bench/calibrate.py measures the upper ones."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from mmap import PROT_READ, mmap
from pathlib import Path
from typing import Any

import pytest

from bench.pfs import (
    INSTANT,
    PROFILES,
    Counts,
    ParallelFileSystem,
    Profile,
    Requests,
    build,
    set_layout,
)
from monarchfs.source.layout import parse
from tests.support import surroundings, trees
from tests.support.mounting import fuse_mounts, processes_about, requires_fuse, wait_for

pytestmark = [requires_fuse, surroundings.program("gcc"), surroundings.requires_own_clone]

MIB = 1 << 20
SECONDS = 60


def python(script: str, *arguments: object) -> Any:
    """What a script prints as JSON. In a process of its own: what reads a mount can hang."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    return json.loads(done.stdout or "null")


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    """Files of several sizes, names and kinds."""
    root = tmp_path / "backing"
    rng = random.Random(7)
    (root / "many").mkdir(parents=True)
    for number in range(300):
        (root / "many" / f"{number:03}").write_bytes(rng.randbytes(number))
    (root / "deep" / "er" / "still").mkdir(parents=True)
    (root / "deep" / "er" / "still" / "ünï çödé\n").write_bytes(b"x")
    (root / "large").write_bytes(rng.randbytes(3 * MIB + 5))
    (root / "again").hardlink_to(root / "large")
    (root / "link").symlink_to("deep/er")
    (root / "dangling").symlink_to("/nowhere")
    return root


Mounter = Callable[..., ParallelFileSystem]


@pytest.fixture
def mounted(backing: Path, tmp_path: Path) -> Iterator[Mounter]:
    """Mounts the backing; nothing is left in the end."""
    with ExitStack() as stack:

        def mount(profile: Profile = INSTANT, **options: Any) -> ParallelFileSystem:
            pfs = ParallelFileSystem(backing, tmp_path / "pfs", profile, **options)
            return stack.enter_context(pfs)

        yield mount
    assert fuse_mounts(str(tmp_path)) == []
    assert processes_about(str(tmp_path)) == []


def test_files_and_ranges_are_those_of_the_backing(backing: Path, mounted: Mounter) -> None:
    pfs = mounted()
    os.setxattr(backing / "large", "user.kind", b"\0random")
    assert trees.differences(backing, pfs.path) == []
    rng, expected = random.Random(3), (backing / "large").read_bytes()
    with (pfs.path / "large").open("rb") as file, mmap(file.fileno(), 0, prot=PROT_READ) as pages:
        for _ in range(200):
            start, size = rng.randrange(len(pages) + 10), rng.randrange(1, 200_000)
            assert os.pread(file.fileno(), size, start) == expected[start : start + size]
            assert pages[start : start + 5000] == expected[start : start + 5000]


READ = """
import os, sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        file.read()
"""


def asked(pfs: ParallelFileSystem, script: str, *arguments: object) -> Counts:
    before = pfs.counts()
    python(script, *arguments)
    return pfs.counts() - before


def drops() -> list[str]:
    """How often anybody on this machine had the kernel drop names and pages."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return [line for line in lines if line.startswith("drop_")]


def test_each_operation_is_counted(mounted: Mounter) -> None:
    while True:
        before, pfs = drops(), mounted()
        try:
            count_each_operation(pfs)
            return
        except AssertionError:
            # What another test had dropped is asked for again, and counted.
            if drops() == before:
                raise
        finally:
            pfs.__exit__(None, None, None)


def count_each_operation(pfs: ParallelFileSystem) -> None:
    assert pfs.counts() == Counts()
    names = [pfs.path / "many" / f"{number:03}" for number in range(100, 110)]
    # The directory's name and theirs, then nothing but the opens: it is all still valid.
    read = Counts(lookup=11, open=10, read=10, read_bytes=sum(range(100, 110)))
    assert asked(pfs, READ, *names) == read
    assert asked(pfs, READ, *names) == Counts(open=10)
    listing = "import os, sys; assert len(os.listdir(sys.argv[1])) == 300"
    assert asked(pfs, listing, pfs.path / "many") == Counts(opendir=1, readdir=1)
    assert asked(pfs, "import os, sys; os.statvfs(sys.argv[1])", pfs.path) == Counts(statfs=1)
    attribute = "import os, sys; os.listxattr(sys.argv[1])"
    assert asked(pfs, attribute, names[0]) == Counts(xattr=1)
    stat_all = "import os, sys; [entry.stat() for entry in os.scandir(sys.argv[1])]"
    stated = asked(pfs, stat_all, pfs.path / "many")
    assert stated._replace(readdir=0) == Counts(opendir=1, lookup=290)
    total = pfs.counts()
    assert total.operations == sum(total[:-1])
    assert total.metadata == total.operations - 10


def test_each_read_is_counted_with_its_bytes(mounted: Mounter) -> None:
    pfs = mounted()
    large = pfs.path / "large"
    direct = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
page = mmap.mmap(-1, 1 << 20)
assert [os.preadv(fd, [page], start << 20) for start in (0, 3, 1)] == [1 << 20, 5, 1 << 20]
"""
    held = os.open(large, os.O_PATH)  # the name stays known, whoever drops caches
    got = Counts(open=1, read=3, read_bytes=2 * MIB + 5)
    assert asked(pfs, direct, large) == got
    # However the kernel cuts it, everything is read once, and then it is cached.
    whole = asked(pfs, READ, large)
    assert whole.read_bytes == 3 * MIB + 5
    assert whole._replace(read=0, read_bytes=0) == Counts(open=1)
    assert 4 <= whole.read <= 3 * MIB // 4096 + 1
    wait_for(lambda: asked(pfs, READ, large) == Counts(open=1), "it to be cached")
    os.close(held)


# -- as Lustre


def test_each_file_has_a_layout(backing: Path, mounted: Mounter) -> None:
    set_layout(backing / "large", 300, stripe_bytes=2 * MIB, first=3)
    set_layout(backing / "many" / "001", released=True)
    pfs = mounted(targets=8)
    assert os.listxattr(pfs.path / "large") == ["lustre.lov"]
    layouts = [
        parse(os.getxattr(pfs.path / name, "lustre.lov"))
        for name in ("large", "many/001", "many/002")
    ]
    large, released, other = filter(None, layouts)
    assert len(large.parts[0].targets) == 300
    assert [large.target(n * MIB) for n in (0, 2, 4, 12)] == [3, 4, 5, 1]
    assert (released.released, other.released) == (True, False)
    assert other.target(0) == (backing / "many" / "002").stat().st_ino % 8
    with pytest.raises(OSError, match="No data") as none:
        os.getxattr(pfs.path, "lustre.lov")
    assert none.value.errno == errno.ENODATA


def test_a_size_is_asked_of_the_targets(backing: Path, mounted: Mounter) -> None:
    set_layout(backing / "large", 3)
    pfs = mounted(targets=4)
    assert (pfs.path / "large").stat().st_size == 3 * MIB + 5
    assert pfs.requests().glimpse == 3


def test_a_released_file_is_brought_back_by_who_reads_it(backing: Path, mounted: Mounter) -> None:
    """Once, for the first read or who looks for data, and not for an open."""
    data = (backing / "large").read_bytes()
    with (backing / "holes").open("wb") as file:
        file.truncate(10 * MIB)
        file.seek(5 * MIB)
        file.write(b"x" * 4096)
    set_layout(backing / "large", 2, released=True)
    set_layout(backing / "holes", released=True)
    pfs = mounted(targets=4, recall_seconds=0.05)
    large, holes = (pfs.path / name for name in ("large", "holes"))
    assert large.stat().st_blocks == 1
    with large.open("rb") as opened, holes.open("rb", buffering=0) as sparse:
        assert pfs.requests().recall == 0
        began = time.monotonic()
        assert opened.read() == data
        assert time.monotonic() - began >= 0.05
        assert large.read_bytes() == data
        assert pfs.requests().recall == 1
        assert os.lseek(sparse.fileno(), 0, os.SEEK_DATA) == 5 * MIB
        assert os.lseek(sparse.fileno(), 5 * MIB, os.SEEK_HOLE) == 5 * MIB + 4096
    assert (pfs.requests().recall, pfs.requests().seek) == (2, 2)
    layout = parse(os.getxattr(large, "lustre.lov"))
    assert layout is not None
    assert not layout.released


def test_what_a_client_of_lustre_would_ask(mounted: Mounter) -> None:
    """Of a cold open, read and close by Python, which asks for the size, too: an enqueue, a
    glimpse, a close, as measured there. A later open is an enqueue, as an attribute is."""
    pfs = mounted(targets=4)
    names = [pfs.path / "many" / f"{number:03}" for number in range(100, 150)]

    def asked_requests(script: str) -> Requests:
        before = pfs.requests()
        python(script, *names)
        wait_for(lambda: (pfs.requests() - before).close >= 50, "the files to be closed")
        return pfs.requests() - before

    directory = 1  # it is looked up
    assert asked_requests(READ) == Requests(enqueue=50 + directory, glimpse=50, close=50)
    assert asked_requests(READ) == Requests(enqueue=50, close=50)
    listing = "import os, sys\nfor path in sys.argv[1:]: os.listxattr(path)"
    assert asked_requests(f"{READ}\n{listing}") == Requests(enqueue=100, close=50)


TIMED = """
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
threads, work, *paths = sys.argv[1:]
def run(path):
    if work == "stat":
        os.stat(path)
    else:
        with open(path, "rb") as file:
            file.read()
started = time.monotonic()
with ThreadPoolExecutor(int(threads)) as pool:
    list(pool.map(run, paths))
print(json.dumps([started, time.monotonic()]))
"""


def seconds(threads: int, work: str, *paths: Path) -> float:
    started, ended = python(TIMED, threads, work, *paths)
    return float(ended - started)


@pytest.mark.parametrize(
    ("profile", "threads", "work", "names", "least"),
    [
        (replace(INSTANT, metadata_seconds=0.01), 1, "stat", range(20), 21 * 0.01),
        # Opens are asked for also where the name is known.
        (replace(INSTANT, metadata_seconds=0.01), 1, "read", [0] * 10, 10 * 0.01),
        (replace(INSTANT, metadata_seconds=0.01, metadata_in_flight=2), 8, "stat", range(40), 0.2),
        (replace(INSTANT, read_seconds=0.02), 1, "read", range(1, 11), 10 * 0.02),
    ],
)
def test_it_is_never_faster_than_it_says(
    profile: Profile, threads: int, work: str, names: Iterable[int], least: float, mounted: Mounter
) -> None:
    pfs = mounted(profile)
    paths = [pfs.path / "many" / f"{number:03}" for number in names]
    assert seconds(threads, work, *paths) >= least


def test_all_readers_share_the_bandwidth(backing: Path, mounted: Mounter) -> None:
    for number in range(4):
        shutil.copy(backing / "large", backing / f"large{number}")
    pfs = mounted(replace(INSTANT, bandwidth=40e6))
    paths = [pfs.path / f"large{number}" for number in range(4)]
    assert seconds(4, "read", *paths) >= 4 * (3 * MIB + 5) / 40e6


def test_others_take_the_share_that_was_drawn(mounted: Mounter) -> None:
    noisy = replace(INSTANT, bandwidth=20e6, noise=0.9, noise_period=0.05)
    pfs = mounted(noisy, seed=5)
    began = time.monotonic()
    pfs.restart_noise()
    _, ended = python(TIMED, 1, "read", pfs.path / "large")
    steps = int((ended - began) / noisy.noise_period) + 1
    middles = [(step + 0.5) * noisy.noise_period for step in range(steps)]
    free = [1 - noisy.share(5, middle) for middle in middles]
    assert sum(free) * noisy.noise_period * noisy.bandwidth >= 3 * MIB + 5
    assert max(free) - min(free) > 0.1


def test_the_noise_is_the_same_here_as_there() -> None:
    profile, seed = replace(PROFILES["crowded"], noise_period=0.25), 2**64 - 1
    done = subprocess.run(
        [build(), "weather", str(seed), str(profile.noise), str(profile.noise_period), "100"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    there = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert there == [(0.25 * step, profile.share(seed, 0.25 * step)) for step in range(100)]
    assert all(0 <= share < profile.noise for _, share in there)
    assert len({share for _, share in there}) == 100
    assert profile.quiet().share(1, 3.0) == 0
