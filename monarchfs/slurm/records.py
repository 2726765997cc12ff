"""Files that prologs and epilogs keep: where they lie, written whole or not at all, and locks.

::

    RUN/locks/KEY             flock'ed by who changes a share; never removed while the node is up
    RUN/shares/KEY/share.json what is mounted (or is about to be)
    RUN/shares/KEY/jobs/JOB   one file for each job that uses it: what it found when it came
    RUN/shares/KEY/idle       since when no job uses it; its modification time
    RUN/shares/KEY/NAME       the mount point
    RUN/jobs/JOB              whose job it is, and what was not mounted for it, for the report
    RUN/env/JOB               what the task prolog prints, or the job's shell reads; its user's
    /run/monarchfs/slurm/config/ by path, the configuration by which the last job was begun
    CACHE/slurm/KEY/          state directory (``state``) and ``cache.json``
    CACHE/slurm/.gone         since when ``gc`` has not found the users of idle caches
    CACHE/recordings/         what is recorded for jobs, by JOB.KEY, until the verdict is known
    TIER/KEY/                 the copies; the user's alone

RUN is on a tmpfs: what a node that crashes leaves there is gone with it. All of it belongs to root
and is changed by root only. A file is written beside its place and renamed, so that a process may
be killed at any point.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from monarchfs.slurm.site import Site
from monarchfs.supervisor.directories import OPEN_DIRECTORY
from monarchfs.system import locks
from monarchfs.system.trusted import Untrusted, make_directories
from monarchfs.types import OperationError

_MOST_BYTES = 1 << 20


def prepare(site: Site) -> None:
    """Makes the missing directories, and raises OperationError if somebody else could change them.
    Others may pass through some of them, but list none."""
    for path in (site.run_dir, site.shares, site.environments):
        make_directory(path, 0o711)
    for path in (site.lock(""), site.facts(0)):
        make_directory(os.path.dirname(path), 0o700)
    make_directory(site.cache_dir, 0o755)
    make_directory(site.caches, 0o711)


def make_directory(path: str, mode: int) -> None:
    """A directory that only we can change, as all those above it; missing ones are made, an
    existing one keeps its mode. Raises OperationError."""
    try:
        if os.geteuid() == 0:
            make_directories(path, mode)
        else:
            os.makedirs(path, mode, exist_ok=True)
        st = os.lstat(path)
    except Untrusted as error:
        raise OperationError(f"{path}: {error.strerror}: configure another") from None
    except OSError as error:
        raise OperationError(f"cannot make {path}: {error.strerror}") from None
    if not stat.S_ISDIR(st.st_mode) or st.st_uid != os.geteuid() or st.st_mode & 0o022:
        raise OperationError(
            f"{path} is not a directory that only root can change: remove it, or configure another"
        )


def write_record(path: str, record: Mapping[str, Any], *, mode: int = 0o600) -> None:
    """Writes one JSON object whole or not at all. Raises OSError."""
    write_text(path, json.dumps(record) + "\n", mode=mode)


def write_text(path: str, text: str, *, mode: int = 0o600, owner: int | None = None) -> None:
    """Writes a file whole or not at all, for ``owner`` if that is not us. Raises OSError."""
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{os.getpid()}")
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "wb") as file:
            file.write(os.fsencode(text))
            file.flush()
            os.fchmod(descriptor, mode)
            if owner is not None and owner != os.geteuid():
                os.fchown(descriptor, owner, -1)
        os.rename(temporary, path)
    except FileExistsError:
        # Of a process of this number that was killed here.
        os.unlink(temporary)
        write_text(path, text, mode=mode, owner=owner)
    except BaseException:
        unlink(temporary)
        raise


def remove_unfinished(path: str) -> None:
    """Removes the unfinished copy of ``path`` that a killed `write_text` left."""
    directory, name = os.path.split(path)
    unfinished = re.compile(rf"\.{re.escape(name)}\.[0-9]+")
    for found in names_in(directory, hidden=True):
        if unfinished.fullmatch(found):
            unlink(os.path.join(directory, found))


def read_record(path: str) -> dict[str, Any] | None:
    """The object that `write_record` wrote; None if there is none, or it is damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            record = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def unlink(path: str) -> bool:
    """Removes a file; whether it was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def remove_directory(path: str) -> None:
    """Removes an empty directory; one that is not empty, or in use, stays."""
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise


def remove_tree(path: str) -> None:
    """Removes a directory of a user's whose parent is root's, however deep it is. Follows no link
    and enters no mount, whatever the user does. If something is left, it raises OperationError
    after it has removed all it can."""
    errors: list[OSError] = []
    parent, name = os.path.split(path)
    here = os.open(parent or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # No stack frame and no descriptor for each level: a user may have made thousands.
    left, way = [[name]], list[tuple[str, os.stat_result]]()
    try:
        while left[-1] or way:
            if left[-1]:
                name = left[-1].pop()
                with _noted(errors):
                    below = _taken(name, here)
                    way.append((name, os.fstat(here)))
                    os.close(here)
                    here = below
                    left.append([])
                    left[-1] += _emptied(here, errors)
                continue
            left.pop()
            name, above = way.pop()
            below, here = here, os.open("..", OPEN_DIRECTORY, dir_fd=here)
            os.close(below)
            if not os.path.samestat(os.fstat(here), above):
                raise OperationError(f"cannot remove all of {path}: it was moved meanwhile")
            with _noted(errors):
                os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)
    if errors:
        raise OperationError(f"cannot remove all of {path}: {errors[0]}")


@contextmanager
def _noted(errors: list[OSError]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        errors.append(error)


def _taken(name: str, directory: int) -> int:
    """A directory in another, opened. Root takes it from its user, who can add and move nothing in
    it any more: ``..`` leads back."""
    descriptor = os.open(name, OPEN_DIRECTORY, dir_fd=directory)
    try:
        st = os.fstat(descriptor)
        if os.geteuid() == 0 and (st.st_uid != 0 or st.st_mode & 0o022):
            os.fchown(descriptor, 0, 0)
            os.fchmod(descriptor, 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _emptied(directory: int, errors: list[OSError]) -> list[str]:
    """Removes what it can in a directory; the directories in it that are not empty."""
    full = []
    for name in os.listdir(directory):
        try:
            try:
                os.unlink(name, dir_fd=directory)
            except IsADirectoryError:
                os.rmdir(name, dir_fd=directory)  # which a mount refuses
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                full.append(name)
            elif error.errno != errno.ENOENT:
                errors.append(error)
    return full


def names_in(path: str, *, hidden: bool = False) -> list[str]:
    """The names in a directory, none if there is no such directory; without those that begin with a
    dot, which are being written, or were when their process was killed."""
    try:
        return sorted(name for name in os.listdir(path) if hidden or not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def locked(path: str, deadline: float) -> AbstractContextManager[None]:
    """Holds the lock ``path`` inside the block. Raises as `locks.locked`."""
    return locks.locked(path, deadline, f"another job's prolog or epilog still holds {path}")
