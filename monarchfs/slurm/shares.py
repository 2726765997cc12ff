"""A share: one dataset mounted for one user with one set of groups, and the jobs that use it.

The methods of `Share` are to be called with its lock held (`records.locked`). Who the user is, and
what a path is for that user, is asked in children that may hang.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monarchfs.config.model import User
from monarchfs.config.places import known_user
from monarchfs.slurm.job import JobId, job_ids
from monarchfs.slurm.records import (
    make_directory,
    names_in,
    read_record,
    remove_directory,
    unlink,
    write_record,
    write_text,
)
from monarchfs.slurm.site import Site, is_below
from monarchfs.supervisor.identity import become
from monarchfs.supervisor.probe import path_of
from monarchfs.system.bounded import Answer, bounded_call, bounded_value
from monarchfs.types import OperationError

KEY = re.compile(r"[0-9a-f]{20}")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}")
_OURS = frozenset({"jobs", "idle", "share.json"})


def share_key(source: str, user: User) -> str:
    """The name of a share. Other groups may give access to other files, so each set of groups has a
    mount and a cache of its own."""
    groups = ",".join(map(str, sorted({user.gid, *user.groups})))
    return hashlib.sha256(os.fsencode(source) + f"\0{user.uid}\0{groups}".encode()).hexdigest()[:20]


def record_of(source: str, user: User) -> dict[str, Any]:
    """Whose it is, for the records of a share and of its cache."""
    groups = list(user.groups)
    return {"source": source, "uid": user.uid, "user": user.name, "gid": user.gid, "groups": groups}


@dataclass(frozen=True, slots=True)
class Share:
    """One share's files. ``record`` is what share.json says, empty before anything is mounted."""

    site: Site
    key: str

    @property
    def directory(self) -> str:
        return os.path.join(self.site.shares, self.key)

    @property
    def lock(self) -> str:
        return self.site.lock(self.key)

    @property
    def cache(self) -> str:
        return self.site.cache(self.key)

    @property
    def _jobs(self) -> str:
        return os.path.join(self.directory, "jobs")

    def jobs(self) -> list[JobId]:
        """The jobs that use it."""
        return job_ids(names_in(self._jobs))

    def record(self) -> dict[str, Any]:
        return read_record(os.path.join(self.directory, "share.json")) or {}

    def write(self, record: Mapping[str, Any]) -> None:
        write_record(os.path.join(self.directory, "share.json"), record)

    def mountpoint(self, source: str) -> str:
        """Where ``source`` is mounted: a directory of its name, if that is plain."""
        name = os.path.basename(source)
        plain = _FOLDER.fullmatch(name) is not None and name not in _OURS
        return os.path.join(self.directory, name if plain else "data")

    # Coming and going

    def enter(self, job: JobId) -> None:
        """Puts a job into the set. Before anything is mounted: if the prolog is killed later, the
        epilog or ``gc`` takes the job out again."""
        make_directory(self.directory, 0o711)
        make_directory(self._jobs, 0o700)
        others = [other for other in self.jobs() if other != job]
        for other in others:
            met = self.entry(other)
            if job not in met.get("met", []):
                self._write_entry(other, {**met, "met": [*met.get("met", []), job]})
        self._write_entry(job, {"entered_unix_seconds": time.time(), "met": others})
        unlink(os.path.join(self.directory, "idle"))

    def note(self, job: JobId, **facts: Any) -> None:
        """Adds to what is known of a job in the set."""
        self._write_entry(job, {**self.entry(job), **facts})

    def entry(self, job: JobId) -> dict[str, Any]:
        return read_record(os.path.join(self._jobs, str(job))) or {}

    def leave(self, job: JobId) -> bool:
        """Takes a job out of the set; whether it was in it."""
        return unlink(os.path.join(self._jobs, str(job)))

    def mark_idle(self) -> None:
        """Notes that no job uses it from now on."""
        write_text(os.path.join(self.directory, "idle"), "")

    def idle_seconds(self) -> float:
        """For how long no job has used it; infinite if that was not recorded."""
        try:
            return max(0.0, time.time() - os.stat(os.path.join(self.directory, "idle")).st_mtime)
        except FileNotFoundError:
            return float("inf")

    def clear(self) -> None:
        """Removes the rest of a share that no job uses and that is not mounted."""
        for name in names_in(self._jobs, hidden=True):
            if name.startswith("."):
                unlink(os.path.join(self._jobs, name))
        remove_directory(self._jobs)
        for name in names_in(self.directory, hidden=True):
            path = os.path.join(self.directory, name)
            if stat.S_ISDIR(os.lstat(path).st_mode):
                remove_directory(path)
            else:
                unlink(path)
        remove_directory(self.directory)

    def _write_entry(self, job: JobId, entry: Mapping[str, Any]) -> None:
        write_record(os.path.join(self._jobs, str(job)), entry)


def every_share(site: Site) -> list[Share]:
    return [Share(site, name) for name in names_in(site.shares) if KEY.fullmatch(name)]


def shares_of(site: Site, job: JobId) -> list[Share]:
    """The shares whose sets a job is in."""
    return [share for share in every_share(site) if job in share.jobs()]


# Of whom, and of what


def uid_of(name: str, timeout: float) -> int:
    """A user's number, which may also be given; a name of digits comes first, as for a mount.
    Raises OperationError as `user_of_job`."""

    def call() -> int:
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            if name.isdecimal():
                return int(name)
            raise OperationError(
                f"this node knows no user {name}: see getent passwd {name}"
            ) from None

    overdue = f"who {name} is was not known within {timeout:.0f} s: check getent passwd"
    return int(bounded_value(call, timeout=timeout, overdue=overdue))


def user_of_job(uid: int, timeout: float) -> User:
    """The user and all groups. Raises OperationError if there is none, or if the directory service
    does not answer within ``timeout`` seconds."""

    def call() -> tuple[str, int, list[int]]:
        try:
            user = known_user(uid)
        except KeyError:
            raise OperationError(
                f"this node knows no user {uid}: see getent passwd {uid}"
            ) from None
        return user.name, user.gid, list(user.groups)

    overdue = f"who user {uid} is was not known within {timeout:.0f} s: check getent passwd"
    name, gid, groups = bounded_value(call, timeout=timeout, overdue=overdue)
    return User(name, uid, gid, tuple(groups))


@dataclass(frozen=True, slots=True)
class Dataset:
    """A directory, looked up once: ``path`` has no symbolic links, and ``descriptor`` stands for
    what it was then (O_PATH). To be closed."""

    path: str
    descriptor: int

    def close(self) -> None:
        os.close(self.descriptor)


def resolve(path: str, roots: Sequence[str] | None, user: User, timeout: float) -> Dataset:
    """The directory that ``path`` is for ``user``.

    Raises OperationError if there is none, if it lies (links followed) in none of ``roots``, where
    given, or if that takes longer than ``timeout`` seconds.
    """

    def call() -> Answer:
        become(user)
        try:
            place = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            os.close(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place))
            # Where it is, not where the path leads by now.
            real = path_of(place)
        except OSError as error:
            raise OperationError(f"{path}: {error.strerror} (for {user.name})") from None
        if roots is not None and not is_below(real, [os.path.realpath(root) for root in roots]):
            raise OperationError(
                f"{path} is {real}, which is in none of the roots that are allowed"
            )
        return real, [place]

    real, (descriptor,) = bounded_call(
        call, timeout=timeout, overdue=f"{path} did not answer within {timeout:.0f} s"
    )
    return Dataset(real, descriptor)
