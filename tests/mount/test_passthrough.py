"""Passthrough on real mounts: the bytes, the ways to get at them, and many processes at once."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from monarchfs.cache.store.segments import SMALL_BYTES
from monarchfs.config.places import OWNER
from tests.support import trees
from tests.support.mounting import (
    REPOSITORY,
    WATCHDOG_SECONDS,
    Bench,
    Mount,
    requires_mounts,
    run,
    wait_for,
)
from tests.support.scenario import Script, differences, playing

pytestmark = requires_mounts

LOAD = str(REPOSITORY / "tests" / "support" / "passthrough_load.py")
SECONDS = float(os.environ.get("PASSING_SECONDS", "2"))
OPENS = int(os.environ.get("PASSING_OPENS", "5000"))
MIB = 1 << 20
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
"""
    lines = Script(script)
    with playing(work) as scenario:
        for line in lines.lines:
            scenario.play(line)
        assert differences(lines, scenario.observed, complete=False) == []
        (mount,) = work.mounts
        assert not evicts(mount), "it is open"
        scenario.play("held holder; close holder; check closed again")
        wait_for(lambda: evicts(mount), "it to be closed")
        status = mount.status()
        assert status["passthrough"] == {"backing_files": 0, "refused": 0, "registered": 0}
        assert status["tiers"][0]["used_bytes"] == 0


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
    rounds = 2
    for _ in range(rounds):
        subprocess.run(
            [sys.executable, "-c", OPEN_AND_CLOSE, str(mount.path), str(OPENS // rounds)],
            timeout=max(60, OPENS / 500), check=True,
        )  # fmt: skip
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


def read_under_changes(work: Bench, mount: Mount) -> None:
    """Processes read and compare; meanwhile files are evicted, and change in the source."""
    source, originals = mount.source, work.path / "originals"
    command = [sys.executable, LOAD, str(mount.path), str(originals), str(SECONDS)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True)
            )
            for seed in range(4)
        ]
        for process in processes:
            stack.callback(process.kill)
        number = 0
        while any(process.poll() is None for process in processes):
            name = f"f{number % 24}"
            changed = originals / f"{name}.1"
            if changed.exists() and number < 24:
                Path(shutil.copyfile(changed, work.path / "new")).rename(source / name)
            run("evict", str(mount.path), name)
            number += 1
        for process in processes:
            output, _ = process.communicate(timeout=30)
            assert process.returncode == 0
            assert json.loads(output) == []


def test_many_processes_and_all_that_may_happen(work: Bench) -> None:
    """Copies complete, files are evicted, and change in the source; PASSING_SECONDS for longer."""
    assert SECONDS < WATCHDOG_SECONDS / 2, "the watchdog would end it"
    chance = random.Random(7)
    first, other = dict[str, bytes](), dict[str, bytes]()
    for number in range(24):
        least, most = (PASSED_BYTES, 3 * MIB) if number % 3 else (1, SMALL_BYTES)
        first[f"f{number}"] = chance.randbytes(chance.randrange(least, most))
        if number % 2:  # what it becomes
            other[f"f{number}.1"] = chance.randbytes(len(first[f"f{number}"]))
    source = trees.write_files(work.path / "src", first)
    originals = {f"{name}.0": data for name, data in first.items()} | other
    trees.write_files(work.path / "originals", originals)
    time.sleep(0.05)  # so that versions can be told apart
    mount = work.mount(
        source, "--freshness", "open", "--evict", "sieve", "--data-path", "passthrough",
        tiers=[f"{work.path}/fast=8M", f"{work.path}/slow=16M"],
    )  # fmt: skip

    def passed_through() -> bool:
        """After another round; on a busy machine it takes some until copies are complete."""
        read_under_changes(work, mount)
        return bool(mount.status()["served"]["passthrough_opens"] > 20)

    wait_for(passed_through, "opens that are passed through", WATCHDOG_SECONDS / 2)
    status = mount.wait_idle()
    assert (status["data_path"], status["passthrough"]["refused"]) == ("passthrough", 0)
    read = ["sh", "-c", 'cat "$0"/*', str(mount.path)]
    for _ in range(2):
        subprocess.run(read, stdout=subprocess.DEVNULL, timeout=60, check=True)
        mount.wait_idle()
    wait_for(lambda: all_are_known(mount), "both sides to count the same")


def all_are_known(mount: Mount) -> bool:
    status = mount.status()
    backed, resident = status["passthrough"], status["files"]["resident"]
    return bool(0 < backed["registered"] == backed["backing_files"] <= resident)
