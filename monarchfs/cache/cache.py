"""The owner of replicas: carries out what placement decides, on the index and the tiers.

Nothing here reads the source. All methods run on the event loop; those that wait are async.
"""

from __future__ import annotations

import logging
import os

from monarchfs.cache.filling import OUT_OF_DESCRIPTORS, Filling
from monarchfs.cache.replicas import OpenReplica
from monarchfs.placement.events import Loaded
from monarchfs.store.errors import ReplicaLost
from monarchfs.store.tier import replica_name
from monarchfs.types import Data, Node, Replica, ReplicaState

log = logging.getLogger(__name__)


class Cache(Filling):
    """Replicas of one mount: what an earlier one left, those that are read, those to come."""

    # -- start and end

    def load(self, *, rebooted: bool) -> None:
        """Take over what an earlier mount left. After a reboot only synced replicas count."""
        totals = self.index.tier_totals()
        parts: dict[int, set[str]] = {tier_id: set() for tier_id in self.tiers}
        whole: dict[int, set[str]] = {tier_id: set() for tier_id in self.tiers}
        # The records are walked only where that can tell something: a mount must not take longer
        # the more it has cached.
        if rebooted or any(n[1] for n in totals.values()) or totals.keys() - self.tiers.keys():
            lost = []
            for ino, replica in self.index.replicas():
                if replica.tier not in self.tiers or (rebooted and not replica.durable):
                    lost.append((ino, replica))
                elif replica.state is ReplicaState.PARTIAL:
                    parts[replica.tier].add(replica_name(replica.version))
                elif rebooted:
                    whole[replica.tier].add(replica_name(replica.version))
            for ino, replica in lost:
                self.index.drop_replica(ino)
                self._tiers.unlink(replica)
        self._tiers.look()
        for tier_id, (resident, partial, allocated) in self.index.tier_totals().items():
            self._handle(Loaded(tier_id, resident + partial, allocated))
        for tier in self.tiers.values():
            try:
                tier.clean_parts(parts[tier.id])
                if rebooted:  # a rename may have reached the disk where its record did not
                    tier.clean_replicas(whole[tier.id])
            except OSError as exc:
                self._tiers.trouble(tier, "cleaning", exc)

    def clean_tiers(self) -> None:
        """Remove all replicas, for an index that knows none. Blocks, longer the more there are."""
        for tier in self.tiers.values():
            try:
                removed = tier.clean_replicas(()) + tier.clean_parts(())
            except OSError as exc:
                self._tiers.trouble(tier, "cleaning", exc)
            else:
                if removed:
                    log.info("tier %s: removed %d unknown replicas", tier.path, len(removed))

    def close(self) -> None:
        """Close what is open. Replicas stay."""
        for replica in self._open.values():
            os.close(replica.fd)
        self._open.clear()

    def check_invariants(self) -> None:
        """Raises AssertionError where the books are wrong; for tests."""
        self._placement.check_invariants()
        assert all(replica.uses > 0 for replica in self._open.values())

    # -- reading

    def resident(self, ino: int) -> bool:
        if ino in self._open:
            return True
        record = self.index.replica(ino)
        return record is not None and record.state is ReplicaState.RESIDENT

    def acquire(self, node: Node) -> OpenReplica | None:
        """The complete replica of ``node``, open, or None. Each needs a ``release``."""
        replica = self._open.get(node.ino)
        if replica is None:
            record = self.index.replica(node.ino)
            if record is None or record.state is not ReplicaState.RESIDENT:
                return None
            replica = self._open_replica(node, record)
            if replica is None:
                return None
            self._open[node.ino] = replica
        replica.uses += 1
        return replica

    def release(self, replica: OpenReplica) -> None:
        replica.uses -= 1
        if replica.uses:
            return
        if self._open.get(replica.ino) is replica:
            del self._open[replica.ino]
        os.close(replica.fd)
        if (reason := self._doomed.pop(replica.ino, None)) is not None:
            self.drop(replica.ino, reason)

    async def read(self, replica: OpenReplica, offset: int, size: int) -> Data:
        """``OpenReplica.read`` in a thread, which keeps the descriptor open until it is done.
        Raises OSError of the tier."""
        replica.uses += 1
        try:
            return await self._in_thread(replica.read, offset, size)
        finally:
            self.release(replica)

    def failed_read(self, replica: OpenReplica, exc: OSError) -> None:
        """A tier failed under a reader, who goes to the source: the replica is not used again."""
        self._tiers.trouble(self.tiers[replica.tier], "reading", exc)
        # Others who read it may have said so already; what is recorded now may be a new one.
        if self._open.get(replica.ino) is replica:
            del self._open[replica.ino]
            self.drop(replica.ino, f"the replica could not be read: {exc.strerror}")

    def _open_replica(self, node: Node, record: Replica) -> OpenReplica | None:
        tier = self.tiers.get(record.tier)
        if tier is None:
            return None
        try:
            fd = tier.open_replica(record.version, record.version.size)
        except ReplicaLost as exc:
            log.warning("replica of inode %d is gone, reading the source: %s", node.ino, exc)
            self._metrics.replicas_lost += 1
            self.drop(node.ino, "its replica was lost")
            return None
        except OSError as exc:
            self._tiers.trouble(tier, "opening", exc)
            if exc.errno not in OUT_OF_DESCRIPTORS:
                self.drop(node.ino, f"its replica could not be opened: {exc.strerror}")
            return None
        return OpenReplica(node.ino, fd, record.version.size, tier.id, tier.memory_backed)

    # -- upkeep

    async def sync_loop(self) -> None:
        """Make replicas durable in groups, for ever."""
        await self._durability.sync_loop()

    async def sync(self) -> None:
        """Make everything durable that is stored by now."""
        await self._durability.sync()

    def usage(self) -> list[dict[str, object]]:
        """One dict a tier, with the keys of ``status --json``."""
        self._tiers.look()
        totals = self.index.tier_totals()
        result: list[dict[str, object]] = []
        for tier in self.tiers.values():
            used, capacity = self._placement.usage(tier.id)
            resident, partial, _allocated = totals.get(tier.id, (0, 0, 0))
            result.append(
                {
                    "path": tier.path,
                    "capacity_bytes": capacity,
                    "used_bytes": used,
                    "files": resident + partial,
                }
            )
        return result
