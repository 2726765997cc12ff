"""Who a job's user is, and what the user means by a path; asked in children that may hang."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence

from monarchfs.bounded import Answer, bounded_call
from monarchfs.config.model import User
from monarchfs.slurm.site import is_below
from monarchfs.supervisor.identity import become
from monarchfs.types import OperationError


def user_of(uid: int, timeout: float) -> User:
    """The user and all groups. Raises OperationError if there is none, or if the directory service
    does not answer within ``timeout`` seconds."""

    def call() -> Answer:
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            raise OperationError(
                f"this node knows no user {uid}: see getent passwd {uid}"
            ) from None
        groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
        return [entry.pw_name, entry.pw_gid, groups], ()

    (name, gid, groups), _ = bounded_call(
        call,
        timeout=timeout,
        overdue=f"who user {uid} is was not known within {timeout:.0f} s: check getent passwd",
    )
    return User(name, uid, gid, tuple(groups))


def resolve(path: str, roots: Sequence[str] | None, user: User, timeout: float) -> str:
    """The directory that ``path`` is for ``user``, without symbolic links.

    Raises OperationError if it is none, if it lies (links followed) in none of ``roots``, where
    those are given, or if that is not known within ``timeout`` seconds.
    """

    def call() -> Answer:
        become(user)
        try:
            real = os.path.realpath(path, strict=True)
            os.close(os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            raise OperationError(f"{path}: {error.strerror} (for {user.name})") from None
        allowed = roots is None or is_below(real, [os.path.realpath(root) for root in roots])
        return [real, allowed], ()

    (real, allowed), _ = bounded_call(
        call, timeout=timeout, overdue=f"{path} did not answer within {timeout:.0f} s"
    )
    if not allowed:
        raise OperationError(f"{path} is {real}, which is in none of the roots that are allowed")
    return str(real)
