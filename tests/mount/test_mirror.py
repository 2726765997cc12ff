"""A reader cannot tell the mount from the source, but where it differs on purpose: as
docs/SEMANTICS.md says."""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import random
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from monarchfs.doctor.system import release_of
from tests.support import trees
from tests.support.mounting import Bench, Mount, as_user, bench, requires_mounts, wait_for
from tests.support.processes import open_slots
from tests.support.programs import Running, execute

pytestmark = requires_mounts

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
ARRAY = np.random.default_rng(1).integers(0, 255, (100, 100, 100), dtype=np.uint8)
IN_OPEN, IN_ACCESS, IN_CLOSE_NOWRITE, IN_ALL_EVENTS, IN_ISDIR = 0x20, 0x1, 0x10, 0xFFF, 0x40000000
AT_FDCWD, AT_EMPTY_PATH, OPEN_TREE_CLONE, MOUNT_ATTR_IDMAP = -100, 0x1000, 1, 0x100000
OPEN_TREE, MOUNT_SETATTR = 428, 442
FS_IOC_GETFLAGS, LL_IOC_LOV_GETSTRIPE = 0x80086601, 0x4008669B
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def source(work: Bench) -> Path:
    path = work.path / "source"
    path.mkdir()
    return path


@pytest.mark.parametrize("freshness", ["immutable", "open"])
def test_a_strange_tree_is_true_cold_and_warm(work: Bench, source: Path, freshness: str) -> None:
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
    assert sorted(os.listdir(mount.path / "big")) == [f"{number:06d}" for number in range(20_000)]
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
        assert os.pread(fd, 10, size - 3) + os.pread(fd, 10, size) == data[-3:]
        parts = [bytearray(1000), bytearray(70_000), bytearray(5)]
        os.lseek(fd, 4321, os.SEEK_SET)
        assert os.readv(fd, parts) == 71_005
        assert b"".join(parts) == data[4321 : 4321 + 71_005]
        for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
            with mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == data
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
        assert os.preadv(direct, [buffer], 777) == 1 << 20, "no alignment is asked for"
        assert buffer[:] == data[777 : 777 + (1 << 20)]


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
    assert (served["relayed_bytes"] - relayed == 1 << 20) == passes  # that by O_DIRECT


def test_mounting_over_the_source_itself(work: Bench, source: Path) -> None:
    contents = trees.dataset(source, files=10)
    mount = work.mount(source, point=source)
    assert {p: (source / p).read_bytes() for p in contents} == contents
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
def mounted() -> Iterator[Mount]:
    """A mount of some files that several tests look at."""
    with bench() as work:
        source = trees.write_files(work.path / "source", {"f": b"f"})
        np.save(source / "a.npy", ARRAY)
        with h5py.File(source / "a.h5", "w") as file:
            file.create_dataset("x", data=ARRAY, chunks=(10, 100, 100), compression="gzip")
        yield work.mount(source, "--freshness", "open")


def test_hdf5_and_numpy_read_as_they_do_from_disk(mounted: Mount) -> None:
    assert (np.load(mounted.path / "a.npy", mmap_mode="r") == ARRAY).all()
    with h5py.File(mounted.path / "a.h5", "r") as file:
        assert (file["x"][:] == ARRAY).all()
    # And statfs(2) is the source's.
    here, there = os.statvfs(mounted.source), os.statvfs(mounted.path)
    assert (there.f_blocks, there.f_frsize) == (here.f_blocks, here.f_frsize)
    assert there.f_namemax == here.f_namemax


@contextmanager
def watched(path: Path) -> Iterator[int]:
    """An inotify(7) descriptor that is told of all that happens there."""
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert fd >= 0
    try:
        assert libc.inotify_add_watch(fd, bytes(path), IN_ALL_EVENTS) >= 0
        yield fd
    finally:
        os.close(fd)


