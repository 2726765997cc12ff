"""Passthrough on real mounts: the bytes, the ways to get at them, and many processes at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from monarchfs.config.places import OWNER
from monarchfs.store.segments import SMALL_BYTES
from tests.support.mounting import (
    REPOSITORY,
    WATCHDOG_SECONDS,
    Bench,
    Mount,
    requires_mounts,
    run,
    wait_for,
)

pytestmark = requires_mounts

LOAD = str(REPOSITORY / "tests" / "support" / "passthrough_load.py")
SECONDS = float(os.environ.get("PASSING_SECONDS", "6"))
OPENS = int(os.environ.get("PASSING_OPENS", "20000"))
MIB = 1 << 20
PASSED_BYTES = SMALL_BYTES + 4096
"""The least that is passed through: smaller copies share files."""


def warm(mount: Mount) -> dict[str, Any]:
    done = run("warm", str(mount.path), "--wait")
    assert done.returncode == 0, done.stderr
    return mount.wait_idle()


def test_what_is_open_meanwhile(work: Bench) -> None:
    """A file is copied, evicted by hand and copied again while a process has it open."""
    source = work.path / "src"
    source.mkdir()
    (source / "file").write_bytes(bytes(PASSED_BYTES))
    mount = work.mount(source)
    path = str(mount.path / "file")
    reads = ["cmp", path, str(source / "file")]
    with held_open(path):
        assert subprocess.run(reads, timeout=60, check=False).returncode == 0
        mount.wait_idle()
        assert subprocess.run(reads, timeout=60, check=False).returncode == 0
        assert mount.status()["served"]["passthrough_opens"] == 0, "its pages are cached"
    wait_for(lambda: passes(mount, reads), "the file to be passed through")
    with held_open(path):
        assert not evicts(mount), "it is open"
        assert subprocess.run(reads, timeout=60, check=False).returncode == 0
    wait_for(lambda: evicts(mount), "it to be closed")
    status = mount.status()
    assert status["passthrough"] == {"backing_files": 0, "refused": 0, "registered": 0}
    assert status["tiers"][0]["used_bytes"] == 0


@contextmanager
def held_open(path: str) -> Iterator[None]:
    """A process has it open inside."""
    process = subprocess.Popen(
        ["sh", "-c", f"exec 9< {path}; echo; exec cat > /dev/null"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"\n"
            yield
        finally:
            process.stdin.close()


def passes(mount: Mount, reads: list[str]) -> bool:
    assert subprocess.run(reads, timeout=60, check=False).returncode == 0
    return int(mount.status()["served"]["passthrough_opens"]) > 0


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
    source = work.path / "src"
    source.mkdir()
    for number in range(40):
        (source / str(number)).write_bytes(bytes((number,)) * PASSED_BYTES)
    fast = f"{work.path}/fast=21M"
    mount = work.mount(
        source, "--evict", "lru", "--freshness", "immutable",
        tiers=[fast, f"{work.path}/slow=20M"],
    )  # fmt: skip
    warm(mount)
    rounds = 4
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


def serving(mount: Mount, killed: list[int]) -> int | None:
    """The worker, if it serves; not one that was killed, and whose death was not noticed yet."""
    status = mount.status()
    pid: int = status["worker"]["pid"]
    return pid if status["state"] == "serving" and pid not in killed else None


def read_under_changes(work: Bench, mount: Mount, seconds: float, killed: list[int] | None) -> None:
    """Processes read and compare; meanwhile files are evicted, and change in the source or, with
    ``killed``, workers are killed and noted there."""
    source, originals = mount.source, work.path / "originals"
    processes = [
        subprocess.Popen(
            [sys.executable, LOAD, str(mount.path), str(originals), str(seconds), str(seed)],
            stdout=subprocess.PIPE, text=True,
        )
        for seed in range(4)
    ]  # fmt: skip
    try:
        number, next_kill = 0, 0.0
        while any(process.poll() is None for process in processes):
            name = f"f{number % 24}"
            changed = originals / f"{name}.1"
            # What is open, not all local and gone from the source is lost with the worker (ESTALE).
            if changed.exists() and number < 24 and killed is None:
                new = work.path / "new"
                new.write_bytes(changed.read_bytes())
                new.rename(source / name)
            run("evict", str(mount.path), name)
            number += 1
            if (
                killed is not None
                and time.monotonic() > next_kill
                and (pid := serving(mount, killed))
            ):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                next_kill = time.monotonic() + 0.8  # it is no crash loop
        for process in processes:
            output, _ = process.communicate(timeout=30)
            assert process.returncode == 0
            report = json.loads(output)
            assert report["wrong"] == []
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize(("policy", "kills"), [("sieve", False), ("keep", False), ("sieve", True)])
def test_many_processes_and_all_that_may_happen(work: Bench, policy: str, kills: bool) -> None:
    """Copies complete, files are evicted, and change in the source or the worker is killed;
    PASSING_SECONDS for longer."""
    seconds = SECONDS / 2
    assert seconds < WATCHDOG_SECONDS / 2, "the watchdog would end it"
    source, originals = work.path / "src", work.path / "originals"
    source.mkdir()
    originals.mkdir()
    chance = random.Random(7)
    for number in range(24):
        least, most = (PASSED_BYTES, 3 * MIB) if number % 3 else (1, SMALL_BYTES)
        data = chance.randbytes(chance.randrange(least, most))
        (source / f"f{number}").write_bytes(data)
        (originals / f"f{number}.0").write_bytes(data)
        if number % 2:  # what it becomes
            (originals / f"f{number}.1").write_bytes(chance.randbytes(len(data)))
    time.sleep(0.05)  # so that versions can be told apart
    mount = work.mount(
        source, "--freshness", "open", "--evict", policy, "--data-path", "passthrough",
        tiers=[f"{work.path}/fast=8M", f"{work.path}/slow=16M"],
    )  # fmt: skip
    killed: list[int] = []

    def passed_through() -> bool:
        """After another round; on a busy machine it takes some until copies are complete."""
        read_under_changes(work, mount, seconds, killed if kills else None)
        return kills or mount.status()["served"]["passthrough_opens"] > 20

    wait_for(passed_through, "opens that are passed through", WATCHDOG_SECONDS / 2)
    status = mount.wait_idle()
    assert status["data_path"] == "passthrough"
    wait_for(
        lambda: mount.status()["worker"]["restarts"] >= len(killed), "the last one's successor"
    )
    assert bool(killed) == kills
    assert status["passthrough"]["refused"] == 0
    read = ["sh", "-c", 'cat "$0"/*', str(mount.path)]
    for _ in range(2):
        subprocess.run(read, stdout=subprocess.DEVNULL, timeout=60, check=True)
        mount.wait_idle()
    wait_for(lambda: all_are_known(mount), "both sides to count the same")


def all_are_known(mount: Mount) -> bool:
    status = mount.status()
    backed, resident = status["passthrough"], status["files"]["resident"]
    return bool(0 < backed["registered"] == backed["backing_files"] <= resident)
