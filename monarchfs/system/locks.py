"""Locks on files (flock(2)). One is held until its descriptor is closed by all who have it, so the
kernel frees it when they die."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from monarchfs.types import OperationError

_POLL_SECONDS = 0.03


def try_lock(descriptor: int) -> bool:
    """Whether nobody else has the file locked; it is ours then. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_named(descriptor: int, name: str, directory: int | None = None) -> bool:
    """Whether the file still has this name: who lets go of a lock may remove its file, and then
    others lock a new one."""
    try:
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(st, os.fstat(descriptor))


class Busy(OperationError):
    """Somebody else has the lock."""


@contextmanager
def locked(path: str, deadline: float, busy: str, *, removes: bool = False) -> Iterator[None]:
    """Has the file locked inside the block; it is made if it is missing, in a directory that only
    we can change. ``removes``: it exists while somebody has it, or was killed with it. Executed
    children do not keep it. Waits for it; raises Busy(``busy``) at ``deadline``
    (time.monotonic()), having tried at least once, and OperationError where the file cannot be
    made."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise OperationError(f"cannot make {path}: {error.strerror}") from None
        try:
            while not try_lock(descriptor):
                if time.monotonic() >= deadline:
                    raise Busy(busy)
                time.sleep(_POLL_SECONDS)
            if removes and not is_named(descriptor, path):
                continue
            try:
                yield
            finally:
                if removes:
                    os.unlink(path)
            return
        finally:
            os.close(descriptor)
