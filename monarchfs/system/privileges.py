"""Privileges that a process with hostile input should not have."""

from __future__ import annotations

import ctypes
import os
import struct

PR_SET_NO_NEW_PRIVS = 38
PR_SET_DUMPABLE = 4
CAP_DAC_READ_SEARCH = 2
CAPABILITY_VERSION_3 = 0x20080522


def drop_capabilities() -> None:
    """Keep no privilege but for reading, for this process and all it starts.

    An ordinary user's worker has none anyway. One that runs as root keeps CAP_DAC_READ_SEARCH
    (capabilities(7)), because it mirrors files of any owner. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if os.geteuid() != 0:
        return
    keep = 1 << CAP_DAC_READ_SEARCH
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    effective = permitted = keep & _permitted()
    data = struct.pack("=6I", effective, permitted, 0, 0, 0, 0)
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def close_to_others() -> None:
    """Keep other processes of this user from inspecting this one or taking its descriptors
    (ptrace(2), pidfd_getfd(2), /proc/PID/fd), and prevent core dumps; root still can. Holds for
    children until execve(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def _permitted() -> int:
    """The lower 32 permitted capabilities (proc_pid_status(5), CapPrm)."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapPrm:"):
                return int(line.split()[1], 16) & 0xFFFFFFFF
    return 0
