"""The processes of a mount: which they are, whether they live, and what they have used."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Unusable, wait_for
from monarchfs.cli.ask import ask
from monarchfs.config.places import runtime_dirs_to_search
from monarchfs.control.client import request
from monarchfs.fuse.handle_table import open_slots
from monarchfs.supervisor.recover import find_one

TICKS = os.sysconf("SC_CLK_TCK")


def processes_of(mountpoint: Path) -> list[int]:
    """The supervisor of a mount and what it has started."""
    parents: dict[int, int] = {}
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                command = file.read()
            parents[int(entry)] = int(_stat(f"/proc/{entry}")[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"\0mount\0" in command and os.fsencode(mountpoint) in command.split(b"\0"):
            found.append(int(entry))
    for pid, parent in sorted(parents.items()):
        if parent in found and pid not in found:
            found.append(pid)
    return found


def alive(pid: int) -> bool:
    """Whether any thread of it lives: the first one may be a zombie before others that hang."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return False
    for thread in threads:
        try:
            if _stat(f"/proc/{pid}/task/{thread}")[0] not in ("Z", "X"):
                return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False


def kill(pids: Iterable[int]) -> None:
    """SIGKILL for each of them; until all are gone."""
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids), "the killed processes to be gone")


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of all their threads, also of those that ended."""
    fields = [_stat(f"/proc/{pid}") for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / TICKS


def idle_seconds() -> float:
    """What all processors together have idled since the machine started (proc_stat(5)). Waiting for
    disks is idling, too."""
    with open("/proc/stat", encoding="ascii") as file:
        fields = file.readline().split()
    return (int(fields[4]) + int(fields[5])) / TICKS


def _stat(directory: str) -> list[str]:
    """What proc_pid_stat(5) has after the command's name: state, parent, ..."""
    with open(f"{directory}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


class Daemon:
    """A mount's two processes. Constant: the supervisor, and the socket on which it answers."""

    def __init__(self, mountpoint: Path) -> None:
        search = partial(runtime_dirs_to_search, os.geteuid(), os.environ)
        found = find_one(str(mountpoint), search)
        if found is None or found.registered is None:
            raise Unusable(f"nothing of monarchfs is mounted on {mountpoint}")
        self._found = found
        self._registered = found.registered
        self.supervisor = found.registered.entry.supervisor_pid

    def status(self) -> dict[str, Any]:
        """Raises OperationError where there is no answer within 10 seconds."""
        return request(self._registered, {"command": "status"}, 10.0)

    def warm(self) -> dict[str, Any]:
        """Has all be copied, and waits for it; the counts of ``monarchfs warm --wait --json``.
        Raises OperationError."""
        question = {"command": "warm", "what": "copy", "wait": True, "paths": [""]}
        return ask(self._found, question, lambda so_far: None)

    @property
    def worker(self) -> int | None:
        pid: int | None = self.status()["worker"]["pid"]
        return pid

    def cpu_seconds(self) -> float:
        pids = [self.supervisor, self.worker]
        return cpu_seconds(pid for pid in pids if pid is not None)

    def open_handles(self) -> int:
        """How many slots are in use in the table of open files that the supervisor keeps."""
        folder = f"/proc/{self.supervisor}/fd"
        for name in os.listdir(folder):
            if "memfd:monarchfs-handles" in os.readlink(f"{folder}/{name}"):
                with open(f"{folder}/{name}", "rb") as file:
                    return sum(1 for _ in open_slots(file.fileno()))
        raise Unusable("the supervisor has no table of open files")
