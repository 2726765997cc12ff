"""A source that hangs while hundreds wait for it: resident reads, killed readers, unmounting."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.harness import MIB, Mount, Source, forget_pages, memory_place, wait_for, write_random
from bench.report import Result
from bench.task import Task

WAITING = 500
PROCESSES = 5
ROUNDS = 5
VICTIMS = 20
UMOUNT_SECONDS = 5.0
SMALL_FILES, SMALL_BYTES = 500, 110_000
LARGE_BYTES = 256 * MIB
BLOCKER = """\
import sys, threading
def wait(path):
    try:
        open(path, "rb").close()
    except OSError:
        pass
threads = [threading.Thread(target=wait, args=(path,)) for path in sys.argv[1:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


class Speed(NamedTuple):
    mb_per_second: float
    opens_per_second: float


def measure(root: Path) -> Speed:
    """Resident files, one reader; no page of theirs is in the page cache."""
    buffer = bytearray(MIB)
    with open(root / "large", "rb", buffering=0) as file:
        forget_pages(file.fileno())
        started = time.perf_counter()
        while file.readinto(buffer):
            pass
        large_seconds = time.perf_counter() - started
    paths = [f"{root}/small/{number}" for number in range(SMALL_FILES)]
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            forget_pages(file.fileno())
    random.Random(1).shuffle(paths)
    started = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            file.readinto(buffer)
    return Speed(LARGE_BYTES / 1e6 / large_seconds, SMALL_FILES / (time.perf_counter() - started))


def waiting(mount: Mount) -> int:
    return int(mount.status()["requests"]["waiting"])


@contextmanager
def blocked_readers(mount: Mount, folder: str) -> Iterator[None]:
    """WAITING threads that wait in open; they go on when the source does."""
    paths = [f"{mount.path}/{folder}/{number}" for number in range(WAITING)]
    processes = [
        subprocess.Popen([sys.executable, "-c", BLOCKER, *paths[part::PROCESSES]])
        for part in range(PROCESSES)
    ]
    try:
        wait_for(lambda: waiting(mount) >= WAITING, "all readers to wait")
        yield
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.wait()


def kill_a_reader(mount: Mount, path: Path) -> float:
    """Milliseconds from SIGKILL to the end of a process that waits in open(2)."""
    before = waiting(mount)
    process = subprocess.Popen(["cat", str(path)])
    wait_for(lambda: waiting(mount) > before, "the reader to wait")
    started = time.perf_counter()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return (time.perf_counter() - started) * 1000


def generate(root: Path) -> None:
    rng = random.Random(1)
    for number in range(SMALL_FILES):
        write_random(root / "small" / str(number), SMALL_BYTES, rng)
    write_random(root / "large", LARGE_BYTES, rng)
    for folder in range(ROUNDS + 1):
        (root / f"remote{folder}").mkdir()
        for number in range(WAITING):
            (root / f"remote{folder}" / str(number)).write_bytes(b"x" * 4096)


def warm_up(mount: Mount) -> None:
    """Large and small files resident, the others' names and attributes known."""
    for path in (mount.path / "large", *(mount.path / "small").iterdir()):
        path.read_bytes()
    for folder in mount.path.glob("remote*"):
        for entry in os.scandir(folder):
            entry.stat()
    mount.wait_idle()
    measure(mount.path)


def run(task: Task) -> Result:
    place = task.place
    result = Result("frozen", f"a source that hangs, {WAITING} requests waiting for it")
    backing = place / "data"
    generate(backing)
    healthy: list[Speed] = []
    frozen: list[Speed] = []
    with (
        memory_place() as memory,
        Source(backing, place / "source") as source,
        Mount(source.path, place / "m", "--freshness", "immutable", tier=memory) as mount,
    ):
        warm_up(mount)
        for number in range(ROUNDS):
            healthy.append(measure(mount.path))
            source.faults(hang=["* *"])
            try:
                with blocked_readers(mount, f"remote{number}"):
                    frozen.append(measure(mount.path))
                    source.faults()
            finally:
                source.faults()
            mount.wait_idle()
        source.faults(hang=["* *"])
        with blocked_readers(mount, f"remote{ROUNDS}"):
            victim = mount.path / f"remote{ROUNDS}" / "0"
            killed = [kill_a_reader(mount, victim) for _ in range(VICTIMS)]
            umount_seconds = mount.umount(UMOUNT_SECONDS)
        source.faults()
    result.compare(
        "resident large file",
        "MB/s",
        [speed.mb_per_second for speed in frozen],
        [speed.mb_per_second for speed in healthy],
    )
    result.compare(
        "resident small files",
        "1/s",
        [speed.opens_per_second for speed in frozen],
        [speed.opens_per_second for speed in healthy],
    )
    result.figure("SIGKILL to the end of a reader in open, median", statistics.median(killed), "ms")
    result.figure("the same, slowest", max(killed), "ms")
    result.figure(
        *(f"umount --timeout {UMOUNT_SECONDS:g}, all of them waiting", umount_seconds, "s"),
        at_most=UMOUNT_SECONDS,
    )
    result.notes = [
        f"'direct' is the same mount before the source hung; {ROUNDS} rounds in turn",
        f"replicas {memory_note()}; a {LARGE_BYTES // MIB} MiB file in 1 MiB reads, and"
        f" {SMALL_FILES} files of {SMALL_BYTES // 1000} KB, their pages dropped before",
        f"{VICTIMS} readers killed, one after the other",
    ]
    return result


def memory_note() -> str:
    return "on tmpfs" if os.path.ismount("/dev/shm") else "on disk"
