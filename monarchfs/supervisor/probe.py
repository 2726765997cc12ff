"""Looking at the source and the mount point without ever hanging with them."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from monarchfs.bounded import Answer, bounded_call
from monarchfs.config import User
from monarchfs.fuse.mountinfo import MONARCHFS, Mount, find_mount, resolve_mountpoint
from monarchfs.supervisor.identity import become
from monarchfs.types import OperationError, UsageError

Identity = tuple[int, int]
"""st_dev and st_ino."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source, opened as the mount's user. ``lineage`` are the identities of the directory
    itself and of those above it; ``path`` has no symbolic links."""

    descriptor: int
    path: str
    lineage: tuple[Identity, ...]

    @property
    def identity(self) -> Identity:
        return self.lineage[0]


@dataclass(frozen=True, slots=True)
class Mountpoint:
    """A directory that can be mounted on; like `Source`, but nothing of it is kept open."""

    path: str
    lineage: tuple[Identity, ...]

    @property
    def identity(self) -> Identity:
        return self.lineage[0]


def probe_source(path: str, user: User, timeout: float) -> Source:
    """Opens the directory ``path`` (absolute) as ``user``.

    Raises UsageError if it is missing or no directory, OperationError if the user may not read it
    or it does not answer within ``timeout`` seconds.
    """

    def call() -> Answer:
        become(user)
        try:
            real = os.path.realpath(path, strict=True)
            descriptor = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.scandir(descriptor).close()
        except OSError as error:
            raise _source_error(path, user, error) from None
        return [real, lineage(descriptor)], [descriptor]

    (real, identities), descriptors = bounded_call(
        call,
        timeout=timeout,
        overdue=f"source {path} did not answer within {timeout:g} s: check its file system",
    )
    return Source(descriptors[0], real, _tuples(identities))


def probe_mountpoint(path: str, timeout: float) -> Mountpoint:
    """Checks that ``path`` (absolute) is a directory with no mount of ours on it.

    Raises UsageError if it is not, OperationError if it does not answer or its daemon is dead.
    """
    literal = find_mount(os.path.normpath(path))
    if literal is not None:
        _refuse_ours(literal)

    def call() -> Answer:
        resolved = resolve_mountpoint(path)
        existing = find_mount(resolved)
        if existing is not None:
            _refuse_ours(existing)
        try:
            descriptor = os.open(resolved, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            return [resolved, lineage(descriptor)], ()
        except OSError as error:
            raise _mountpoint_error(path, error) from None

    (resolved, identities), _ = bounded_call(
        call,
        timeout=timeout,
        overdue=f"mount point {path} did not answer within {timeout:g} s:"
        f" check its file system, or detach what hangs there with umount -l {path}",
    )
    return Mountpoint(resolved, _tuples(identities))


def lineage(descriptor: int) -> list[Identity]:
    """The identities of an open directory and of all above it, up to the root or as far as this
    process may go."""
    identities: list[Identity] = []
    current = os.dup(descriptor)
    try:
        while True:
            st = os.fstat(current)
            if identities and identities[-1] == (st.st_dev, st.st_ino):
                return identities
            identities.append((st.st_dev, st.st_ino))
            above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = above
    except PermissionError:
        return identities
    finally:
        os.close(current)


def _tuples(identities: list[list[int]]) -> tuple[Identity, ...]:
    return tuple((device, ino) for device, ino in identities)


def _refuse_ours(mount: Mount) -> None:
    if mount.fstype == MONARCHFS:
        raise UsageError(
            f"{mount.mountpoint} is already a monarchfs mount of {mount.source}:"
            f" unmount it first with monarchfs umount {mount.mountpoint}"
        )


def _source_error(path: str, user: User, error: OSError) -> Exception:
    match error.errno:
        case errno.ENOENT:
            return UsageError(f"source {path} does not exist: name an existing directory")
        case errno.ENOTDIR:
            return UsageError(f"source {path} is not a directory: name the dataset's directory")
        case errno.ELOOP:
            return UsageError(f"source {path} is a loop of symbolic links: name a directory")
        case errno.EACCES | errno.EPERM:
            return OperationError(
                f"source {path} cannot be read by {user.name}: mount as a user who may read it"
                " (as root: --user)"
            )
        case errno.ENOTCONN:
            return OperationError(f"source {path} has lost its file system: mount that again")
        case _:
            return OperationError(
                f"source {path} cannot be opened: {error.strerror}: check its file system"
            )


def _mountpoint_error(path: str, error: OSError) -> Exception:
    match error.errno:
        case errno.ENOENT:
            return UsageError(f"mount point {path} does not exist: create it with mkdir {path}")
        case errno.ENOTDIR if not stat.S_ISDIR(_mode_of(path)):
            return UsageError(f"mount point {path} is not a directory: name an empty directory")
        case errno.ENOTCONN:
            return OperationError(
                f"mount point {path} holds a mount whose daemon is dead:"
                f" clear it with umount -l {path} (or fusermount3 -u -z {path})"
            )
        case errno.EACCES:
            return OperationError(
                f"mount point {path} cannot be entered: Permission denied: use one of your own"
            )
        case _:
            return OperationError(f"mount point {path} cannot be used: {error.strerror}")


def _mode_of(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0
