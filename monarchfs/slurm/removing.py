"""Removes a cache: with its locks held, with its user's rights, and never one in use."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from typing import Any

from monarchfs.config.places import OWNER
from monarchfs.slurm.discovery import LocalCache
from monarchfs.slurm.records import remove_tree
from monarchfs.supervisor.directories import LOCK, OPEN_FILE, open_users
from monarchfs.supervisor.identity import become
from monarchfs.system.bounded import Tell, bounded_talk
from monarchfs.system.locks import try_lock
from monarchfs.system.trusted import place_of
from monarchfs.types import OperationError

_SILENCE_SECONDS = 120.0
_OURS = re.compile(r"tiers(\.new)?|index(\.bad-\d+)?|suspect|(worker|supervisor)\.log(\.1)?")
"""What lies in a state directory (docs/ARCHITECTURE.md, "On disk"). Nothing else is removed there,
because --state-dir may name any directory."""


def remove_cache(cache: LocalCache) -> None:
    """Removes a cache: its directories and, unless only a part is meant, its state directory.

    Blocks until all is removed, or nothing happens for two minutes. Raises OperationError
    if it is in use (then nothing was removed), or something cannot be removed.
    """
    tiers = [(one.path, OWNER) for one in cache.directories]
    state = [(cache.state_dir, LOCK)] if cache.claimed and not cache.part else []

    def call(tell: Tell) -> list[str]:
        become(cache.user)
        # All locks before anything is removed.
        held = [_hold(*one, cache.user.uid) for one in [*state, *tiers]]
        left = []
        for path, lock, directory in [one for one in reversed(held) if one is not None]:
            try:
                if not _empty(path, lock, directory, tell):
                    left.append(path)
            except OSError as error:
                raise OperationError(f"cannot remove all of {path}: {error.strerror}") from None
        return left

    def heard(_name: Any) -> None:
        """The messages matter only as a sign of progress."""

    left: Sequence[str] = bounded_talk(
        call,
        silence=_SILENCE_SECONDS,
        overdue=f"the cache of {cache.source} was not removed: its file system does not answer",
        heard=heard,
    )
    for path in left:
        _remove_as_root(path)


def _hold(path: str, lock: str, uid: int) -> tuple[str, str, int] | None:
    """Open the directory, and lock it for the life of this process; None if it is gone."""
    try:
        directory = open_users(path, uid)
        if directory is None:
            raise OperationError(f"{path} is not the cache's any more: it was left as it is")
        descriptor = os.open(lock, os.O_RDONLY | OPEN_FILE, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OperationError(f"cannot open {path}: {error.strerror}") from None
    if not try_lock(descriptor):
        raise OperationError(f"{path} is in use: unmount that first")
    return path, lock, directory


def _empty(path: str, lock: str, directory: int, tell: Tell) -> bool:
    """Removes a directory's content, its lock last, and then the directory. False if that failed,
    or if something else lies there."""
    os.fchdir(directory)
    for name in os.listdir("."):
        if name == lock or (lock == LOCK and not _OURS.fullmatch(name)):
            continue
        tell(name)
        if stat.S_ISDIR(os.lstat(name).st_mode):
            remove_tree(name)
        else:
            os.unlink(name)
    os.unlink(lock)
    if os.geteuid() == 0:
        return False  # it is done by name, with care for links
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            return False
        if error.errno != errno.ENOTEMPTY:
            raise
    return True


def _remove_as_root(path: str) -> None:
    """Removes an empty directory that its user has no right to remove, or that is root's."""
    try:
        with place_of(path, alone=False) as place:
            os.rmdir(place.name, dir_fd=place.directory)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            return  # what is not ours lies there
        raise OperationError(
            f"{path} was emptied and cannot be removed: {error.strerror}: ask root"
        ) from None
