"""Locks on files (flock(2)). One is held until its descriptor is closed by all who have it, so the
kernel frees it when they die."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def named_lock(path: str, deadline: float, overdue: str) -> Iterator[None]:
    """Has the file locked, in a directory that only we can change. It exists while somebody has it,
    or was killed with it. Waits for it; raises OperationError(``overdue``) at ``deadline``
    (time.monotonic()), and where the file cannot be made."""
    while (descriptor := _made_and_locked(path)) is None:
        if time.monotonic() > deadline:
            raise OperationError(overdue)
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        os.unlink(path)
        os.close(descriptor)


def _made_and_locked(path: str) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise OperationError(f"cannot make {path}: {error.strerror}") from None
    try:
        if try_lock(descriptor) and is_named(descriptor, path):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
