"""Passthrough on real mounts: the bytes, the ways to get at them, and many processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from monarchfs.cli.main import main
from monarchfs.store.segments import SMALL_BYTES
from tests.support.mounting import Bench, Mount, requires_mounts, run, wait_for
from tests.support.scenario import allocated, play, playing

pytestmark = requires_mounts

SECONDS = float(os.environ.get("PASSING_SECONDS", "6"))
OPENS = int(os.environ.get("PASSING_OPENS", "20000"))
PASSED_BYTES = SMALL_BYTES + 4096
"""The least that is passed through: smaller copies share files."""

OPEN_MEANWHILE = f"""
file f {PASSED_BYTES}
mount
open holder; held holder; idle; read; check its pages are cached
  served.passthrough_opens 0
close holder; check closed
read; check it is passed through
  served.passthrough_opens 1
open holder; command evict f; check it is open
  files.resident 1
held holder; close holder; check closed again
command evict f; until files.resident = 0; until tiers.0.used_bytes = 0
until passthrough.backing_files = 0; until passthrough.registered = 0; until passthrough.refused = 0
"""


def test_what_is_open_meanwhile(work: Bench) -> None:
    """A file is copied, evicted by hand and copied again while a process has it open."""
    play(work, OPEN_MEANWHILE)


def evicts(mount: Mount) -> bool:
    done = run("evict", str(mount.path))
    assert done.returncode in (0, 1), done.stderr
    return bool(mount.wait_idle()["files"]["resident"] == 0)


OPEN_AND_CLOSE = """
import os, random, sys
path, opens, chance = sys.argv[1], int(sys.argv[2]), random.Random(3)
names = sorted(os.listdir(path))
for _ in range(opens):
    fd = os.open(path + "/" + chance.choice(names), os.O_RDONLY)
    os.pread(fd, 1, 0)
    os.close(fd)
"""


def test_no_id_is_leaked(work: Bench) -> None:
    """Over opens, evictions and copies; PASSING_OPENS=1000000 for many."""
    with playing(work) as scenario:
        scenario.play(f"file {{0..39}} {PASSED_BYTES}; mount --evict lru --freshness immutable"
                      " tier=21M,20M; command warm --wait; idle")  # fmt: skip
        (mount,), rounds = work.mounts, 4
        command = [sys.executable, "-c", OPEN_AND_CLOSE, str(mount.path), str(OPENS // rounds)]
        for _ in range(rounds):
            subprocess.run(command, timeout=max(60, OPENS / 500), check=True)
        status = mount.wait_idle()
        assert status["served"]["passthrough_opens"] > OPENS // 4
        assert status["evictions"]["policy"] > 0
        assert 0 < status["passthrough"]["backing_files"] <= status["files"]["resident"]
        wait_for(lambda: backed(mount), "the worker to count every id")
        # A file that was opened before may still be copied; then another eviction removes it.
        wait_for(lambda: evicts(mount), "all copies to be evicted")
        scenario.play("until passthrough.backing_files = 0; until passthrough.registered = 0")
        # Their room counts until they are unlinked, which is a moment later.
        scenario.play("until tiers.0.used_bytes = 0; until tiers.1.used_bytes = 0")
        assert mount.status()["passthrough"]["refused"] == 0
        assert [allocated(work.path / f"tier{number}") for number in (1, 2)] == [0, 0]


def backed(mount: Mount) -> int | None:
    """How many files the kernel has open, if the worker knows them all."""
    status = mount.status()["passthrough"]
    known: int = status["backing_files"]
    return known if known == status["registered"] else None


@pytest.mark.parametrize(("policy", "kills"), [("sieve", False), ("keep", False), ("sieve", True)])
def test_many_processes_and_all_that_may_happen(work: Bench, policy: str, kills: bool) -> None:
    """Copies complete, files are evicted, and change in the source or the worker is killed;
    PASSING_SECONDS for longer."""
    sizes = {f"f{n}": 900_000 if n % 3 else 40_000 for n in range(24)}
    readers, options = ("one", "two", "three", "four"), ("--freshness", "open", "--evict", policy)
    with playing(work) as scenario:
        for name, size in sizes.items():
            scenario.play(f"file {name} {size}")
        scenario.mount(*options, "--data-path", "passthrough", tier="8M,16M")
        for reader in readers:
            scenario.loop(reader, versions="1" if kills else "2")
        (mount,), end, number = work.mounts, time.monotonic() + SECONDS / 2, 0
        while time.monotonic() < end:
            name = f"f{number % 24}"
            # What is open, not all local and gone from the source is lost with the worker (ESTALE).
            if number < 24 and number % 2 and not kills:
                scenario.play(f"replace {name} {sizes[name]}")
            main(["evict", str(mount.path), name])
            if kills and number % 8 == 7:
                scenario.kill("worker")
            number += 1
        for reader in readers:
            scenario.end(reader)
        status = mount.wait_idle()
        assert status["data_path"] == "passthrough"
        assert kills or status["served"]["passthrough_opens"] > 20
        assert status["passthrough"]["refused"] == 0
        scenario.play("read; idle; read; idle")
        known = wait_for(lambda: backed(mount), "both sides to count the same")
        assert known <= mount.status()["files"]["resident"]
