"""Which replicas are not known to survive a reboot yet, and the groups in which they come to be."""

from __future__ import annotations

import logging

import trio

from monarchfs.cache.tiers import Tiers
from monarchfs.index.index import Index
from monarchfs.types import IndexWriteError

log = logging.getLogger(__name__)

SYNC_INTERVAL_SECONDS = 30.0


class Durability:
    """Changing: the inodes of each tier whose replicas were stored since they were last synced
    (dicts for their order), and the group being synced now."""

    def __init__(self, index: Index, tiers: Tiers) -> None:
        self._index = index
        self._tiers = tiers
        self._unsynced: dict[int, dict[int, None]] = {tier_id: {} for tier_id in tiers.by_id}
        self._syncing: dict[int, None] = {}

    def stored(self, ino: int, tier_id: int) -> None:
        """A complete replica was recorded. What a tmpfs holds is gone after a reboot anyway."""
        if not self._tiers.by_id[tier_id].memory_backed:
            self._unsynced[tier_id][ino] = None

    def dropped(self, ino: int, tier_id: int) -> None:
        """Its record is gone: what is recorded for this inode next was not synced."""
        if tier_id in self._unsynced:
            self._unsynced[tier_id].pop(ino, None)
        self._syncing.pop(ino, None)

    async def sync_loop(self) -> None:
        """Make replicas durable in groups, for ever."""
        while True:
            await trio.sleep(SYNC_INTERVAL_SECONDS)
            await self.sync()

    async def sync(self) -> None:
        """Data first, then the records, then the mark that they survive a reboot. What fails is
        tried again with the next group."""
        for tier_id in self._unsynced:
            if self._unsynced[tier_id]:
                await self._sync_tier(tier_id)
        try:
            await trio.to_thread.run_sync(self._index.sync, abandon_on_cancel=True)
        except IndexWriteError as exc:
            log.warning("replicas are not durable: %s", exc)

    async def _sync_tier(self, tier_id: int) -> None:
        self._syncing, self._unsynced[tier_id] = self._unsynced[tier_id], {}
        tier = self._tiers.by_id[tier_id]
        try:
            await trio.to_thread.run_sync(tier.sync, abandon_on_cancel=True)
            self._index.mark_durable(self._syncing)
            self._syncing = {}
        except OSError as exc:
            self._tiers.trouble(tier, "syncing", exc)
        except IndexWriteError as exc:
            log.warning("replicas are not durable: %s", exc)
        finally:
            # Also of one that was cancelled: the end of the mount syncs once more.
            self._unsynced[tier_id] = self._syncing | self._unsynced[tier_id]
            self._syncing = {}
