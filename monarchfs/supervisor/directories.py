"""What a mount owns on disk: its state directory, and a directory of its own in each tier. How they
are found again, made, opened and locked.

Nobody else may use them: a mount, or ``fsck``, has a lock (flock(2)) on ``lock`` in the state
directory, and on ``owner`` in each of the others. The first also says who had it last, for
messages, and where the replicas lie, for ``fsck`` of a lost index.

A state directory owns one directory in each tier with which it was ever mounted. Its name is
random, so that two mounts of one source do not share it, and nobody else can take the name first in
a directory to which everybody may write. ``tiers`` in the state directory names it, written and
synced before it is made or renamed. ``owner`` says whose it is, for those who cannot see the state
directory. One that its state directory does not claim any more is taken over by renaming it: the
name alone says who owns it, and the worker reconciles a directory of another name.

All of this is the user's, whoever mounts, and done as the user. Root makes or renames something
only where root alone can change the way there (``trusted``), and gives away only what it has just
made. Elsewhere the user does, who could lead root anywhere. What is made is noted in an ExitStack,
which removes it if the mount fails: only what was made here, and only while it is empty.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shlex
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from monarchfs.config import Config, User
from monarchfs.config.places import DATASET_ID, OWNER
from monarchfs.fuse.mountinfo import mount_id
from monarchfs.supervisor.identity import acting_as, become, open_file_as, user_name
from monarchfs.system.bounded import answer_within
from monarchfs.system.locks import is_named, try_lock
from monarchfs.system.sizes import format_bytes
from monarchfs.system.trusted import (
    Untrusted,
    make_directories,
    open_directory,
    place_of,
    remove_if_empty,
)
from monarchfs.types import MonarchError, OperationError, UsageError

LOCK = "lock"
RECORD = "tiers"
RECORD_NEW = RECORD + ".new"
SUSPECT = "suspect"
"""Says that the index may be damaged; ``cache.index.recovery`` knows it by the same name."""
WORKER_LOG = "worker.log"
SUPERVISOR_LOG = "supervisor.log"
_SUPERVISORS = frozenset({LOCK, SUSPECT, WORKER_LOG, SUPERVISOR_LOG, RECORD, RECORD_NEW})
"""What lies in a state directory before a worker has put anything there."""

NAME = re.compile(rf"{DATASET_ID.pattern}-[0-9a-f]{{16}}")
"""A directory in a tier: the dataset's id, then 64 random bits."""

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""What has a file's name may be a link of the user's, or a FIFO."""

_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 10_000
_MOST_CANDIDATES = 16
_ATTEMPTS = 3
_LOOK_SECONDS = 2.0
MEASURE_SECONDS, _LEFT_OUT_SECONDS = 3.0, 0.5
_MOST_LEFT_OUT = 8
"""More tiers than anybody had; the record is the user's file."""
_DEEPEST = 8
"""Copies lie three directories below the tier's directory."""

T = TypeVar("T")

log = logging.getLogger(__name__)


# The lock on a state directory


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a state directory, or did last. ``tiers`` are paths; the dataset's own directory
    below each is called ``dataset_id``. ``checking``: ``fsck`` holds it, as process ``pid``, and
    has found the rest."""

    pid: int
    mountpoint: str
    source: str
    dataset_id: str
    tiers: tuple[str, ...]
    checking: bool = False

    def __str__(self) -> str:
        if self.checking:
            return f"monarchfs fsck (process {self.pid}): wait for its end"
        return (
            f"the mount of {self.source} on {self.mountpoint}: unmount that first with"
            f" monarchfs umount {self.mountpoint}"
        )


class InUse(MonarchError):
    """Somebody else holds the lock; the text says who, and how to change that."""


def take_lock(state_dir: int, user: User) -> int:
    """The descriptor of the lock file in an open state directory, locked until it is closed. Opened
    as ``user``, who owns the directory and may have put a symbolic link there. Raises InUse, or
    OSError."""
    while True:
        lock = open_file_as(user, LOCK, os.O_RDWR | os.O_CREAT, directory=state_dir)
        try:
            if not try_lock(lock):
                raise InUse(str(read_holder(lock) or "another mount: unmount that first"))
            # A supervisor that gives up removes the file: a new one is locked by somebody else.
            if is_named(lock, LOCK, state_dir):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def read_holder(lock: int) -> Holder | None:
    """What the lock file says; None if it makes no sense. It is the user's: do not trust it."""
    content = _read_json(lock)
    try:
        return Holder(
            pid=int(content["pid"]),
            mountpoint=str(content["mountpoint"]),
            source=str(content["source"]),
            dataset_id=str(content.get("dataset_id", "")),
            tiers=tuple(str(path) for path in content.get("tiers", ())),
            checking=bool(content.get("checking", False)),
        )
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return None


