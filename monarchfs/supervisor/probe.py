"""Looks at the source and the mount point without ever hanging with them."""

from __future__ import annotations

import difflib
import errno
import os
import stat
from dataclasses import dataclass
from itertools import islice

from monarchfs.config import User
from monarchfs.fuse.mountinfo import (
    MONARCHFS,
    Mount,
    find_mount,
    is_network_type,
    read_mountinfo,
    resolve_mountpoint,
)
from monarchfs.supervisor.identity import become
from monarchfs.system.bounded import Answer, answer_within, bounded_call, is_missing
from monarchfs.system.trusted import place_of
from monarchfs.types import OperationError, UsageError

_MOST_NAMES = 10_000
"""Of a directory's, in which a name like a mistyped one is looked for."""

Identity = tuple[int, int]
"""st_dev and st_ino."""


class EmptySource(OperationError):
    """There is nothing in the source, and that is an error where files are required."""


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """The source, opened as the mount's user. ``lineage``: identities of the directory itself and
    of those above it; ``path`` has no symbolic links."""

    descriptor: int
    path: str
    lineage: tuple[Identity, ...]
    empty: bool

    @property
    def identity(self) -> Identity:
        return self.lineage[0]


@dataclass(frozen=True, slots=True)
class Mountpoint:
    """A directory that can be mounted on; as `OpenedSource`, but nothing is kept open."""

    path: str
    lineage: tuple[Identity, ...]

    @property
    def identity(self) -> Identity:
        return self.lineage[0]


def path_of(descriptor: int) -> str:
    """Where an open directory lies now, whatever symbolic links say (proc_pid_fd(5)). Raises
    OSError where it was removed or moved meanwhile."""
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if not os.path.samestat(os.stat(path), os.fstat(descriptor)):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return path


def probe_source(path: str, user: User, timeout: float, opened: int | None = None) -> OpenedSource:
    """Opens the directory ``path`` (absolute) as ``user``; if ``opened`` is given, that
    descriptor's, of which ``path`` is the name.

    Raises UsageError if it is missing or no directory, OperationError if the user may not read it
    or it does not answer within ``timeout`` seconds.
    """

    def call() -> Answer:
        become(user)
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            if opened is None:
                descriptor = os.open(path, flags)
                real = path_of(descriptor)
            else:
                descriptor = os.open(".", flags, dir_fd=opened)
                real = path
            with os.scandir(descriptor) as entries:
                empty = next(entries, None) is None
        except OSError as error:
            raise _source_error(path, user, error) from None
        return [real, lineage(descriptor), empty], [descriptor]

    (real, identities, empty), descriptors = bounded_call(
        call,
        timeout=timeout,
        overdue=f"source {path} did not answer within {timeout:g} s: check its file system",
        keep=[] if opened is None else [opened],
    )
    return OpenedSource(descriptors[0], real, _tuples(identities), empty)


def check_exists(path: str, user: User, timeout: float) -> None:
    """Raises UsageError if ``user`` sees that there is no ``path`` (absolute) within ``timeout``
    seconds."""

    def complaint() -> str | None:
        become(user)
        return _missing(path) if is_missing(path) else None

    if (said := answer_within(timeout, complaint, otherwise=None)) is not None:
        raise UsageError(said)


def seems_unmounted(source: OpenedSource, mounts: list[Mount] | None = None) -> str | None:
    """If the source is empty and looks as if its file system was not mounted on this node: the
    mount point of another file system beside it. None otherwise."""
    mounts = read_mountinfo() if mounts is None else mounts
    is_mounted = any(mount.mountpoint == source.path for mount in mounts)
    devices = [device for device, _ in source.lineage[:2]]
    if not source.empty or is_mounted or len(set(devices)) > 1:
        return None
    return next(
        (
            mount.mountpoint
            for mount in mounts
            if os.path.dirname(mount.mountpoint) == os.path.dirname(source.path)
            and (is_network_type(mount.fstype) or mount.source.startswith("/dev/"))
            and mount.fstype != MONARCHFS
        ),
        None,
    )


def complaint_of_empty(source: OpenedSource) -> str | None:
    """What to tell of a source that seems not to be mounted; None where all is well."""
    beside = seems_unmounted(source)
    if beside is None:
        return None
    return (
        f"source {source.path} is empty, and no file system is mounted on it, as on {beside} beside"
        " it: see whether it is mounted on this node"
    )


def check_filled(source: OpenedSource) -> None:
    """Raises EmptySource for one that is."""
    if source.empty:
        why = complaint_of_empty(source) or f"source {source.path} is empty: name another directory"
        raise EmptySource(f"{why}, or leave out --require-files")


def probe_mountpoint(path: str, timeout: float) -> Mountpoint:
    """Checks that ``path`` (absolute) is a directory with no mount of ours on it. Raises UsageError
    if it is no directory, OperationError if there is such a mount, or it does not answer."""
    literal = find_mount(os.path.normpath(path))
    if literal is not None:
        _refuse_ours(literal)

    def call() -> Answer:
        resolved = resolve_mountpoint(path)
        existing = find_mount(resolved)
        if existing is not None:
            _refuse_ours(existing)
        try:
            if os.geteuid() == 0:
                # A link of a user's could have root hide any directory behind the mount.
                with place_of(path, alone=False):
                    pass
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
    if mount.fstype != MONARCHFS:
        return
    remedy = f"unmount it first with monarchfs umount {mount.mountpoint}"
    if mount.user_id is not None and os.geteuid() not in (0, mount.user_id):
        remedy = "it belongs to another user: name another mount point"
    raise OperationError(
        f"{mount.mountpoint} is already a monarchfs mount of {mount.source}: {remedy}"
    )


def _source_error(path: str, user: User, error: OSError) -> Exception:
    match error.errno:
        case errno.ENOENT:
            return UsageError(_missing(path))
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


def _missing(path: str) -> str:
    """Says that there is no source of that path, and which one was perhaps meant."""
    above, name = os.path.split(os.path.normpath(path))
    while not os.path.isdir(above):
        above, name = os.path.split(above)
    rest = os.path.relpath(path, os.path.join(above, name))
    try:
        with os.scandir(above) as entries:
            names = [entry.name for entry in islice(entries, _MOST_NAMES) if entry.is_dir()]
    except OSError:
        names = []  # it may be entered, but not listed
    close = difflib.get_close_matches(name, names, n=1)
    remedy = "name an existing directory"
    if close:
        near = os.path.normpath(os.path.join(above, close[0], rest))
        remedy = f"did you mean {near}?" if os.path.isdir(near) else f"did you mean {close[0]}?"
    return f"source {path} does not exist: {remedy}"


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
