"""Locks on files (flock(2)). One is held until its descriptor is closed by all who have it, so the
kernel frees it when they die."""

from __future__ import annotations

import fcntl
import os
import time

from monarchfs.types import OperationError

_POLL_SECONDS = 0.05


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


def take_named_lock(path: str, deadline: float, overdue: str) -> int:
    """A locked file in a directory that only we can change: its descriptor. It exists while
    somebody has it, or was killed with it. Waits for it; raises OperationError(``overdue``) at
    ``deadline`` (time.monotonic()), and where the file cannot be made."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise OperationError(f"cannot make {path}: {error.strerror}") from None
        try:
            is_free = try_lock(descriptor)
            if is_free and is_named(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not is_free:
            if time.monotonic() > deadline:
                raise OperationError(overdue)
            time.sleep(_POLL_SECONDS)


def release_named_lock(path: str, descriptor: int) -> None:
    """Removes the file, then lets the next one in."""
    os.unlink(path)
    os.close(descriptor)
