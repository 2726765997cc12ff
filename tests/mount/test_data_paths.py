"""Who answers opens and reads of local files: the kernel (passthrough), or the C part, with opens
and without; and small files that the C part copies ahead of their readers."""

import os
import subprocess
import sys

import psutil
import pytest

from monarchfs.cache.store.allocator import SMALL_BYTES
from monarchfs.config.places import OWNER
from tests.support import trees
from tests.support.mounting import Bench, Mount, requires_fuse, requires_root, run, wait_for
from tests.support.scenario import play, playing

pytestmark = requires_fuse

OPENS = int(os.environ.get("PASSING_OPENS", "5000"))
PASSED_BYTES = SMALL_BYTES + 4096
"""The least that is passed through: smaller copies share files."""
SMALL = "file {0..2}/{0..19} 1500\n"
ALL = """
until files.resident = 60
read
check all
  source.read_bytes 90000
"""
"""They are here, and each was read once."""

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
        "a file is copied, and evicted by hand, while a process has it open": f"""
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
""",
        "a reader is answered from the read that was begun ahead": f"""{SMALL}
slow read seconds=0.3
mount --freshness immutable --prefetch all
begin a 0/0; begin b 1/3; begin c 0/16; begin d 2/19
finish a; finish b; finish c; finish d
{ALL}
""",
    }
)


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, CASES[case])


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


@requires_root
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
