"""A FUSE connection as its control file system shows it (fs/fuse/control.c).

A connection has the minor number of its mounts. The kernel gives that number to the next mount as
soon as these are gone, while the daemon may still have to clean up. A process that aborts a
connection by its number then aborts somebody else's. So the control files are opened while the
number is surely this connection's. After it ended, they do nothing.
"""

from __future__ import annotations

import os
import select

from monarchfs.fuse.mountinfo import Mount, read_mountinfo

CONTROL = "/sys/fs/fuse/connections"


class FuseConnection:
    """Constant: ``number``; the descriptors of its control files, -1 if this process cannot see
    any. The files belong to the mount's user."""

    def __init__(self, number: int, mount: Mount | None, fuse: int = -1) -> None:
        """``mount`` is its first mount, if that can be seen; ``fuse`` its open /dev/fuse, where
        this process has that."""
        self.number = number
        self._mount = mount
        self._fuse = fuse
        self._abort = _open(number, "abort", os.O_WRONLY)
        self._waiting = _open(number, "waiting", os.O_PATH)
        if not self.is_meant():
            self.close()

    def is_meant(self) -> bool:
        """Whether the number still is that of the connection that is meant. One that somebody
        aborted still has its mounts."""
        if self._fuse >= 0 and not is_dead(self._fuse):
            return True
        return self._mount is not None and self._mount in read_mountinfo()

    def close(self) -> None:
        for fd in (self._abort, self._waiting):
            if fd >= 0:
                os.close(fd)
        self._abort = self._waiting = -1

    @property
    def lives(self) -> bool:
        """Whether the kernel still has it; False where that cannot be seen."""
        return self.waiting is not None

    @property
    def waiting(self) -> int | None:
        """How many requests wait for an answer; None if that cannot be seen, or the connection
        ended."""
        if self._waiting < 0:
            return None
        try:
            # It can only be read once (nonseekable_open).
            with open(f"/proc/self/fd/{self._waiting}", "rb", buffering=0) as file:
                count = file.read()
        except OSError:
            return None
        return int(count) if count else None

    def abort(self) -> None:
        """Make each of its requests fail with ECONNABORTED, where that is possible."""
        if self._abort < 0:
            return
        try:
            os.write(self._abort, b"1")
        except OSError:
            self.close()  # it cannot be asked either


def connection_of_mount(mount: Mount) -> FuseConnection:
    """The connection of a mount that was found in the mount table."""
    return FuseConnection(mount.minor, mount)


def is_dead(fuse: int) -> bool:
    """Whether the connection of an open /dev/fuse ended. Call it now and then; do not wait for an
    event: the kernel wakes a poller at every request."""
    poll = select.poll()
    poll.register(fuse, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _open(number: int, name: str, flags: int) -> int:
    try:
        return os.open(f"{CONTROL}/{number}/{name}", flags | os.O_CLOEXEC)
    except OSError:
        return -1
