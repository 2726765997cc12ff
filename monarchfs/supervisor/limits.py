"""What a mount needs of the limits that it inherits (setrlimit(2)), and whether it has that."""

from __future__ import annotations

import os
import threading
from resource import (
    RLIM_INFINITY,
    RLIMIT_AS,
    RLIMIT_DATA,
    RLIMIT_FSIZE,
    RLIMIT_NOFILE,
    RLIMIT_NPROC,
    getrlimit,
)

from monarchfs.config import User
from monarchfs.supervisor.identity import become
from monarchfs.system.bounded import Answer, bounded_call
from monarchfs.system.limits import explained
from monarchfs.system.sizes import format_bytes
from monarchfs.types import OperationError

LEAST_OPEN_FILES = 256
"""A worker begins with 40; a supervisor with 25, and up to 200 for clients."""
LEAST_TASKS = 40
"""A supervisor, a worker with its threads (20 as it begins), children that come and go."""
LEAST_BYTES = {
    # A worker begins with 1.6 to 2.2G: the index, and stacks and arenas of threads.
    RLIMIT_AS: 3 << 30,
    RLIMIT_DATA: 512 << 20,
    # The index: of that size, with the names of 3 million files.
    RLIMIT_FSIZE: 1 << 30,
}

_NAMES = {
    RLIMIT_AS: ("address space", "-v"),
    RLIMIT_DATA: ("private memory", "-d"),
    RLIMIT_FSIZE: ("the size of a file", "-f"),
}
_STACK_BYTES = max(64 << 10, os.sysconf("SC_THREAD_STACK_MIN"))
_TRIAL_SECONDS = 10.0


def check_limits(user: User) -> None:
    """Raises OperationError, with the limit's name and what is needed, where a mount of ``user``
    could not live. Soft limits do not count (``system.inherited``)."""
    for which, least in LEAST_BYTES.items():
        most = getrlimit(which)[1]
        if most != RLIM_INFINITY and most < least:
            what, flag = _NAMES[which]
            raise OperationError(
                f"{what} is limited to {format_bytes(most)}, and a mount needs"
                f" {format_bytes(least)}: raise the limit (ulimit {flag})"
            )
    files = getrlimit(RLIMIT_NOFILE)[1]
    if files != RLIM_INFINITY and files < LEAST_OPEN_FILES:
        raise OperationError(
            f"open files are limited to {files}, and a mount needs {LEAST_OPEN_FILES}: raise the"
            " limit (ulimit -n)"
        )
    try:
        begun, _ = bounded_call(
            lambda: _begin_tasks(user), timeout=_TRIAL_SECONDS, overdue="threads do not begin"
        )
    except OSError as error:
        raise OperationError(explained(error)) from None
    if begun < LEAST_TASKS:
        most = getrlimit(RLIMIT_NPROC)[1]
        limit = "" if most == RLIM_INFINITY else f"ulimit -u is {most}, "
        raise OperationError(
            f"{user.name} may begin {begun} more processes and threads, and a mount needs"
            f" {LEAST_TASKS}: raise the limit ({limit}or pids.max of the control group)"
        )


def _begin_tasks(user: User) -> Answer:
    """How many more may run, as far as a mount needs them: threads count as processes do. Tried,
    because no number tells how many there are. For a child."""
    become(user)
    threading.stack_size(_STACK_BYTES)
    end = threading.Event()
    for number in range(LEAST_TASKS):
        try:
            threading.Thread(target=end.wait, daemon=True).start()
        except RuntimeError:
            return number, ()
    return LEAST_TASKS, ()
