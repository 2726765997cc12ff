"""The state directory and the tiers' directories: checked, made, opened, locked, and taken back.

Checks come first and change nothing. What is made is noted in an ExitStack, which removes it if the
mount fails: only directories made here, and only while they are empty. They belong to the mount's
user, whoever mounts. Root makes one only where root alone can change the way there (``trusted``),
and gives away only what it has just made. Elsewhere the user makes it, who could lead root
anywhere.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from monarchfs.config import Config, TierSpec, User
from monarchfs.fuse.mountinfo import is_network_filesystem, mount_of
from monarchfs.supervisor.identity import acting_as, open_file_as, user_name
from monarchfs.supervisor.lock import LOCK, Holder, InUse, take_lock, write_holder
from monarchfs.supervisor.probe import Mountpoint, OpenedSource, lineage
from monarchfs.supervisor.tierdirs import OPEN_DIRECTORY, RECORD, RECORD_NEW, read_record_of
from monarchfs.system.bounded import Answer, bounded_call
from monarchfs.system.effective_access import may_access
from monarchfs.system.sizes import format_bytes
from monarchfs.system.trusted import (
    Untrusted,
    make_directories,
    open_directory,
    place_of,
    remove_if_empty,
)
from monarchfs.types import OperationError, UsageError

WORKER_LOG = "worker.log"
SUPERVISOR_LOG = "supervisor.log"
SUSPECT = "suspect"
"""Says that the index may be damaged; ``cache.index.recovery`` knows it by the same name."""

log = logging.getLogger(__name__)


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

    def call() -> Answer:
        for directory in directories_of(config):
            existing = _check_exists(directory, cache_dir)
            _check_apart(directory, existing, source, mountpoint)
            _check_local(directory, existing)
            _check_own(directory, config.user)
            _check_writable(directory, config.user)
        for tier in config.tiers:
            check_size(tier, nearest(tier.path))
        return None, ()

    paths = ", ".join([tier.path for tier in config.tiers] + [config.state_dir])
    bounded_call(
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


def check_directory(directory: StorageDirectory, cache_dir: str, user: User) -> str:
    """`check_storage` of one directory, without source and mount point, in this process: blocks as
    the file system does. Returns the directory, or the nearest above it that exists."""
    existing = _check_exists(directory, cache_dir)
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


def open_state_dir(config: Config, undo: ExitStack) -> tuple[int, int]:
    """Makes and opens the state directory, with mode 0700 for the mount's user, and takes its lock:
    both descriptors. The lock is held until the second is closed. Raises UsageError if the
    directory is not the user's alone, and OperationError, naming the other mount, if another
    supervisor holds it, or where it cannot be made."""
    path, user = config.state_dir, config.user
    try:
        descriptor = _opened_or_made(path, user, undo)
    except OSError as error:
        raise OperationError(
            f"cannot make {path} for {user.name}: {error.strerror}: name another --state-dir"
        ) from None
    undo.callback(os.close, descriptor)
    _refuse_foreign(os.fstat(descriptor), path, user)
    lock = _lock(config, descriptor)
    undo.callback(os.close, lock)
    undo.callback(_clear_if_unused, descriptor, user)
    return descriptor, lock


def open_log(state_dir: int, name: str, user: User, *, truncate: bool) -> int:
    """A file in the state directory for appending. If something else has its name, a warning says
    so and the log is dropped: that is no reason not to mount."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if truncate else 0)
    try:
        return open_file_as(user, name, flags, directory=state_dir)
    except OSError as error:
        log.warning(
            "%s in the state directory cannot be written: %s: remove it", name, error.strerror
        )
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def mark_suspect(state_dir: int, user: User) -> None:
    """Notes that a worker died as LMDB does of a damaged index: the next worker checks it before it
    opens it. Written as the user; errors are logged."""
    try:
        flags = os.O_WRONLY | os.O_CREAT
        os.close(open_file_as(user, SUSPECT, flags, directory=state_dir))
    except OSError as error:
        log.error("cannot mark the index as suspect: %s", error.strerror)


def last_log_line(state_dir: int, name: str, user: User) -> str:
    """The last line of a log that names an error, else the last; empty if there is none. (The
    traceback of an exception group ends with a drawn frame.)"""
    try:
        descriptor = open_file_as(user, name, os.O_RDONLY, directory=state_dir)
    except OSError:
        return ""
    with open(descriptor, "rb") as file:
        file.seek(max(0, os.fstat(descriptor).st_size - 4096))
        text = file.read(4096).decode(errors="replace")
    lines = [line for raw in reversed(text.split("\n")) if (line := raw.strip(" |+-"))]
    return next((line for line in lines if "Error: " in line), lines[0] if lines else "")


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
        _refuse_foreign(st, directory.path, user)


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


