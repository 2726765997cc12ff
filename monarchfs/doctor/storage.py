"""The source, tiers and the state directory: whether they can be used, their file systems, and how
much room there is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from monarchfs.config import Config, TierSpec, User
from monarchfs.doctor.checks import Check, Value, from_error, ok, warning
from monarchfs.fuse.mountinfo import (
    MONARCHFS,
    RENUMBERING,
    Mount,
    is_network_type,
    mount_of,
    mount_on_the_way,
    read_mountinfo,
    resolve_mountpoint,
)
from monarchfs.supervisor.preflight import check_directory, check_size, directories_of
from monarchfs.supervisor.probe import OpenedSource, complaint_of_empty, probe_source
from monarchfs.system.bounded import bounded_value
from monarchfs.system.memory import MemoryHeadroom, MemoryProbe
from monarchfs.system.sizes import format_bytes
from monarchfs.types import MonarchError, OperationError, Space, TierSize, UsageError

OFTEN_PURGED = frozenset(
    ("lustre", "gpfs", "beegfs", "beegfs_nodev", "wekafs", "panfs", "pvfs2", "orangefs")
)
_REMEDIES = {"fuse.squashfuse": "let the kernel mount the image: mount -t squashfs -o loop,ro"}
_REMEDY = "unpack the files into a directory of the parallel file system"
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
LITTLE_BYTES = 64 << 20
JOB_SCRATCH = ("TMPDIR", "SLURM_TMPDIR", "JOB_TMPDIR", "SCRATCH", "LOCAL_SCRATCH")
"""Environment variables in which batch systems tell jobs where their scratch is."""
COMMON_SCRATCH = ("/tmp", "/var/tmp", "/scratch", "/local", "/localscratch")


def source(path: str, user: User, seconds: float, *, touches: bool) -> list[Check]:
    """Takes a little more than ``seconds`` if the source hangs. ``touches``: --touch-source is
    given."""
    try:
        found = look_at_source(path, user, seconds)
    except MonarchError as error:
        return [from_error("source", error)]
    complaint = complaint_of_empty(found)
    if complaint is not None:
        return [warning("source", complaint, "mount it, or name another", path=found.path)]
    mount = mount_of(found.path)
    if mount is None:
        detail = f"{found.path} is on a file system that the table of mounts does not have"
        return [ok("source", detail, path=found.path, type=None)]
    return [
        judge_type(found.path, mount.fstype),
        *judge_inode_numbers(mount.fstype),
        *judge_purge(mount.fstype, f"{mount.options},{mount.super_options}", touches=touches),
    ]


def look_at_source(path: str, user: User, seconds: float) -> OpenedSource:
    """What ``path`` (absolute) is for ``user``; its descriptor is closed. Raises UsageError,
    OperationError for what cannot be mounted."""
    overdue = f"source {path} did not answer within {seconds:g} s: check its file system"
    resolved = bounded_value(lambda: resolve_mountpoint(path), timeout=seconds, overdue=overdue)
    refuse_ours(resolved)
    found = probe_source(path, user, seconds)
    os.close(found.descriptor)
    refuse_ours(found.path)
    return found


def judge_type(path: str, fstype: str) -> Check:
    network = is_network_type(fstype)
    detail = f"{path} can be read; a {'network' if network else 'local'} file system ({fstype})"
    return ok("source", detail, path=path, type=fstype, network=network)


def judge_inode_numbers(fstype: str) -> list[Check]:
    """Of file systems that number files as they are looked up."""
    if fstype not in RENUMBERING:
        return []
    detail = f"{fstype} gives files other inode numbers, so copies are kept until the unmount only"
    return [warning("inode_numbers", detail, _REMEDIES.get(fstype, _REMEDY), type=fstype)]


def judge_purge(fstype: str, options: str, *, touches: bool) -> list[Check]:
    """Sites purge such file systems by access time, and no program can find out."""
    if fstype not in OFTEN_PURGED:
        return []
    unrecorded = "noatime" in options.split(",")
    numbers: dict[str, Value] = {"type": fstype, "noatime": unrecorded, "touch_source": touches}
    if unrecorded:
        detail = f"this {fstype} is mounted with noatime: reading does not keep files from a purge"
        return [warning("purge", detail, "ask how files are purged here", **numbers)]
    if touches:
        return [ok("purge", "--touch-source keeps access times going", **numbers)]
    detail = (
        f"many sites purge {fstype} by access time, and what is cached is not read there any more"
    )
    return [warning("purge", detail, "if yours does: --touch-source 1d", **numbers)]


def refuse_ours(path: str) -> None:
    """Raises UsageError if ``path`` (absolute, without symbolic links) is one of our mounts, or
    lies in one, by the mount table."""
    mount = mount_on_the_way(path)
    if mount is not None and mount.fstype == MONARCHFS:
        raise UsageError(
            f"{path} is itself a monarchfs mount of {mount.source}, or lies in one: name the"
            f" dataset where it is not covered, or unmount it with monarchfs umount"
            f" {mount.mountpoint}"
        )


@dataclass(frozen=True, slots=True)
class TierLocation:
    """What a tier lies on. ``existing`` is its directory, or the nearest existing one above;
    ``device`` is st_dev. ``headroom`` is set for a tier in memory."""

    path: str
    existing: str
    fstype: str
    mount_options: str
    device: int
    space: Space
    headroom: MemoryHeadroom | None


@dataclass(frozen=True, slots=True)
class UsableRoom:
    """``capacity_bytes`` is what was asked for, ``usable_bytes`` what of that is there now."""

    capacity_bytes: int
    usable_bytes: int
    limited_by: str


def locate(path: str, existing: str) -> TierLocation:
    """Blocks as long as the file system does. Raises OSError."""
    st, vfs = os.stat(existing), os.statvfs(existing)
    mount = mount_of(existing)
    fstype = mount.fstype if mount else "unknown"
    return TierLocation(
        path,
        existing,
        fstype,
        f"{mount.options},{mount.super_options}" if mount else "",
        st.st_dev,
        Space(vfs.f_blocks * vfs.f_frsize, vfs.f_bavail * vfs.f_frsize, vfs.f_files, vfs.f_favail),
        MemoryProbe().read() if fstype in IN_MEMORY else None,
    )


def room_of(place: TierLocation, size: TierSize, reserve_percent: float) -> UsableRoom:
    """How much a tier could hold if it were empty now."""
    capacity = size.resolve(place.space.total_bytes)
    kept = int(place.space.total_bytes * reserve_percent / 100)
    limits = [
        (capacity, "its size"),
        (
            place.space.free_bytes - kept,
            f"its file system, of which {reserve_percent:g}% stay free",
        ),
    ]
    if place.headroom is not None:
        spare = place.headroom.available_bytes - int(
            place.headroom.limit_bytes * reserve_percent / 100
        )
        limits.append((spare, f"memory ({place.headroom.limited_by})"))
    usable, by = min(limits, key=lambda limit: limit[0])
    return UsableRoom(capacity, max(0, usable), by)


def check_and_locate(spec: TierSpec, config: Config, cache_dir: str) -> TierLocation:
    """Raises UsageError for what a mount would refuse, OperationError for a disk that fails."""
    directory = next(d for d in directories_of(config) if d.path == spec.path)
    try:
        place = locate(spec.path, check_directory(directory, cache_dir, config.user))
    except OSError as error:
        raise OperationError(f"tier {spec.path}: {error.strerror}: use another disk") from None
    check_size(spec, place.existing)
    return place


def tier(spec: TierSpec, config: Config, cache_dir: str, environ: Mapping[str, str]) -> list[Check]:
    try:
        place = check_and_locate(spec, config, cache_dir)
    except MonarchError as error:
        return [replace(from_error("tier", error), numbers={"path": spec.path})]
    room = room_of(place, spec.size, config.reserve_percent)
    scratch = sharing(place.device, ["/", *scratch_directories(environ)], read_mountinfo())
    return [
        judge_room(place, room, has_xattrs(place.existing)),
        *judge_sharing(place, scratch, config.reserve_percent),
        *judge_memory(place, room),
    ]


def state_dir(config: Config, cache_dir: str) -> list[Check]:
    directory = directories_of(config)[-1]
    try:
        existing = check_directory(directory, cache_dir, config.user)
    except MonarchError as error:
        return [from_error("state_dir", error)]
    free = os.statvfs(existing)
    free_bytes = free.f_bavail * free.f_frsize
    numbers: dict[str, Value] = {"path": config.state_dir, "free_bytes": free_bytes}
    if free_bytes < LITTLE_BYTES:
        detail = f"{config.state_dir}: {free_bytes >> 20}M are free, too little for a large index"
        return [warning("state_dir", detail, "name another --state-dir", **numbers)]
    return [ok("state_dir", config.state_dir, **numbers)]


def judge_room(place: TierLocation, room: UsableRoom, xattrs: bool) -> Check:
    space = place.space
    numbers: dict[str, Value] = {
        "path": place.path,
        "type": place.fstype,
        "capacity_bytes": room.capacity_bytes,
        "usable_bytes": room.usable_bytes,
        "free_bytes": space.free_bytes,
        "total_bytes": space.total_bytes,
        "free_inodes": space.free_inodes if space.total_inodes else None,
        "xattrs": xattrs,
    }
    what = f"{place.path} ({place.fstype})"
    if space.total_inodes and space.free_inodes < space.total_inodes / 10:
        detail = f"{what}: {space.free_inodes} inodes are free, of which none are used for copies"
        return warning("tier", detail, "remove small files there", **numbers)
    if room.usable_bytes < room.capacity_bytes:
        detail = (
            f"{what}: of {format_bytes(room.capacity_bytes)} only"
            f" {format_bytes(room.usable_bytes)} can be used: limited by {room.limited_by}"
        )
        return warning(
            "tier", detail, "name a size that is there (--tier PATH=SIZE), or make room", **numbers
        )
    inodes = f", {space.free_inodes} inodes free" if space.total_inodes else ""
    return ok("tier", f"{what}: {format_bytes(room.usable_bytes)}{inodes}", **numbers)


def judge_sharing(
    place: TierLocation, scratch: Sequence[str], reserve_percent: float
) -> list[Check]:
    """``scratch``: what jobs or the system itself use on the same file system."""
    if not scratch:
        return []
    detail = f"{place.path} shares its file system with {', '.join(scratch)}, which others fill"
    remedy = (
        f"mount the disk that was meant, or leave room ({reserve_percent:g}% are left in any case)"
    )
    return [warning("scratch", detail, remedy, path=place.path)]


def judge_memory(place: TierLocation, room: UsableRoom) -> list[Check]:
    headroom = place.headroom
    if headroom is None:
        return []
    numbers: dict[str, Value] = {
        "path": place.path,
        "charged_to": headroom.limited_by,
        "available_bytes": headroom.available_bytes,
        "huge_pages": "huge=" in place.mount_options and "huge=never" not in place.mount_options,
    }
    whose = "the machine" if headroom.limited_by == "machine" else headroom.limited_by
    detail = (
        f"{place.path} lies in memory and is charged to {whose}, as the job's own memory is:"
        f" {format_bytes(headroom.available_bytes)} of {format_bytes(headroom.limit_bytes)} left"
    )
    charged = headroom.limited_by.startswith("cgroup")
    if charged or room.capacity_bytes > headroom.available_bytes:
        remedy = "ask for so much more memory (Slurm: --mem), or give the tier less"
        return [warning("tier_memory", detail, remedy, **numbers)]
    return [ok("tier_memory", detail, **numbers)]


def scratch_directories(environ: Mapping[str, str]) -> list[str]:
    named = [environ[name] for name in JOB_SCRATCH if environ.get(name, "").startswith("/")]
    return list(dict.fromkeys((*named, *COMMON_SCRATCH)))


def sharing(device: int, directories: Iterable[str], mounts: Sequence[Mount]) -> list[str]:
    """Those on the file system ``device``, by the mount table alone: asking another's directory
    could hang. A file system may be mounted in several places."""
    found = []
    for directory in directories:
        above = directory.rstrip("/") + "/"
        holding = [m for m in mounts if above.startswith(m.mountpoint.rstrip("/") + "/")]
        # The last of the longest, as later mounts cover earlier ones.
        mount = max(reversed(holding), key=lambda m: len(m.mountpoint), default=None)
        if mount is None or (mount.major, mount.minor) != (os.major(device), os.minor(device)):
            continue
        if mount.mountpoint == directory or os.path.isdir(directory):
            found.append(directory)
    return found


def has_xattrs(directory: str) -> bool:
    """Whether files there can have user attributes; tried on a file without a name."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        os.setxattr(fd, b"user.monarchfs.probe", b"1")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