def write_holder(lock: int, holder: Holder) -> None:
    """Says who holds the lock. Raises OSError."""
    _write_json(lock, asdict(holder))


def in_use(directory: str, lock: str = LOCK) -> bool:
    """Whether a mount or fsck has locked a state directory or, by ``lock``, one in a tier."""
    try:
        descriptor = os.open(os.path.join(directory, lock), os.O_RDONLY | OPEN_FILE)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


# The state directory


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
    refuse_foreign(os.fstat(descriptor), path, user)
    lock = _lock(config, descriptor, undo)
    undo.callback(_clear_if_unused, descriptor, user)
    return descriptor, lock


def refuse_foreign(st: os.stat_result, path: str, user: User) -> None:
    """Raises UsageError unless ``st`` is a state directory of the user's that nobody else may
    change."""
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


def _opened_or_made(path: str, user: User, undo: ExitStack) -> int:
    if os.geteuid() == 0:
        try:
            # Of root's own mount others may move the directory, but not lead it elsewhere.
            return _open_as_root(path, user, undo, alone=user.uid != 0)
        except Untrusted:
            if user.uid == 0:
                raise
    with acting_as(user):
        _make_missing(path, user, undo)
        return os.open(path, OPEN_DIRECTORY)


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


def _remove_if_empty(path: str, user: User) -> None:
    try:
        with acting_as(user):
            os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            log.warning("cannot remove %s: %s", path, error.strerror)


def _lock(config: Config, state_dir: int, undo: ExitStack) -> int:
    path = os.path.join(config.state_dir, LOCK)
    try:
        lock = take_lock(state_dir, config.user)
    except InUse as error:
        raise OperationError(
            f"state directory {config.state_dir} is in use by {error}, or name another --state-dir"
        ) from None
    except OSError as error:
        raise _cannot("lock", path, error) from None
    undo.callback(os.close, lock)
    holder = Holder(
        pid=os.getpid(),
        mountpoint=config.mountpoint,
        source=config.source,
        dataset_id=config.dataset_id,
        tiers=tuple(tier.path for tier in config.tiers),
    )
    try:
        write_holder(lock, holder)
    except OSError as error:
        raise _cannot("write", path, error) from None
    return lock


def _cannot(verb: str, path: str, error: OSError) -> OperationError:
    return OperationError(f"cannot {verb} {path}: {error.strerror}: name another directory")


def _clear_if_unused(state_dir: int, user: User) -> None:
    """Removes the supervisor's own files from the state directory, if it holds nothing else."""
    with acting_as(user):
        names = set(os.listdir(state_dir))
        if names <= _SUPERVISORS:
            for name in names:
                os.unlink(name, dir_fd=state_dir)


# Who owns which directory in a tier


@dataclass(frozen=True, slots=True)
class TierOwner:
    """Whose copies a directory in a tier holds. ``state_dir`` is a path."""

    source: str
    uid: int
    state_dir: str


def read_record(state_dir: int, user: User) -> dict[str, str]:
    """The names of the directories that a state directory owns, by their tiers' paths. Empty
    without a record, or if it makes no sense: it is the user's file."""
    try:
        descriptor = open_file_as(user, RECORD, os.O_RDONLY, directory=state_dir)
    except OSError:
        return {}
    try:
        tiers = _read_json(descriptor).get("tiers")
    finally:
        os.close(descriptor)
    return {
        path: name
        for path, name in (tiers.items() if isinstance(tiers, dict) else ())
        if isinstance(name, str) and NAME.fullmatch(name) and os.path.isabs(path)
    }


