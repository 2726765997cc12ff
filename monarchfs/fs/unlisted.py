"""Directories in which names are looked up that nobody has listed: a job may have its list of files
from elsewhere.

Without a listing each such name is a call of its own. After a few of them the directory is
listed, while nobody waits; then those that follow can be asked for together (``statahead``).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from monarchfs.types import IndexWriteError

log = logging.getLogger(__name__)

FEW, MANY = 3, 32
"""So many names are looked up before the directory is listed: twice as many, up to the second,
after one that turned out to have fewer than ``WORTH`` names. A tree may be all such directories."""

WORTH = 8

DIRECTORY_BYTES = 8192
"""In a large directory, one for each so many bytes of it: some 256 names. On GlusterFS, say, its
size does not tell; there it is by ``MOST_NAMES`` alone."""

MOST_NAMES = 1024
"""For each name that was looked up, so many are listed at most. Where there are more, it ends."""

AGAIN = 8
"""What failed, or ended, is tried again after so many times as many names."""

LISTINGS = 4
"""At once. Where more would begin, the next name begins them."""

SILENCE_SECONDS = 10.0
"""A listing that brings nothing for so long is given up."""

MOST_KEPT = 10_000
"""Directories of which is remembered that listing them failed."""


class Unlisted:
    """Constant: its parts. Changing: ``_few``, after how many names a directory is listed, and
    ``_again``, after how many one is tried again; ``_running``, the listings under way.

    ``size`` says how many bytes a directory has; ``ask`` (directory, most names, what to call with
    each answer) lists it, and says how many names it has; None: more. It raises OSError and
    IndexWriteError."""

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
        """Of a directory without a listing, a name had to be asked for of which nothing is known;
        by now, so many. Raises nothing, waits for nothing."""
        if ino in self._running or times < self._again.get(ino, self._few):
            return
        if times * DIRECTORY_BYTES < self._size(ino):
            return
        if len(self._running) < LISTINGS:
            self._running[ino] = trio.CancelScope()
            self._nursery.start_soon(self._list, ino, times)

    def stop(self, ino: int) -> None:
        """Somebody else lists it now."""
        if (scope := self._running.get(ino)) is not None:
            scope.cancel()

    async def _list(self, ino: int, times: int) -> None:
        scope = self._running[ino]
        names: int | None = None

        def tell() -> None:
            scope.deadline = trio.current_time() + SILENCE_SECONDS

        try:
            tell()
            with scope:
                names = await self._ask(ino, times * MOST_NAMES, tell)
        except (OSError, IndexWriteError) as exc:
            # Who lists it himself is told by the source.
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
