"""What the kernel says of a process."""

from __future__ import annotations


def stat_fields(pid: int, thread: int | None = None) -> list[bytes]:
    """The fields of proc_pid_stat(5) from the third one, the state, on; empty for what is gone."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot (proc_pid_stat(5), field 22); None if it is
    dead."""
    fields = stat_fields(pid)
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])
