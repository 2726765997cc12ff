"""Files of dropped records, on their way out.

Unlinking a large file takes the disk a while, so threads do it. The room of the file counts as used
until it is gone. A crash in between is harmless: the index journals each file before its record
goes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from functools import partial

import trio

from monarchfs.cache.index.index import Index
from monarchfs.cache.placement.events import (
    Action,
    Dropped,
    Evicted,
    EvictionFailed,
    PlacementEvent,
)
from monarchfs.cache.replicas import OpenReplica, Removal
from monarchfs.cache.segments import SegmentRecords
from monarchfs.cache.store.tier import Tier
from monarchfs.cache.tier_threads import TierThreads
from monarchfs.cache.tiers import Tiers
from monarchfs.types import IndexWriteError, Replica, ReplicaState

log = logging.getLogger(__name__)

KEPT_SECONDS = 2.0
"""How long a removal waits for others to close the file; then the file counts as gone."""

Item = tuple[int, Replica]
"""An inode number, and its dropped record."""


class Removals:
    """Changing: what is under way by tier and inode; what could not be removed yet, and what
    somebody has open, which both count although their records are gone."""

    def __init__(
        self,
        index: Index,
        tiers: Tiers,
        handle: Callable[[PlacementEvent], list[Action]],
        threads: TierThreads,
        nursery: trio.Nursery,
        segments: SegmentRecords,
        let_go: Callable[[int], trio.Event | None],
    ) -> None:
        self._segments = segments
        self._index = index
        self._tiers = tiers
        self._handle = handle
        self._threads = threads
        self._nursery = nursery
        self._let_go = let_go
        self._pending: dict[int, set[Removal]] = {tier_id: set() for tier_id in tiers.by_id}
        self._stuck: list[Item] = []
        self._open: list[Item] = []

    def pending(self, tier_id: int) -> list[Removal]:
        """What new writes to the tier must wait for: its room already counts as theirs."""
        return list(self._pending[tier_id])

    @property
    def count(self) -> int:
        return sum(len(pending) for pending in self._pending.values())

    def counted(self, tier_id: int) -> list[Replica]:
        """What placement counts in the tier although the record is gone."""
        return [record for _, record in (*self._stuck, *self._open) if record.tier == tier_id]

    def replaced(self, tier_id: int) -> None:
        """The tier has another directory: what had no record any more is not there."""
        self._stuck = [item for item in self._stuck if item[1].tier != tier_id]
        self._open = [item for item in self._open if item[1].tier != tier_id]

    def start(self, ino: int, record: Replica, opened: OpenReplica | None = None) -> None:
        """Remove the file of a dropped record; placement knows that it is leaving.

        ``opened``: somebody still reads it. An unlinked file keeps its blocks until it is closed;
        only then is placement told that they are free. A replica that shares its file is punched
        when it is closed.
        """
        if opened is not None:
            self._open.append((ino, record))
        if record.segment and opened is not None and opened.uses:
            self._segments.leaves(record)
            opened.then.append(partial(self._closed, ino, record))
        else:
            self._start([(ino, record)], opened)

    def start_each(self, replicas: Sequence[Item]) -> None:
        """``start`` of each, which nobody has open; those that share files together."""
        shared: dict[int, list[Item]] = defaultdict(list)
        for ino, record in replicas:
            if record.segment:
                shared[record.tier].append((ino, record))
            else:
                self._start([(ino, record)])
        for items in shared.values():
            self._start(items)

    def _start(self, items: Sequence[Item], opened: OpenReplica | None = None) -> None:
        """Start with one that has a file of its own, or with those of a tier that share files."""
        removal = Removal()
        self._pending[items[0][1].tier].add(removal)
        kept: list[trio.Event] = []
        for ino, record in items:
            if record.segment:
                self._segments.leaves(record)
            if (closed := self._let_go(ino)) is not None:
                kept.append(closed)
        self._nursery.start_soon(self._remove, items, removal, opened, kept)

    def _closed(self, ino: int, record: Replica) -> None:
        if self._forget_open((ino, record)):
            self._handle(Dropped(ino, record.tier, record.allocated_bytes))
            self.start(ino, record)

    async def finish(self, ino: int, record: Replica) -> None:
        """Remove the file and wait until it is gone, even if the mount ends meanwhile."""
        removal = Removal()
        self._pending[record.tier].add(removal)
        await self._remove([(ino, record)], removal, None, [])

    async def _remove(
        self,
        items: Sequence[Item],
        removal: Removal,
        opened: OpenReplica | None,
        kept: Sequence[trio.Event],
    ) -> None:
        tier = self._tiers.by_id[items[0][1].tier]
        try:
            with trio.CancelScope(shield=True):
                await self._remove_files(tier, items, kept)
        except OSError as exc:
            self._tiers.failed(tier, "removing a replica", exc)
            removal.failed = True
            for item in items:
                if opened is None:
                    self._handle(EvictionFailed(item[0], tier.id))
                if opened is None or self._forget_open(item):
                    self._stuck.append(item)
        else:
            for ino, record in items:
                if not record.segment:
                    self.gone(record.tier, record.name)
                if opened is None:
                    self._handle(Evicted(ino, record.tier))
                elif opened.uses:
                    opened.then.append(partial(self._files_removed, ino, record))
                else:
                    self._files_removed(ino, record)
        finally:
            self._pending[tier.id].discard(removal)
            removal.done.set()

    async def _remove_files(
        self, tier: Tier, items: Sequence[Item], kept: Sequence[trio.Event]
    ) -> None:
        """Remove what ``_start`` was given. Raises OSError."""
        _ino, record = items[0]
        if record.segment:
            for closed in kept:
                await closed.wait()
            await self._segments.remove(items)
            return
        if record.state is ReplicaState.PARTIAL:
            await self._threads.run(tier.files.remove_part, record.name)
        else:
            await self._threads.run(tier.files.remove, record.name, record.checksum)
        with trio.move_on_after(KEPT_SECONDS):
            for closed in kept:
                await closed.wait()

    def _files_removed(self, ino: int, record: Replica) -> None:
        if self._forget_open((ino, record)):
            self._handle(Dropped(ino, record.tier, record.allocated_bytes))
            self._handle(Evicted(ino, record.tier))

    def _forget_open(self, item: Item) -> bool:
        """It does not count as open any more. False if it did not: its directory is gone."""
        counted = item in self._open
        if counted:
            self._open.remove(item)
        return counted

    def gone(self, tier_id: int, name: bytes) -> None:
        """No file of that name is in the tier any more."""
        try:
            self._index.replicas.file_gone(tier_id, name)
        except IndexWriteError as exc:
            # The next mount looks for it once more.
            log.warning("the journal keeps an entry of a file that is gone: %s", exc)

    def retry(self, busy: Container[bytes]) -> None:
        """Try again what could not be removed, in tiers that are in service by now. Skips the names
        ``busy``, which are being copied anew."""
        again = [item for item in self._stuck if not self._tiers.out_of_service(item[1].tier)]
        for ino, record in again:
            if record.name in busy and not record.segment:
                continue
            self._stuck.remove((ino, record))
            self._handle(Dropped(ino, record.tier, record.allocated_bytes))
            if (
                not record.segment
                and self._index.replicas.owner(record.tier, record.name) is not None
            ):
                # A new replica of the same version took the place of the file.
                self._handle(Evicted(ino, record.tier))
            else:
                self.start(ino, record)