def events(fd: int) -> set[int]:
    """What happened since, without IN_ISDIR."""
    found: set[int] = set()
    with suppress(BlockingIOError):
        data = os.read(fd, 1 << 16)
        while data:
            _watch, mask, _cookie, length = struct.unpack_from("iIII", data)
            found.add(mask & ~IN_ISDIR)
            data = data[16 + length :]
    return found


def test_trusted_attributes_are_not_shown(mounted: Mount) -> None:
    for name in ("trusted.a", "user.a"):
        os.setxattr(mounted.source / "f", name, b"value")
    assert set(os.listxattr(mounted.source / "f")) >= {"trusted.a", "user.a"}
    assert os.listxattr(mounted.path / "f") == ["user.a"]
    assert os.getxattr(mounted.path / "f", "user.a") == b"value"
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(mounted.path / "f", "trusted.a")


@pytest.mark.parametrize(
    ("options", "runs_unread"),
    [(("--user", "nobody"), False), (("-o", "allow_other"), True)],
    ids=["a user's mount", "a mount for all"],
)
def test_what_may_be_run_but_not_read(
    work: Bench, source: Path, options: tuple[str, str], runs_unread: bool
) -> None:
    program = source / "program"
    program.write_bytes(Path("/bin/true").read_bytes())

    def runs(path: Path) -> bool:
        done = execute(as_user("nobody", ["sh", "-c", '"$0"', str(path)]))
        assert done.returncode in (0, 126), done.stderr
        return done.returncode == 0

    if not runs_unread:  # its state directory is made by the user
        work.path.chmod(0o777)
    mount = work.mount(source, *options, "--freshness", "open")
    for mode, as_ever in ((0o755, True), (0o711, runs_unread)):
        program.chmod(mode)
        assert runs(program)
        assert runs(mount.path / "program") == as_ever


def test_inotify_tells_of_the_mounts_own_users_alone(mounted: Mount) -> None:
    source, f = mounted.source, mounted.path / "f"
    with watched(source) as of_source, watched(mounted.path) as of_mount:
        before = f.read_bytes()
        assert events(of_mount) == {IN_OPEN, IN_ACCESS, IN_CLOSE_NOWRITE}
        events(of_source)
        trees.write_files(source, {"f": before + b"another", "new": b"new"})
        (source / "new").rename(source / "newer")
        assert events(of_source)
        wait_for(lambda: f.read_bytes() == before + b"another", "the change to show")
        assert (mounted.path / "newer").read_bytes() == b"new"
        assert events(of_mount) <= {IN_OPEN, IN_ACCESS, IN_CLOSE_NOWRITE}


@pytest.mark.parametrize("prefetch", ["none", "all"])
@pytest.mark.parametrize("data_path", ["auto", "relay"])
def test_holes_are_data(work: Bench, source: Path, prefetch: str, data_path: str) -> None:
    """A sparse file that is read from the source, or from a replica that has holes itself."""
    size, at = 4 << 20, 3 << 20
    with (source / "sparse").open("wb") as file:
        file.truncate(size)
        file.seek(at)
        file.write(b"data")
    mount = work.mount(source, "--prefetch", prefetch, "-o", f"data_path={data_path}")
    if prefetch == "all":
        wait_for(lambda: mount.status()["files"]["resident"] == 1, "the copy")
    path = mount.path / "sparse"
    with path.open("rb") as file:
        for where in (0, 5, at, size - 1):
            assert os.lseek(file.fileno(), where, os.SEEK_DATA) == where
            assert os.lseek(file.fileno(), where, os.SEEK_HOLE) == size
        with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
            os.lseek(file.fileno(), size, os.SEEK_DATA)
    assert path.stat().st_blocks == (source / "sparse").stat().st_blocks < size // 512
    # cp(1) of newer coreutils takes all for data, and looks for zeros only when told to.
    subprocess.run(["cp", "--sparse=always", path, work.path / "copy"], check=True)
    assert (work.path / "copy").read_bytes() == (source / "sparse").read_bytes()
    assert (work.path / "copy").stat().st_blocks * 512 < size // 2


