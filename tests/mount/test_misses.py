"""Small files that are not cached, on a real mount: the C part opens and reads them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support import trees
from tests.support.mounting import Bench, FaultySource, Mount, requires_mounts, run, wait_for

pytestmark = [*requires_mounts, pytest.mark.smoke]

FILES = 60
MODES = ["immutable", "ttl=3600", "open"]


def content(number: int) -> bytes:
    return bytes([number]) * (1000 + 7 * number)


@pytest.fixture
def source(faulty: FaultySource) -> FaultySource:
    trees.write_files(faulty.backing, {f"{n % 3}/{n}": content(n) for n in range(FILES)})
    return faulty


def read_all(root: Path) -> None:
    for number in range(FILES):
        assert (root / f"{number % 3}" / f"{number}").read_bytes() == content(number)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prefetch", ["none", "access"])
def test_each_file_is_opened_and_read_once(
    work: Bench, source: FaultySource, mode: str, prefetch: str
) -> None:
    source.wait_old()
    mount = work.mount(source.path, "--freshness", mode, "--prefetch", prefetch)
    read_all(mount.path)
    total = sum(len(content(number)) for number in range(FILES))
    counts = source.counts()
    assert counts["read_bytes"] == total
    assert counts["operations"]["open"] == FILES
    status = mount.wait_idle()
    assert status["source_io"]["read_bytes"] == total
    assert status["served"]["source_opens"] == FILES
    assert status["served"]["source_file_bytes"] == total
    assert status["files"]["resident"] == (FILES if prefetch == "access" else 0)
    read_all(mount.path)
    assert source.counts()["read_bytes"] == (total if prefetch == "access" else 2 * total)


@pytest.mark.parametrize("mode", ["ttl=3600", "open"])
def test_who_has_a_file_open_keeps_its_version(
    work: Bench, source: FaultySource, mode: str
) -> None:
    source.wait_old()
    mount = work.mount(source.path, "--freshness", mode, "--prefetch", "none")
    path = mount.path / "1/1"
    fd = os.open(path, os.O_RDONLY)
    try:
        assert os.pread(fd, 10, 0) == content(1)[:10]
        (source.backing / "1/new").write_bytes(b"another")
        (source.backing / "1/new").rename(source.backing / "1/1")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(fd, 1 << 20, 0) == content(1)
        assert run("refresh", str(mount.path)).returncode == 0
        assert path.read_bytes() == b"another"
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(fd, 1 << 20, 0) == content(1)
    finally:
        os.close(fd)


def test_a_new_worker_reads_what_was_open(work: Bench, source: FaultySource) -> None:
    source.wait_old()
    mount = work.mount(source.path, "--freshness", "ttl=3600", "--prefetch", "none")
    fds = [os.open(mount.path / f"{n % 3}" / f"{n}", os.O_RDONLY) for n in range(FILES)]
    try:
        before = mount.worker_pid()
        os.kill(before, 9)
        wait_for(lambda: mount.worker_pid() != before, "another worker")
        for number, fd in enumerate(fds):
            assert os.pread(fd, 1 << 20, 0) == content(number)
    finally:
        for fd in fds:
            os.close(fd)
    read_all(mount.path)


def test_what_the_source_says_reaches_the_reader(work: Bench, source: FaultySource) -> None:
    source.wait_old()
    mount = work.mount(source.path, "--freshness", "ttl=3600", "--prefetch", "none")
    source.faults(fail={"open *": errno.EIO})
    with pytest.raises(OSError, match="Input/output error"):
        (mount.path / "1/1").read_bytes()
    source.faults()
    assert (mount.path / "1/1").read_bytes() == content(1)


def test_a_tier_that_is_too_small_keeps_what_fits(work: Bench, source: FaultySource) -> None:
    source.wait_old()
    mount = work.mount(source.path, "--prefetch", "access", tier="80K")
    read_all(mount.path)
    status = mount.wait_idle()
    assert 0 < status["files"]["resident"] <= 20
    assert status["prefetch"]["refused"] > 0
    assert status["tiers"][0]["used_bytes"] <= 20 * 4096
    read_all(mount.path)


def test_directories_that_change_places(work: Bench, source: FaultySource) -> None:
    """A directory that the C part knows goes on meaning what it did. The version tells whether the
    file is the one that was meant."""
    source.wait_old()
    mount = work.mount(source.path, "--freshness", "open", "--prefetch", "none")
    read_all(mount.path)
    backing = source.backing
    (backing / "1").rename(backing / "was 1")
    (backing / "2").rename(backing / "1")
    (backing / "was 1").rename(backing / "2")

    def swapped(mount: Mount) -> bool:
        return (mount.path / "1/2").read_bytes() == content(2)

    wait_for(lambda: swapped(mount), "the directories to have changed places")
    for number in range(FILES):
        directory = {0: "0", 1: "2", 2: "1"}[number % 3]
        assert (mount.path / directory / f"{number}").read_bytes() == content(number)
