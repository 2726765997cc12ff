"""Unmounting within a time limit, whatever the daemon and the mount's users are doing.

The mount point is never looked at (stat would hang with a hung daemon): what is mounted is read
from mountinfo, and umount2(2) is called in a child that can be left behind.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from contextlib import suppress
from enum import Enum

from monarchfs.fuse.connection import FuseConnection
from monarchfs.fuse.mount import SYSTEM_PATH, fusermount_path, may_mount
from monarchfs.fuse.mountinfo import Mount, find_mount, open_directory, read_mountinfo
from monarchfs.system.bounded import Answer, bounded_call
from monarchfs.types import OperationError

MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 1, 2, 8
_CALL_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_LAZY_GRACE = 0.3


class Unmounted(Enum):
    """How far an unmount had to go."""

    NOT_MOUNTED = "nothing was mounted"
    CLEAN = "unmounted"
    LAZY = "unmounted while in use"
    ABORTED = "unmounted by force"
    FAILED = "still mounted"

    @property
    def gone(self) -> bool:
        return self is not Unmounted.FAILED


class Unmount:
    """An attempt to unmount a connection, in steps, so that a loop can do other things meanwhile:
    polite while it is busy, from shortly before ``deadline`` (time.monotonic) lazy, and then the
    connection is aborted if it still lives. Its mounts go wherever they are: their directory may
    have been renamed, and bind mounts of a connection that ends would only fail.

    Constant: the mounts' identities. Changing: deadline, outcome.
    """

    def __init__(self, connection: FuseConnection, deadline: float) -> None:
        """Only FUSE mounts are ever unmounted. ``connection`` stays the caller's."""
        self.deadline = deadline
        self.outcome: Unmounted | None = None
        self.next_step = time.monotonic()
        self._pause = _FIRST_PAUSE
        self._detached_at: float | None = None
        self._connection = connection
        self._meant: set[int] | None = None
        with suppress(OSError):  # the first step looks, then
            self._look()

    def step(self) -> Unmounted | None:
        """Goes one step further (at ``next_step`` or later, time.monotonic); the outcome once there
        is one. Blocks for about 2 seconds at most, and only where the kernel does. Raises OSError
        where the mounts cannot be read now; the step is to be repeated then."""
        if self._meant is None:
            self._look()
        if self.outcome is None:
            self.outcome = self._detached() if self._detached_at else self._attached()
            self._pause = min(self._pause * 1.5, _LONGEST_PAUSE)
            self.next_step = min(time.monotonic() + self._pause, self._lazy_from)
            if self._detached_at:
                self.next_step = time.monotonic() + _FIRST_PAUSE
        return self.outcome

    def _look(self) -> None:
        table, number = read_mountinfo(), self._connection.number
        self._meant = {one.mount_id for one in table if one.minor == number and _is_fuse(one)}
        if not self._left(table):
            self.outcome = Unmounted.NOT_MOUNTED

    @property
    def _lazy_from(self) -> float:
        return self.deadline - 2 * _LAZY_GRACE

    def _attached(self) -> Unmounted | None:
        patient = time.monotonic() < self._lazy_from
        table = read_mountinfo()
        for mount in self._left(table):
            # Unmounting its mount point must meet this mount, and not a later one on it.
            if find_mount(mount.mountpoint, table) == mount:
                force = not patient and not _has_fusectl()
                unmount_call(mount.mountpoint, lazy=not patient, force=force)
        if not self._left(read_mountinfo()):
            self._detached_at = time.monotonic()
            return Unmounted.CLEAN if patient else None
        if patient:
            return None
        self._connection.abort()
        return Unmounted.FAILED if self._left(read_mountinfo()) else Unmounted.ABORTED

    def _detached(self) -> Unmounted | None:
        assert self._detached_at is not None
        if not self._connection.lives:
            return Unmounted.LAZY
        if time.monotonic() < self._detached_at + _LAZY_GRACE:
            return None
        self._connection.abort()
        return Unmounted.ABORTED

    def _left(self, table: list[Mount]) -> list[Mount]:
        """What is still mounted, the newest first. The kernel gives out numbers of mounts again."""
        if self._meant is None or not self._connection.is_meant():
            return []
        ours = (mount for mount in reversed(table) if mount.minor == self._connection.number)
        return [mount for mount in ours if mount.mount_id in self._meant and _is_fuse(mount)]


def unmount_bounded(connection: FuseConnection, deadline: float) -> Unmounted:
    """Unmounts by ``deadline`` (time.monotonic), see `Unmount`.

    Idempotent. Blocks until then at most, give or take the 2 seconds that a stuck system call is
    waited for.
    """
    attempt = Unmount(connection, deadline)
    while attempt.step() is None:
        time.sleep(max(0.0, attempt.next_step - time.monotonic()))
    assert attempt.outcome is not None
    return attempt.outcome


def unmount_call(mountpoint: str, *, lazy: bool = False, force: bool = False) -> int:
    """One umount2(2) where `may_mount`, else one run of fusermount3; returns errno, 0 if done.

    ETIMEDOUT stands for a call that does not come back, EAGAIN for a process that could not be
    started. ``force`` aborts the connection (as root; fuse_umount_begin in fs/fuse/inode.c).
    """
    if not may_mount():
        return _fusermount_call(mountpoint, lazy)
    flags = UMOUNT_NOFOLLOW | (MNT_DETACH if lazy else 0) | (MNT_FORCE if force else 0)

    def call() -> Answer:
        import ctypes  # only here, because loading it is slow

        libc = ctypes.CDLL(None, use_errno=True)
        above, name = os.path.split(mountpoint)
        try:
            # UMOUNT_NOFOLLOW is about the name alone; what is above it can be the user's to rename,
            # with a link in its place, and what that leads to is not to be unmounted.
            directory = open_directory(above)
        except OSError as error:
            return error.errno, ()
        path = f"/proc/self/fd/{directory}/{name}" if name else above
        failed = libc.umount2(os.fsencode(path), flags)
        code = ctypes.get_errno() if failed else 0
        os.close(directory)
        return code, ()

    try:
        code, _ = bounded_call(call, timeout=_CALL_SECONDS, overdue="umount")
    except OperationError:
        return errno.ETIMEDOUT
    except OSError:  # no process can be started: this one waits if the call does
        code, _ = call()
    return int(code)


def _is_fuse(mount: Mount) -> bool:
    return mount.fstype.split(".")[0] == "fuse"


def _has_fusectl() -> bool:
    return any(mount.fstype == "fusectl" for mount in read_mountinfo())


def _fusermount_call(mountpoint: str, lazy: bool) -> int:
    command = [fusermount_path(), "-u", "-q", *(["-z"] if lazy else []), "--", mountpoint]
    try:
        process = subprocess.Popen(
            command,
            env={"PATH": SYSTEM_PATH, "LANG": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
    except OSError as error:
        return error.errno or errno.EAGAIN
    try:
        return errno.EBUSY if process.wait(_CALL_SECONDS) else 0
    except subprocess.TimeoutExpired:
        process.kill()
        return errno.ETIMEDOUT
