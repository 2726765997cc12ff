"""What is mounted where, from proc_pid_mountinfo(5), without touching any file system."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection
from typing import NamedTuple

MONARCHFS = "fuse.monarchfs"
"""The file system type under which the kernel shows our mounts."""

_OCTAL = re.compile(rb"\\([0-7]{3})")
_NETWORK = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "autofs"),
        *("lustre", "gpfs", "ceph", "glusterfs", "beegfs", "beegfs_nodev", "wekafs", "panfs"),
        *("pvfs2", "orangefs", "ocfs2", "gfs2", "acfs", "virtiofs"),
    )
)
RENUMBERING = frozenset(
    f"fuse.{name}"
    for name in (
        *("squashfuse", "sshfs", "s3fs", "archivemount", "fuse-zip", "curlftpfs"),
        *("gcsfuse", "rclone", "blobfuse2", "ratarmount"),
    )
)
"""File systems that number files as they are looked up (fuse(8), use_ino and noforget): when one is
mounted again, a number may be another file's."""

_LOCAL_FUSE = frozenset(("fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.exfat"))


class Mount(NamedTuple):
    """One line of mountinfo. ``major`` and ``minor`` are st_dev of the files in it; the minor
    number of a FUSE mount is also the name of its connection in /sys/fs/fuse/connections."""

    mount_id: int
    parent_id: int
    major: int
    minor: int
    root: str
    mountpoint: str
    options: str
    fstype: str
    source: str
    super_options: str

    @property
    def user_id(self) -> int | None:
        """Whose FUSE mount it is; None for other file systems."""
        match = re.search(r"(?:^|,)user_id=(\d+)", self.super_options)
        return int(match[1]) if match else None


def parse_mountinfo(content: bytes) -> list[Mount]:
    """The mounts of a mountinfo file; of those on one directory, the topmost comes last."""
    return [_parse_line(line) for line in content.split(b"\n") if line]


def read_mountinfo() -> list[Mount]:
    """The mounts of this process's mount namespace."""
    with open("/proc/self/mountinfo", "rb") as file:
        return parse_mountinfo(file.read())


def find_mount(mountpoint: str, mounts: list[Mount] | None = None) -> Mount | None:
    """The mount that a look-up of ``mountpoint`` (absolute, without symbolic links) ends in, if
    one is mounted there: the topmost one, unless another mount above it in the path hides it."""
    found = mount_on_the_way(mountpoint, mounts)
    return found if found is not None and found.mountpoint == mountpoint else None


def mount_on_the_way(path: str, mounts: list[Mount] | None = None) -> Mount | None:
    """The mount that a look-up of ``path`` (absolute, without symbolic links) ends in. Touches no
    file system."""
    mounts = read_mountinfo() if mounts is None else mounts
    ids = {mount.mount_id for mount in mounts}
    # From mount to mount as the kernel goes. The first one's parent is outside of our root.
    below = [mount for mount in mounts if _is_above(mount.mountpoint, path)]
    found, next_ones = None, [mount for mount in below if mount.parent_id not in ids]
    while next_ones:
        found = min(next_ones, key=lambda mount: len(mount.mountpoint))
        below.remove(found)
        next_ones = [mount for mount in below if mount.parent_id == found.mount_id]
    return found


def connection_of(device: int) -> int | None:
    """The connection of an open /dev/fuse: the minor number of its mounts. None where the kernel
    does not say it (before Linux 6.18)."""
    return _fdinfo(device, "fuse_connection:")


