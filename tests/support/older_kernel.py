"""The command line as on an older kernel: the system calls that it lacks fail, in all processes
that are started, and FUSE_INIT offers what that kernel knows.

    python older_kernel.py ERRNO NUMBERS MINOR RELEASE ARGUMENTS...

NUMBERS are those of the calls that fail with ERRNO, as in ``1,2,3``; the last one may be ``N-``,
for all from N on. MINOR is the version of FUSE that the kernel is to have: 27, or 0 for its own.
RELEASE is that of a kernel which keeps each listing that it has, as Linux 6.9 does; or empty. An
OPENDIR for which the source is asked fails then with EAGAIN, and the next one is answered from
what is known: that way this kernel drops none.
"""

import ctypes
import errno
import os
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

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


def run_worker(release: str, arguments: list[str]) -> None:
    """A worker on a kernel of that release, which keeps all listings."""
    own = os.uname()
    vars(os)["uname"] = lambda: os.uname_result((*own[:2], release, *own[3:]))
    from monarchfs.fuse import session  # isort: skip  # before pyfuse3
    from monarchfs.fuse import packing
    from monarchfs.fuse.answerer import Answerer
    from monarchfs.worker import __main__ as worker

    assert session.hooks
    ask = Answerer._opendir

    async def asked(self: Answerer, *arguments: Any) -> Any:
        await ask(self, *arguments)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    Answerer._opendir = asked  # type: ignore[assignment,method-assign]
    packing.FOPEN_CACHE_DIR |= packing.FOPEN_KEEP_CACHE
    worker.main(arguments)


if __name__ == "__main__":
    sys.path[0] = str(HERE.parents[1])
    if sys.argv[1] == "worker":
        run_worker(sys.argv[2], sys.argv[3:])
        sys.exit()
    code, numbers, minor, release = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if numbers:
        refuse(code, numbers)
    from monarchfs.cli import main, mount
    from monarchfs.supervisor import start

    if minor:
        read = start.read_init_request
        vars(start)["read_init_request"] = lambda *given: as_version_27(read(*given))
    if release:
        command = (sys.executable, "-I", __file__, "worker", release)
        mount.mount_command = partial(mount.mount_command, worker_command=command)
    sys.exit(main.main(sys.argv[5:]))
