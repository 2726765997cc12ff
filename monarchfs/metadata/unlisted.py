"""Listing directories in which a job looks names up without listing them: it may have its list of
files from elsewhere.

Without a listing each such name is a call of its own. After a few of them the directory is listed
in the background; from then on names can be asked for in batches (``statahead``).

The kernel may remember that a name is missing which such a listing has; with ``immutable`` it
would do so for good. So it is told to forget these names. A worker that took over does not know
them, and lists nothing ahead with ``immutable``.
"""

from __future__ import annotations

import logging

import trio

from monarchfs.metadata.directories import Directories
from monarchfs.metadata.known import KnownMetadata
from monarchfs.metadata.recorder import Recorder
from monarchfs.types import IndexWriteError

log = logging.getLogger(__name__)

FEW, MANY = 3, 32
"""Names that are looked up before a directory is listed. The number doubles, up to MANY, with each
directory that turns out to have fewer than WORTH names: a tree may have only such directories."""

WORTH = 8

DIRECTORY_BYTES = 8192
"""A large directory needs one more name for each so many of its bytes (some 256 names). On some
file systems, as GlusterFS, the size says nothing; there MOST_NAMES alone limits the listing."""

MOST_NAMES = 1024
"""A listing ends after this many names for each name that was looked up."""

AGAIN = 8
"""A listing that failed or ended is tried again after this many times as many names."""

LISTINGS = 4
"""Under way. Where more are needed, a later name begins them."""

MOST_KEPT = 10_000
"""Directories whose failed listing is remembered."""


class Unlisted:
    """Constant: its parts. Changing: ``_few``, the number of names after which a directory is
    listed; ``_again``, the number after which one is tried again; ``_running``, the listings under
    way."""

    def __init__(
        self,
        nursery: trio.Nursery,
        known: KnownMetadata,
        recorder: Recorder,
        directories: Directories,
    ) -> None:
        self._nursery = nursery
        self._known = known
        self._recorder = recorder
        self._directories = directories
        self._few = FEW
        self._again: dict[int, int] = {}
        self._running: set[int] = set()

    def missed(self, ino: int, times: int) -> None:
        """In a directory without a listing, ``times`` unknown names had to be asked for by now.
        Raises nothing, waits for nothing."""
        # The kernel may go on taking for missing what the listing has, and refresh not notice.
        if self._known.freshness.trusts_times and self._recorder.negative.unknown(ino):
            return
        if ino in self._running or times < self._again.get(ino, self._few):
            return
        if times * DIRECTORY_BYTES < self._known.size(ino):
            return
        if len(self._running) < LISTINGS:
            self._running.add(ino)
            self._directories.announce_ahead(ino)
            self._nursery.start_soon(self._list, ino, times)

    async def _list(self, ino: int, times: int) -> None:
        names: int | None = None
        try:
            names = await self._directories.list_ahead(ino, times * MOST_NAMES)
        except (OSError, IndexWriteError) as exc:
            # A caller that lists it gets the error itself.
            log.debug("directory inode %d is not listed ahead: %s", ino, exc)
        finally:
            self._running.discard(ino)
        if names is not None:
            self._again.pop(ino, None)
            self._few = FEW if names >= WORTH else min(2 * self._few, MANY)
            return
        while len(self._again) >= MOST_KEPT:
            del self._again[next(iter(self._again))]
        self._again[ino] = AGAIN * times
