"""The files that are read from the source or copied, by inode number."""

from __future__ import annotations

import logging

import trio

from monarchfs.cache.cache import Cache
from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import Reservation
from monarchfs.metrics import Metrics
from monarchfs.prefetch.copy import Copy
from monarchfs.prefetch.fill import Fill
from monarchfs.prefetch.jobs import CopyJobs
from monarchfs.prefetch.queue import Priority
from monarchfs.prefetch.remote import RemoteFile
from monarchfs.prefetch.spans import Nodes
from monarchfs.source.source import Source
from monarchfs.system.listeners import Listeners
from monarchfs.types import Lane, Node

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 30.0
CHECKPOINT_MIN_BYTES = 64 << 20
"""A crash costs a smaller file's copy all it had; of a larger one, what the last half minute
brought."""


class Fills:
    """Constant: its parts. Changing: ``files`` of the jobs."""

    def __init__(
        self,
        jobs: CopyJobs,
        source: Source,
        cache: Cache,
        metrics: Metrics,
        nursery: trio.Nursery,
        nodes: Nodes | None,
        *,
        trusts_times: bool,
    ) -> None:
        """``nodes`` share large files (None: nobody does); ``trusts_times``: the source does not
        change while it is mounted."""
        self._nodes = nodes
        self.on_reading: Listeners[[int]] = Listeners()
        """A file is opened here, and no thread of the C part has begun to read it."""
        self._jobs = jobs
        self._files = jobs.files
        self._source = source
        self._cache = cache
        self._metrics = metrics
        self._nursery = nursery
        self._trusts_times = trusts_times
        cache.accounts.on_replaced.add(self._give_up)

    def _give_up(self, tier_id: int) -> None:
        for fill in list(self._files.values()):
            reservation = fill.copy.reservation
            if reservation is not None and reservation.tier.id == tier_id:
                fill.copy.give_up(Cause.FAILED, "its part is gone: its tier is another directory")

    def get(self, ino: int) -> Fill | None:
        return self._files.get(ino)

    async def open(self, node: Node, *, as_is: bool = False) -> Fill:
        """The file behind a node that is not resident; its ``handles`` go up by one.

        Asks the source for a descriptor, and so for permission, unless that was done already.
        Raises the source's OSError, or SourceChanged where it holds another version now.

        ``as_is``, for an outdated node: what is read is what the source has now at its place, or
        what those read who have it open already; nothing of it is kept. SourceChanged then means
        that the directory lies elsewhere.
        """
        fill = self._files.get(node.ino)
        if fill is None:
            fill = self._make(node)
            if not self._cache.readers.exclude(node.ino, excluded=True):
                self.on_reading(node.ino)
        fill.copy.handles += 1
        try:
            if as_is:
                await fill.open_as_is()
                fill.copy.outdated()
            else:
                await fill.copy.remote.open(Lane.DEMAND)
        except BaseException:
            fill.copy.release()
            raise
        return fill

    def to_copy(self, node: Node) -> Fill | None:
        """The file; None where all of it is being read already, for a reader or into the window."""
        fill = self._files.get(node.ino)
        if fill is None:
            if self._cache.readers.exclude(node.ino, excluded=True):
                self._cache.readers.exclude(node.ino, excluded=False)
                return None
            fill = self._make(node)
        return fill

    def copy_alone(self, place: Reservation, priority: Priority) -> None:
        """Copy a small file as large ones are; it has its room. No checkpoint."""
        node = place.node
        fill = self.to_copy(node)
        if fill is None:
            self._cache.writer.cancel(place)
        elif fill.copy.begin_filling(place):
            self._jobs.begin_copy(fill, priority)
        self._jobs.end_arrivals([node.ino])

    def _make(self, node: Node) -> Fill:
        remote = RemoteFile(
            node, self._source, self._cache, self._nodes, trusts_times=self._trusts_times
        )
        copy = Copy(
            node,
            remote,
            self._cache,
            self._metrics,
            self._nursery,
            self._forget,
            self._jobs.stepped,
        )
        fill = self._files[node.ino] = Fill(copy, self._cache, self._metrics, self._nursery)
        return fill

    def _forget(self, copy: Copy) -> None:
        ino = copy.node.ino
        fill = self._files.get(ino)
        if fill is not None and fill.copy is copy:
            del self._files[ino]
            fill.close()
            self._cache.readers.exclude(ino, excluded=False)
            self._jobs.on_step([ino])

    async def checkpoints(self) -> None:
        """Record how far large copies have come, for ever."""
        while True:
            await trio.sleep(CHECKPOINT_SECONDS)
            for ino, fill in list(self._files.items()):
                if fill.copy.size >= CHECKPOINT_MIN_BYTES:
                    try:
                        fill.copy.checkpoint()
                    except OSError as exc:
                        log.warning("inode %d: its progress is not recorded: %s", ino, exc)
                    await trio.lowlevel.checkpoint()

    async def suspend(self) -> None:
        """Record what is partly copied, before the end. Nothing may be reading any more."""
        for fill in list(self._files.values()):
            await fill.copy.suspend()
