"""Directories that belong to a mount's user, whoever mounts: opened, made and taken back.

Root makes one only where root alone can change the way there (``trusted``), and gives away only
what it has just made. Elsewhere the user makes it, who could lead root anywhere.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import ExitStack

from monarchfs.config import User
from monarchfs.supervisor.identity import acting_as, user_name
from monarchfs.system.trusted import (
    Untrusted,
    make_directories,
    open_directory,
    place_of,
    remove_if_empty,
)
from monarchfs.types import OperationError, UsageError

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

log = logging.getLogger(__name__)


def open_own(path: str, option: str, user: User, undo: ExitStack) -> int:
    """Opens the directory ``path``; a missing one is made with mode 0700 for ``user``, and those
    missing above it. ``undo`` takes back what was made. Raises UsageError, naming ``option``, for
    one that is not the user's alone, OperationError where it cannot be made."""
    try:
        descriptor = _opened_or_made(path, user, undo)
    except OSError as error:
        raise OperationError(
            f"cannot make {path} for {user.name}: {error.strerror}: name another {option}"
        ) from None
    try:
        refuse_foreign(os.fstat(descriptor), path, option, user)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_shared(path: str, user: User, undo: ExitStack) -> tuple[int, bool]:
    """Opens a directory in which others may have theirs; makes what is missing: a descriptor
    (O_PATH), and whether root alone can change the way there. Raises OSError."""
    if os.geteuid() == 0:
        alone = user.uid != 0
        try:
            make_directories(path, 0o755, undo, alone=alone)
            return open_directory(path, alone=alone), True
        except Untrusted:
            if user.uid == 0:
                raise
    with acting_as(user):
        _make_missing(path, user, undo)
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), False


def _opened_or_made(path: str, user: User, undo: ExitStack) -> int:
    if os.geteuid() != 0:
        return _open_as(user, path, undo)
    try:
        # Of root's own mount others may move the directory, but not lead it elsewhere.
        return _open_as_root(path, user, undo, alone=user.uid != 0)
    except Untrusted:
        if user.uid == 0:
            raise
        return _open_as(user, path, undo)


def _open_as_root(path: str, user: User, undo: ExitStack, *, alone: bool) -> int:
    """Raises Untrusted, having made nothing, or OSError."""
    make_directories(os.path.dirname(path), 0o755, undo, alone=alone)
    with place_of(path, alone=alone) as place:
        new = place.make(0o700)
        if new:
            undo.callback(remove_if_empty, path)
        descriptor = place.open(os.O_RDONLY | os.O_DIRECTORY)
    if new and os.fstat(descriptor).st_uid == 0 != user.uid and not os.listdir(descriptor):
        os.fchown(descriptor, user.uid, user.gid)
    return descriptor


def _open_as(user: User, path: str, undo: ExitStack) -> int:
    """All of it with the user's rights. Raises OSError."""
    with acting_as(user):
        _make_missing(path, user, undo)
        return os.open(path, _OPEN_DIRECTORY)


def _make_missing(path: str, user: User, undo: ExitStack) -> None:
    """Acting as the user already."""
    missing = []
    while not os.path.lexists(path) and path != "/":
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            continue  # another mount made it meanwhile; whose it is, is looked at later
        undo.callback(_remove_if_empty, directory, user)


def refuse_foreign(st: os.stat_result, path: str, option: str, user: User) -> None:
    """Raises UsageError unless ``st`` is a directory of the user's that nobody else may change."""
    if not stat.S_ISDIR(st.st_mode):
        raise UsageError(f"{path} is not a directory: remove it, or name another {option}")
    if st.st_uid != user.uid:
        raise UsageError(
            f"{path} belongs to {user_name(st.st_uid)}, not to {user.name}: name another {option}"
        )
    if st.st_mode & 0o022:
        raise UsageError(
            f"{path} can be written by others: chmod 700 {path}, or name another {option}"
        )


def _remove_if_empty(path: str, user: User) -> None:
    try:
        with acting_as(user):
            os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            log.warning("cannot remove %s: %s", path, error.strerror)
