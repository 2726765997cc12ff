"""``monarchfs umount``: ask the supervisor, or do it without one."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress

from monarchfs.cli.output import complain
from monarchfs.config.places import search_of
from monarchfs.fuse.connection import connection_of_mount
from monarchfs.fuse.mount import SYSTEM_PATH, check_fusermount, fusermount_path, may_mount
from monarchfs.fuse.mountinfo import MONARCHFS, Mount, read_mountinfo
from monarchfs.fuse.unmount import Unmounted
from monarchfs.supervisor.recover import FoundMount, find_one, find_others_mount, unmount_found
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import counted
from monarchfs.types import OperationError, UsageError

_WORD_SECONDS = 1.0
_MOST_NAMED = 5


def umount_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns 0 when nothing of ours is mounted there any more (or never was), within ``--timeout``
    seconds and a moment."""
    deadline = time.monotonic() + arguments.timeout
    path = arguments.mountpoint
    found = find_one(path, search_of(environ))
    if found is None:
        other = find_others_mount(path)
        if other is not None:
            ours = other.fstype == MONARCHFS
            what = "a part of a monarchfs mount" if ours else "not of monarchfs"
            raise UsageError(f"{path} is a mount of type {other.fstype}, {what}: use umount")
        print(f"{printable(path)} is not mounted")
        return 0
    if found.mount is not None and not found.on_top:
        raise OperationError(
            f"{found.mountpoint} is hidden by another mount on it or above it: unmount that first"
        )
    found.refuse_others()
    by_fusermount = found.mount is not None and not may_mount()
    if by_fusermount:
        check_fusermount()
        if not found.supervisor_alive and not _may_fork():
            _become_fusermount(found.mountpoint)
    with _told_that_it_waits(found, deadline):
        outcome = unmount_found(found, deadline)
    if not outcome.gone:
        if by_fusermount and not _may_fork():
            _become_fusermount(found.mountpoint)
        raise OperationError(
            f"cannot unmount {found.mountpoint}: try umount -l {found.mountpoint} as root"
        )
    if outcome in (Unmounted.LAZY, Unmounted.ABORTED):
        complain(f"{found.mountpoint} was in use to the end: who still uses it gets errors", 0)
    return 0


def _may_fork() -> bool:
    try:
        pid = os.fork()
    except OSError:
        return False
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def _become_fusermount(mountpoint: str) -> None:
    """The end of this process, which cannot start another one. Lazily: nobody could wait here."""
    program = fusermount_path()
    words = [program, "-u", "-z", "--", mountpoint]
    os.execve(program, words, {"PATH": SYSTEM_PATH, "LANG": "C"})


@contextmanager
def _told_that_it_waits(found: FoundMount, deadline: float) -> Iterator[None]:
    """Says so, if the block takes long. By a signal: a thread may be one too many."""
    before = signal.signal(signal.SIGALRM, lambda *_: say_that_it_waits(found, deadline))
    signal.setitimer(signal.ITIMER_REAL, _WORD_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def say_that_it_waits(found: FoundMount, deadline: float) -> None:
    """Prints whom an unmount waits for, until ``deadline`` (time.monotonic)."""
    if found.mount is None or found.mount not in read_mountinfo():
        return  # its worker makes copies durable
    users = list(_users(found.mount))
    named = ", ".join(users[:_MOST_NAMED])
    named += f" and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else ""
    with closing(connection_of_mount(found.mount)) as connection:
        waiting = connection.waiting
    asked = f"; {counted(waiting, 'request')} of it without an answer" if waiting else ""
    left = max(0.0, deadline - time.monotonic())
    complain(
        f"{found.mountpoint} is in use by {named or 'somebody'}{asked}: waiting, for {left:.0f} s"
        " at most; then who still uses it gets errors",
        0,
    )


def _users(mount: Mount) -> Iterator[str]:
    """Processes that have something of the mount open, or are in it, as far as this one may know.
    Only the kernel is asked: the mount's daemon may hang."""
    below = mount.mountpoint.rstrip("/") + "/"
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if _uses(f"/proc/{pid}", mount, below):
                with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as name:
                    yield f"{name.read().strip()} ({pid})"


def _uses(process: str, mount: Mount, below: str) -> bool:
    if any((os.readlink(f"{process}/{name}") + "/").startswith(below) for name in ("cwd", "root")):
        return True
    for number in os.listdir(f"{process}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            if (os.readlink(f"{process}/fd/{number}") + "/").startswith(below):
                # The daemon has the source open, which may lie below the mount.
                with open(f"{process}/fdinfo/{number}", encoding="ascii") as file:
                    if f"mnt_id:\t{mount.mount_id}\n" in file.read():
                        return True
    return False
