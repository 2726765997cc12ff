"""Names that are published to those who answer look-ups without Python.

A scan of the whole dataset publishes what it finds. A request to warm or an earlier
mount may also know names before anybody looks them up: each look-up that Python answers publishes
some more names of the same directory.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Protocol

from monarchfs.metadata.known import Entry, KnownMetadata
from monarchfs.types import Node

BATCH = 16
"""Names published for one look-up: a quarter of a millisecond at most."""

FEW = 3
"""Look-ups in a directory before other names of it are published."""

PAUSE_SECONDS = 10.0
"""After its last name, a directory begins again after this time."""

MOST_NAMES = 1_000_000
"""As many as _names.c holds: of more, most would be pushed out before they are looked up."""

DIRECTORIES_KEPT = 30_000


class NameThreads(Protocol):
    """The threads that answer look-ups without Python. No method has a checkpoint."""

    def name_known(self, parent: int, name: bytes, entry: Entry) -> None:
        """What a name in a directory stands for."""

    def known(self, parent: int, name: bytes, entry: Entry) -> None:
        """``name_known``; the file may be opened next."""


class SiblingNames:
    """Constant: its parts. Changing: by directory, the number of look-ups, the cookie up to which
    names were published, and the time (time.monotonic) before which none is.

    Not only the thread of the event loop calls ``looked_up`` (_handoff.c)."""

    def __init__(self, known: KnownMetadata, threads: NameThreads | None) -> None:
        self._known = known
        self._threads = threads
        self._directories: OrderedDict[int, tuple[int, int, float]] = OrderedDict()

    @property
    def fits(self) -> bool:
        """Whether all names that are known may be published."""
        return self._known.index.nodes.count_nodes() <= MOST_NAMES

    def publish(self, parent: int, name: bytes, node: Node | None, checked_ns: int) -> None:
        """``name`` was asked for at ``checked_ns``; it is published if it may be believed."""
        entry = self._known.entry(checked_ns, node, time.time_ns())
        if entry is not None and self._threads is not None:
            self._threads.known(parent, name, entry)

    def scanned(self, parent: int, name: bytes, entry: Entry | None) -> None:
        """A scan found it: nobody need be about to read the file."""
        if entry is not None and self._threads is not None:
            self._threads.name_known(parent, name, entry)

    def looked_up(self, parent: int) -> None:
        """Python answered a look-up there. No checkpoint."""
        times, after, paused_until = self._directories.pop(parent, (0, 0, 0.0))
        times += 1
        if times > FEW and time.monotonic() >= paused_until and self.fits:
            rows = self._known.index.listings.entries(parent, after, BATCH)
            for dirent, node in rows:
                self.publish(parent, dirent.name, node, dirent.checked_ns)
            after = rows[-1][0].cookie if len(rows) == BATCH else 0
            if not after:
                times, paused_until = 0, time.monotonic() + PAUSE_SECONDS
        self._directories[parent] = times, after, paused_until
        if len(self._directories) > DIRECTORIES_KEPT:
            self._directories.popitem(last=False)