def read_record_of(path: str, user: User) -> dict[str, str]:
    """`read_record` of a state directory by its path. Raises OSError where it cannot be opened."""
    with acting_as(user):
        state_dir = os.open(path, OPEN_DIRECTORY)
    try:
        return read_record(state_dir, user)
    finally:
        os.close(state_dir)


def recorded_directories(config: Config) -> dict[str, str]:
    """The dataset's directories of the last mount, by their tiers' paths. Blocks."""
    try:
        record = read_record_of(config.state_dir, config.user)
    except OSError:
        return {}
    return {path: os.path.join(path, name) for path, name in record.items()}


def write_record(state_dir: int, user: User, record: Mapping[str, str]) -> None:
    """Replaces the record, durably. Raises OSError."""
    with acting_as(user):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FILE
        _unlink(RECORD_NEW, state_dir)
        descriptor = os.open(RECORD_NEW, flags, 0o600, dir_fd=state_dir)
        try:
            _write_json(descriptor, {"tiers": dict(record)})
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(RECORD_NEW, RECORD, src_dir_fd=state_dir, dst_dir_fd=state_dir)
    os.fsync(state_dir)


def read_owner(owner_file: int) -> TierOwner | None:
    """What an owner file says; None if it does not make sense. It is the user's file."""
    content = _read_json(owner_file)
    try:
        return TierOwner(str(content["source"]), int(content["uid"]), str(content["state_dir"]))
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return None


def write_owner(owner_file: int, owner: TierOwner) -> None:
    """Says whose the directory is. The file's time of change tells when it was used last. Raises
    OSError."""
    _write_json(owner_file, asdict(owner))


def claims(state_dir: str, tier: str, name: str, user: User) -> bool:
    """Whether a state directory says that it owns a directory in a tier, or may say so but cannot
    be read within 2 seconds."""

    def claimed() -> bool:
        become(user)
        try:
            return read_record_of(state_dir, user).get(tier) == name
        except (FileNotFoundError, NotADirectoryError):
            return False

    return bool(answer_within(_LOOK_SECONDS, claimed, otherwise=True))


def directories_in(
    place: int, names: re.Pattern[str], most: int | None = None
) -> Iterator[tuple[str, os.stat_result]]:
    """The directories with such ``names`` in an open directory, among its first ``most`` entries.
    Raises OSError."""
    with os.scandir(place) as entries:
        for entry in islice(entries, most):
            if names.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    st = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(st.st_mode):
                        yield entry.name, st


def names_for(dataset_id: str, tier: int, uid: int) -> list[str]:
    """A user's directories for a dataset in the open directory ``tier``, the newest first; of the
    first 10,000 entries. Empty where the tier must not be listed. Raises OSError."""
    try:
        place = os.open(".", OPEN_DIRECTORY, dir_fd=tier)
    except PermissionError:
        return []
    try:
        found = [
            (st.st_mtime_ns, name)
            for name, st in directories_in(place, NAME, _MOST_ENTRIES)
            if name.startswith(dataset_id) and st.st_uid == uid
        ]
    finally:
        os.close(place)
    return [name for _, name in sorted(found, reverse=True)]


# The directories in tiers


@dataclass(frozen=True, slots=True)
class TierRoot:
    """A tier's directory ``path``, open (O_PATH), for mounts of ``user``. ``roots``: only root can
    change it and the way there, so root may make and rename what lies in it."""

    path: str
    user: User
    descriptor: int
    roots: bool

    def act(self, call: Callable[[], T]) -> T:
        """Does something there as the user, or as root if only root may. Raises OSError."""
        try:
            with acting_as(self.user):
                return call()
        except PermissionError:
            if os.geteuid() != 0 or not self.roots:
                raise
        return call()

    def open_own(self, name: str) -> OwnDirectory:
        """A directory of the user's, and its owner file, made if it is missing; not locked. Raises
        OSError; PermissionError for what belongs to others or can be changed by them."""
        directory = self.act(partial(os.open, name, OPEN_DIRECTORY, dir_fd=self.descriptor))
        try:
            st = os.fstat(directory)
            if st.st_uid != self.user.uid:
                raise PermissionError(errno.EPERM, f"it belongs to user {st.st_uid}")
            if st.st_mode & 0o022:
                raise PermissionError(errno.EPERM, "others can write there")
            with acting_as(self.user):
                flags = os.O_RDWR | os.O_CREAT | OPEN_FILE
                owner = os.open(OWNER, flags, 0o600, dir_fd=directory)
            if stat.S_ISREG(os.fstat(owner).st_mode):
                return OwnDirectory(name, directory, owner)
            os.close(owner)
            raise OSError(errno.EINVAL, f"{OWNER} is not a file")
        except BaseException:
            os.close(directory)
            raise


