"""Mount namespaces of our own: making one, and joining one that another process made.

Root only needs a mount namespace. Anybody else makes a user namespace with it, in which the own uid
and gid are mapped to themselves and all other ids to 65534 (user_namespaces(7)). Access by
supplementary groups still works, because the kernel keeps its own numbers.

For processes of one thread: setns(2) and unshare(2) refuse others. (Python has them since 3.12.)
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from monarchfs.system import libc
from monarchfs.types import OperationError

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_REMEDY = "ask the administrator to allow user namespaces, or to mount for you"


@dataclass(frozen=True, slots=True)
class Spaces:
    """Descriptors of a mount namespace, of the root directory to have in it, and of its user
    namespace, unless that is the initial one."""

    mounts: int
    root: int
    users: int | None

    @classmethod
    def own(cls, *, with_users: bool) -> Spaces:
        """Those of this process, opened."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        return cls(
            os.open("/proc/self/ns/mnt", flags),
            os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC),
            os.open("/proc/self/ns/user", flags) if with_users else None,
        )

    @classmethod
    def from_descriptors(cls, descriptors: Sequence[int]) -> Spaces:
        """What `descriptors` gave; raises ValueError for a wrong number of them."""
        mounts, root, *users = descriptors
        if len(users) > 1:
            raise ValueError("too many descriptors")
        return cls(mounts, root, users[0] if users else None)

    @property
    def descriptors(self) -> list[int]:
        return [self.mounts, self.root, *(() if self.users is None else (self.users,))]

    @property
    def place(self) -> list[int]:
        """Numbers by which a process sees that it is in the same mount namespace and root."""
        root = os.fstat(self.root)
        return [os.fstat(self.mounts).st_ino, root.st_dev, root.st_ino]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def leave_for_own() -> bool:
    """Moves this process into a mount namespace of its own; whether that took a user namespace.

    Mounts made outside later (by an automounter, say) appear inside; mounts made inside are never
    seen outside. Raises OperationError, with the remedy, where it is not allowed.
    """
    uid, gid = os.geteuid(), os.getegid()
    as_user = uid != 0
    flags = _CLONE_NEWNS | (_CLONE_NEWUSER if as_user else 0)
    if (code := libc.error_of("unshare", flags)) != 0:
        raise OperationError(_refusal(code, as_user=as_user))
    if as_user:
        try:
            map_ids(uid, gid, uid, gid)
        except OSError as error:
            raise OperationError(
                f"the kernel lets you make user namespaces, but not use them ({error.strerror};"
                f" AppArmor does that): {_REMEDY}"
            ) from None
    propagation = ctypes.c_ulong(_MS_REC | _MS_SLAVE)
    if (code := libc.error_of("mount", b"none", b"/", None, propagation, None)) != 0:
        # mount(2): the root directory is no mount point.
        remedy = ": in a chroot, bind it on itself first" if code == errno.EINVAL else ""
        raise OperationError(f"cannot make the mounts private: {os.strerror(code)}{remedy}")
    return as_user


def join(spaces: Spaces) -> None:
    """Moves this process into namespaces that another one made, with the root as working directory.
    Raises OSError."""
    if spaces.users is not None:
        libc.call("setns", spaces.users, _CLONE_NEWUSER)
    libc.call("setns", spaces.mounts, _CLONE_NEWNS)
    # That has moved us to the namespace's own root, which is not ours in a chroot (setns(2)).
    if not os.path.samestat(os.fstat(spaces.root), os.stat("/")):
        os.fchdir(spaces.root)
        os.chroot(".")


def bind(existing: str, path: str) -> None:
    """Shows the mount on ``existing`` on ``path`` as well. Raises OSError."""
    flags = ctypes.c_ulong(_MS_BIND)
    libc.call("mount", os.fsencode(existing), os.fsencode(path), None, flags, None)


def map_ids(inside_uid: int, inside_gid: int, uid: int, gid: int) -> None:
    """Names the only user and group of this process's new user namespace. Raises OSError."""
    # setgroups before gid_map, as user_namespaces(7) says.
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside_uid} {uid} 1"),
        ("gid_map", f"{inside_gid} {gid} 1"),
    ):
        with open(f"/proc/self/{file}", "w", encoding="ascii") as opened:
            opened.write(text)


def _refusal(code: int, *, as_user: bool) -> str:
    if not as_user:
        return (
            f"root may not make a mount namespace ({os.strerror(code)}):"
            " it needs CAP_SYS_ADMIN (in a container: --cap-add SYS_ADMIN)"
        )
    why = {
        errno.ENOSPC: "user.max_user_namespaces is used up, or 0",
        errno.EPERM: "the kernel's settings, a container or a chroot forbids it",
    }.get(code, os.strerror(code))
    return f"you may not make a user namespace here ({why}): {_REMEDY}"
