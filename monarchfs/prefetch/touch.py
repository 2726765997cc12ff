"""Touching in the source what is used: sites purge parallel file systems by access time, and a file
that is served locally is not read there any more.

A touch is what any reader does: open, read a byte, close. Times are never set.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import trio

from monarchfs.cache.cache import Cache
from monarchfs.metadata.known import KnownMetadata
from monarchfs.metrics import Metrics
from monarchfs.source.source import Source
from monarchfs.types import Lane, MonarchError, ReplicaState

log = logging.getLogger(__name__)

MOST_REMEMBERED = 100_000
"""So many used files are remembered one by one (about 7 MB); where more are used, all that are
resident count as used."""

FASTEST_SECONDS = 0.005
"""At most 200 touches a second, however many files and however short the interval."""
SLOWEST_SECONDS = 1.0
PATIENCE_SECONDS = 10.0
"""A touch that takes longer is given up; its thread comes back when the source does."""
MOST_GIVEN_UP = 8
"""After so many in a row the rest waits for the next round."""


class Touch:
    """Constant: its parts, the interval. Changing: ``used``, the inodes that were opened locally
    since the last round; ``overflowed``, whether there were too many to remember."""

    def __init__(
        self,
        source: Source,
        cache: Cache,
        metrics: Metrics,
        known: KnownMetadata,
        interval_seconds: float,
    ) -> None:
        self.used: set[int] = set()
        self.overflowed = False
        self._source = source
        self._cache = cache
        self._metrics = metrics
        self._known = known
        self._interval = interval_seconds

    def note_open(self, ino: int) -> None:
        """A file was opened without asking the source. No checkpoint."""
        if len(self.used) < MOST_REMEMBERED:
            self.used.add(ino)
        else:
            self.overflowed = True

    async def run(self) -> None:
        """A round every interval, for ever. A round that takes longer delays the next."""
        due = trio.current_time()
        while True:
            due = max(due + self._interval, trio.current_time())
            await trio.sleep_until(due)
            await self.round()

    async def round(self) -> None:
        """Touch what was used since the last round, or is open; paced over half the interval."""
        # Open for days, a file is opened once.
        used, self.used = self.used.union(self._cache.readers.open_inodes()), set()
        overflowed, self.overflowed = self.overflowed, False
        count = len(used)
        if overflowed:
            count = sum(
                totals.resident for totals in self._cache.index.replicas.tier_totals().values()
            )
        pause = min(SLOWEST_SECONDS, max(FASTEST_SECONDS, self._interval / 2 / max(1, count)))
        given_up = 0
        for ino in self._all_resident() if overflowed else used:
            if self._source.responding:
                given_up = 0 if await self._touch(ino) else given_up + 1
            if given_up == MOST_GIVEN_UP or not self._source.responding:
                log.warning("the source does not answer: what is used is touched later")
                self.used |= used
                self.overflowed |= overflowed
                return
            # The longer the source takes, the less is asked of it.
            await trio.sleep(pause * 2**given_up)

    def _all_resident(self) -> Iterator[int]:
        for ino, record in self._cache.index.replicas.all():
            if record.state is ReplicaState.RESIDENT:
                yield ino

    async def _touch(self, ino: int) -> bool:
        """False where the source did not answer."""
        try:
            with trio.move_on_after(PATIENCE_SECONDS) as patience:
                source, place = self._source, self._known.place(ino)
                await source.call(Lane.BACKGROUND, source.posix.touch, *place)
        except (OSError, MonarchError) as exc:
            # Gone, or replaced: nothing that is used here is at stake.
            self._metrics.touches_failed += 1
            log.debug("inode %d is not touched: %s", ino, exc)
            return True
        if patience.cancelled_caught:
            self._metrics.touches_failed += 1
            return False
        self._metrics.touches_completed += 1
        return True
