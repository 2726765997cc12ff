"""A reader cannot tell the mount from the source."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support import trees
from tests.support.mounting import Bench, Mount, bench, requires_mounts, wait_for
from tests.support.processes import open_slots

pytestmark = requires_mounts

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
ARRAY = np.random.default_rng(1).integers(0, 255, (100, 100, 100), dtype=np.uint8)


@pytest.fixture
def source(work: Bench) -> Path:
    path = work.path / "source"
    path.mkdir()
    return path


@pytest.mark.parametrize("freshness", ["immutable", "open"])
def test_a_strange_tree_looks_the_same_cold_and_warm(
    work: Bench, source: Path, freshness: str
) -> None:
    trees.strange_tree(source)
    mount = work.mount(source, "--freshness", freshness)
    assert trees.differences(source, mount.path) == []
    mount.wait_idle()
    DROP_CACHES.write_text("3")
    assert trees.differences(source, mount.path) == []


def test_a_large_directory_is_listed_without_a_stat_each(work: Bench, source: Path) -> None:
    (source / "big").mkdir()
    for number in range(20_000):
        (source / "big" / f"{number:06d}").touch()
    mount = work.mount(source)
    before = mount.status()["source_io"]["operations"]
    names = os.listdir(mount.path / "big")
    assert sorted(names) == [f"{number:06d}" for number in range(20_000)]
    assert mount.status()["source_io"]["operations"] - before < 200
    with os.scandir(mount.path / "big") as entries:
        some = [entry for entry in entries if entry.name.endswith("777")]
    assert all(entry.is_file(follow_symlinks=False) for entry in some)
    assert all(os.lstat(entry.path).st_ino == entry.inode() for entry in some)


def test_a_listing_goes_on_after_names_came_and_went(work: Bench, source: Path) -> None:
    for number in range(500):
        (source / f"n{number:05d}").touch()
    mount = work.mount(source, "--freshness", "ttl=0.01")
    with os.scandir(mount.path) as entries:
        seen = [next(entries).name for _ in range(100)]
        for name in seen[:50]:
            (source / name).unlink()
        (source / "a new one").touch()
        os.listdir(mount.path)
        seen += [entry.name for entry in entries]
    assert len(seen) == len(set(seen))
    assert {f"n{number:05d}" for number in range(500)} <= set(seen)


def ways_to_read(path: Path, data: bytes) -> None:
    """All the ways in which a program reads a file, each against what it must see."""
    size = len(data)
    with path.open("rb") as file:
        fd = file.fileno()
        rng = random.Random(5)
        for _ in range(50):
            offset, length = rng.randrange(size), rng.randrange(1, 300_000)
            assert os.pread(fd, length, offset) == data[offset : offset + length]
        assert os.pread(fd, 10, size) == b""
        assert os.pread(fd, 10, size - 3) == data[-3:]
        parts = [bytearray(1000), bytearray(70_000), bytearray(5)]
        os.lseek(fd, 4321, os.SEEK_SET)
        assert os.readv(fd, parts) == 71_005
        assert b"".join(parts) == data[4321 : 4321 + 71_005]
        for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
            with mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == data
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        address = libc.mmap(None, ctypes.c_size_t(size), 1, 1, fd, ctypes.c_long(0))
        assert os.lseek(fd, 0, os.SEEK_END) == size
        assert os.lseek(fd, 0, os.SEEK_HOLE) == size
        reader, writer = os.pipe()
        try:
            assert os.sendfile(writer, fd, 100, 4096) == 4096
            assert os.splice(fd, writer, 4096, 4196) == 4096
            assert os.read(reader, 8192) == data[100 : 100 + 8192]
        finally:
            os.close(reader)
            os.close(writer)
    assert ctypes.string_at(address, size) == data, "a map of a closed file"
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with open(direct, "rb"), mmap.mmap(-1, 1 << 20) as buffer:
        assert os.preadv(direct, [buffer], 4096) == 1 << 20
        assert buffer[:] == data[4096 : 4096 + (1 << 20)]


@pytest.mark.smoke
@pytest.mark.parametrize("data_path", ["relay", "passthrough"])
def test_every_way_to_read_uncached_and_resident(work: Bench, source: Path, data_path: str) -> None:
    data = trees.random_bytes((5 << 20) + 777, 3)
    (source / "data").write_bytes(data)
    mount = work.mount(source, "--data-path", data_path)
    ways_to_read(mount.path / "data", data)
    before = mount.wait_idle()["served"]["passthrough_opens"]  # of the last ways, perhaps
    wait_for(lambda: open_slots(mount) == 0, "all to be closed")
    assert os.getxattr(mount.path / "data", "user.monarchfs.state") == b"resident"
    DROP_CACHES.write_text("3")
    relayed = mount.status()["served"]["relayed_bytes"]
    ways_to_read(mount.path / "data", data)
    status = mount.status()
    assert status["data_path"] == data_path
    served, passes = status["served"], data_path == "passthrough"
    assert (served["passthrough_opens"] > before) == passes
    assert (served["relayed_bytes"] == relayed) == passes


def test_mounting_over_the_source_itself(work: Bench, source: Path) -> None:
    contents = trees.dataset(source, files=10)
    mount = work.mount(source, point=source)
    for path, data in contents.items():
        assert (source / path).read_bytes() == data
    mount.wait_idle()
    assert mount.status()["files"]["resident"] == len(contents)
    mount.umount()
    assert {p: (source / p).read_bytes() for p in contents} == contents


def test_a_file_system_mounted_inside_the_source(work: Bench, source: Path) -> None:
    inner = source / "inner"
    inner.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(inner)], check=True)
    try:
        (inner / "file").write_bytes(b"from another file system")
        mount = work.mount(source)
        assert (mount.path / "inner" / "file").read_bytes() == b"from another file system"
        assert mount.umount().returncode == 0
    finally:
        subprocess.run(["umount", str(inner)], check=True)


@pytest.fixture(scope="module")
def small() -> Iterator[Mount]:
    """A mount of some files that several tests look at."""
    with bench() as work:
        source = work.path / "source"
        source.mkdir()
        np.save(source / "a.npy", ARRAY)
        with h5py.File(source / "a.h5", "w") as file:
            file.create_dataset("x", data=ARRAY, chunks=(10, 100, 100), compression="gzip")
        yield work.mount(source)


def test_hdf5_and_numpy_read_as_they_do_from_disk(small: Mount) -> None:
    assert (np.load(small.path / "a.npy", mmap_mode="r") == ARRAY).all()
    with h5py.File(small.path / "a.h5", "r") as file:
        assert (file["x"][:] == ARRAY).all()


def test_statfs_is_the_sources(small: Mount) -> None:
    here, there = os.statvfs(small.source), os.statvfs(small.path)
    assert (there.f_blocks, there.f_frsize) == (here.f_blocks, here.f_frsize)
    assert there.f_namemax == here.f_namemax