@dataclass(frozen=True, slots=True)
class OwnDirectory:
    """The dataset's directory ``name`` in a tier, open. The lock is one on its owner file."""

    name: str
    descriptor: int
    lock: int

    def close(self) -> None:
        os.close(self.lock)
        os.close(self.descriptor)


def open_tiers(config: Config, state_dir: int, undo: ExitStack) -> tuple[Config, TierDirectories]:
    """Makes and opens the dataset's directory in each tier, in their order, and returns the
    configuration that names them. Raises OperationError."""
    directories = TierDirectories(config, state_dir, undo)
    for tier in config.tiers:
        directories.open(tier.path)
    tiers = tuple(
        replace(tier, directory=directory.name)
        for tier, directory in zip(config.tiers, directories.opened, strict=True)
    )
    return replace(config, tiers=tiers), directories


class TierDirectories:
    """The directories of a mount. ``opened`` has the order of the tiers; ``record`` is what the
    state directory owns; ``remarks`` are lines for the log, once there is a mount."""

    def __init__(self, config: Config, state_dir: int, undo: ExitStack) -> None:
        """``state_dir`` is open and locked; ``undo`` takes back what is made here."""
        self._config = config
        self._user = config.user
        self._owner = TierOwner(config.source, config.user.uid, config.state_dir)
        self._state_dir = state_dir
        self._undo = undo
        self.record = read_record(state_dir, config.user)
        self.opened: list[OwnDirectory] = []
        self.remarks: list[tuple[int, str]] = []

    @property
    def locks(self) -> list[int]:
        """To be closed at the end."""
        return [directory.lock for directory in self.opened]

    def open(self, tier: str) -> None:
        """Opens the directory in a tier: the one it had, one that nobody claims, or a new one.
        Raises OperationError."""
        try:
            with _open_root(tier, self._user, self._undo) as root:
                found = self._recorded(root) or self._unclaimed(root) or self._made(root)
        except OSError as error:
            raise OperationError(
                f"cannot make a directory in {tier}: {error.strerror}: have it made writable for"
                f" {self._user.name}, or name another --tier"
            ) from None
        self._undo.callback(found.close)
        self.opened.append(found)

    def left_out(self) -> list[str]:
        """A line for each tier that the mount had before, and does not have now, and that holds
        copies. Blocks for 2 seconds a tier at most; looks as the user."""
        tiers = {tier.path for tier in self._config.tiers}
        others = [item for item in sorted(self.record.items()) if item[0] not in tiers]
        lines = []
        for tier, name in others[:_MOST_LEFT_OUT]:
            path = os.path.join(tier, name)
            count, whole = answer_within(
                _LOOK_SECONDS, partial(_measure_copies, path, self._user), otherwise=(0, True)
            )
            if not count:
                continue
            lines.append(
                f"copies of an earlier mount stay in {path} ({'' if whole else 'at least '}"
                f"{format_bytes(count)}), which no --tier names: name --tier {tier} again to use"
                f" them, or remove them with monarchfs cache remove {shlex.quote(path)}"
                f" --state-dir {shlex.quote(self._config.state_dir)}"
            )
        return lines

    def _recorded(self, root: TierRoot) -> OwnDirectory | None:
        name = self.record.get(root.path)
        if name is None or not name.startswith(self._config.dataset_id):
            return None  # the state directory was another dataset's
        found = self._hold(root, name)
        if found is None:
            return None
        owner = read_owner(found.lock)
        if owner is not None and owner.state_dir != self._owner.state_dir:
            # The state directory was moved, or copied: then the other one claims it, too.
            return self._take_over(root, found)
        self._sign(found)
        return found

    def _unclaimed(self, root: TierRoot) -> OwnDirectory | None:
        """One of the same source and user whose state directory is gone, or owns another by now."""
        try:
            names = names_for(self._config.dataset_id, root.descriptor, self._user.uid)
        except OSError as error:
            self._warn(f"cannot look for earlier copies in {root.path}: {error.strerror}")
            return None
        for name in names[:_MOST_CANDIDATES]:
            found = self._hold(root, name)
            if found is None:
                continue
            owner = read_owner(found.lock)
            if owner is None or not self._may_have(owner, root.path, name):
                found.close()
            elif (taken := self._take_over(root, found)) is not None:
                return taken
        return None

    def _may_have(self, owner: TierOwner, tier: str, name: str) -> bool:
        if (owner.source, owner.uid) != (self._owner.source, self._owner.uid):
            return False
        own = owner.state_dir == self._owner.state_dir
        return own or not claims(owner.state_dir, tier, name, self._user)

    def _made(self, root: TierRoot) -> OwnDirectory:
        for _ in range(_ATTEMPTS):
            name = self._new_name(root.path)
            try:
                root.act(partial(self._make, root.descriptor, name))
            except FileExistsError:
                continue
            found = self._hold(root, name)
            if found is not None:
                self._undo.callback(_remove_if_unused, root.path, name, self._user)
                self._sign(found)
                return found
        raise FileExistsError(errno.EEXIST, "others made what was to be made")

    def _make(self, parent: int, name: str) -> None:
        os.mkdir(name, 0o700, dir_fd=parent)
        if os.geteuid() == self._user.uid:
            return
        # Root's own directory: nobody else can have put anything under the name.
        descriptor = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
        try:
            os.fchown(descriptor, self._user.uid, self._user.gid)
        finally:
            os.close(descriptor)

    def _take_over(self, root: TierRoot, found: OwnDirectory) -> OwnDirectory | None:
        """Renames it to a name that this state directory owns; None, with it closed, if that
        fails."""
        name = self._new_name(root.path)
        try:
            there = root.descriptor
            root.act(partial(os.rename, found.name, name, src_dir_fd=there, dst_dir_fd=there))
        except OSError as error:
            self._warn(f"{root.path}/{found.name} cannot be taken over: {error.strerror}")
            found.close()
            return None
        taken = replace(found, name=name)
        self._sign(taken)
        line = f"took over the copies in {root.path}/{found.name}, as {name}"
        self.remarks.append((logging.INFO, line))
        return taken

    def _new_name(self, tier: str) -> str:
        name = f"{self._config.dataset_id}-{secrets.token_hex(8)}"
        if not self.record:
            self._undo.callback(_remove_record, self._state_dir, self._user)
        self.record[tier] = name
        try:
            write_record(self._state_dir, self._user, self.record)
        except OSError as error:
            raise OperationError(
                f"cannot write {self._config.state_dir}/{RECORD}: {error.strerror}: remove it, or"
                " name another --state-dir"
            ) from None
        return name

    def _hold(self, root: TierRoot, name: str) -> OwnDirectory | None:
        """Opens and locks one; None where it is gone, not ours, or in use."""
        try:
            found = root.open_own(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"{root.path}/{name} is not used: {error.strerror}")
            return None
        if try_lock(found.lock):
            return found
        found.close()
        return None

    def _sign(self, directory: OwnDirectory) -> None:
        """Says in the directory whose it is."""
        try:
            write_owner(directory.lock, self._owner)
        except OSError as error:
            # The record says it, too.
            self._warn(f"cannot write {directory.name}/{OWNER}: {error.strerror}")

    def _warn(self, line: str) -> None:
        self.remarks.append((logging.WARNING, line))


