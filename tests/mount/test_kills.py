"""Real workers that are killed again and again, or get no processor, under processes that read
and compare."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from monarchfs.control import client, registration
from tests.support import trees
from tests.support.mounting import Bench, requires_mounts, wait_for
from tests.support.processes import READER, Processes, clean_after, some_files

pytestmark = requires_mounts

KILLS = 30
MOST_ROUND_SECONDS = 20.0
"""On a machine that does other things as well; the pauses alone would make it more."""

TIMED_READER = READER.replace("sys\n", "sys, time\n", 1).replace(
    "    name = random", "    began = time.monotonic()\n    name = random"
).replace("done = 0", "done, worst = 0, 0.0").replace(
    "    done += 1", "    done += 1\n    worst = max(worst, time.monotonic() - began)"
).replace("print(done,", "print(worst,")  # fmt: skip


def workers_of(supervisor: int) -> list[int]:
    """The one that serves or starts, and the one that waits."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return [pid for pid in map(int, children) if b"--bootstrap-fd" in command_of(pid)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_worker_and_standby_killed_together_again_and_again(
    work: Bench, processes: Processes
) -> None:
    """Also those that are only starting. Whoever does it, the mount stays, and stays whole."""
    source = work.path / "source"
    some_files(source, 10, 110_000)
    (source / "long").write_bytes(trees.random_bytes(1_000_000, 99))
    mount = work.mount(source)
    (found,) = [
        one
        for one in registration.find_mounts(["/run/monarchfs"])
        if one.entry.mountpoint == str(mount.path)
    ]
    supervisor = found.entry.supervisor_pid
    reader = processes.start(TIMED_READER, source, mount.path, "long")
    assert reader.line() == "reading"
    chance = random.Random(9)
    for _ in range(KILLS):
        for pid in workers_of(supervisor):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if chance.random() < 0.7:  # else the next one is killed while it starts
            wait_for(lambda: status_of(found)["state"] == "serving", "the next worker")
        time.sleep(chance.uniform(0, 0.3))
    report = wait_for(lambda: (now := status_of(found))["state"] == "serving" and now, "a worker")
    assert report["worker"]["restarts"] > KILLS / 2
    worst = float(reader.end())
    print(f"{KILLS} kills of worker and standby: the worst round of a reader took {worst:.2f} s")
    assert worst < MOST_ROUND_SECONDS
    clean_after(work, mount)


HOG = "while True: pass"


def test_a_busy_machine_does_not_look_like_a_hang(work: Bench, processes: Processes) -> None:
    """Eight processes want the processors all the while."""
    source = work.path / "source"
    some_files(source, 10, 110_000)
    (source / "long").write_bytes(trees.random_bytes(1_000_000, 99))
    mount = work.mount(source, "--freshness", "open")
    for _ in range(8):
        processes.start(HOG)
    readers = [processes.start(READER, source, mount.path, "long") for _ in range(2)]
    for reader in readers:
        assert reader.line() == "reading"
    mount.wait_idle()
    for reader in readers:
        reader.end()
    assert mount.status()["worker"]["restarts"] == 0
    assert "the worker hangs" not in work.log()
    for process in processes.started:
        process.kill()
    clean_after(work, mount)


def status_of(found: registration.Registered) -> dict[str, Any]:
    return client.request(found, {"command": "status"}, 5)
