"""What a process gives up (prctl(2)): privileges that one with hostile input should not have, and
life without its parent."""

from __future__ import annotations

import os
import signal
import struct

from monarchfs.system import libc

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_SET_DUMPABLE = 4
CAP_DAC_READ_SEARCH = 2
CAPABILITY_VERSION_3 = 0x20080522


def drop_capabilities() -> None:
    """Keep no privilege but for reading, for this process and all it starts.

    An ordinary user's worker has none anyway. One that runs as root keeps CAP_DAC_READ_SEARCH
    (capabilities(7)), because it mirrors files of any owner. Raises OSError.
    """
    libc.call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid() != 0:
        return
    keep = 1 << CAP_DAC_READ_SEARCH
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    effective = permitted = keep & _permitted()
    data = struct.pack("=6I", effective, permitted, 0, 0, 0, 0)
    libc.call("capset", header, data)


def close_to_others() -> None:
    """Keep other processes of this user from inspecting this one or taking its descriptors
    (ptrace(2), pidfd_getfd(2), /proc/PID/fd), and prevent core dumps; root still can. Holds for
    children until execve(2). Raises OSError."""
    libc.call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies (PR_SET_PDEATHSIG(2const));
    a change of identity takes that back. Ends it now if the parent is dead already."""
    libc.call("prctl", PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _permitted() -> int:
    """The lower 32 permitted capabilities (proc_pid_status(5), CapPrm)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapPrm:"):
                return int(line.split()[1], 16) & 0xFFFFFFFF
    return 0
