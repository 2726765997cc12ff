"""What the kernel says of a process."""

from __future__ import annotations


def stat_fields(directory: str) -> list[bytes]:
    """The fields of proc_pid_stat(5) from the third one, the state, on; empty for what is gone.
    ``directory``: that of a process or thread in /proc."""
    try:
        with open(f"{directory}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot (proc_pid_stat(5), field 22); None if it is
    dead, or hidden (hidepid, proc(5))."""
    try:
        fields = stat_fields(f"/proc/{pid}")
    except PermissionError:
        return None
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])