def test_inode_numbers_are_the_mounts_own(mounted: Mount) -> None:
    """A new version has a new one."""
    f, of_source = mounted.path / "f", mounted.source / "f"
    first, in_source = f.stat(), of_source.stat()
    assert (first.st_dev, first.st_ino) != (in_source.st_dev, in_source.st_ino)
    of_source.write_bytes(b"other")
    assert f.read_bytes() == b"other"
    assert f.stat().st_ino != first.st_ino
    assert of_source.stat().st_ino == in_source.st_ino


@pytest.mark.skipif(release_of(platform.release()) < (6, 8), reason="needs Linux 6.8")
def test_there_are_no_file_handles(mounted: Mount) -> None:
    """name_to_handle_at(2): once the kernel has forgotten the file, nothing would find it. Before
    Linux 6.8, a FUSE file system cannot refuse handles."""
    handle = ctypes.create_string_buffer(struct.pack("Ii128x", 128, 0))
    at, path = ctypes.c_int(), bytes(mounted.path / "f")
    done = libc.name_to_handle_at(AT_FDCWD, path, handle, ctypes.byref(at), 0)
    assert (done, ctypes.get_errno()) == (-1, errno.EOPNOTSUPP)


def test_there_are_no_ioctls(mounted: Mount) -> None:
    for path in (mounted.path, mounted.path / "f"):
        fd = os.open(path, os.O_RDONLY)
        for command in (termios.TCGETS, FS_IOC_GETFLAGS, LL_IOC_LOV_GETSTRIPE):
            with pytest.raises(OSError) as failed:  # noqa: PT011
                fcntl.ioctl(fd, command, bytes(128))
            assert failed.value.errno in (errno.ENOTTY, errno.EOPNOTSUPP)
        os.close(fd)


def test_what_no_fuse_file_system_has(mounted: Mount) -> None:
    os.mkfifo(mounted.source / "fifo")
    with open(os.open(mounted.source / "fifo", os.O_NONBLOCK)), (mounted.path / "f").open() as f:
        with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
            os.open(mounted.path / "fifo", os.O_WRONLY | os.O_NONBLOCK)
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            os.preadv(f.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
    assert execute(["stat", "-c", "%w", str(mounted.path / "f")]).stdout == "-\n"


@contextmanager
def mapped_users() -> Iterator[int]:
    """A user namespace in which user 0 is user 1000."""
    process = Running(["unshare", "--user", "sh", "-c", "echo; read line"])
    try:
        process.line()
        for kind in ("uid", "gid"):
            Path(f"/proc/{process.pid}/{kind}_map").write_text("0 1000 1")
        with open(f"/proc/{process.pid}/ns/user", "rb") as namespace:
            yield namespace.fileno()
    finally:
        process.communicate("")


def idmap_error(path: Path, namespace: int) -> int:
    """Of mount_setattr(2) on a clone of that mount: the errno, or 0."""
    tree = libc.syscall(OPEN_TREE, AT_FDCWD, bytes(path), OPEN_TREE_CLONE | os.O_CLOEXEC)
    assert tree >= 0, os.strerror(ctypes.get_errno())
    attributes = struct.pack("=QQQQ", MOUNT_ATTR_IDMAP, 0, 0, namespace)
    done = libc.syscall(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes))
    os.close(tree)
    return ctypes.get_errno() if done < 0 else 0


def test_mounts_of_it_are_not_idmapped(mounted: Mount) -> None:
    with mapped_users() as namespace:
        if idmap_error(Path("/dev/shm"), namespace):
            pytest.skip("needs Linux 6.3: before, tmpfs cannot be idmapped either")
        assert idmap_error(mounted.path, namespace) == errno.EINVAL
