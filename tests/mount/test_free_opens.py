"""Opens and reads that the C part answers, on real mounts: with opens, and without."""

from __future__ import annotations

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
from tests.support.scenario import play

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


RELAY = "mount --data-path relay --freshness"
CASES = (
    {
        f"opens and bytes are counted ({freshness})": f"""
file a bb ccc 300000
{RELAY} {freshness} --prefetch all; until files.resident = 3
read; read; read
check read
  served.local_opens 9
  served.local_file_bytes 2700000
  served.source_opens 0
  served.relayed_bytes >=2700000
"""
        for freshness in ("ttl=3600", "immutable")
    }
    | {
        f"a file that becomes resident while it is open ({freshness})": f"""
file a 300000
{RELAY} {freshness}
open holder a; part a 0 10; until files.resident = 1; check copied
held holder
check read again
  source_io.operations 0
  served.source_opens 0
close holder
"""
        for freshness in ("ttl=3600", "immutable")
    }
    | {
        f"opens are told where it matters what is used ({option})": f"""
file a 300000
{RELAY} immutable {option} --prefetch all; until files.resident = 1
read; read way=again; read way=again
check read
  served.local_opens 3
"""
        for option in ("--evict lru", "--touch-source 1d")
    }
    | {
        "an open is free, and pages are kept": f"""
file a 300000
{RELAY} immutable --prefetch all; until files.resident = 1
read; read way=again
pause; read way=again; read way=again; read way=again; resume
""",
        "an open file is not evicted": f"""
file a 300000
{RELAY} ttl=3600 --prefetch all; until files.resident = 1
open one a; open other a; close one
command evict a
check it is still there
  files.resident 1
held other; close other; check it is closed
command evict a
check it is gone
  files.resident 0
  tier1.used_bytes 0
""",
        "where nobody knows what is open, an evicted file is read from the source": f"""
file a 300000
{RELAY} immutable --prefetch all; until files.resident = 1
open holder a; held holder; command evict a; until files.resident = 0
held holder; read way=mapped; until files.resident = 1
held holder; close holder
""",
        "what the source refuses is said by the first read": f"""
file a b 300000
{RELAY} immutable
size; open holder
remove a; replace b 12
held holder a error=ENOENT|ESTALE; held holder b error=ESTALE
same b; close holder
""",
    }
)


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, CASES[case])


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
