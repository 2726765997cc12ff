"""What /proc tells of processes, and of the threads of one that hangs."""

from __future__ import annotations

import os

_MOST_THREADS = 64
_MOST_FRAMES = 12


def describe_threads(pid: int) -> list[str]:
    """A line for each thread: name, state, system call, and for root the kernel's stack
    (proc_pid_stack(5)). Empty for a process that is gone. Blocks for nothing."""
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except FileNotFoundError:
        return []
    lines = [_describe(pid, thread) for thread in threads[:_MOST_THREADS]]
    if len(threads) > _MOST_THREADS:
        lines.append(f"and {len(threads) - _MOST_THREADS} more threads")
    return lines


def _describe(pid: int, thread: int) -> str:
    name, state = _read(pid, thread, "comm"), _read(pid, thread, "stat").rpartition(") ")[2][:1]
    where = [f"in {wait}"] if (wait := _read(pid, thread, "wchan")) not in ("", "0") else []
    if call := _read(pid, thread, "syscall"):
        where.append(f"call {call.split(' ')[0]}")
    frames = _read(pid, thread, "stack").splitlines()[:_MOST_FRAMES]
    if frames:
        where.append("kernel: " + " < ".join(frame.rpartition("] ")[2] for frame in frames))
    return f"thread {thread} ({name}) {state or 'gone'}: {', '.join(where) or 'running'}"


def _read(pid: int, thread: int, file: str) -> str:
    try:
        with open(
            f"/proc/{pid}/task/{thread}/{file}", encoding="ascii", errors="replace"
        ) as opened:
            return opened.read().strip()
    except OSError:
        return ""
