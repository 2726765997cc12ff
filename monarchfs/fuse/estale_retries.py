"""Which threads got ESTALE a moment ago, and so ask for the second and last time.

The kernel walks the path of an open(2) or stat(2) that fails with ESTALE once more, asking about
each name (LOOKUP_REVAL: fs/namei.c, do_filp_open; fs/stat.c), and gives the next ESTALE to its
caller. The same thread does both: it is in one system call.
"""

from __future__ import annotations

import errno
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from monarchfs.metadata.known import KnownMetadata

MOST_KEPT = 10_000
"""Threads that are remembered; of more, the first are forgotten."""

KEPT_NS = 60_000_000_000
"""A second try that comes later, because the source is slow, counts as a first one."""

KEPT_OF_LISTINGS_NS = 5_000_000_000
"""The same where a second try lists nothing: it had better be one."""

SHARED_NS = 1_000_000_000
"""A look-up may share an answer that the source was asked for this long before."""


class EstaleRetries:
    """Changing: by thread, the number that it was last refused, and when (time.time_ns())."""

    def __init__(self, known: KnownMetadata, kept_ns: int = KEPT_NS) -> None:
        self._known = known
        self._kept_ns = kept_ns
        self._threads: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def again(self, ino: int, thread: int) -> bool:
        """Whether ``thread`` (of the request) asks for the second time: about a number that the
        source was asked about since, or again about the file that it was refused, which it then
        does not have from a name (but from a link in /proc/PID/fd)."""
        refusal = self._threads.get(thread) if self._threads else None
        if refusal is None:
            return False
        refused, at_ns = refusal
        if time.time_ns() > at_ns + self._kept_ns:
            return False
        if self._known.asked_ns(ino) >= at_ns - SHARED_NS:
            return True
        return refused == ino and not self._known.is_directory(ino)

    @contextmanager
    def noting(self, ino: int, thread: int, *, last: bool = True) -> Iterator[None]:
        """Around an answer to ``thread`` about ``ino``; the last one of a system call unless it is
        asked for on the way to another (of attributes, for the rights that execve(2) needs)."""
        try:
            yield
        except OSError as exc:
            self._threads.pop(thread, None)
            if exc.errno == errno.ESTALE:
                self._threads[thread] = ino, time.time_ns()
                if len(self._threads) > MOST_KEPT:
                    self._threads.popitem(last=False)
            raise
        if self._threads and last:
            self._threads.pop(thread, None)