@contextmanager
def _open_root(tier: str, user: User, undo: ExitStack) -> Iterator[TierRoot]:
    """A tier's directory, where others may have theirs; made if it is missing. Raises OSError."""
    descriptor, roots = _open_shared(tier, user, undo)
    try:
        alone = roots and not os.fstat(descriptor).st_mode & 0o022
        yield TierRoot(tier, user, descriptor, alone)
    finally:
        os.close(descriptor)


def _open_shared(path: str, user: User, undo: ExitStack) -> tuple[int, bool]:
    """The directory (O_PATH), and whether root alone can change the way there."""
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


def _remove_if_unused(tier: str, name: str, user: User) -> None:
    """Takes back a directory of a mount that failed."""
    with ExitStack() as cleanup:
        try:
            root = cleanup.enter_context(_open_root(tier, user, cleanup))
            own = root.open_own(name)
            cleanup.callback(own.close)
            with acting_as(user):
                for name_below in ("parts", "segments"):
                    with suppress(FileNotFoundError):
                        os.rmdir(name_below, dir_fd=own.descriptor)
                if os.listdir(own.descriptor) == [OWNER]:
                    os.unlink(OWNER, dir_fd=own.descriptor)
            root.act(partial(os.rmdir, name, dir_fd=root.descriptor))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                log.warning("cannot remove %s/%s: %s", tier, name, error.strerror)


