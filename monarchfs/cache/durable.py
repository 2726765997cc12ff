"""Making replicas durable, in groups."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import trio

from monarchfs.cache.tiers import Tiers
from monarchfs.index.index import Index
from monarchfs.placement.events import Action, PlacementEvent, Resized
from monarchfs.placement.placement import Placement
from monarchfs.store.tier import Tier
from monarchfs.system.threads import run_sync
from monarchfs.types import IndexWriteError, Replica, TierFile

log = logging.getLogger(__name__)

SYNC_INTERVAL_SECONDS = 30.0

Group = dict[int, Replica]
"""Replicas by inode number, in the order in which they were stored."""


class Durability:
    """Changing: the replicas of each tier that were stored since it was last synced, and the group
    that is being synced. Replicas on a tmpfs do not survive a reboot: they are only noted in the
    lists of segments."""

    def __init__(
        self,
        index: Index,
        tiers: Tiers,
        placement: Placement,
        handle: Callable[[PlacementEvent], list[Action]],
    ) -> None:
        """``handle`` passes events to placement."""
        self._index = index
        self._placement = placement
        self._handle = handle
        self._tiers = tiers
        self._unsynced: dict[int, Group] = {tier_id: {} for tier_id in tiers.by_id}
        self._syncing: Group = {}

    def stored(self, ino: int, replica: Replica) -> None:
        """A complete replica was recorded."""
        if replica.segment or not self._tiers.by_id[replica.tier].memory_backed:
            self._unsynced[replica.tier][ino] = replica

    def dropped(self, ino: int, tier_id: int) -> None:
        """The record is gone. The next one of this inode is not synced by an earlier sync."""
        if tier_id in self._unsynced:
            self._unsynced[tier_id].pop(ino, None)
        self._syncing.pop(ino, None)

    async def sync_loop(self) -> None:
        """Make replicas durable in groups, for ever."""
        while True:
            await trio.sleep(SYNC_INTERVAL_SECONDS)
            await self.sync()

    async def sync(self) -> None:
        """Sync the data, then the records, then mark these as durable. What fails is tried again
        with the next group."""
        for tier_id in self._unsynced:
            if self._unsynced[tier_id]:
                await self._sync_tier(tier_id)
            await self._measure(self._tiers.by_id[tier_id])
        try:
            await run_sync(self._index.sync, abandon_on_cancel=True)
        except IndexWriteError as exc:
            log.warning("replicas are not durable: %s", exc)

    def _resize(self, tier_id: int, allocated: Mapping[bytes, int]) -> None:
        """Correct what replicas with a file each occupy: their extents are on the disk now."""
        for ino, synced in self._syncing.items():
            now = self._index.replica(ino)
            if now is None or (now.tier, now.name) != (tier_id, synced.name) or now.segment:
                continue
            more = allocated.get(now.name, now.allocated_bytes) - now.allocated_bytes
            if more and not self._placement.busy(ino, tier_id):
                right = now._replace(allocated_bytes=now.allocated_bytes + more)
                self._index.put_replica(ino, right)
                self._handle(Resized(ino, tier_id, more))

    async def _measure(self, tier: Tier) -> None:
        """Measure what the extents of its segments take, now that they are on the disk."""
        try:
            if not tier.memory_backed:
                await run_sync(tier.segments.trees.measure, abandon_on_cancel=True)
        except OSError as exc:
            self._tiers.failed(tier, "looking at its segments", exc)

    async def _sync_tier(self, tier_id: int) -> None:
        self._syncing, self._unsynced[tier_id] = self._unsynced[tier_id], {}
        tier = self._tiers.by_id[tier_id]
        try:
            if not tier.memory_backed:
                await run_sync(tier.sync, abandon_on_cancel=True)
            # The tier notes it too, in case the index is lost.
            group = list(self._syncing.values())
            allocated = await run_sync(_note, tier, group, abandon_on_cancel=True)
            if not tier.memory_backed:
                self._resize(tier_id, allocated)
                self._index.mark_durable(self._syncing)
            self._syncing = {}
        except OSError as exc:
            self._tiers.failed(tier, "syncing", exc)
        except IndexWriteError as exc:
            log.warning("replicas are not durable: %s", exc)
        finally:
            # Also if this was cancelled: the end of the mount syncs once more.
            self._unsynced[tier_id] = self._syncing | self._unsynced[tier_id]
            self._syncing = {}


def _note(tier: Tier, replicas: Sequence[Replica]) -> dict[bytes, int]:
    """Note in the tier that their data are on the disk. Returns, by name, the bytes that those with
    a file each occupy. For a thread."""
    by_segment: dict[int, list[TierFile]] = defaultdict(list)
    own = [(replica.name, replica.checksum) for replica in replicas if not replica.segment]
    for replica in replicas:
        if replica.segment:
            by_segment[replica.segment].append(file_of(replica))
    allocated = tier.files.mark_synced(own)
    for segment, rows in by_segment.items():
        tier.segments.lists.append(segment, rows)
    return allocated


def file_of(replica: Replica) -> TierFile:
    """The row of a segment's list about it."""
    return TierFile(
        replica.name,
        replica.checksum,
        replica.size,
        replica.allocated_bytes,
        synced=True,
        segment=replica.segment,
        offset=replica.offset,
    )
