"""The command line as on an older kernel: the system calls that it lacks fail, in all processes
that are started, and FUSE_INIT offers what that kernel knows.

    python older_kernel.py ERRNO NUMBERS MINOR ARGUMENTS...

NUMBERS are those of the calls that fail with ERRNO, as in ``1,2,3``; the last one may be ``N-``,
for all from N on. MINOR is the version of FUSE that the kernel is to have: 27, or 0 for its own.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

NEWER_CALLS = {
    "pidfd_send_signal": "424",
    "io_uring": "425,426,427",
    "open_tree": "428",
    "move_mount": "429",
    "fsopen": "430,431,432,433",
    "pidfd_open": "434",
    "clone3": "435",
    "close_range": "436",
    "openat2": "437",
    "pidfd_getfd": "438",
    "faccessat2": "439",
    "mount_setattr": "442",
    "cachestat": "451",
    "statmount": "457,458",
}
"""Calls that Linux 4.18 lacks, and what goes with them. Numbers from 424 on are the same on all
machines."""

ALL_NEWER = "424-"

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2

_FLAGS_AT = 40 + 12
"""Of ``flags`` in a FUSE_INIT request: fuse_in_header, then major, minor, max_readahead."""


def refuse(code: int, numbers: str) -> None:
    """Have system calls fail with ``code``, for this process and all that it starts (seccomp(2)).
    Where an ordinary user does that, setuid programs get no privilege."""
    program = [(_LOAD, 0, 0, 0)]  # the call's number
    for number in numbers.split(","):
        how = _AT_LEAST if number.endswith("-") else _EQUAL
        program += [(how, 0, 1, int(number.rstrip("-"))), (_RETURN, 0, 0, _ERRNO | code)]
    program.append((_RETURN, 0, 0, _ALLOW))
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in program))
    head = struct.pack("@HP", len(program), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 and libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, head, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp(2)")


def as_version_27(request: bytes) -> bytes:
    """A FUSE_INIT request as Linux 4.18 would send it: nothing after ``flags``, whose highest bit
    is FUSE_ABORT_ERROR (include/uapi/linux/fuse.h)."""
    (flags,) = struct.unpack_from("=I", request, _FLAGS_AT)
    end = _FLAGS_AT + 4
    short = bytearray(request[:end])
    struct.pack_into("=I", short, 0, end)
    struct.pack_into("=I", short, 44, 27)
    struct.pack_into("=I", short, _FLAGS_AT, flags & 0x3FFFFF)
    return bytes(short)


if __name__ == "__main__":
    sys.path[0] = str(HERE.parents[1])
    code, numbers, minor = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if numbers:
        refuse(code, numbers)
    from monarchfs.cli import main
    from monarchfs.supervisor import first_worker, start

    if minor:
        read = first_worker.read_init_request
        vars(start)["read_init_request"] = lambda *given: as_version_27(read(*given))
    sys.exit(main.main(sys.argv[4:]))