def _remove_record(state_dir: int, user: User) -> None:
    with acting_as(user):
        _unlink(RECORD, state_dir)


# A user's directory, looked at by others


def open_users(path: str, uid: int) -> int | None:
    """Open a directory of this process's user; None if it is another user's, or others may change
    it. Raises OSError; as root also if the path has a link of another user."""
    if os.geteuid() == 0:
        place = open_directory(path, alone=False)
        try:
            directory = os.open(".", OPEN_DIRECTORY, dir_fd=place)
        finally:
            os.close(place)
    else:
        directory = os.open(path, OPEN_DIRECTORY)
    st = os.fstat(directory)
    if st.st_uid == uid and not st.st_mode & 0o022:
        return directory
    os.close(directory)
    return None


@dataclass(slots=True)
class Size:
    """The size of a tree: ``bytes`` are its blocks. ``whole``: all of it was measured."""

    bytes: int = 0
    files: int = 0
    whole: bool = True


def tree_size(path: str, seconds: float = MEASURE_SECONDS) -> Size:
    """The blocks and the number of all files below, or of those found within ``seconds``."""
    size = Size()
    top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _add_below(size, top, path.lstrip("/"), time.monotonic() + seconds, _DEEPEST)
    finally:
        os.close(top)
    return size


def _add_below(size: Size, directory: int, name: str, deadline: float, deepest: int) -> None:
    """The size of one directory in another. The tree is a user's: no link is followed, and nothing
    that the user has mounted there is asked, because that may hang."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with ExitStack() as closing:
        try:
            place = os.open(name, os.O_PATH | flags, dir_fd=directory)
            closing.callback(os.close, place)
            if deepest < _DEEPEST and mount_id(place) != mount_id(directory):
                return
            listed = os.open(".", os.O_RDONLY | flags, dir_fd=place)
            closing.callback(os.close, listed)
            for entry in closing.enter_context(os.scandir(listed)):
                if time.monotonic() > deadline:
                    size.whole = False
                    break
                if not entry.is_dir(follow_symlinks=False):
                    size.bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    size.files += 1
                elif deepest:
                    _add_below(size, listed, entry.name, deadline, deepest - 1)
        except FileNotFoundError:
            return  # removed meanwhile
        except OSError:
            size.whole = False


def _measure_copies(path: str, user: User) -> tuple[int, bool]:
    """The blocks of the copies in a directory of ``user``, in bytes, and whether all of them were
    looked at. For a child."""
    become(user)
    directory = open_users(path, user.uid)
    if directory is None:
        return 0, True
    size = tree_size(f"/proc/self/fd/{directory}/.", _LEFT_OUT_SECONDS)
    own = os.stat(OWNER, dir_fd=directory, follow_symlinks=False)
    return size.bytes - own.st_blocks * 512, size.whole


# Files of the user's


def _read_json(descriptor: int) -> dict[str, Any]:
    """The object in a file; an empty one where that makes no sense."""
    try:
        content = json.loads(os.pread(descriptor, _MOST_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_json(descriptor: int, content: Mapping[str, Any]) -> None:
    line = json.dumps(content).encode() + b"\n"
    os.pwrite(descriptor, line, 0)
    os.ftruncate(descriptor, len(line))


def _unlink(name: str, directory: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
