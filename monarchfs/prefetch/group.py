"""Small files that are copied together: one errand of a thread in the source, one in the tier.

Readers do not notice. A file that somebody reads is taken out if its turn has not come, and fetched
at once; if it was read already, it is answered from that. A file that hangs holds up none of the
others: ``give_back`` has those that were not begun copied by others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import trio

from monarchfs.cache.cache import Cache
from monarchfs.prefetch.fetch import Fetch
from monarchfs.prefetch.fill import Fill
from monarchfs.source.errand import Errand, Wanted
from monarchfs.source.source import Source
from monarchfs.types import Lane

Member = tuple[Fill, Fetch]
"""A file, and the fetch of all of it, which is claimed."""


class Group:
    """Constant: its parts. Changing: ``members``, by their places in the errand, without those that
    were taken out; ``started``, when the errand began (trio's clock)."""

    def __init__(
        self,
        members: Sequence[Member],
        source: Source,
        cache: Cache,
        nursery: trio.Nursery,
        failed: Callable[[Fill, OSError], None],
    ) -> None:
        """``failed`` is told of what the source said of a file, before that one is let go."""
        self.members: dict[int, Member] = {}
        self.started: float | None = None
        self._wanted: list[Wanted] = []
        self._source = source
        self._cache = cache
        self._nursery = nursery
        self._failed = failed
        self._errand: Errand | None = None
        for fill, fetch in members:
            try:
                self._wanted.append(fill.remote.wanted())
            except OSError as exc:
                self.members[-1 - len(self.members)] = fill, fetch  # no place in the errand
                fill.answered(fetch, exc)
            else:
                self.members[len(self._wanted) - 1] = fill, fetch

    async def run(self) -> tuple[float, list[int]]:
        """Copy them. Raises nothing. Returns how long the source took, and for files of which
        sizes."""
        try:
            seconds = await self._read()
            sizes = [fill.size for fill, fetch in self.members.values() if fetch.data is not None]
        finally:
            await self._finish(self.members)
        return seconds, sizes

    async def _finish(self, members: dict[int, Member]) -> None:
        """Store what was read, and let go of them all."""
        try:
            for fill, fetch in members.values():
                if fetch.error is not None:
                    self._failed(fill, fetch.error)
            await self._write(list(members.values()))
        finally:
            # Who is told of the last one's end finds that none is left.
            while members:
                _, (fill, fetch) = members.popitem()
                fetch.pull = None
                fill.end(fetch)

    async def _read(self) -> float:
        errand = self._errand = self._source.errand(self._wanted, self._deliver)
        for place, (fill, fetch) in self.members.items():
            if place >= 0:
                fetch.pull = partial(self._pull, place, fill, fetch)
        started = self.started = trio.current_time()
        await self._source.read_each(errand, Lane.BACKGROUND)
        self._deliver()
        self._errand = None
        for _, fetch in self.members.values():
            fetch.pull = None
        return trio.current_time() - started

    def _pull(self, place: int, fill: Fill, fetch: Fetch) -> None:
        """A reader wants it now."""
        assert self._errand is not None
        if self._errand.take(place):
            del self.members[place]
            fetch.pull = None
            self._nursery.start_soon(fill.fetch, fetch, Lane.DEMAND)
        elif self._errand.wait_for(place) is not None:
            self._deliver()

    def _deliver(self) -> None:
        """Hand over what was read so far."""
        if self._errand is None:
            return  # the last news of one that has ended: all was handed over
        for place, answer in list(self._errand.answers.items()):
            if place in self.members:
                fill, fetch = self.members[place]
                fill.answered(fetch, answer)

    def give_back(self) -> list[Member]:
        """The errand hangs: what it has not begun is not of this group any more, and what it has
        read is stored now. No checkpoint."""
        if self._errand is None:
            return []
        self._deliver()
        taken = [self.members.pop(place) for place in self._errand.take_all()]
        for _, fetch in taken:
            fetch.pull = None
        done = [place for place, (_, fetch) in self.members.items() if fetch.done.is_set()]
        if done:
            self._nursery.start_soon(self._finish, {n: self.members.pop(n) for n in done})
        return taken

    async def _write(self, members: list[Member]) -> None:
        kept = []
        for fill, fetch in members:
            place = fill.kept_whole(fetch)
            if place is not None and fetch.data is not None:
                kept.append((fill, fetch, place, fetch.data))
        if not kept:
            return
        results = await self._cache.write_each([(place, data) for *_, place, data in kept])
        for (fill, fetch, place, _), result in zip(kept, results, strict=True):
            fill.stored_whole(fetch, place, result)