def _lock(config: Config, state_dir: int) -> int:
    path = os.path.join(config.state_dir, LOCK)
    try:
        lock = take_lock(state_dir, config.user)
    except InUse as error:
        raise OperationError(
            f"state directory {config.state_dir} is in use by {error}, or name another --state-dir"
        ) from None
    except OSError as error:
        raise _cannot("lock", path, error) from None
    holder = Holder(
        pid=os.getpid(),
        mountpoint=config.mountpoint,
        source=config.source,
        dataset_id=config.dataset_id,
        tiers=tuple(tier.path for tier in config.tiers),
    )
    try:
        write_holder(lock, holder)
    except BaseException as error:
        os.close(lock)
        if isinstance(error, OSError):
            raise _cannot("write", path, error) from None
        raise
    return lock


def _cannot(verb: str, path: str, error: OSError) -> OperationError:
    return OperationError(f"cannot {verb} {path}: {error.strerror}: name another directory")


def _clear_if_unused(state_dir: int, user: User) -> None:
    """Removes the supervisor's own files from the state directory, if it holds nothing else."""
    ours = {LOCK, SUSPECT, WORKER_LOG, SUPERVISOR_LOG, RECORD, RECORD_NEW}
    with acting_as(user):
        names = set(os.listdir(state_dir))
        if names <= ours:
            for name in names:
                os.unlink(name, dir_fd=state_dir)


def open_shared(path: str, user: User, undo: ExitStack) -> tuple[int, bool]:
    """Opens a directory in which others may have theirs; makes what is missing: a descriptor
    (O_PATH), and whether root alone can change the way there. Raises OSError."""
    if os.geteuid() == 0:
        alone = user.uid != 0
        try:
            make_directories(path, 0o755, undo, alone=alone)
            return open_directory(path, alone=alone), True
        except Untrusted:
            if user.uid == 0:
                raise
    with acting_as(user):
        _make_missing(path, user, undo)
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), False


def _opened_or_made(path: str, user: User, undo: ExitStack) -> int:
    if os.geteuid() != 0:
        return _open_as(user, path, undo)
    try:
        # Of root's own mount others may move the directory, but not lead it elsewhere.
        return _open_as_root(path, user, undo, alone=user.uid != 0)
    except Untrusted:
        if user.uid == 0:
            raise
        return _open_as(user, path, undo)


def _open_as_root(path: str, user: User, undo: ExitStack, *, alone: bool) -> int:
    """Raises Untrusted, having made nothing, or OSError."""
    make_directories(os.path.dirname(path), 0o755, undo, alone=alone)
    with place_of(path, alone=alone) as place:
        new = place.make(0o700)
        if new:
            undo.callback(remove_if_empty, path)
        descriptor = place.open(os.O_RDONLY | os.O_DIRECTORY)
    if new and os.fstat(descriptor).st_uid == 0 != user.uid and not os.listdir(descriptor):
        os.fchown(descriptor, user.uid, user.gid)
    return descriptor


def _open_as(user: User, path: str, undo: ExitStack) -> int:
    """All of it with the user's rights. Raises OSError."""
    with acting_as(user):
        _make_missing(path, user, undo)
        return os.open(path, OPEN_DIRECTORY)


def _make_missing(path: str, user: User, undo: ExitStack) -> None:
    """Acting as the user already."""
    missing = []
    while not os.path.lexists(path) and path != "/":
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            continue  # another mount made it meanwhile; whose it is, is looked at later
        undo.callback(_remove_if_empty, directory, user)


def _refuse_foreign(st: os.stat_result, path: str, user: User) -> None:
    """Raises UsageError unless ``st`` is a directory of the user's that nobody else may change."""
    if not stat.S_ISDIR(st.st_mode):
        raise UsageError(f"{path} is not a directory: remove it, or name another --state-dir")
    if st.st_uid != user.uid:
        raise UsageError(
            f"{path} belongs to {user_name(st.st_uid)}, not to {user.name}: name another"
            " --state-dir"
        )
    if st.st_mode & 0o022:
        raise UsageError(
            f"{path} can be written by others: chmod 700 {path}, or name another --state-dir"
        )


def _remove_if_empty(path: str, user: User) -> None:
    try:
        with acting_as(user):
            os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            log.warning("cannot remove %s: %s", path, error.strerror)
