"""Opens and reads that the C part answers, on real mounts: with opens, and without; and small files
that it copies ahead of their readers."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from monarchfs.cache.store.segments import SMALL_BYTES
from tests.support import on_disk
from tests.support.dataset import content
from tests.support.mounting import Bench, requires_fuse, wait_for
from tests.support.reading import COMMAND, Reader, digest
from tests.support.scenario import play, playing
from tests.support.trees import write_files

pytestmark = requires_fuse

OWN_FILE = SMALL_BYTES + 70_000
"""What a copy has that lies in a file of its own."""
RELAY = "mount --data-path relay --freshness"
CASES = (
    {
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


SMALL = "file {0..2}/{0..19} 1500\n"
ALL = """
until files.resident = 60
read
check all
  source.read_bytes 90000
"""
"""They are here, and each was read once."""

COPIED_AHEAD = {
    "a reader is answered from the read that was begun ahead": f"""
slow read seconds=0.3
mount --prefetch all
begin a 0/0; begin b 1/3; begin c 0/16; begin d 2/19
finish a; finish b; finish c; finish d
{ALL}
""",
    "some that hang hold up neither others nor readers": f"""
hang open {{0..1}}/{{0..3}}
mount --prefetch all
until files.resident = 52
until prefetch.active = 8
state copying 1/2
heal
{ALL}
""",
    "what fails is tried again": f"""
fail read 0/{{0..4}} EIO
mount --prefetch all
reason 0/3 copying failed: Input/output error
heal
{ALL}
  prefetch.failed 0
  prefetch.outdated 0
""",
}


@pytest.mark.parametrize("case", COPIED_AHEAD)
def test_copied_ahead(work: Bench, case: str) -> None:
    play(work, SMALL + COPIED_AHEAD[case], "--freshness", "immutable")


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
@pytest.mark.parametrize("how", ["wiped", "cut", "linked", "replaced by a directory"])
def test_replicas_that_somebody_spoiled(work: Bench, freshness: str, how: str) -> None:
    """Of two small files in one segment, and of two in files of their own."""
    sizes = {"a": 300_000, "b": 300_000, "own a": OWN_FILE, "own b": OWN_FILE}
    files = {name: content(name, size) for name, size in sizes.items()}
    options = ("--data-path", "relay", "--freshness", freshness, "--prefetch", "all")
    mount = work.mount(write_files(work.path / "src", files), *options)
    assert mount.wait_idle()["files"]["resident"] == 4
    root, tier = str(mount.path), work.path / "tier"
    sums = {name: digest(data) for name, data in files.items()}
    with closing(Reader(COMMAND)) as process:
        process.ask("open", root, ["a", "own a"])
        assert process.ask("held", ["a", "own a"]).items() <= sums.items()
        spoiled = on_disk.own_files(tier) + on_disk.segments(tier)
        assert len(spoiled) == 3
        for path in spoiled:
            spoil(path, how)
        process.ask("open", root, ["b", "own b"])
        for _ in range(2):
            assert process.ask("held", list(files)) == sums
        process.ask("close", ["b", "own b"])
        again = process.ask("read", root, ["b", "own b"], "whole", 0)
        assert again.items() <= sums.items()


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
