"""What is looked at of the directories that a mount is to use, before anything is made
(`supervisor.directories`)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from monarchfs.config import Config, TierSpec, User
from monarchfs.fuse.mountinfo import is_network_filesystem, mount_of
from monarchfs.supervisor.directories import read_record_of, refuse_foreign
from monarchfs.supervisor.identity import acting_as, user_name
from monarchfs.supervisor.probe import Mountpoint, OpenedSource, lineage
from monarchfs.system.bounded import bounded_value
from monarchfs.system.effective_access import may_access
from monarchfs.system.sizes import format_bytes
from monarchfs.system.trusted import Untrusted, place_of
from monarchfs.types import UsageError


@dataclass(frozen=True, slots=True)
class StorageDirectory:
    """A directory that the user named (or left to the default), for messages and checks. ``own`` is
    the dataset's own one there: the directory itself, one below it, or none yet."""

    what: str
    option: str
    path: str
    own: str | None

    def refusal(self, reason: str) -> UsageError:
        return UsageError(f"{self.what}{reason}: name another {self.option}")


def check_storage(
    config: Config, source: OpenedSource, mountpoint: Mountpoint, cache_dir: str, timeout: float
) -> None:
    """Raises UsageError for a tier or a state directory that cannot serve. Changes nothing.
    ``cache_dir`` is the default place, in which missing parents are made later."""

    def call() -> None:
        for directory in directories_of(config):
            check_directory(directory, cache_dir, config.user, (source, mountpoint))
        for tier in config.tiers:
            check_size(tier, nearest(tier.path))

    paths = ", ".join([tier.path for tier in config.tiers] + [config.state_dir])
    bounded_value(
        call,
        timeout=timeout,
        overdue=f"one of {paths} did not answer within {timeout:g} s: use another disk",
    )


def directories_of(config: Config) -> list[StorageDirectory]:
    """The tiers' directories in their order, then the state directory. Blocks."""
    owned = recorded_directories(config)
    directories = [
        StorageDirectory(f"tier {tier.path}", "--tier", tier.path, owned.get(tier.path))
        for tier in config.tiers
    ]
    state = f"state directory {config.state_dir}"
    return [
        *directories,
        StorageDirectory(state, "--state-dir", config.state_dir, config.state_dir),
    ]


def recorded_directories(config: Config) -> dict[str, str]:
    """The dataset's directories of the last mount, by their tiers' paths. Blocks."""
    try:
        record = read_record_of(config.state_dir, config.user)
    except OSError:
        return {}
    return {path: os.path.join(path, name) for path, name in record.items()}


def check_directory(
    directory: StorageDirectory,
    cache_dir: str,
    user: User,
    apart: tuple[OpenedSource, Mountpoint] | None = None,
) -> str:
    """Raises UsageError for one that cannot serve, also if it is not ``apart`` from these. Blocks
    as the file system does. Returns the directory, or the nearest above it that exists."""
    existing = _check_exists(directory, cache_dir)
    if apart is not None:
        _check_apart(directory, existing, *apart)
    _check_local(directory, existing)
    _check_own(directory, user)
    _check_writable(directory, user)
    return existing


def check_size(tier: TierSpec, existing: str) -> None:
    """Raises UsageError for a tier larger than the whole file system of ``existing``, a directory:
    a slip, or a size for another node; and where that file system does not count what it holds
    (ramfs, a tmpfs with size=0). Blocks as the file system does."""
    vfs = os.statvfs(existing)
    total = vfs.f_blocks * vfs.f_frsize
    if total == 0:
        mount = mount_of(existing)
        raise UsageError(
            f"tier {tier.path}: its file system ({mount.fstype if mount else 'unknown'}) has no"
            " size, so nothing tells how much room is left: name another --tier (in memory: on a"
            " tmpfs with a size=)"
        )
    size = tier.size.resolve(total)
    if size > total:
        raise UsageError(
            f"tier {tier.path}: its size, {format_bytes(size)}, is more than all of its file"
            f" system, which has {format_bytes(total)}: give less, or a share of it, as in 80%"
        )


def _check_exists(directory: StorageDirectory, cache_dir: str) -> str:
    """The directory, or the one above in which it can be made."""
    path = directory.path
    existing = nearest(path)
    if not os.path.isdir(existing):
        raise directory.refusal(f": {existing} is not a directory")
    parent = os.path.dirname(path)
    in_default = path == cache_dir or path.startswith(cache_dir + "/")
    if existing not in (path, parent) and not in_default:
        what, option = directory.what, directory.option
        raise UsageError(f"{what}: {parent} does not exist: create it, or name another {option}")
    owner = os.stat(existing).st_uid
    if existing == cache_dir and owner not in (0, os.geteuid()):
        raise directory.refusal(f" belongs to {user_name(owner)}")
    return existing


def _check_apart(
    directory: StorageDirectory, existing: str, source: OpenedSource, mountpoint: Mountpoint
) -> None:
    what, option = directory.what, directory.option
    try:
        descriptor = os.open(existing, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise directory.refusal(f": {error.strerror}") from None
    above = lineage(descriptor)
    os.close(descriptor)
    if source.identity in above:
        raise directory.refusal(f" lies inside the source {source.path}")
    if mountpoint.identity in above:
        raise directory.refusal(f" lies inside the mount point {mountpoint.path}")
    holds_source = existing == directory.path and above[0] in source.lineage
    if option == "--tier" and holds_source:
        raise UsageError(
            f"the source {source.path} lies inside {what}: name a directory beside it with {option}"
        )


def _check_local(directory: StorageDirectory, existing: str) -> None:
    if is_network_filesystem(existing):
        mount = mount_of(existing)
        kind = mount.fstype if mount else "unknown"
        raise UsageError(
            f"{directory.what} is on a network file system ({kind}): name a directory on a local"
            f" disk with {directory.option}"
        )


def _check_own(directory: StorageDirectory, user: User) -> None:
    """An existing state directory must be the user's own. (In a tier, another one is made.)"""
    try:
        st = os.lstat(directory.path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise directory.refusal(f": {error.strerror}") from None
    if directory.own == directory.path:
        refuse_foreign(st, directory.path, user)


def _check_writable(directory: StorageDirectory, user: User) -> None:
    """By root where root alone can change the way there, else by the user: as it is made."""
    own = directory.own
    existing = own if own is not None and os.path.isdir(own) else nearest(directory.path)
    inside = "" if existing == own else "/."
    who: AbstractContextManager[None] = nullcontext()
    if os.geteuid() == 0:
        try:
            with place_of(existing + inside, alone=user.uid != 0):
                pass
        except Untrusted as error:
            if user.uid == 0:
                raise directory.refusal(f": {error.strerror}") from None
            who = acting_as(user)
    with who:
        writable = may_access(existing, os.W_OK | os.X_OK)
    if not writable:
        raise UsageError(
            f"{directory.what}: {existing} is not writable: name another {directory.option}, or"
            " have it made writable"
        )


def nearest(path: str) -> str:
    """The path, or the nearest directory above it that exists. Blocks."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
