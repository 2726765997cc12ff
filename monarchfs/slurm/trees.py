"""Trees of a user, measured and removed safely, whatever that user does meanwhile."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from monarchfs.fuse.mountinfo import mount_id
from monarchfs.supervisor.lock import LOCK
from monarchfs.system.trusted import open_directory
from monarchfs.types import OperationError

_MEASURE_SECONDS = 3.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEEPEST = 8
"""Copies lie three directories below the tier's directory."""


def open_users(path: str, uid: int) -> int | None:
    """Open a directory of this process's user; None if it is another user's, or others may change
    it. Raises OSError; as root also if the path has a link of another user."""
    if os.geteuid() == 0:
        place = open_directory(path, alone=False)
        try:
            directory = os.open(".", _DIRECTORY, dir_fd=place)
        finally:
            os.close(place)
    else:
        directory = os.open(path, _DIRECTORY)
    st = os.fstat(directory)
    if st.st_uid == uid and not st.st_mode & 0o022:
        return directory
    os.close(directory)
    return None


@dataclass(slots=True)
class Size:
    """The size of a tree: ``bytes`` are its blocks. ``whole``: all of it was measured."""

    bytes: int = 0
    files: int = 0
    whole: bool = True


def remove_tree(path: str) -> None:
    """Removes a directory of the user whose parent is root's. Follows no link, whatever the user
    does (shutil.rmtree works by descriptors). If something is left, it raises OperationError after
    it has removed all it can."""
    assert shutil.rmtree.avoids_symlink_attacks
    errors: list[BaseException] = []

    def failed(_call: object, _where: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):
            errors.append(info[1])

    shutil.rmtree(path, onerror=failed)
    if errors:
        raise OperationError(f"cannot remove all of {path}: {errors[0]}")


def tree_size(path: str, seconds: float = _MEASURE_SECONDS) -> Size:
    """The blocks and the number of all files below, or of those found within ``seconds``."""
    size = Size()
    top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _add_below(size, top, path.lstrip("/"), time.monotonic() + seconds, _DEEPEST)
    finally:
        os.close(top)
    return size


def _add_below(size: Size, directory: int, name: str, deadline: float, deepest: int) -> None:
    """The size of one directory in another. The tree is a user's: no link is followed, and nothing
    that the user has mounted there is asked, because that may hang."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with ExitStack() as closing:
        try:
            place = os.open(name, os.O_PATH | flags, dir_fd=directory)
            closing.callback(os.close, place)
            if deepest < _DEEPEST and mount_id(place) != mount_id(directory):
                return
            listed = os.open(".", os.O_RDONLY | flags, dir_fd=place)
            closing.callback(os.close, listed)
            for entry in closing.enter_context(os.scandir(listed)):
                if time.monotonic() > deadline:
                    size.whole = False
                    break
                if not entry.is_dir(follow_symlinks=False):
                    size.bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    size.files += 1
                elif deepest:
                    _add_below(size, listed, entry.name, deadline, deepest - 1)
        except OSError:
            return  # removed meanwhile


def in_use(directory: str, lock: str = LOCK) -> bool:
    """Whether a mount or fsck has locked a state directory or a directory in a tier."""
    path = os.path.join(directory, lock)
    try:
        # The directory is the user's, so anything may have the name of the lock.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
