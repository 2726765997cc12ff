"""What changes in the source, seen through a real mount and the kernel's caches."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support import surroundings, trees
from tests.support.mounting import Bench, requires_mounts, run, wait_for
from tests.support.scenario import play

pytestmark = [*requires_mounts, pytest.mark.smoke]

MIB = 1 << 20
OLD, NEW = trees.random_bytes(2 * MIB, 1), trees.random_bytes(2 * MIB, 2)


def long_ago(time_ns: int) -> bool:
    return time_ns < time.time_ns() - 1_010_000_000


@pytest.fixture
def source(work: Bench) -> Path:
    path = work.path / "source"
    path.mkdir()
    (path / "f").write_bytes(OLD)
    wait_for(lambda: (path / "f").stat().st_ctime_ns < time.time_ns() - 25_000_000, "the clock")
    return path


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        yield pages


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(NEW)


def shorten(path: Path) -> None:
    os.truncate(path, 1000)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


EVERY_OPEN = """
file f 2M
mount --freshness open --prefetch {prefetch}
read; idle
{change}; read; size
idle; read
remove f; missing f
"""


@pytest.mark.parametrize("change", ["file f 2M", "replace f 2M", "truncate f 1000", "append f 4"])
@pytest.mark.parametrize("prefetch", ["none", "access"])
def test_every_new_open_shows_it(work: Bench, change: str, prefetch: str) -> None:
    play(work, EVERY_OPEN.format(prefetch=prefetch, change=change))


REFRESH = """
file f 2M; file d/g 10
mount --freshness immutable
read; list d; missing new d/new; open holder f; idle
file f 2M; remove d/g; file new d/new 3
read f old=1; read d/g; missing new d/new
command refresh
same f new d/new d/g; list d
held holder old=1; close holder
"""
"""Nothing of a change is seen before: that is what immutable means. What is open was local, and is
one version."""


def test_refresh_reaches_what_the_kernel_remembers(work: Bench) -> None:
    play(work, REFRESH)


def test_pages_of_a_file_that_is_mapped_are_dropped(work: Bench, source: Path) -> None:
    """It is not local, so who has it open sees the source as it is, once the change was noticed."""
    mount = work.mount(source, "--freshness", "open", "--prefetch", "none")
    with mapped(mount.path / "f") as pages:
        assert pages[:] == OLD
        rewrite(source / "f")
        assert os.stat(mount.path / "f").st_size == len(NEW)  # somebody looks
        wait_for(lambda: pages[:] == NEW, "the pages to go")


def test_a_map_of_what_is_local_stays_one_version(work: Bench, source: Path) -> None:
    mount = work.mount(source, "--freshness", "open")
    assert (mount.path / "f").read_bytes() == OLD
    mount.wait_idle()
    with mapped(mount.path / "f") as pages:
        assert pages[:MIB] == OLD[:MIB]
        rewrite(source / "f")
        assert (mount.path / "f").read_bytes() == NEW
        Path("/proc/sys/vm/drop_caches").write_text("1")
        assert pages[:] == OLD


@pytest.mark.parametrize("change", [shorten, append, rewrite])
def test_an_open_file_follows_the_source(
    work: Bench, source: Path, change: Callable[[Path], None]
) -> None:
    """fstat and read of a descriptor agree; no zeros where a file was truncated."""
    mount = work.mount(source, "--freshness", "open", "--prefetch", "none")
    with (mount.path / "f").open("rb", buffering=0) as file:
        assert file.read(len(OLD)) == OLD
        change(source / "f")
        now = (source / "f").read_bytes()
        os.stat(mount.path / "f")
        wait_for(lambda: os.fstat(file.fileno()).st_size == len(now), "fstat to follow")

        def follows() -> bool:
            file.seek(0)
            return b"".join(iter(lambda: file.read(MIB), b"")) == now

        wait_for(follows, "reads to follow")


def test_a_file_that_was_deleted_goes_on_for_who_has_it_open(work: Bench, source: Path) -> None:
    mount = work.mount(source, "--freshness", "open", "--prefetch", "none")
    with (mount.path / "f").open("rb", buffering=0) as file:
        assert file.read(1000) == OLD[:1000]
        (source / "f").unlink()
        assert not (mount.path / "f").exists()
        assert os.fstat(file.fileno()).st_size == len(OLD)
        file.seek(MIB)
        assert file.read(MIB) == OLD[MIB:]


@pytest.fixture
def coarse(work: Bench) -> Iterator[Path]:
    """A source whose times are whole seconds: inodes of 128 bytes have no room for more (ext4(5)).
    Others give each time that somebody saw to one change only, since Linux 6.13."""
    image, point = work.path / "image", work.path / "coarse"
    surroundings.mount_ext4(image, point, 16 * MIB, "-I", "128", "-O", "^has_journal")
    try:
        yield point
    finally:
        for mount in work.mounts:
            mount.umount()
        subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.mark.parametrize("prefetch", ["none", "access"])
def test_changes_within_one_tick_of_the_clock(work: Bench, coarse: Path, prefetch: str) -> None:
    """Two writes of the same size that leave the same times: each open sees what it should."""
    source = coarse
    mount = work.mount(source, "--freshness", "open", "--prefetch", prefetch)
    through = mount.path / "f"
    alike = 0
    for number in range(50):
        rewritten = b"a%06d" % number, b"b%06d" % number
        times = []
        for data in rewritten:
            (source / "f").write_bytes(data)
            times.append(os.stat(source / "f").st_ctime_ns)
            assert through.read_bytes() == data
        alike += times[0] == times[1]
        # Also once the tick is over and what is read may be kept.
        if number % 25 == 0:
            wait_for(partial(long_ago, times[1]), "the clock")
            assert through.read_bytes() == rewritten[1]
            mount.wait_idle()
            assert through.read_bytes() == rewritten[1]
    assert alike > 0, "no change fell into the tick of another"


def test_refresh_of_a_path_that_is_not_there(work: Bench, source: Path) -> None:
    mount = work.mount(source)
    done = run("refresh", str(mount.path), "nothing/here")
    assert done.returncode == 1
    assert os.strerror(errno.ENOENT) in done.stderr
