"""Inspects the directories of a cache, in a child with the rights of the user who owns them.

Raises OSError if something cannot be inspected.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import asdict
from itertools import islice
from typing import Any

from monarchfs.cache.store.segments import SegmentFiles
from monarchfs.config import User
from monarchfs.config.places import OWNER
from monarchfs.slurm.trees import Size, in_use, open_users, tree_size
from monarchfs.supervisor.lock import LOCK, read_holder
from monarchfs.supervisor.tierdirs import OPEN_DIRECTORY, read_owner, read_record
from monarchfs.system.trusted import open_directory

MEASURE_SECONDS = 3.0
MOST_NAMES = 1000
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def names_in(path: str, uid: int, pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    """The directories of ``uid`` in ``path``, with their owners; those of all users if it is
    root's."""
    directory = os.open(path, OPEN_DIRECTORY)
    everybody = uid == 0 and _is_roots(path)
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not pattern.fullmatch(entry.name):
                continue
            st = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(st.st_mode) and (everybody or st.st_uid == uid):
                found.append((entry.name, st.st_uid))
    return list(islice(sorted(found), MOST_NAMES))


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
    lock = os.open(LOCK, _FILE, dir_fd=directory)
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
    file = os.open(OWNER, _FILE, dir_fd=directory)
    owner = read_owner(file)
    here = f"/proc/self/fd/{directory}"
    size = tree_size(f"{here}/.", MEASURE_SECONDS) if measure else Size(whole=False)
    # The owner file itself is no copy.
    copies = size.files - 1 + (_sharing(directory, user) if measure else 0)
    return {
        "owner": None if owner is None else asdict(owner),
        "size": (size.bytes, max(0, copies), size.whole),
        "in_use": in_use(here, OWNER),
        "last_used": os.fstat(file).st_mtime,
    }
