"""Processes that use a mount, and what this process has open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from monarchfs.fuse.handle_table import HEADER_BYTES
from tests.support import trees
from tests.support.mounting import Bench, Mount, as_user, run, wait_for


class Processes:
    """Who uses a mount; killed at the end whatever happens."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, code: str, *arguments: object, user: str | None = None) -> Peer:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(
            as_user(user, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return Peer(process)

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate(timeout=10)


class Peer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def tell(self, command: str, path: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {path}\n")
        self.process.stdin.flush()

    def ask(self, command: str, path: object) -> str:
        self.tell(command, path)
        return self.line()

    def end(self) -> str:
        """Has a reader stop; what it says at last. Fails the test where something was wrong."""
        out, complaint = self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0, complaint
        return out.strip()


def nice_of(pid: int, thread: int) -> int:
    """Field 19 of /proc/PID/task/TID/stat."""
    stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[16])


def priorities(pid: int) -> set[int]:
    """Those of a process' threads."""
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


READER = """
import os, random, select, sys
source, mount, long_name = sys.argv[1:]
names = sorted(os.listdir(source))
expected = {}
for name in names:
    with open(f"{source}/{name}", "rb") as file:
        expected[name] = file.read()
long = os.open(f"{mount}/{long_name}", os.O_RDONLY)
done = 0
print("reading", flush=True)
while done < 10 or not select.select([sys.stdin], [], [], 0)[0]:
    name = random.choice(names)
    with open(f"{mount}/{name}", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert file.readall() == expected[name], f"{name}: wrong bytes"
    at = random.randrange(len(expected[long_name]))
    os.posix_fadvise(long, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.pread(long, 5000, at) == expected[long_name][at:at + 5000], f"wrong bytes at {at}"
    assert sorted(os.listdir(mount)) == names
    done += 1
print(done, flush=True)
"""


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


def some_files(directory: Path, count: int, size: int) -> dict[str, bytes]:
    directory.mkdir(exist_ok=True)
    contents = {f"f{n}": trees.random_bytes(size, n) for n in range(count)}
    for name, data in contents.items():
        (directory / name).write_bytes(data)
    return contents


def clean_after(work: Bench, mount: Mount) -> None:
    """Nothing was forgotten: no file is open, and the cache is as its index says."""
    wait_for(lambda: open_slots(mount) == 0, "all files to be closed")
    assert mount.umount().returncode == 0
    done = run("fsck", f"{work.path}/state", "--checksum", user=mount.user)
    assert done.returncode == 0, done.stdout + done.stderr
