"""Who a job's user is, and what a path is for that user; asked in children that may hang."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass

from monarchfs.config.model import User
from monarchfs.slurm.site import is_below
from monarchfs.supervisor.identity import become
from monarchfs.supervisor.probe import path_of
from monarchfs.system.bounded import Answer, bounded_call, bounded_value
from monarchfs.types import OperationError


def user_of(uid: int, timeout: float) -> User:
    """The user and all groups. Raises OperationError if there is none, or if the directory service
    does not answer within ``timeout`` seconds."""

    def call() -> tuple[str, int, list[int]]:
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            raise OperationError(
                f"this node knows no user {uid}: see getent passwd {uid}"
            ) from None
        return entry.pw_name, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)

    name, gid, groups = bounded_value(
        call,
        timeout=timeout,
        overdue=f"who user {uid} is was not known within {timeout:.0f} s: check getent passwd",
    )
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
