"""What the kernel says of processes: of a mount's worker, of this one."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.fuse.handle_table import HEADER_BYTES
from tests.support.mounting import Mount
from tests.support.timing import Stopwatch


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def state_of(pid: int) -> str:
    """One letter (proc(5)); empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


def status_of(pid: int) -> dict[str, str]:
    """The lines of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def nice_of(pid: int, thread: int) -> int:
    """Field 19 of /proc/PID/task/TID/stat."""
    stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[16])


def priorities(pid: int) -> set[int]:
    return set(threads_by_nice(pid))


def threads_by_nice(pid: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in os.listdir(f"/proc/{pid}/task"):
        try:
            found.setdefault(nice_of(pid, int(name)), []).append(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found


def descriptors() -> set[tuple[str, str]]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        except FileNotFoundError:
            continue  # the one that lists them
    return found


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """For the conftest of a folder whose tests open things in this process. Threads may be late."""
    before = descriptors()
    yield
    watch = Stopwatch()
    while left := descriptors() - before:
        watch.check(5, f"{left} is not closed")
        time.sleep(0.002)


def open_slots(mount: Mount) -> int:
    """How many files are open by the table that the workers share."""
    pid = mount.worker_pid()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if "monarchfs-handles" in os.readlink(entry):
            # Read, not mapped for writing: the worker is using it.
            table = os.open(entry, os.O_RDONLY)
            try:
                used = int.from_bytes(os.pread(table, 4, 12), sys.byteorder)
                return sum(any(os.pread(table, 8, HEADER_BYTES + 32 * n)) for n in range(used))
            finally:
                os.close(table)
    raise AssertionError("the worker has no table of open files")
