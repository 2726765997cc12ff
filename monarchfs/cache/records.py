"""Which replicas there are: the records, their files, and the accounts of placement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from monarchfs.cache.durable import Durability
from monarchfs.cache.readers import Readers
from monarchfs.cache.reasons import Cause, ReasonLog
from monarchfs.cache.reconciliation import Reconciliation
from monarchfs.cache.record_lookup import RecordLookup
from monarchfs.cache.removals import Removals
from monarchfs.cache.replicas import OpenReplica
from monarchfs.cache.segments import SegmentRecords
from monarchfs.cache.tier_threads import TierThreads
from monarchfs.cache.tiers import Tiers
from monarchfs.cache.usage import TierUsage
from monarchfs.index.index import Index
from monarchfs.metrics import Metrics
from monarchfs.placement.events import (
    Abandoned,
    Action,
    Dropped,
    Evict,
    EvictionFailed,
    EvictionReason,
    Move,
    MoveFailed,
    Place,
    PlacementEvent,
    RefusalReason,
    Refuse,
)
from monarchfs.placement.placement import PARTIAL_MIN_BYTES, Placement
from monarchfs.store.segments import SMALL_BYTES
from monarchfs.store.tier import Tier
from monarchfs.system.memory import MemoryHeadroom, MemoryProbe
from monarchfs.types import EvictionPolicy, IndexWriteError, Node, Replica, TierSize

log = logging.getLogger(__name__)

_EVICTED = {
    EvictionReason.OUTDATED: "evicted: the source does not have this version any more",
    EvictionReason.POLICY: "evicted for another file",
    EvictionReason.PRESSURE: "evicted because its tier has less room",
}


class ReplicaHolder(Protocol):
    """A part that opens replicas without ``OpenReplica``. Its methods raise nothing."""

    def stored(self, ino: int) -> None:
        """It has become resident, in a file of its own."""

    def let_go(self, ino: int) -> trio.Event | None:
        """The replica's file is being removed. The event is set when the file is no longer kept
        open here; None if it is not kept open."""

    def reclaim(self, ino: int) -> None:
        """The cache is about to check whether the replica is open: make an ``OpenReplica`` for each
        open that has none, and open no more."""


class NoHolder:
    """For mounts in which only this process opens and reads replicas."""

    def stored(self, ino: int) -> None: ...

    def let_go(self, ino: int) -> None: ...

    def reclaim(self, ino: int) -> None: ...


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Replicas of up to ``shared_bytes`` share files with others."""

    eviction: EvictionPolicy = EvictionPolicy.KEEP
    reserve_percent: float = 10.0
    partial_min_bytes: int = PARTIAL_MIN_BYTES
    shared_bytes: int = SMALL_BYTES


