"""The owner of replicas: carries out what placement decides, on the index and the tiers.

A replica's life, and the order that makes a crash harmless at every point:

1. ``reserve``: placement sets room aside (memory only).
2. The copier writes a part file (``store``), chunk by chunk, or a small file in one go.
3. The part is renamed to its final name.
4. The index commit makes it resident. A crash before this leaves a file that the next mount
   removes or adopts, never a record without its file.

Nothing here reads the source.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import trio

from monarchfs.cache.replicas import OpenReplica, Reservation
from monarchfs.index.index import Index
from monarchfs.metrics import Metrics
from monarchfs.placement.events import (
    Abandoned,
    Action,
    Dropped,
    Event,
    Grant,
    Kept,
    Loaded,
    Place,
    Refuse,
    Resumed,
    RoomWanted,
    Stored,
    TierSeen,
    Wanted,
)
from monarchfs.placement.placement import Placement
from monarchfs.store.errors import ReplicaLost
from monarchfs.store.read import read_full, read_nowait
from monarchfs.store.tier import Tier, replica_name
from monarchfs.types import Data, Node, Replica, ReplicaState, TierSize

log = logging.getLogger(__name__)

SPACE_MAX_AGE_SECONDS = 0.25
"""Others fill the tier's file system too: placement decides on a statvfs no older than this."""

REASONS_KEPT = 10_000
"""So many reasons why a file is not resident are remembered for ``user.monarchfs.reason``."""

SYNC_INTERVAL_SECONDS = 30.0

MOST_UNWRITTEN_BYTES = 256 << 20
"""So much of the source may wait in memory for a slow tier; more is not kept."""

T = TypeVar("T")


