"""Keeps a log short: few lines of a kind, and a file of a bounded size.

What is logged for one file can be logged for a million of them at once.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    ToStream = logging.StreamHandler[TextIO]
else:  # not to be subscripted before Python 3.11
    ToStream = logging.StreamHandler

MOST_LINES = 3
"""Lines of a kind (one place in the program) in an interval; the others are only counted."""
INTERVAL_SECONDS = 60.0
MOST_BYTES = 10 << 20
"""Of a log; as much again is kept of what it held before."""

log = logging.getLogger(__name__)


class FewOfEach(logging.Filter):
    """Lets through the first lines of each kind, and counts the others until the interval is over.

    Changing, under the lock: by kind, when its interval began, how many lines came, the last one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int], tuple[float, int, logging.LogRecord]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == __name__:
            return True
        kind = (record.pathname, record.lineno)
        with self._lock:
            began, count, _ = self._kinds.get(kind, (self._clock(), 0, record))
            self._kinds[kind] = (began, count + 1, record)
        return count < MOST_LINES

    def report(self, *, all_of_them: bool = False) -> None:
        """Log how many lines were left out, of the kinds whose interval is over. Costs next to
        nothing without any."""
        if not self._kinds:
            return
        until = self._clock() - (0.0 if all_of_them else INTERVAL_SECONDS)
        with self._lock:
            over = {kind: seen for kind, seen in self._kinds.items() if seen[0] <= until}
            for kind in over:
                del self._kinds[kind]
        for began, count, last in over.values():
            if count > MOST_LINES:
                log.log(
                    last.levelno,
                    "and %d more like this in %.0f s, the last one: %s",
                    count - MOST_LINES,
                    self._clock() - began,
                    last.getMessage(),
                )


def keep_small(descriptor: int, suspend: Callable[[], None]) -> None:
    """Renames a log that is too large (``suspend``); empties it if that raises OSError."""
    st = os.fstat(descriptor)
    if st.st_size <= MOST_BYTES or not stat.S_ISREG(st.st_mode):
        return
    try:
        suspend()
    except OSError:
        os.ftruncate(descriptor, 0)


def suspend(name: str, directory: int, descriptor: int) -> None:
    """Renames the log ``name``, on which ``descriptor`` is open, to ``name``.1, unless somebody
    else did so meanwhile. Raises OSError."""
    with suppress(FileNotFoundError):
        there = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if os.path.samestat(os.fstat(descriptor), there):
            os.rename(name, name + ".1", src_dir_fd=directory, dst_dir_fd=directory)


def write_at_once(descriptor: int, text: bytes) -> int:
    """Writes as much as there is room for now, and returns how much that was: who reads may have
    stopped. (O_NONBLOCK would be set for others, too, that have the open file.) Raises OSError."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    done = 0
    while done < len(text) and poll.poll(0):
        # What is no longer than this finds room as a whole (pipe(7)).
        most = done + select.PIPE_BUF
        done += os.write(descriptor, text[done : text.rfind(b"\n", done, most) + 1 or most])
    return done


class Lossy(logging.Handler):
    """A handler whose ``emit`` does not wait: lines that find no room are lost, and the next one
    says how many. Changing: how many were, and of how many the last line told."""

    _lost = _told = 0

    def format(self, record: logging.LogRecord) -> str:
        self._told, self._lost = self._lost, 0
        line = super().format(record)
        return f"{line} ({self._told} lines before this one were lost)" if self._told else line

    def handleError(self, record: logging.LogRecord) -> None:
        self._lost = self._told + 1


class BoundedLog(ToStream):
    """A log in an open directory, which is begun anew when it is too large."""

    def __init__(
        self,
        directory: int,
        name: str,
        stream: TextIO | None = None,
        as_owner: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``stream`` writes the log, by default standard error. The directory is changed inside
        ``as_owner()`` only, as its owner."""
        super().__init__(sys.stderr if stream is None else stream)
        self._directory = directory
        self._name = name
        self._as_owner = as_owner

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            keep_small(self.stream.fileno(), self._begin_anew)
        except (OSError, ValueError):
            self.handleError(record)

    def _begin_anew(self) -> None:
        ours = self.stream.fileno()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._as_owner():
            suspend(self._name, self._directory, ours)
            new = os.open(self._name, flags | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        try:
            if not stat.S_ISREG(os.fstat(new).st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            os.dup2(new, ours, inheritable=os.get_inheritable(ours))
        finally:
            os.close(new)