class Records:
    """The part of the cache that filling and reading share.

    Constant: ``index``, ``tiers`` by their numbers, ``eviction``. Changing: ``reasons``, the
    replicas that are open by inode, the inodes (and names) of replicas that are being copied or
    moved.
    """

    def __init__(
        self,
        index: Index,
        tiers: Sequence[tuple[Tier, TierSize]],
        metrics: Metrics,
        threads: TierThreads,
        nursery: trio.Nursery,
        readers: Readers,
        options: CacheOptions,
        headroom: Callable[[], MemoryHeadroom] | None = None,
    ) -> None:
        """``headroom`` says how much memory is left for tiers in memory; ``readers`` read replicas
        without asking."""
        self.index = index
        self._in_thread = threads.run
        self._in_thread_now = threads.run_now
        self._write_in_thread = threads.write
        self.readers = readers
        self.reasons = ReasonLog()
        self._noticed: Callable[[int], None] = self._mark_outdated
        self.room_appeared: Callable[[], object] = lambda: None
        """Called when files that found no tier may find one now."""
        self.weighed: Callable[..., object] = lambda weights, *, replace: None
        """Called as ``weigh``, after it."""
        self._forget_pages: Callable[[int], object] = lambda ino: None
        self._holder: ReplicaHolder = NoHolder()
        self._open: dict[int, OpenReplica] = {}
        self._busy: dict[int, bytes] = {}
        self.lookup = RecordLookup(index, self._open, self._busy, self.readers)
        self.placement = Placement(
            [tier.id for tier, _size in tiers],
            self.lookup,
            eviction=options.eviction,
            partial_min_bytes=options.partial_min_bytes,
            reserve_percent=options.reserve_percent,
        )
        self.eviction = options.eviction
        self._metrics = metrics
        self._nursery = nursery
        self._tiers = Tiers(
            tiers,
            index,
            self.placement,
            self._handle,
            metrics,
            headroom or MemoryProbe().read,
            options.reserve_percent,
            self.readers,
        )
        self.tiers = self._tiers.by_id
        self._durability = Durability(index, self._tiers, self.placement, self._handle)
        self.sync_loop, self.sync = self._durability.sync_loop, self._durability.sync
        self._segments = SegmentRecords(
            *(index, self._tiers, self.readers, self._in_thread),
            capacity=lambda tier_id: self.placement.ledger(tier_id).usage[1],
            most_bytes=options.shared_bytes,
        )
        self._removals = Removals(
            *(index, self._tiers, self._handle, self._in_thread, nursery, self._segments),
            let_go=lambda ino: self._holder.let_go(ino),
        )
        self.usage = TierUsage(index, self._tiers, self.placement, self._removals)
        self._reconciliation = Reconciliation(
            *(index, self._tiers, self._handle, metrics, self._in_thread, nursery, self._segments),
            on_done=lambda: self.room_appeared(),
        )

    def bind(
        self,
        noticed: Callable[[int], None],
        holder: ReplicaHolder | None = None,
        forget_pages: Callable[[int], object] = lambda ino: None,
    ) -> None:
        """Connect parts that are made after the cache. ``noticed`` gets each inode whose version
        the source no longer has, ``forget_pages`` each of which the kernel may have read wrong
        bytes."""
        self._noticed = noticed
        self._holder = holder or NoHolder()
        self._forget_pages = forget_pages

    def state(self, ino: int) -> Replica | None:
        """The record of its replica; None for one in a tier that this mount does not have."""
        record = self.index.replicas.replica(ino)
        return record if record is None or record.tier in self.tiers else None

    def states(self, inos: Sequence[int]) -> dict[int, Replica]:
        """``state`` of each, where there is one."""
        records = self.index.replicas.replicas_of(inos)
        return {ino: record for ino, record in records.items() if record.tier in self.tiers}

    def outdated(self, node: Node) -> None:
        """The source was seen to hold another version than the node stands for."""
        self._noticed(node.ino)

    def _mark_outdated(self, ino: int) -> None:
        try:
            self.index.tree.mark_outdated(ino)
        except IndexWriteError as exc:
            log.warning("inode %d is not marked as outdated: %s", ino, exc)

    # -- replicas that go

    def drop(self, ino: int, reason: str, cause: Cause = Cause.LOST) -> bool:
        """Remove the replica of ``ino`` and its record. Nobody opens it any more; readers that have
        it open keep it. False if there is none, or the record cannot be removed."""
        self._holder.reclaim(ino)
        record = self.index.replicas.replica(ino)
        if record is None or ino in self._busy or not self._forget([(ino, record.tier)]):
            return False
        self.readers.invalidate(ino)
        self.reasons.put(ino, cause, reason)
        if record.tier not in self.tiers:
            return True
        opened = self._open.pop(ino, None)
        if opened is None:
            self._handle(Dropped(ino, record.tier, record.allocated_bytes))
        self._removals.start(ino, record, opened)
        return True

    def _forget(self, replicas: Sequence[tuple[int, int]]) -> bool:
        """Remove the records of (inode, tier), in one commit. False if the index cannot be written:
        they then stay, and count."""
        try:
            self.index.replicas.drop_replicas([ino for ino, _ in replicas])
        except IndexWriteError as exc:
            inos = ", ".join(str(ino) for ino, _ in replicas)
            log.warning("the replicas of inodes %s stay recorded: %s", inos, exc)
            return False
        for ino, _tier in replicas:
            self._durability.changed(ino)
        return True

    # -- placement's answers

    def _handle(self, event: PlacementEvent) -> list[Action]:
        """Tell placement. Carry out its evictions and moves, and return its other answers."""
        actions = self.placement.handle(event)
        if not actions:
            return actions
        evictions = [action for action in actions if isinstance(action, Evict)]
        stay = self._evict(evictions) if evictions else []
        answers: list[Action] = []
        for action in actions:
            if isinstance(action, Move):
                if any(eviction.tier == action.to for eviction in stay):
                    self._handle(MoveFailed(action.ino))  # there is no room for it
                else:
                    self._begin_move(action)
            elif not isinstance(action, Evict):
                answers.append(action)
        return self._withdraw(answers, stay) if stay else answers

    def _withdraw(self, answers: list[Action], stay: Sequence[Evict]) -> list[Action]:
        """Some replicas stay, so the last of the files that were placed lack room: refuse them."""
        files, size = len(stay), sum(eviction.allocated_bytes for eviction in stay)
        for n in reversed(range(len(answers))):
            action = answers[n]
            if isinstance(action, Place) and (files > 0 or size > 0):
                self._handle(Abandoned(action.ino))
                answers[n] = Refuse(action.ino, RefusalReason.NO_ROOM, 0)
                files, size = files - 1, size - action.reserved_bytes
        return answers

    def _evict(self, actions: Sequence[Evict]) -> list[Evict]:
        """Evict replicas. Returns those that could not be evicted."""
        going: list[tuple[Evict, Replica]] = []
        for action in actions:
            record = self.index.replicas.replica(action.ino)
            if record is not None and self.readers.try_remove(action.ino):
                going.append((action, record))
        if not self._forget([(action.ino, record.tier) for action, record in going]):
            going = []
        for action, _ in going:
            match action.reason:
                case EvictionReason.OUTDATED:
                    self._metrics.evictions_outdated += 1
                case EvictionReason.POLICY:
                    self._metrics.evictions_policy += 1
                case EvictionReason.PRESSURE:
                    self._metrics.evictions_pressure += 1
            self.reasons.put(action.ino, Cause.EVICTED, _EVICTED[action.reason])
        self._removals.start_each([(action.ino, record) for action, record in going])
        gone = {action.ino for action, _ in going}
        stay = [action for action in actions if action.ino not in gone]
        for action in stay:
            self._handle(EvictionFailed(action.ino, action.tier))
        return stay

    def _begin_move(self, action: Move) -> None:
        """Moves are begun one level up (``Moves``)."""
        raise NotImplementedError
