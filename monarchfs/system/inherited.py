"""What a process has from its caller, and cannot work with: undone at the start of every command.

These are steps of daemon(7). A caller may ignore SIGCHLD: then nobody can wait for a child
(wait(2), ECHILD). It may block signals, which nobody unblocks afterwards. Its umask may take rights
from a file's owner: we could not open again what we make. And soft limits (getrlimit(2)) are for
what a shell starts: that of open files, say, is low for programs that use select(2). Python itself
sets LC_CTYPE where the locale is C (PEP 538).
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Set
from contextlib import suppress
from resource import (
    RLIMIT_AS,
    RLIMIT_DATA,
    RLIMIT_FSIZE,
    RLIMIT_NOFILE,
    RLIMIT_NPROC,
    getrlimit,
    setrlimit,
)
from typing import NamedTuple

_OWNERS_RIGHTS = 0o700
_RAISED = (RLIMIT_NOFILE, RLIMIT_NPROC, RLIMIT_FSIZE, RLIMIT_AS, RLIMIT_DATA)


class Inherited(NamedTuple):
    """As it was when this process began. ``mask``: the blocked signals; ``limits``: soft and hard
    ones; ``ctype``: LC_CTYPE."""

    mask: Set[int]
    ignores_children: bool
    umask: int
    limits: Mapping[int, tuple[int, int]]
    ctype: str | None


_inherited: Inherited | None = None


def put_right() -> None:
    """At the start of a process of one thread. Signals that are ignored stay so (nohup(1)), but
    SIGCHLD."""
    global _inherited
    umask = os.umask(0o077)
    os.umask(umask & ~_OWNERS_RIGHTS)
    ignores_children = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if ignores_children:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    limits = {which: getrlimit(which) for which in _RAISED}
    for which, (_soft, hard) in limits.items():
        setrlimit(which, (hard, hard))
    _inherited = Inherited(mask, ignores_children, umask, limits, _given_ctype())


def restore() -> None:
    """As before `put_right`: in a child that becomes the caller's own program."""
    assert _inherited is not None
    os.umask(_inherited.umask)
    if _inherited.ignores_children:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for which, both in _inherited.limits.items():
        setrlimit(which, both)
    os.environ.pop("LC_CTYPE", None)
    if _inherited.ctype is not None:
        os.environ["LC_CTYPE"] = _inherited.ctype
    signal.pthread_sigmask(signal.SIG_SETMASK, _inherited.mask)


def _given_ctype() -> str | None:
    with suppress(OSError), open("/proc/self/environ", "rb") as file:
        found = re.search(rb"(?:^|\0)LC_CTYPE=([^\0]*)", file.read())
        return os.fsdecode(found[1]) if found else None
    return os.environ.get("LC_CTYPE")


def drop_streams() -> None:
    """Descriptors 0 to 2 are /dev/null from now on: who reads our output is not to wait for our
    end."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    if null > 2:
        os.close(null)


def close_all_but(keep: Set[int]) -> None:
    """Closes the caller's descriptors, but for 0 to 2 and those in ``keep``."""
    # By name, because the limit of descriptors can be in the billions.
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in keep:
            os.closerange(number, number + 1)
