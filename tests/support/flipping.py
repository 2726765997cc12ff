"""A user who leads root astray: a directory of the user's takes turns with a link to one of root's.

`Flipper` does it in a process of the user's, as fast as it can. `at_each_call` does it in between
two system calls of this process, for each two of them: what a race would hit by luck.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_EXCHANGE = 2
_AT_FDCWD = -100
_EVENTS = frozenset(
    (
        *("open", "os.mkdir", "os.rmdir", "os.remove", "os.chown", "os.chmod", "os.rename"),
        *("os.symlink", "os.link", "os.listdir", "os.scandir", "os.truncate", "os.chdir"),
    )
)
"""The system calls that change or open something, as Python's audit events name them."""


def exchange(one: Path, other: Path) -> None:
    """Each gets the other's name, in one step (renameat2(2), RENAME_EXCHANGE)."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if libc.renameat2(*paths, _EXCHANGE) != 0:
        code = ctypes.get_errno()
        pytest.skip(f"two names cannot be exchanged here: {os.strerror(code)}")


class Bait:
    """``way`` is a directory of the user's, to begin with, and ``link`` a link to ``precious``,
    which is root's. `flip` exchanges the two; `flip_back` sees to it that they are as at first."""

    def __init__(self, users: Path, precious: Path, uid: int) -> None:
        self.way, self.link, self.uid = users / "way", users / "link", uid
        self.way.mkdir()
        self.link.symlink_to(precious)
        for path in (self.way, self.link):
            os.chown(path, uid, uid, follow_symlinks=False)

    def flip(self) -> None:
        exchange(self.way, self.link)

    def flip_back(self) -> None:
        if self.way.is_symlink():
            self.flip()

    @contextmanager
    def flipping(self) -> Iterator[None]:
        """A process of the user's flips without end."""
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setresgid(self.uid, self.uid, self.uid)
                os.setresuid(self.uid, self.uid, self.uid)
                while True:
                    self.flip()
            finally:
                os._exit(0)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.flip_back()


_before_call: Callable[[], None] | None = None
_installed = False


def at_each_call(bait: Bait, act: Callable[[], None], check: Callable[[], None]) -> int:
    """Runs ``act`` again and again: the first time the flip comes before its first system call, the
    next time before its second, until there are no more; ``check`` looks at each outcome. Returns
    how many there were. ``act`` must not raise."""
    global _before_call, _installed
    if not _installed:
        # For good: there is no way to remove one.
        sys.addaudithook(lambda event, _: event in _EVENTS and _before_call and _before_call())
        _installed = True
    turn = 0
    while True:
        left = turn

        def count() -> None:
            nonlocal left
            left -= 1
            if left == -1:
                bait.flip()

        _before_call = count
        try:
            act()
        finally:
            _before_call = None
            bait.flip_back()
        check()
        if left >= 0:
            return turn
        turn += 1
