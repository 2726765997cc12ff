"""Making replicas durable, in groups."""

from __future__ import annotations

import logging
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import trio

from monarchfs.cache.index.index import Index
from monarchfs.cache.placement.by_inode import ByInode
from monarchfs.cache.placement.events import Action, PlacementEvent, Resized
from monarchfs.cache.placement.placement import Placement
from monarchfs.cache.store.tier import Tier
from monarchfs.cache.tiers import Tiers
from monarchfs.system.threads import run_sync
from monarchfs.types import IndexWriteError, Replica, ReplicaState, TierFile

log = logging.getLogger(__name__)

SYNC_INTERVAL_SECONDS = 30.0

BATCH = 2000
"""Records that are read, noted and marked without a checkpoint: some 10 ms."""


class Durability:
    """Changing: which replicas of each tier were stored since it was last synced. Only numbers are
    kept: many are stored between two syncs. Replicas on a tmpfs do not survive a reboot: they are
    only noted in the lists of segments."""

    def __init__(
        self,
        index: Index,
        tiers: Tiers,
        placement: Placement,
        handle: Callable[[PlacementEvent], list[Action]],
        corrupt: Callable[[int], None],
    ) -> None:
        """``handle`` passes events to placement; ``corrupt`` drops what has wrong bytes."""
        self._index = index
        self._placement = placement
        self._handle = handle
        self._corrupt = corrupt
        self._tiers = tiers
        self._doubted: set[int] = set()
        """The tiers of which a sync failed. The kernel says so once, drops what it could not write,
        and the next sync succeeds: from then on replicas are read before they are marked."""
        self._unsynced = {tier_id: array("Q") for tier_id in tiers.by_id}
        self._changed: ByInode[int] | None = None
        """1 for those whose records came or went since a sync began; None while there is none."""

    def stored(self, ino: int, replica: Replica) -> None:
        """A complete replica was recorded."""
        if replica.segment or not self._tiers.by_id[replica.tier].memory_backed:
            self._unsynced[replica.tier].append(ino)
            self.changed(ino)

    async def take_over(self) -> None:
        """What a worker that ended without a sync, in this boot, left to be synced."""
        for batch in self._index.replicas.not_durable():
            for ino, replica in batch:
                tier = self._tiers.by_id.get(replica.tier)
                complete = replica.state is not ReplicaState.PARTIAL
                if complete and tier is not None and not tier.memory_backed:
                    self.stored(ino, replica)
            await trio.lowlevel.checkpoint()

    def changed(self, ino: int) -> None:
        """Its record came or went. A sync under way does not make the next one durable."""
        if self._changed is not None:
            self._changed.put(ino, 1)

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
            await run_sync(self._index.environment.sync, abandon_on_cancel=True)
        except IndexWriteError as exc:
            log.warning("replicas are not durable: %s", exc)

    async def _measure(self, tier: Tier) -> None:
        """Measure what the extents of its segments take, now that they are on the disk."""
        try:
            if not tier.memory_backed:
                await run_sync(tier.segments.trees.measure, abandon_on_cancel=True)
        except OSError as exc:
            self._tiers.failed(tier, "looking at its segments", exc)

    async def _sync_tier(self, tier_id: int) -> None:
        group, self._unsynced[tier_id] = self._unsynced[tier_id], array("Q")
        tier = self._tiers.by_id[tier_id]
        self._changed = ByInode(array("b", [0]))
        done = 0
        try:
            if not tier.memory_backed:
                await run_sync(self._sync_data, tier, abandon_on_cancel=True)
            while done < len(group):
                await self._mark(tier, group[done : done + BATCH])
                done += BATCH
        except OSError as exc:
            self._tiers.failed(tier, "syncing", exc)
        except IndexWriteError as exc:
            log.warning("replicas are not durable: %s", exc)
        finally:
            # Also if this was cancelled: the end of the mount syncs once more.
            self._unsynced[tier_id] = group[done:] + self._unsynced[tier_id]
            self._changed = None

    def _sync_data(self, tier: Tier) -> None:
        """For a thread, which may outlive the caller. Raises OSError."""
        try:
            tier.sync()
        except OSError:
            self._doubted.add(tier.id)
            raise

    async def _mark(self, tier: Tier, inos: Sequence[int]) -> None:
        """The data of these are on the disk, except of those that were dropped."""
        if tier.id in self._doubted:
            read = self._still(tier, inos).items()
            inos = [ino for ino, now in read if await self._reads_right(tier, ino, now)]
        synced = self._still(tier, inos)
        # The tier notes it too, in case the index is lost.
        allocated = await run_sync(_note, tier, list(synced.values()), abandon_on_cancel=True)
        if not tier.memory_backed:
            synced = self._still(tier, synced)
            self._resize(tier, synced, allocated)
            self._index.replicas.mark_durable(synced)

    async def _reads_right(self, tier: Tier, ino: int, replica: Replica) -> bool:
        """Whether its bytes are on the disk; it is dropped if not."""
        try:
            right = await run_sync(tier.verify_complete, replica, abandon_on_cancel=True)
        except OSError as exc:
            log.debug("tier %s: %s", tier.path, exc)
            right = False
        if not right and self._still(tier, [ino]):
            log.warning("tier %s: a sync lost the replica of inode %d", tier.path, ino)
            self._corrupt(ino)
        return right

    def _still(self, tier: Tier, inos: Iterable[int]) -> dict[int, Replica]:
        """The records of those that were complete in ``tier`` before the sync began."""
        changed = self._changed
        replicas = self._index.replicas.replicas_of(
            [ino for ino in inos if changed is None or not changed.get(ino)]
        )
        return {
            ino: now
            for ino, now in replicas.items()
            if now.tier == tier.id and now.state is not ReplicaState.PARTIAL
        }

    def _resize(
        self, tier: Tier, synced: Mapping[int, Replica], allocated: Mapping[bytes, int]
    ) -> None:
        """Correct what replicas with a file each occupy: their extents are on the disk now."""
        for ino, now in synced.items():
            more = allocated.get(now.name, now.allocated_bytes) - now.allocated_bytes
            if more and not now.segment and not self._placement.busy(ino, tier.id):
                right = now._replace(allocated_bytes=now.allocated_bytes + more)
                self._index.replicas.put_replica(ino, right)
                self._handle(Resized(ino, tier.id, more))


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
