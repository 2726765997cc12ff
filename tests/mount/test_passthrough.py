"""Passthrough on real mounts: the bytes, the ways to get at them, and many processes at once."""

from __future__ import annotations

import os
import subprocess
import sys

from monarchfs.cache.store.segments import SMALL_BYTES
from monarchfs.config.places import OWNER
from tests.support import trees
from tests.support.mounting import Bench, Mount, requires_mounts, run, wait_for
from tests.support.scenario import play, playing

pytestmark = requires_mounts

OPENS = int(os.environ.get("PASSING_OPENS", "5000"))
PASSED_BYTES = SMALL_BYTES + 4096
"""The least that is passed through: smaller copies share files."""


def test_what_is_open_meanwhile(work: Bench) -> None:
    """A file is copied, and evicted by hand, while a process has it open."""
    script = f"""
file f {PASSED_BYTES}
mount
open holder f; read f; idle; read f; check its pages are cached
  served.passthrough_opens 0
close holder; check closed; open holder f; held holder; check it is passed through
  served.passthrough_opens 1
command evict f; check it is open
  files.resident 1
held holder; close holder; check closed again
command evict f; check it is gone
  files.resident 0
  tier1.used_bytes 0
until passthrough.registered = 0; until passthrough.backing_files = 0
"""
    play(work, script)


def evicts(mount: Mount) -> bool:
    done = run("evict", str(mount.path))
    assert done.returncode in (0, 1), done.stderr
    return bool(mount.wait_idle()["files"]["resident"] == 0)


def all_counted(mount: Mount) -> bool:
    now = mount.status()["passthrough"]
    return bool(now["registered"] == now["backing_files"])


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
    contents = {str(number): bytes((number,)) * PASSED_BYTES for number in range(20)}
    mount = work.mount(
        trees.write_files(work.path / "src", contents),
        *("--evict", "lru", "--freshness", "immutable"),
        tiers=[f"{work.path}/fast=11M", f"{work.path}/slow=10M"],
    )
    assert run("warm", str(mount.path), "--wait").returncode == 0
    for _ in range(2):
        command = [sys.executable, "-c", OPEN_AND_CLOSE, str(mount.path), str(OPENS // 2)]
        subprocess.run(command, timeout=max(60, OPENS / 500), check=True)
    status = mount.wait_idle()
    assert status["served"]["passthrough_opens"] > OPENS // 4
    assert status["evictions"]["policy"] > 0
    assert 0 < status["passthrough"]["backing_files"] <= status["files"]["resident"]
    wait_for(lambda: all_counted(mount), "the worker to count every id")
    # A file that was opened before may still be copied; then another eviction removes it.
    wait_for(lambda: evicts(mount), "all copies to be evicted")
    none = {"backing_files": 0, "refused": 0, "registered": 0}
    wait_for(lambda: mount.status()["passthrough"] == none, "the kernel to keep no file open")
    # Their room counts until they are unlinked, which is a moment later.
    wait_for(
        lambda: [tier["used_bytes"] for tier in mount.status()["tiers"]] == [0, 0],
        "the room of what was evicted to be free",
    )
    for tier in (work.path / "fast", work.path / "slow"):
        assert [p for p in tier.rglob("*") if p.is_file() and p.name != OWNER] == []


def test_many_processes_and_all_that_may_happen(work: Bench) -> None:
    """Copies complete, files are evicted for others and by hand, and change in the source. The
    fuzzer has files change while they are read (tests/fuzz)."""
    with playing(work) as scenario:
        scenario.play("file f{0..15} 1200000; file g{0..3} 3M; file small{0..9} 20000")
        scenario.mount(
            *("--freshness", "open", "--evict", "sieve", "--data-path", "passthrough"),
            tier="8M,16M",
        )
        readers = [f"reader{number}" for number in range(4)]
        for reader in readers:
            scenario.loop(reader)
        for number in range(32):
            scenario.command("evict", f"f{number % 16}")
        for reader in readers:
            scenario.end(reader)
        scenario.play("until served.passthrough_opens >= 1")
        for name in ("f0", "f7", "g1", "small3"):
            scenario.play(f"replace {name} 1300000; same {name}")
        scenario.play("read by=2; idle; until passthrough.refused = 0")
        (mount,) = work.mounts
        wait_for(lambda: all_counted(mount), "both sides to count the same")
