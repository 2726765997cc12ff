"""Opens and reads that the C part answers, on real mounts: with opens, and without."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from monarchfs.store.segments import SMALL_BYTES
from tests.support import on_disk
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import Bench, Mount, requires_fuse, requires_root, run, wait_for
from tests.support.reader import Reader, reader

pytestmark = requires_fuse

SIZE = 300_000
OWN_FILE = SMALL_BYTES + 70_000
"""What a copy has that lies in a file of its own."""
TTL = ("--freshness", "ttl=3600")
IMMUTABLE = ("--freshness", "immutable")
both = pytest.mark.parametrize("freshness", [TTL, IMMUTABLE], ids=["opens", "free"])


@pytest.fixture
def process() -> Iterator[Reader]:
    with reader() as found:
        yield found


def content(name: str, size: int = SIZE) -> bytes:
    seed = name.encode()
    return (seed * (size // len(seed) + 1))[:size]


def dataset(work: Bench, *names: str, size: int = SIZE) -> Path:
    source = work.path / "src"
    source.mkdir()
    for name in names:
        (source / name).write_bytes(content(name, size))
    return source


def resident(work: Bench, *names: str, freshness: tuple[str, ...], size: int = SIZE) -> Mount:
    mount = work.mount(
        dataset(work, *names, size=size), "--data-path", "relay", *freshness, "--prefetch", "all"
    )
    assert mount.wait_idle()["files"]["resident"] == len(names)
    return mount


def evict(mount: Mount, name: str) -> bool:
    run("evict", str(mount.path), name)
    left: int = mount.status()["files"]["resident"]
    return not left


def replicas(work: Bench) -> list[Path]:
    """Files that copies lie in."""
    tier = work.path / "tier"
    return on_disk.own_files(tier) + on_disk.segments(tier)


def occupied(work: Bench) -> int:
    return sum(path.stat().st_blocks for path in replicas(work)) * 512


@both
def test_opens_and_bytes_are_counted(
    work: Bench, process: Reader, freshness: tuple[str, ...]
) -> None:
    names = ("a", "bb", "ccc")
    mount = resident(work, *names, freshness=freshness)
    for name in names:
        for _ in range(3):
            fd = process.open(mount.path / name)
            assert process.read(fd) == content(name)
            process.close(fd)
    served = mount.status()["served"]
    assert served["local_opens"] == 9
    assert served["local_file_bytes"] == 9 * SIZE
    assert served["source_opens"] == 0
    assert served["relayed_bytes"] >= 9 * SIZE


@pytest.mark.smoke
def test_an_open_is_free_and_pages_are_kept(work: Bench, process: Reader) -> None:
    """Without a message: the worker is stopped meanwhile."""
    mount = resident(work, "a", freshness=IMMUTABLE)
    fd = process.open(mount.path / "a")
    assert process.again(fd) == content("a")
    process.close(fd)
    worker = psutil.Process(mount.worker_pid())
    worker.suspend()
    try:
        for _ in range(3):
            fd = process.open(mount.path / "a")
            assert process.again(fd) == content("a")
            process.close(fd)
    finally:
        worker.resume()


def test_an_open_file_is_not_evicted(work: Bench, process: Reader) -> None:
    mount = resident(work, "a", freshness=TTL)
    first, second = process.open(mount.path / "a"), process.open(mount.path / "a")
    process.close(first)
    assert not evict(mount, "a")
    assert process.read(second) == content("a")
    assert occupied(work) >= SIZE
    process.close(second)
    wait_for(lambda: evict(mount, "a"), "the closed file to be evicted")
    wait_for(lambda: not occupied(work), "its blocks to be given back")


def test_a_file_that_is_evicted_while_it_is_open_is_read_from_the_source(
    work: Bench, process: Reader
) -> None:
    """Where nobody knows what is open."""
    mount = resident(work, "a", freshness=IMMUTABLE)
    fd = process.open(mount.path / "a")
    assert process.read(fd) == content("a")
    assert evict(mount, "a")
    assert process.read(fd) == content("a")
    assert process.mapped(fd, 1000, 5000) == content("a")[1000:6000]
    assert mount.wait_idle()["files"]["resident"] == 1
    assert process.read(fd) == content("a")


@both
@pytest.mark.parametrize("size", [SIZE, OWN_FILE])
@pytest.mark.parametrize("spoil", ["wiped", "cut", "linked", "replaced by a directory"])
def test_replicas_that_somebody_spoiled(
    work: Bench, process: Reader, freshness: tuple[str, ...], spoil: str, size: int
) -> None:
    mount = resident(work, "a", "b", freshness=freshness, size=size)
    a, b = content("a", size), content("b", size)
    fd = process.open(mount.path / "a")
    assert process.read(fd) == a
    spoiled = replicas(work)
    assert len(spoiled) == (1 if size == SIZE else 2)
    for path in spoiled:
        if spoil == "wiped":
            shutil.rmtree(path.parent, ignore_errors=True)
        elif spoil == "cut":
            os.truncate(path, 1000)
        elif spoil == "linked":
            path.rename(path.with_suffix(".away"))
            path.symlink_to("/etc/passwd")
        else:
            path.unlink()
            path.mkdir()
    other = process.open(mount.path / "b")
    for _ in range(2):
        assert process.read(fd) == a
        assert process.read(other) == b
    process.close(other)
    again = process.open(mount.path / "b")
    assert process.read(again) == b


@both
def test_a_file_that_becomes_resident_while_it_is_open(
    work: Bench, process: Reader, freshness: tuple[str, ...]
) -> None:
    mount = work.mount(dataset(work, "a"), "--data-path", "relay", *freshness)
    fd = process.open(mount.path / "a")
    assert process.read(fd, 0, 10) == content("a")[:10]
    assert mount.wait_idle()["files"]["resident"] == 1
    before = mount.status()
    assert process.read(fd) == content("a")
    after = mount.status()
    assert after["source_io"]["operations"] == before["source_io"]["operations"]
    assert after["served"]["source_opens"] == 1


def test_what_nobody_reads_is_closed(work: Bench, process: Reader) -> None:
    """A small file at once, a larger one after a while."""
    source = dataset(work, "small")
    (source / "large").write_bytes(bytes(range(256)) * (8 << 10))
    mount = work.mount(source, "--data-path", "relay", *IMMUTABLE, "--prefetch", "none")
    small, large = process.open(mount.path / "small"), process.open(mount.path / "large")
    worker = psutil.Process(mount.worker_pid())

    def open_in_source(name: str) -> bool:
        return any(entry.path == str(source / name) for entry in worker.open_files())

    def is_closed(name: str) -> bool:
        return not open_in_source(name)

    for fd, name in ((small, "small"), (large, "large")):
        data = (source / name).read_bytes()
        assert process.read(fd, 5, 10) == data[5:15]
        if name == "large":
            assert open_in_source(name)
        wait_for(partial(is_closed, name), "the source to be closed")
        assert process.read(fd, 5, 10) == data[5:15]


def test_what_the_source_refuses_is_said_by_the_first_read(work: Bench, process: Reader) -> None:
    source = dataset(work, "a", "b")
    mount = work.mount(source, "--data-path", "relay", *IMMUTABLE)
    gone, replaced = process.open(mount.path / "a"), process.open(mount.path / "b")
    (source / "a").unlink()
    (source / "b").unlink()
    (source / "b").write_bytes(b"another file")
    with pytest.raises(OSError, match="in the reader") as failed:
        process.read(gone)
    assert failed.value.errno in (errno.ENOENT, errno.ESTALE)
    with pytest.raises(OSError, match="in the reader") as failed:
        process.read(replaced)
    assert failed.value.errno == errno.ESTALE

    def reads_the_new_one() -> bool:
        fd = process.open(mount.path / "b")
        try:
            return process.read(fd) == b"another file"
        except OSError:
            return False
        finally:
            process.close(fd)

    wait_for(reads_the_new_one, "the name to be looked up again")


@requires_root
def test_permissions_of_a_mount_for_one_user(work: Bench) -> None:
    interpreter_for("nobody")
    source = dataset(work, "a", "secret")
    (source / "secret").chmod(0)
    work.path.chmod(0o1777)
    mount = work.mount(source, "--data-path", "relay", *IMMUTABLE, "--user", "nobody")
    with reader("nobody") as process:
        fd = process.open(mount.path / "a")
        assert process.read(fd) == content("a")
        assert not process.access(mount.path / "secret")
        fd = process.open(mount.path / "secret")
        for _ in range(2):
            with pytest.raises(PermissionError):
                process.read(fd)


@requires_root
def test_permissions_of_a_mount_for_all(work: Bench) -> None:
    """The kernel checks them itself."""
    interpreter_for("nobody")
    source = dataset(work, "a", "secret")
    (source / "secret").chmod(0o600)
    work.path.chmod(0o755)
    mount = work.mount(
        source, "--data-path", "relay", *IMMUTABLE, "-o", "allow_other", "--prefetch", "all"
    )
    mount.wait_idle()
    with reader("nobody") as process:
        assert process.read(process.open(mount.path / "a")) == content("a")
        with pytest.raises(PermissionError):
            process.open(mount.path / "secret")


@pytest.mark.parametrize("option", [("--evict", "lru"), ("--touch-source", "1d")], ids=str)
def test_opens_are_told_where_it_matters_what_is_used(
    work: Bench, process: Reader, option: tuple[str, str]
) -> None:
    mount = resident(work, "a", freshness=(*IMMUTABLE, *option))
    for _ in range(3):
        process.close(process.open(mount.path / "a"))
    assert mount.status()["served"]["local_opens"] == 3
