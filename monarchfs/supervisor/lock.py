"""The lock on a state directory: one mount, or one ``fsck``, at a time. And locks that are only
names.

The file also says who had it last, for messages, and where the replicas lie, for ``fsck`` of a lost
index.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass

from monarchfs.config import User
from monarchfs.supervisor.identity import open_file_as
from monarchfs.types import MonarchError, OperationError

LOCK = "lock"
_MOST_BYTES = 1 << 20
_POLL_SECONDS = 0.05


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
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A supervisor that gives up removes the file: a new one is locked by somebody else.
            if _still_named(lock, state_dir):
                return lock
        except BlockingIOError:
            holder = read_holder(lock)
            os.close(lock)
            raise InUse(str(holder or "another mount: unmount that first")) from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def read_holder(lock: int) -> Holder | None:
    """What the lock file says; None if it makes no sense. It is the user's: do not trust it."""
    try:
        content = json.loads(os.pread(lock, _MOST_BYTES, 0))
        holder = Holder(
            pid=int(content["pid"]),
            mountpoint=str(content["mountpoint"]),
            source=str(content["source"]),
            dataset_id=str(content.get("dataset_id", "")),
            tiers=tuple(str(path) for path in content.get("tiers", ())),
            checking=bool(content.get("checking", False)),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None
    except RecursionError:  # nested too deeply
        return None
    return holder


def write_holder(lock: int, holder: Holder) -> None:
    """Says who holds the lock. Raises OSError."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(asdict(holder)).encode() + b"\n", 0)


def take_named_lock(path: str, deadline: float, overdue: str) -> int:
    """A locked file in a directory that only we can change: its descriptor. It exists while
    somebody has it, or was killed with it. Waits for it; raises OperationError(``overdue``) at
    ``deadline`` (time.monotonic()), and where the file cannot be made."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise OperationError(f"cannot make {path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _still_named(descriptor, None, path):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise OperationError(overdue) from None
            time.sleep(_POLL_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def release_named_lock(path: str, descriptor: int) -> None:
    """Removes the file, then lets the next one in."""
    os.unlink(path)
    os.close(descriptor)


def _still_named(lock: int, state_dir: int | None, name: str = LOCK) -> bool:
    try:
        st = os.stat(name, dir_fd=state_dir, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(st, os.fstat(lock))
