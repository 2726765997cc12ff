"""Inspects the directories of a cache, in a child with the rights of the user who owns them.

Raises OSError if something cannot be inspected.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from typing import Any

from monarchfs.cache.store.segments import SegmentFiles
from monarchfs.config import User
from monarchfs.config.places import OWNER
from monarchfs.supervisor.directories import (
    LOCK,
    OPEN_DIRECTORY,
    OPEN_FILE,
    Size,
    directories_in,
    in_use,
    open_users,
    read_holder,
    read_owner,
    read_record,
    tree_size,
)
from monarchfs.system.trusted import open_directory

MOST_NAMES = 1000


def names_in(path: str, uid: int, pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    """The directories of ``uid`` in ``path``, with their owners; those of all users if it is
    root's."""
    directory = os.open(path, OPEN_DIRECTORY)
    everybody = uid == 0 and _is_roots(path)
    found = [
        (name, st.st_uid)
        for name, st in directories_in(directory, pattern)
        if everybody or st.st_uid == uid
    ]
    return sorted(found)[:MOST_NAMES]


def _is_roots(path: str) -> bool:
    try:
        os.close(open_directory(path))
    except OSError:
        return False
    return True


def inspect_state(path: str, user: User) -> dict[str, Any] | None:
    """What a state directory says; None if it is none."""
    directory = open_users(path, user.uid)
    if directory is None:
        return None
    lock = os.open(LOCK, os.O_RDONLY | OPEN_FILE, dir_fd=directory)
    holder = read_holder(lock)
    if holder is None:
        return None
    times = [os.fstat(lock).st_mtime]
    try:
        index = os.stat("index/data.mdb", dir_fd=directory, follow_symlinks=False)
        times.append(index.st_mtime)
    except OSError:
        pass  # it was never mounted, or is no directory: the lock's time counts
    return {
        "source": holder.source,
        "mountpoint": None if holder.checking else holder.mountpoint,
        "last_tiers": holder.tiers,
        "tiers": read_record(directory, user),
        "in_use": in_use(f"/proc/self/fd/{directory}"),
        "last_used": max(times),
    }


def _sharing(directory: int, user: User) -> int:
    """How many more copies lie in segments than there are files of segments."""
    segments = SegmentFiles(directory, f"/proc/self/fd/{directory}", user.uid)
    try:
        found = segments.found()
        lists = sum(bool(segments.noted(segment)) for segment in found)
        return sum(len(segments.present(segment)) for segment in found) - len(found) - lists
    finally:
        segments.close()


def inspect_copies(path: str, user: User, *, measure: bool) -> dict[str, Any] | None:
    """What a directory in a tier says; None if it is none."""
    directory = open_users(path, user.uid)
    if directory is None:
        return None
    file = os.open(OWNER, os.O_RDONLY | OPEN_FILE, dir_fd=directory)
    owner = read_owner(file)
    here = f"/proc/self/fd/{directory}"
    size = tree_size(f"{here}/.") if measure else Size(whole=False)
    # The owner file itself is no copy.
    copies = size.files - 1 + (_sharing(directory, user) if measure else 0)
    return {
        "owner": None if owner is None else asdict(owner),
        "size": (size.bytes, max(0, copies), size.whole),
        "in_use": in_use(here, OWNER),
        "last_used": os.fstat(file).st_mtime,
    }
