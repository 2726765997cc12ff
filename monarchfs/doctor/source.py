"""The source: whether it can be read, its file system, and its speed beside the tiers."""

from __future__ import annotations

import os

from monarchfs.config import User
from monarchfs.doctor.checks import Check, Value, from_error, ok, warning
from monarchfs.fuse.mountinfo import (
    MONARCHFS,
    RENUMBERING,
    is_network_type,
    mount_of,
    mount_on_the_way,
    resolve_mountpoint,
)
from monarchfs.insight.estimates import RELAY_BYTES_PER_SECOND, SourceRates, TierRates
from monarchfs.supervisor.probe import complaint_of_empty, probe_source
from monarchfs.types import MonarchError, UsageError

OFTEN_PURGED = frozenset(
    ("lustre", "gpfs", "beegfs", "beegfs_nodev", "wekafs", "panfs", "pvfs2", "orangefs")
)
WORTH_IT = 1.5

_REMEDIES = {"fuse.squashfuse": "let the kernel mount the image: mount -t squashfs -o loop,ro"}
_REMEDY = "unpack the files into a directory of the parallel file system"


def source(path: str, user: User, seconds: float, *, touches: bool) -> list[Check]:
    """Takes a little more than ``seconds`` if the source hangs. ``touches``: --touch-source is
    given."""
    try:
        refuse_ours(path)
        found = probe_source(path, user, seconds)
        os.close(found.descriptor)
        refuse_ours(found.path)
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


def judge_source_speed(rates: SourceRates) -> Check:
    numbers: dict[str, Value] = {
        "read_bytes_per_second": rates.read_bytes_per_second,
        "open_seconds": rates.open_seconds,
        "threads": rates.threads,
        "sampled_bytes": rates.sampled_bytes,
        "sampled_files": rates.sampled_files,
    }
    if rates.read_bytes_per_second is None or rates.open_seconds is None:
        detail = "no file was found within a second that could be read"
        return warning("source_speed", detail, "see whether it holds files", **numbers)
    detail = (
        f"{rates.read_bytes_per_second / 1e6:.0f} MB/s with {rates.threads} threads,"
        f" {rates.open_seconds * 1e3:.2f} ms to open a file and read its beginning"
    )
    if rates.read_bytes_per_second >= RELAY_BYTES_PER_SECOND:
        detail += "; a mount relays hardly more"
        remedy = "read it directly, if it is always that fast (it may have been in memory)"
        return warning("source_speed", detail, remedy, **numbers)
    return ok("source_speed", detail, **numbers)


def judge_tier_speed(path: str, rates: TierRates, of_source: SourceRates | None) -> Check:
    source_rate = of_source.read_bytes_per_second if of_source else None
    ratio = rates.read_bytes_per_second / source_rate if source_rate else None
    numbers: dict[str, Value] = {
        "path": path,
        "write_bytes_per_second": rates.write_bytes_per_second,
        "read_bytes_per_second": rates.read_bytes_per_second,
        "sampled_bytes": rates.sampled_bytes,
        "times_source": ratio,
    }
    detail = (
        f"{path}: writes {rates.write_bytes_per_second / 1e6:.0f} MB/s,"
        f" reads {rates.read_bytes_per_second / 1e6:.0f} MB/s"
    )
    if ratio is not None:
        detail += f", {ratio:.1f} x the source"
        if ratio < WORTH_IT:
            remedy = "use a faster disk or memory; what is gained is the load off the source"
            return warning("tier_speed", detail, remedy, **numbers)
    return ok("tier_speed", detail, **numbers)


def refuse_ours(path: str) -> None:
    """Raises UsageError if ``path`` (absolute) is one of our mounts, or lies in one, by the mount
    table."""
    mount = mount_on_the_way(resolve_mountpoint(path))
    if mount is not None and mount.fstype == MONARCHFS:
        raise UsageError(
            f"{path} is itself a monarchfs mount of {mount.source}, or lies in one: name the"
            f" dataset where it is not covered, or unmount it with monarchfs umount"
            f" {mount.mountpoint}"
        )
