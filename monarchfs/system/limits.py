"""Errors for want of something that is limited (setrlimit(2)), with the limit's name."""

from __future__ import annotations

import errno
import os

_REACHED = {
    errno.EMFILE: "the limit of open files is reached: raise it (ulimit -n)",
    errno.ENFILE: "the machine's limit of open files is reached: raise it (fs.file-max)",
    errno.EAGAIN: "the limit of processes and threads is reached: raise it (ulimit -u, or pids.max"
    " of the control group)",
    errno.ENOMEM: "memory is short, or limited: raise it (ulimit -v, or memory.max of the control"
    " group)",
    errno.EFBIG: "the limit of a file's size is reached: raise it (ulimit -f)",
}
"""By the errno of what failed for want of something."""


def explained(error: OSError) -> str:
    """The error for people, with what it is about. Where a limit was reached, with its name."""
    limit = _REACHED.get(error.errno or 0)
    if limit is None:
        if error.strerror is None or error.filename is None:
            return error.strerror or str(error)
        name = error.filename
        return f"{os.fsdecode(name) if isinstance(name, bytes) else name}: {error.strerror}"
    where = f" ({error.filename})" if error.filename is not None else ""
    return f"{error.strerror}{where}: {limit}"


def passing(error: Exception) -> str | None:
    """The same where others may soon leave more of it, the machine or the control group; None for
    errors that mean something else. Of a group (ExceptionGroup), one of them."""
    if inner := getattr(error, "exceptions", ()):
        return next((why for one in inner if (why := passing(one)) is not None), None)
    if isinstance(error, OSError):
        soon = (errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
        return explained(error) if error.errno in soon else None
    return unmet(error)


def unmet(error: Exception) -> str | None:
    """The same for errors of other types that mean a limit; None for those that do not."""
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return (
            "no thread can be started: the limit of processes and threads, or of memory, is"
            " reached: raise it (ulimit -u, ulimit -v, or pids.max of the control group)"
        )
    # dlopen(3) of a module that is written in C; what Python 3.13 raises for want of memory.
    lost = isinstance(error, SystemError) and " exception" in str(error)
    if lost or isinstance(error, MemoryError) or "failed to map segment" in str(error):
        return f"{str(error) or 'no memory'}: {_REACHED[errno.ENOMEM]}"
    return None
