"""Acting as the mount's user, so that the file system decides what that user may do."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from monarchfs.config import User
from monarchfs.system import libc
from monarchfs.system.trusted import TrustedPath, Untrusted, place_of

_AT_FDCWD, _AT_EACCESS = -100, 0x200


def is_self(user: User) -> bool:
    """Whether this process has the user's identity already."""
    return (os.geteuid(), os.getegid()) == (user.uid, user.gid)


def popen_as(user: User) -> dict[str, Any]:
    """Arguments with which subprocess.Popen runs a program as ``user``."""
    if is_self(user):
        return {}
    return {"user": user.uid, "group": user.gid, "extra_groups": list(user.groups)}


@contextmanager
def acting_as(user: User) -> Iterator[None]:
    """The effective identity of ``user``, without root's capabilities, inside the block. Of the
    whole process; for processes of one thread. Does nothing if this process is ``user`` (in a user
    namespace setgroups(2) would fail)."""
    if is_self(user):
        yield
        return
    uid, gid, groups = os.geteuid(), os.getegid(), os.getgroups()
    # The groups first: without uid 0 they cannot be changed any more.
    os.setgroups(user.groups)
    try:
        os.setegid(user.gid)
        os.seteuid(user.uid)
        yield
    finally:
        os.seteuid(uid)
        os.setegid(gid)
        os.setgroups(groups)


def open_file_as(
    user: User, name: str, flags: int, mode: int = 0o600, *, directory: int | None = None
) -> int:
    """A file, opened as ``user``: its name, in the open ``directory`` where that is given, may be a
    link's, or a FIFO's, for which a plain open(2) would wait. Raises OSError."""
    safe = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with acting_as(user):
        return regular(os.open(name, safe, mode, dir_fd=directory))


def regular(descriptor: int) -> int:
    """The same; raises OSError, and closes it, if it is not that of a file."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a file")


@contextmanager
def roots_place(path: str, user: User, *, alone: bool) -> Iterator[TrustedPath | None]:
    """Where ``path`` ends, if this is root, which may act there itself (`place_of`). None: ``user``
    is to do what is done there, who could lead root anywhere. Raises Untrusted where that is root;
    OSError."""
    with ExitStack() as closing:
        place = None
        if os.geteuid() == 0:
            try:
                place = closing.enter_context(place_of(path, alone=alone))
            except Untrusted:
                if user.uid == 0:
                    raise
        yield place


def may_access(path: str, mask: int) -> bool:
    """Whether this process may do with a file what ``mask`` (os.R_OK and so on) says, by its
    effective ids. True as well where that is not told: filters of containers may answer EPERM to
    faccessat2(2), which the C library passes on; who then tries it gets the error."""
    code = libc.error_of("faccessat", _AT_FDCWD, os.fsencode(path), mask, _AT_EACCESS)
    return code in (0, errno.EPERM)


def become(user: User) -> None:
    """The identity of ``user`` for good; for a child process."""
    if is_self(user):
        return
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)


def in_first_user_namespace(uid_map: str = "/proc/self/uid_map") -> bool:
    """Whether privileges of this process are those of the machine (user_namespaces(7)): only the
    first user namespace maps all ids."""
    with open(uid_map, encoding="ascii") as file:
        return [int(word) for word in file.read().split()] == [0, 0, (1 << 32) - 1]


def user_name(uid: int) -> str:
    """For messages."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