class Cache:
    """Replicas of one mount. All methods run on the event loop; those that wait are async.

    ``local`` limits the threads that read and write tiers, apart from those of the source.
    """

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Tier],
        sizes: Sequence[TierSize],
        placement: Placement,
        metrics: Metrics,
        local: trio.CapacityLimiter,
    ) -> None:
        self.index = index
        self.tiers = {tier.id: tier for tier in tiers}
        self.local = local
        self._sizes = {tier.id: size for tier, size in zip(tiers, sizes, strict=True)}
        self._written = {tier.id: 0 for tier in tiers}
        self._placement = placement
        self._metrics = metrics
        self._open: dict[int, OpenReplica] = {}
        self._seen_at = -1.0
        self._unsynced: dict[int, list[int]] = {tier.id: [] for tier in tiers}
        self._unwritten_bytes = 0
        self._doomed: set[int] = set()
        self.reasons: OrderedDict[int, str] = OrderedDict()

    # -- start and end

    def load(self, *, rebooted: bool) -> None:
        """Take over what an earlier mount left. After a reboot only synced replicas count."""
        totals = self.index.tier_totals()
        keep: dict[int, set[str]] = {tier_id: set() for tier_id in self.tiers}
        # The records are walked only where that can tell something: a mount must not take longer
        # the more it has cached.
        if rebooted or any(n[1] for n in totals.values()) or totals.keys() - self.tiers.keys():
            lost = []
            for ino, replica in self.index.replicas():
                if replica.tier not in self.tiers or (rebooted and not replica.durable):
                    lost.append((ino, replica))
                elif replica.state is ReplicaState.PARTIAL:
                    keep[replica.tier].add(replica_name(replica.version))
            for ino, replica in lost:
                self.index.drop_replica(ino)
                if (tier := self.tiers.get(replica.tier)) is not None:
                    self._unlink(tier, replica)
        self._look_at_tiers()
        for tier_id, (resident, partial, allocated) in self.index.tier_totals().items():
            self._handle(Loaded(tier_id, resident + partial, allocated))
        for tier in self.tiers.values():
            try:
                tier.clean_parts(keep[tier.id])
            except OSError as exc:
                self._tier_trouble(tier, "cleaning", exc)

    def clean_tiers(self) -> None:
        """Remove all replicas, for an index that knows none. Blocks, longer the more there are."""
        for tier in self.tiers.values():
            try:
                removed = tier.clean_replicas(()) + tier.clean_parts(())
            except OSError as exc:
                self._tier_trouble(tier, "cleaning", exc)
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

    def state(self, ino: int) -> Replica | None:
        return self.index.replica(ino)

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
        if replica.ino in self._doomed:
            self._doomed.discard(replica.ino)
            self.drop(replica.ino, "outdated")

    def failed_read(self, replica: OpenReplica, exc: OSError) -> None:
        """A tier failed under a reader, who goes to the source: the replica is not used again."""
        self._tier_trouble(self.tiers[replica.tier], "reading", exc)
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
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                log.warning("out of descriptors: inode %d is read from the source", node.ino)
                return None
            self._tier_trouble(tier, "opening", exc)
            return None
        return OpenReplica(node.ino, fd, record.version.size, tier.id, tier.memory_backed)

    def drop(self, ino: int, reason: str) -> None:
        """Forget and remove the replica of ``ino``; one that is open goes at its last release."""
        if ino in self._open:
            self._doomed.add(ino)
            return
        record = self.index.replica(ino)
        if record is None:
            return
        self.index.drop_replica(ino)
        if record.tier in self.tiers:
            self._handle(Dropped(ino, record.tier, record.allocated_bytes))
        self.explain(ino, reason)
        if (tier := self.tiers.get(record.tier)) is not None:
            self._unlink(tier, record)

    def explain(self, ino: int, reason: str) -> None:
        """Remember why ``ino`` is not resident."""
        self.reasons[ino] = reason
        self.reasons.move_to_end(ino)
        if len(self.reasons) > REASONS_KEPT:
            self.reasons.popitem(last=False)

    # -- filling

    def reserve(self, node: Node) -> Reservation | None:
        """Room for a replica of ``node``; None (and a reason) where there is none."""
        assert node.stat is not None
        self._look_at_tiers()
        size = node.stat.size
        record = self.index.replica(node.ino)
        partial = record is not None and record.state is ReplicaState.PARTIAL
        if record is not None and partial and (resumed := self._resume(node, record)):
            return resumed
        (action,) = self._handle(Wanted(node.ino, size))
        if isinstance(action, Place):
            return Reservation(node, node.stat.version, self.tiers[action.tier], action.whole)
        assert isinstance(action, Refuse)
        self._metrics.copies_refused += 1
        self.explain(node.ino, f"{action.reason.value}: {action.missing_bytes} bytes short")
        return None

    def _resume(self, node: Node, record: Replica) -> Reservation | None:
        tier = self.tiers.get(record.tier)
        if tier is None:
            return None
        reservation = Reservation(node, record.version, tier, whole=False)
        try:
            reservation.fd = tier.open_part(record.version)
        except OSError as exc:
            self._tier_trouble(tier, "opening a part", exc)
            self.drop(node.ino, "its part was lost")
            return None
        self._handle(Resumed(node.ino, record.tier, record.allocated_bytes))
        return reservation

    def grow(self, reservation: Reservation, size: int) -> bool:
        """``size`` bytes more for a partial replica; False where there is no room."""
        if reservation.whole:
            return True
        self._look_at_tiers()
        (action,) = self._handle(RoomWanted(reservation.node.ino, size))
        return isinstance(action, Grant)

    async def write(self, reservation: Reservation, offset: int, data: bytes) -> None:
        """Put bytes of the source into the part file. Raises OSError of the tier."""
        with reservation.using(), self._unwritten(len(data)):
            if reservation.fd < 0:
                async with reservation.lock:
                    if reservation.fd < 0:
                        reservation.fd = await self._in_thread(reservation.new_part)
            await self._in_thread(reservation.tier.write, reservation.fd, offset, data)
        reservation.written += len(data)
        self._written[reservation.tier.id] += len(data)

    async def finish(self, reservation: Reservation) -> None:
        """All bytes are there: make the part a resident replica. Raises OSError of the tier.

        The part's descriptor stays open for those who still read it: ``Reservation.close``.
        """
        allocated = await self._in_thread(
            reservation.tier.finish_part, reservation.fd, reservation.version
        )
        self._commit(reservation, allocated)

    async def write_all(self, reservation: Reservation, data: bytes) -> None:
        """``write`` and ``finish`` of a whole file in one step."""
        with self._unwritten(len(data)):
            allocated = await self._in_thread(
                reservation.tier.write_whole, reservation.version, data
            )
        self._commit(reservation, allocated)

    @property
    def backlogged(self) -> bool:
        """Whether the tiers are so far behind that bytes must not wait for them any more."""
        return self._unwritten_bytes > MOST_UNWRITTEN_BYTES

    @contextmanager
    def _unwritten(self, size: int) -> Iterator[None]:
        self._unwritten_bytes += size
        try:
            yield
        finally:
            self._unwritten_bytes -= size

    async def _in_thread(self, fn: Callable[..., T], *args: object) -> T:
        return await trio.to_thread.run_sync(fn, *args, limiter=self.local)

    async def read_part(self, reservation: Reservation, offset: int, size: int) -> bytes:
        """Bytes that were written already. Raises OSError of the tier."""
        with reservation.using():
            return await self._in_thread(read_full, reservation.fd, offset, size)

    def read_part_nowait(self, reservation: Reservation, offset: int, size: int) -> Data | None:
        """The same, or None where the disk would have to be waited for."""
        return read_nowait(
            reservation.fd, offset, size, memory_backed=reservation.tier.memory_backed
        )

    def _commit(self, reservation: Reservation, allocated: int) -> None:
        # No checkpoint between the index commit and the books.
        ino = reservation.node.ino
        self.index.put_replica(
            ino,
            Replica(
                reservation.tier.id,
                ReplicaState.RESIDENT,
                reservation.version,
                allocated,
                durable=False,
                created_ns=time.time_ns(),
            ),
        )
        self._end(reservation, Stored(ino, allocated))
        self._metrics.copies_completed += 1
        self.reasons.pop(ino, None)
        self._unsynced[reservation.tier.id].append(ino)

    async def rest(self, reservation: Reservation, chunk_bytes: int, present: bytes) -> None:
        """Put an unfinished copy aside: what is there is recorded, for this mount and later ones.

        ``present`` has one byte a chunk, 1 where the chunk was written.
        """
        ino = reservation.node.ino
        allocated = await self._in_thread(reservation.tier.allocated, reservation.fd)
        await reservation.close()
        self.index.put_replica(
            ino,
            Replica(
                reservation.tier.id,
                ReplicaState.PARTIAL,
                reservation.version,
                allocated,
                durable=False,
                created_ns=time.time_ns(),
                chunk_bytes=chunk_bytes,
                present=present,
            ),
        )
        self._end(reservation, Kept(ino, allocated))

    async def abandon(self, reservation: Reservation, reason: str) -> None:
        """Give a copy up: its part goes, its room is free again."""
        ino = reservation.node.ino
        await reservation.close()
        self.index.drop_replica(ino)
        self.explain(ino, reason)
        try:
            await self._in_thread(reservation.tier.remove_part, reservation.version)
        except OSError as exc:
            self._tier_trouble(reservation.tier, "removing a part", exc)
        finally:
            self._end(reservation, Abandoned(ino))

    def _end(self, reservation: Reservation, event: Event) -> None:
        self._written[reservation.tier.id] -= reservation.written
        reservation.written = 0
        self._handle(event)

    def tier_failed(self, reservation: Reservation, exc: OSError) -> None:
        """Count and log what a copier ran into."""
        self._tier_trouble(reservation.tier, "writing", exc)

    # -- upkeep

    async def sync_loop(self) -> None:
        """Make replicas durable in groups, for ever."""
        while True:
            await trio.sleep(SYNC_INTERVAL_SECONDS)
            await self.sync()

    async def sync(self) -> None:
        """Data first, then the records, then the mark that they survive a reboot."""
        for tier_id, inos in self._unsynced.items():
            if not inos or self.tiers[tier_id].memory_backed:
                inos.clear()
                continue
            batch, self._unsynced[tier_id] = inos, []
            tier = self.tiers[tier_id]
            try:
                await trio.to_thread.run_sync(tier.sync, abandon_on_cancel=True)
            except OSError as exc:
                self._tier_trouble(tier, "syncing", exc)
                continue
            self.index.mark_durable(batch)
        await trio.to_thread.run_sync(self.index.sync, abandon_on_cancel=True)

    def usage(self) -> list[dict[str, object]]:
        """One dict a tier, with the keys of ``status --json``."""
        self._look_at_tiers()
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

    def _look_at_tiers(self) -> None:
        now = trio.current_time()
        if now - self._seen_at < SPACE_MAX_AGE_SECONDS:
            return
        self._seen_at = now
        for tier in self.tiers.values():
            try:
                space = tier.space()
            except OSError as exc:
                self._tier_trouble(tier, "looking at", exc)
                continue
            capacity = self._sizes[tier.id].resolve(space.total_bytes)
            self._handle(TierSeen(tier.id, capacity, space, self._written[tier.id]))

    def _handle(self, event: Event) -> list[Action]:
        return self._placement.handle(event)

    def _unlink(self, tier: Tier, record: Replica) -> None:
        try:
            if record.state is ReplicaState.RESIDENT:
                tier.remove(record.version)
            else:
                tier.remove_part(record.version)
        except OSError as exc:
            self._tier_trouble(tier, "removing from", exc)

    def _tier_trouble(self, tier: Tier, doing: str, exc: OSError) -> None:
        self._metrics.tier_errors += 1
        log.warning("tier %s: %s: %s", tier.path, doing, exc)
