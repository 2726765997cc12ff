"""What is looked at before a mount is made. Nothing here changes anything. ``doctor`` looks at the
same."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from resource import (
    RLIM_INFINITY,
    RLIMIT_AS,
    RLIMIT_DATA,
    RLIMIT_FSIZE,
    RLIMIT_NOFILE,
    RLIMIT_NPROC,
    getrlimit,
)
from typing import BinaryIO

from monarchfs.config import Config, TierSpec, User
from monarchfs.config.places import DefaultPlaces, build_config
from monarchfs.config.settings import Settings
from monarchfs.fuse.mount import check_device
from monarchfs.fuse.mountinfo import (
    MONARCHFS,
    RENUMBERING,
    mount_of,
    storage_of,
    type_of_device,
)
from monarchfs.supervisor.backing import check_privileges
from monarchfs.supervisor.directories import recorded_directories, refuse_foreign
from monarchfs.supervisor.identity import (
    acting_as,
    become,
    may_access,
    roots_place,
    user_name,
)
from monarchfs.supervisor.logs import check_log_file
from monarchfs.supervisor.probe import (
    Mountpoint,
    OpenedSource,
    check_filled,
    complaint_of_empty,
    lineage,
    probe_mountpoint,
    probe_source,
)
from monarchfs.supervisor.registration import check_runtime_dir
from monarchfs.system.bounded import Answer, bounded_call, bounded_value
from monarchfs.system.limits import explained
from monarchfs.system.sizes import format_bytes
from monarchfs.system.trusted import Untrusted
from monarchfs.types import OperationError, UsageError

log = logging.getLogger(__name__)

_LONGEST_LINE = 8192
"""Twice PATH_MAX (limits.h): a path with that of its root."""

_MOST_LOOKED_AT = 1000
_LOOK_SECONDS = 1.0
_READ_SECONDS = 3.0


LEAST_OPEN_FILES = 256
"""A worker begins with 40; a supervisor with 25, and up to 200 for clients."""
LEAST_TASKS = 40
"""A supervisor, a worker with its threads (20 as it begins), children that come and go."""
LEAST_BYTES = {
    # A worker begins with 1.6 to 2.2G: the index, and stacks and arenas of threads.
    RLIMIT_AS: 3 << 30,
    RLIMIT_DATA: 512 << 20,
    # The index: of that size, with the names of 3 million files.
    RLIMIT_FSIZE: 1 << 30,
}

_NAMES = {
    RLIMIT_AS: ("address space", "-v"),
    RLIMIT_DATA: ("private memory", "-d"),
    RLIMIT_FSIZE: ("the size of a file", "-f"),
}
_STACK_BYTES = max(64 << 10, os.sysconf("SC_THREAD_STACK_MIN"))
_TRIAL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class MountSpec:
    """What is to be mounted where; paths are absolute. With ``source_fd`` the directory behind that
    descriptor is mounted, and ``source`` is its name."""

    settings: Settings
    source: str
    mountpoint: str
    user: User
    places: DefaultPlaces
    source_fd: int | None = None


def check_mount(spec: MountSpec) -> None:
    """Checks all that mounting checks before it makes anything, with the same errors."""
    with ExitStack() as undo:
        checked(spec, time.monotonic() + spec.settings.start_timeout_seconds, undo)


def checked(spec: MountSpec, deadline: float, undo: ExitStack) -> tuple[Config, OpenedSource]:
    """What will be mounted, and its source, opened. Raises UsageError or OperationError."""
    settings, user, places = spec.settings, spec.user, spec.places
    check_limits(user)
    check_privileges(settings.data_path)
    check_device()
    check_runtime_dir(places.runtime_dir)
    if settings.log_file is not None:
        check_log_file(settings.log_file, user)
    where = probe_mountpoint(spec.mountpoint, _left(deadline))
    what = probe_source(spec.source, user, _left(deadline), spec.source_fd)
    undo.callback(os.close, what.descriptor)
    _check_overlap(what, where)
    if settings.require_files:
        check_filled(what)
    elif (complaint := complaint_of_empty(what)) is not None:
        log.warning("%s", complaint)
    config = build_config(
        settings, source=what.path, mountpoint=where.path, user=user, places=places
    )
    fstype = type_of_device(what.identity[0])
    if fstype == MONARCHFS:
        raise UsageError(f"source {what.path} is a mount of monarchfs: name what it was made of")
    if config.peers and fstype in RENUMBERING:
        raise UsageError(
            f"{what.path}: {fstype} gives files other inode numbers on each node: leave out --peers"
        )
    if config.allow_other and fstype == "nfs4":
        raise UsageError(
            f"{what.path}: the kernel cannot check ACLs of NFSv4 for others: leave out allow_other"
        )
    if config.prefetch_list is not None:
        _check_readable(config.prefetch_list, user)
        complaint = _complaint_of_list(config.prefetch_list, what, config.mountpoint, user)
        if complaint is not None:
            log.warning("%s", complaint)
    check_storage(config, what, where, places.cache_dir, _left(deadline))
    return config, what


def _check_overlap(source: OpenedSource, mountpoint: Mountpoint) -> None:
    if mountpoint.identity == source.identity:
        return
    if source.identity in mountpoint.lineage:
        raise UsageError(
            f"mount point {mountpoint.path} lies inside the source {source.path}: mount on the"
            " source itself, or outside of it"
        )
    if mountpoint.identity in source.lineage:
        raise UsageError(
            f"mount point {mountpoint.path} would hide the source {source.path}, which lies inside"
            " it: mount on the source itself, or outside of it"
        )


def _check_readable(path: str, user: User) -> None:
    """Raises UsageError for a list that the worker is to read and could not."""
    reason = ""
    with acting_as(user):
        try:
            # A FIFO without a writer would be waited for, and could be read once only.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                reason = "it is not a file"
            os.close(descriptor)
        except OSError as error:
            reason = str(error.strerror)
    if reason:
        raise UsageError(
            f"prefetch list {path} cannot be read by {user.name}: {reason}: use none, access, auto,"
            " all or the path of a readable list"
        )


def _complaint_of_list(path: str, source: OpenedSource, mountpoint: str, user: User) -> str | None:
    """What is wrong with a list that ``user`` may read, in one line; None where nothing is seen.

    All lines are read, and the first thousand names looked up in the source, as far as that gets
    within a second. Takes some seconds at most.
    """
    roots = [os.fsencode(root).rstrip(b"/") + b"/" for root in (mountpoint, source.path)]

    def call() -> Answer:
        become(user)
        began = time.monotonic()
        lines = wrong = looked = 0
        first: tuple[int, str] | None = None
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            for number, line in _lines(file):
                lines += 1
                seconds = time.monotonic() - began
                looks = looked < _MOST_LOOKED_AT and seconds < _LOOK_SECONDS
                looked += looks
                if _is_wrong(line, roots, source.descriptor if looks else None):
                    wrong += 1
                    first = first or (number, os.fsdecode(line[:200]))
                if seconds > _READ_SECONDS:
                    break
        return [lines, looked, wrong, first], ()

    try:
        (lines, looked, wrong, first), _ = bounded_call(
            call, timeout=2 * _READ_SECONDS, overdue="", keep=[source.descriptor]
        )
    except OperationError:
        return None  # the source does not answer just now; the worker goes through the list later
    if lines == 0:
        return f"prefetch list {path} names nothing: write a path in the source on each line"
    if not wrong:
        return None
    part = f" (names of {looked:,} were looked up)" if looked < lines else ""
    return (
        f"prefetch list {path}: {wrong:,} of {lines:,} lines name no file in the source{part}, the"
        f" first is line {first[0]}: {first[1]}"
    )


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers; of long ones the beginning."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        whole = line
        while whole and not whole.endswith(b"\n"):
            whole = file.readline(_LONGEST_LINE)
        if plain := line.rstrip(b"\n"):
            yield number, plain


def _is_wrong(line: bytes, roots: list[bytes], source: int | None) -> bool:
    """``source``: where to look for the name; None: by its form alone."""
    for root in roots:
        if line.startswith(root):
            line = line[len(root) :]
            break
    if line.startswith(b"/") or b"\0" in line or len(line) > _LONGEST_LINE // 2:
        return True
    if b".." in line.split(b"/"):
        return True
    if source is None or not line:
        return not line
    try:
        return not stat.S_ISREG(os.stat(line, dir_fd=source, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # it may be there


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


# The limits that a mount inherits (setrlimit(2))


def check_limits(user: User) -> None:
    """Raises OperationError, with the limit's name and what is needed, where a mount of ``user``
    could not live. Soft limits do not count (``system.inherited``)."""
    for which, least in LEAST_BYTES.items():
        most = getrlimit(which)[1]
        if most != RLIM_INFINITY and most < least:
            what, flag = _NAMES[which]
            raise OperationError(
                f"{what} is limited to {format_bytes(most)}, and a mount needs"
                f" {format_bytes(least)}: raise the limit (ulimit {flag})"
            )
    files = getrlimit(RLIMIT_NOFILE)[1]
    if files != RLIM_INFINITY and files < LEAST_OPEN_FILES:
        raise OperationError(
            f"open files are limited to {files}, and a mount needs {LEAST_OPEN_FILES}: raise the"
            " limit (ulimit -n)"
        )
    try:
        begun, _ = bounded_call(
            lambda: _begin_tasks(user), timeout=_TRIAL_SECONDS, overdue="threads do not begin"
        )
    except OSError as error:
        raise OperationError(explained(error)) from None
    if begun < LEAST_TASKS:
        most = getrlimit(RLIMIT_NPROC)[1]
        limit = "" if most == RLIM_INFINITY else f"ulimit -u is {most}, "
        raise OperationError(
            f"{user.name} may begin {begun} more processes and threads, and a mount needs"
            f" {LEAST_TASKS}: raise the limit ({limit}or pids.max of the control group)"
        )


def _begin_tasks(user: User) -> Answer:
    """How many more may run, as far as a mount needs them: threads count as processes do. Tried,
    because no number tells how many there are. For a child."""
    become(user)
    threading.stack_size(_STACK_BYTES)
    end = threading.Event()
    for number in range(LEAST_TASKS):
        try:
            threading.Thread(target=end.wait, daemon=True).start()
        except RuntimeError:
            return number, ()
    return LEAST_TASKS, ()


# The directories that it is to use


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
    if storage_of(existing) == "network":
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
    try:
        with roots_place(existing + inside, user, alone=user.uid != 0) as place:
            by_root = place is not None
    except Untrusted as error:
        raise directory.refusal(f": {error.strerror}") from None
    with nullcontext() if by_root else acting_as(user):
        writable = may_access(existing, os.W_OK | os.X_OK)
    if not writable:
        missing = "" if existing in (own, directory.path) else "it does not exist, and "
        raise UsageError(
            f"{directory.what}: {missing}{existing} is not writable: name another"
            f" {directory.option}, or have it made{' writable' * (not missing)}"
        )


def nearest(path: str) -> str:
    """The path, or the nearest directory above it that exists. Blocks."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
