"""Opens and reads that the C part answers, on real mounts: with opens, and without."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from monarchfs.store.segments import SMALL_BYTES
from tests.support import on_disk
from tests.support.dataset import content
from tests.support.mounting import Bench, as_user, requires_fuse, requires_root, wait_for
from tests.support.reading import COMMAND, Reader, digest
from tests.support.scenario import play, playing

pytestmark = requires_fuse

SIZE = 300_000
OWN_FILE = SMALL_BYTES + 70_000
"""What a copy has that lies in a file of its own."""


@contextmanager
def reader(user: str | None = None) -> Iterator[Reader]:
    process = Reader(as_user(user, COMMAND))
    try:
        yield process
    finally:
        process.close()


def dataset(work: Bench, *names: str, size: int = SIZE) -> Path:
    source = work.path / "src"
    source.mkdir()
    for name in names:
        (source / name).write_bytes(content(name, size))
    return source


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


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, CASES[case])


def spoil(path: Path, how: str) -> None:
    if how == "wiped":
        shutil.rmtree(path.parent, ignore_errors=True)
    elif how == "cut":
        os.truncate(path, 1000)
    elif how == "linked":
        path.rename(path.with_suffix(".away"))
        path.symlink_to("/etc/passwd")
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("freshness", ["ttl=3600", "immutable"], ids=["opens", "free"])
@pytest.mark.parametrize("size", [SIZE, OWN_FILE])
@pytest.mark.parametrize("how", ["wiped", "cut", "linked", "replaced by a directory"])
def test_replicas_that_somebody_spoiled(work: Bench, freshness: str, how: str, size: int) -> None:
    options = ("--data-path", "relay", "--freshness", freshness, "--prefetch", "all")
    mount = work.mount(dataset(work, "a", "b", size=size), *options)
    assert mount.wait_idle()["files"]["resident"] == 2
    root, tier = str(mount.path), work.path / "tier"
    sums = {name: digest(content(name, size)) for name in ("a", "b")}
    with reader() as process:
        process.ask("open", root, ["a"])
        assert process.ask("held", ["a"]) == {"a": sums["a"]}
        spoiled = on_disk.own_files(tier) + on_disk.segments(tier)
        assert len(spoiled) == (1 if size == SIZE else 2)
        for path in spoiled:
            spoil(path, how)
        process.ask("open", root, ["b"])
        for _ in range(2):
            assert process.ask("held", ["a", "b"]) == sums
        process.ask("close", ["b"])
        assert process.ask("read", root, ["b"], "whole", 0) == {"b": sums["b"]}


def test_what_nobody_reads_is_closed(work: Bench) -> None:
    """A small file at once, a larger one after a while."""
    with playing(work) as scenario:
        scenario.play("file small 300000; file large 2M")
        scenario.play(f"{RELAY} immutable --prefetch none; open holder")
        worker = psutil.Process(work.mounts[0].worker_pid())
        for name in ("small", "large"):
            path = str(work.faulty[0].path / name)
            scenario.play(f"held holder {name}")
            if name == "large":
                assert path in [entry.path for entry in worker.open_files()]
            wait_for(
                lambda: path not in [entry.path for entry in worker.open_files()],  # noqa: B023
                "the source to be closed",
            )
            scenario.play(f"held holder {name}")
        scenario.play("close holder")


@requires_root
def test_permissions_of_a_mount_for_one_user(work: Bench) -> None:
    source = dataset(work, "a", "secret")
    (source / "secret").chmod(0)
    work.path.chmod(0o1777)
    options = ("--data-path", "relay", "--freshness", "immutable", "--user", "nobody")
    mount = work.mount(source, *options)
    with reader("nobody") as process:
        process.ask("open", str(mount.path), ["a", "secret"])
        assert process.ask("held", ["a"]) == {"a": digest(content("a", SIZE))}
        readable = as_user("nobody", ["test", "-r", str(mount.path / "secret")])
        assert subprocess.run(readable, check=False).returncode == 1
        for _ in range(2):
            with pytest.raises(PermissionError):
                process.ask("held", ["secret"])


@requires_root
def test_permissions_of_a_mount_for_all(work: Bench) -> None:
    """The kernel checks them itself."""
    source = dataset(work, "a", "secret")
    (source / "secret").chmod(0o600)
    options = ("--data-path", "relay", "--freshness", "immutable", "-o", "allow_other")
    mount = work.mount(source, *options, "--prefetch", "all")
    mount.wait_idle()
    with reader("nobody") as process:
        found = process.ask("read", str(mount.path), ["a"], "whole", 0)
        assert found == {"a": digest(content("a", SIZE))}
        with pytest.raises(PermissionError):
            process.ask("open", str(mount.path), ["secret"])