def mount_of(path: str) -> Mount | None:
    """The mount that holds ``path``; None where this process's root hides it. Looks it up, so it
    can hang there."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        number = mount_id(place)
    finally:
        os.close(place)
    return next((mount for mount in read_mountinfo() if mount.mount_id == number), None)


def type_of_device(device: int) -> str:
    """The type of the mounted file system with this st_dev; empty if none is seen from here."""
    number = os.major(device), os.minor(device)
    return next((m.fstype for m in read_mountinfo() if (m.major, m.minor) == number), "")


def mount_id(descriptor: int) -> int:
    """In which mount something open is (proc_pid_fdinfo(5)): the kernel alone is asked, also of
    what was opened as a place (O_PATH). Raises OSError."""
    if (number := _fdinfo(descriptor, "mnt_id:")) is None:
        raise OSError(errno.ENOSYS, "the kernel names no mount")
    return number


def _fdinfo(descriptor: int, key: str) -> int | None:
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
        found = next((line for line in file if line.startswith(key)), None)
    return None if found is None else int(found.split()[1])


def is_network_type(fstype: str) -> bool:
    """Whether files of that type are (or may well be) kept on another machine.

    FUSE says nothing about where its files are: what is not known to be local counts as remote.
    """
    return fstype in _NETWORK or is_user_space(fstype)


def is_user_space(fstype: str) -> bool:
    """Whether a process serves it, which may number its files as it likes."""
    return fstype == "fuse" or (fstype.startswith("fuse.") and fstype not in _LOCAL_FUSE)


def storage_of(path: str) -> str:
    """As ``config.places.StorageOf``, of ``path`` or the nearest existing directory above it."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    mount = mount_of(path)
    if mount is not None and is_network_type(mount.fstype):
        return "network"
    return "memory" if mount is not None and mount.fstype in ("tmpfs", "ramfs") else "disk"


def resolve_mountpoint(path: str, mounts: list[Mount] | None = None) -> str:
    """``path`` (absolute) without symbolic links and dots, as mountinfo would name it.

    Never asks a file system about its own root directory, because the daemon behind a mount point
    may hang or be dead. Components that do not exist stay as they are.
    """
    mounts = read_mountinfo() if mounts is None else mounts
    known = {mount.mountpoint for mount in mounts}
    literal = os.path.normpath(path)
    if literal in known:
        return literal
    return _follow(path, known, until=())[0]


def _follow(
    path: str, mountpoints: Collection[str], *, until: Collection[str]
) -> tuple[str, list[str]]:
    """``path`` with its links followed, as far as one of ``until``, and the components after that.
    No mount point is asked whether it is a link, and nor is what leads to it: the mount table has
    no links, and the file system above a mount point may hang, too."""
    resolved, remaining, links = "/", path.split("/"), 0
    while remaining and resolved not in until:
        rest = [name for name in remaining if name not in ("", ".")]
        whole = os.path.join(resolved, *rest)
        if ".." not in rest:
            for point in (whole,) if whole in mountpoints else until:
                if _is_above(point, whole):
                    return point, whole[len(point.rstrip("/")) + 1 :].split("/")
        name = remaining.pop(0)
        if name in ("", ".", ".."):
            resolved = os.path.dirname(resolved) if name == ".." else resolved
            continue
        candidate = os.path.join(resolved, name)
        target = None if candidate in mountpoints else _link_target(candidate)
        links += target is not None
        if target is None or links > 40:
            resolved = candidate
            continue
        remaining[:0] = target.split("/")
        resolved = "/" if target.startswith("/") else resolved
    return resolved, remaining


def open_directory(path: str) -> int:
    """A directory of this very path (absolute, resolved), as a place (O_PATH, open(2)).

    What was resolved a moment ago may lead elsewhere now: who owns a directory on the way can put a
    link there. Raises OSError, ELOOP for that.
    """
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.readlink(f"/proc/self/fd/{descriptor}") != path:
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return descriptor


def split_below(path: str, mountpoints: Collection[str]) -> tuple[str, str] | None:
    """``path`` (absolute) as one of ``mountpoints`` and what comes below that; None where it is
    below none. Symbolic links are followed up to the mount point; what is in it is never asked."""
    resolved, remaining = _follow(path, mountpoints, until=mountpoints)
    if resolved not in mountpoints:
        return None
    # A mount may lie in a mount.
    whole = os.path.normpath("/".join((resolved, *remaining)))
    for mountpoint in sorted(mountpoints, key=len, reverse=True):
        if _is_above(mountpoint, whole):
            return mountpoint, whole[len(mountpoint.rstrip("/")) + 1 :]
    return None


def _link_target(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _is_above(mountpoint: str, path: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")


def _parse_line(line: bytes) -> Mount:
    # The optional fields between the options and the hyphen vary in number.
    left, _, right = line.partition(b" - ")
    mount_id, parent_id, device, root, mountpoint, options, *_ = left.split(b" ")
    fstype, source, super_options = (*right.split(b" ", 2), b"")[:3]
    major, _, minor = device.partition(b":")
    return Mount(
        int(mount_id),
        int(parent_id),
        int(major),
        int(minor),
        _text(root),
        _text(mountpoint),
        _text(options),
        _text(fstype),
        _text(source),
        _text(super_options),
    )


def _text(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))
