"""Stores small files that the C part has read whole from the source, for readers or for the copier.
Both kinds arrive here, many at a time, and are stored in the same way.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import Reservation
from monarchfs.core.misses import ARCHIVED, CHANGED, Misses, Served
from monarchfs.metrics import NS, Metrics
from monarchfs.prefetch.fills import Fills
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.queue import Batch, CopyJob, Priority
from monarchfs.source.source import Source
from monarchfs.types import Archived, Node

log = logging.getLogger(__name__)

MOST_TOGETHER = 128
"""The most files in one transaction, which one thread writes."""

SIDE_BY_SIDE = 2
"""How many such portions are stored at once."""

PAUSE_SECONDS = 0.01
"""Files that were served during this pause are handled together."""

PATIENCE_SECONDS = 0.03
"""The longest that files wait to be stored with others: a commit costs the same for one as for ten.
The wait ends early with MOST_TOGETHER files, MUCH_BYTES, or a whole batch of the copier."""

MUCH_BYTES = 8 << 20


Arrived = tuple[Node, memoryview, Batch | None]
"""A file that was read, all of its bytes, and for which batch of the copier."""


class SmallFiles:
    """Constant: its parts; the files' ``CopyJob`` are among them. Changing: ``_batches``, how many
    of the copier's are under way; ``_waiting``, files to be stored once a batch is complete
    (``_complete``) or at a time (``_store_by``); ``_storing``, how many tasks store; ``_over``:
    nothing is stored any more."""

    def __init__(
        self,
        misses: Misses,
        source: Source,
        cache: Cache,
        jobs: CopyJobs,
        files: Fills,
        metrics: Metrics,
        nursery: trio.Nursery,
        opened: Callable[[Node, int, bool], None],
    ) -> None:
        """``files`` gets what cannot be read in this way; ``opened`` is told of each file that was
        opened, and how often."""
        self.misses = misses
        self._source = source
        self._cache = cache
        self._jobs = jobs
        self._files = files
        self._metrics = metrics
        self._nursery = nursery
        self._opened = opened
        self._batches = 0
        self._waiting: deque[Arrived] = deque()
        self._waiting_bytes = 0
        self._complete = self._over = False
        self._store_by = math.inf
        self._sleep = self._pause = trio.CancelScope()
        self._patience = PATIENCE_SECONDS
        self._storing = 0
        files.on_reading.add(self.leave)

    async def run(
        self, pause_seconds: float = PAUSE_SECONDS, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """For ever."""
        self._patience = patience_seconds
        while True:
            busy = self._storing == SIDE_BY_SIDE
            self._sleep = trio.CancelScope(deadline=math.inf if busy else self._store_by)
            with self._sleep:
                await trio.lowlevel.wait_readable(self.misses.events_fd)
            self.take_events()
            with trio.CancelScope() as self._pause:
                await trio.sleep(0 if self._jobs.hurried else pause_seconds)

    # -- for the copier

    def want(self, places: Sequence[Reservation], priority: Priority) -> Batch:
        """Make a batch for ``copy``. Files of it that are read for a reader meanwhile also count
        for it. No checkpoint."""
        by_ino = {place.node.ino: place for place in places}
        batch = Batch(by_ino, priority, len(places), len(places))
        for ino in by_ino:
            job = self._jobs.get(ino)
            assert job.arriving
            job.batch = batch
        return batch

    async def copy(self, batch: Batch) -> tuple[float, list[int]]:
        """Have its files read, and store each at its place. Raises nothing. Returns how long the
        source took, and the sizes of the files."""
        nodes, owners = [place.node for place in batch.places.values()], self._jobs.owners
        self._batches += 1
        try:
            await self._source.open_directories(self.misses.unopened(nodes))
            theirs = [] if owners is None else list(filter(owners.elsewhere, nodes))
            numbers = {node.ino for node in theirs}
            self._fetch([node for node in nodes if node.ino not in numbers])
            if owners is not None and theirs:
                asked = [job for job in (self._jobs.get(n.ino) for n in theirs) if job.arriving]
                for job in asked:
                    job.asked = True
                try:
                    late = await owners.ask(theirs)
                finally:
                    left = self._take_asked(asked)
                for node in late:
                    if node in left and (wanted := self._jobs.get(node.ino).batch) is not None:
                        self.leave(node.ino)
                        self._jobs.want(node.ino, wanted.priority)  # its owner still copies it
                self._fetch(left)
            await batch.done.wait()
        finally:
            self._batches -= 1
        return batch.took_ns / NS, batch.sizes

    def _take_asked(self, jobs: Sequence[CopyJob]) -> list[Node]:
        """Those of which another node is asked, and which have not arrived: it is asked no more."""
        asked = [job for job in jobs if job.asked]
        for job in asked:
            job.asked = False
        return [job.batch.places[job.ino].node for job in asked if job.batch is not None]

    def _fetch(self, nodes: Sequence[Node]) -> None:
        nodes = [node for node in nodes if self._jobs.get(node.ino).batch is not None]
        for ino in self.misses.fetch(nodes, self._batches):
            wanted = self._no_more(ino)
            assert wanted is not None
            self._files.copy_alone(wanted.places[ino], wanted.priority)
            wanted.end_one()
        if hurried := [node.ino for node in nodes if self._jobs.get(node.ino).hurried]:
            self.misses.hurry(hurried)

    def hurry(self, inos: Sequence[int]) -> None:
        """Somebody waits until these are stored. No checkpoint."""
        jobs = self._jobs.hurry(inos)
        if not jobs:
            return
        self._fetch(self._take_asked(jobs))  # who waits has no time to wait for other nodes
        self.misses.hurry([job.ino for job in jobs])
        self._complete |= any(self._jobs.get(node.ino).hurried for node, *_ in self._waiting)
        self._pause.cancel()
        self._begin_storing()

    def leave(self, ino: int) -> None:
        """Do nothing more for a file that no thread has begun to read. No checkpoint."""
        if (wanted := self._no_more(ino)) is not None:
            self._cache.writer.cancel(wanted.places[ino])
            self._end([(ino, wanted)])

    def suspend(self) -> None:
        """The mount ends: nothing more is stored."""
        self._over = True
        for ino, batch in self._jobs.take_batches():
            self._cache.writer.cancel(batch.places[ino])
        for node, _data, wanted in self._waiting:
            if wanted is not None:
                self._cache.writer.cancel(wanted.places[node.ino])
        self._waiting.clear()

    # -- what the C part reports

    def take_events(self) -> None:
        """Handle what was served since the last call. No checkpoint."""
        events = self.misses.served()
        others = [served.ino for served in events if self._jobs.get(served.ino).batch is None]
        nodes = self._cache.index.nodes.nodes_of(others)
        for served in events:
            self._complete |= self._jobs.get(served.ino).hurried
            wanted = self._no_more(served.ino)
            if wanted is not None:
                node: Node | None = wanted.places[served.ino].node
            else:
                node = nodes.get(served.ino) or self._cache.index.nodes.node(served.ino)
            if node is not None and served.opens:
                self._opened(node, served.opens, served.spared)
            if wanted is not None:
                self._take(wanted, served)
            elif node is not None and self._jobs.keeps and not served.from_window:
                self._keep(node, served)
        self._begin_storing()

    def _begin_storing(self) -> None:
        if self._waiting and self._storing < SIDE_BY_SIDE and self._due() and not self._over:
            self._storing += 1
            self._nursery.start_soon(self._store_all)

    def _no_more(self, ino: int) -> Batch | None:
        """A file has arrived or is given up: the batch of the copier that waited for it."""
        job = self._jobs.get(ino)
        if job.batch is None:
            return None
        wanted, job.batch = job.batch, None
        wanted.unread -= 1
        self._complete |= not wanted.unread
        return wanted

    def _wait(self, arrived: Arrived) -> None:
        """Queue a file to be stored with others."""
        if not self._waiting:
            self._store_by = self._sleep.deadline = trio.current_time() + self._patience
        self._waiting.append(arrived)
        self._waiting_bytes += len(arrived[1])

    def _due(self) -> bool:
        """Whether the waiting files are to be stored now."""
        return (
            self._complete
            or len(self._waiting) >= MOST_TOGETHER
            or self._waiting_bytes >= MUCH_BYTES
            or trio.current_time() >= self._store_by
        )

    def _keep(self, node: Node, served: Served) -> None:
        """Handle a file that a reader wanted."""
        ino = node.ino
        if served.data is None:
            if served.opens and not (self._jobs.get(ino).arriving or self._cache.resident(node)):
                self._jobs.want_opened(ino)  # its bytes must be read again
        elif not node.outdated and self._jobs.begin_arrival(ino):
            self._wait((node, served.data, None))

    def _take(self, wanted: Batch, served: Served) -> None:
        """Handle a file that the copier wanted."""
        ino = served.ino
        place = wanted.places[ino]
        node = place.node
        if served.data is not None:
            if served.took_ns and not served.from_window:
                wanted.took_ns += served.took_ns
                wanted.sizes.append(place.size)
            self._jobs.forget_failures(ino)
            self._wait((node, served.data, wanted))
            return
        self._cache.writer.cancel(place)
        if served.error == CHANGED:
            self._cache.accounts.on_outdated(node.ino)
        known = self._cache.index.nodes.node(ino)
        if known is None or known.outdated:
            self._metrics.copies_outdated += 1
            self._cache.reasons.put_changed(node, "it changed in the source while it was copied")
        elif served.error == ARCHIVED:
            archived = Archived(errno.ENODATA, "its bytes are in the archive (HSM)")
            self._jobs.failed(ino, wanted.priority, archived)
        elif served.error > 0:
            exc = OSError(served.error, os.strerror(served.error))
            self._jobs.failed(ino, wanted.priority, exc)
        else:
            self._jobs.want(ino, wanted.priority)
        self._end([(ino, wanted)])

    def _end(self, ended: Sequence[tuple[int, Batch | None]]) -> None:
        self._jobs.end_arrivals([ino for ino, _wanted in ended])
        for _ino, wanted in ended:
            if wanted is not None:
                wanted.end_one()

    # -- the tiers

    async def _store_all(self) -> None:
        try:
            while self._waiting and self._due():
                await self._store(self._portion())
        finally:
            self._storing -= 1
            self._sleep.deadline = self._store_by

    def _portion(self) -> list[Arrived]:
        count = min(MOST_TOGETHER, len(self._waiting))
        portion = [self._waiting.popleft() for _ in range(count)]
        self._waiting_bytes -= sum(len(data) for _node, data, _wanted in portion)
        if not self._waiting:
            self._complete, self._store_by = False, math.inf
        return portion

    async def _store(self, arrived: list[Arrived]) -> None:
        try:
            kept = self._placed(arrived)
            if not kept:
                await trio.lowlevel.checkpoint()
                return
            results = await self._cache.writer.write_each(kept)
            for (place, _data), result in zip(kept, results, strict=True):
                if isinstance(result, OSError):
                    self._cache.writer.tier_failed(place, result)
                    self._metrics.copy_failed(result.errno)
                    await self._cache.writer.abandon(
                        place, Cause.FAILED, f"copying failed: {result.strerror}"
                    )
        finally:
            self._end([(node.ino, wanted) for node, _data, wanted in arrived])

    def _placed(self, arrived: list[Arrived]) -> list[tuple[Reservation, memoryview]]:
        """The files for which there is room, each with its place."""
        homeless = [node for node, _data, wanted in arrived if wanted is None]
        found = iter(self._cache.reservations.reserve_each(homeless, evicts=True))
        places = [
            next(found) if wanted is None else wanted.places[node.ino]
            for node, _data, wanted in arrived
        ]
        return [
            (place, data)
            for place, (_node, data, _wanted) in zip(places, arrived, strict=True)
            if place is not None
        ]
