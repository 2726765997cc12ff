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
from collections.abc import Awaitable, Callable

import trio

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

SILENCE_SECONDS = 10.0
"""A listing that brings nothing for this long is given up."""

MOST_KEPT = 10_000
"""Directories whose failed listing is remembered."""


class Unlisted:
    """Constant: its parts. Changing: ``_few``, the number of names after which a directory is
    listed; ``_again``, the number after which one is tried again; ``_running``, the listings under
    way.

    ``size`` returns the bytes of a directory. ``ask`` (directory, most names, what to call with
    each batch) lists it and returns the number of its names, None if there are more. It raises
    OSError and IndexWriteError."""

    def __init__(
        self,
        nursery: trio.Nursery,
        size: Callable[[int], int],
        ask: Callable[[int, int, Callable[[], None]], Awaitable[int | None]],
    ) -> None:
        self._nursery = nursery
        self._size = size
        self._ask = ask
        self._few = FEW
        self._again: dict[int, int] = {}
        self._running: dict[int, trio.CancelScope] = {}

    def missed(self, ino: int, times: int) -> None:
        """In a directory without a listing, ``times`` unknown names had to be asked for by now.
        Raises nothing, waits for nothing."""
        if ino in self._running or times < self._again.get(ino, self._few):
            return
        if times * DIRECTORY_BYTES < self._size(ino):
            return
        if len(self._running) < LISTINGS:
            self._running[ino] = trio.CancelScope()
            self._nursery.start_soon(self._list, ino, times)

    def stop(self, ino: int) -> None:
        """Another caller lists the directory now."""
        if (scope := self._running.get(ino)) is not None:
            scope.cancel()

    async def _list(self, ino: int, times: int) -> None:
        scope = self._running[ino]
        names: int | None = None

        def on_batch() -> None:
            scope.deadline = trio.current_time() + SILENCE_SECONDS

        try:
            on_batch()
            with scope:
                names = await self._ask(ino, times * MOST_NAMES, on_batch)
        except (OSError, IndexWriteError) as exc:
            # A caller that lists it gets the error itself.
            log.debug("directory inode %d is not listed ahead: %s", ino, exc)
        finally:
            del self._running[ino]
        if names is not None:
            self._again.pop(ino, None)
            self._few = FEW if names >= WORTH else min(2 * self._few, MANY)
            return
        while len(self._again) >= MOST_KEPT:
            del self._again[next(iter(self._again))]
        self._again[ino] = AGAIN * times
