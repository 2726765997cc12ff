"""Which replicas there are: the records, their files, and the accounts of placement; moves between
tiers."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence

import trio

from monarchfs.cache.durable import Durability
from monarchfs.cache.index.index import Index
from monarchfs.cache.placement.events import (
    Abandoned,
    Action,
    Dropped,
    Evict,
    EvictionFailed,
    EvictionReason,
    Move,
    Moved,
    MoveFailed,
    Place,
    PlacementEvent,
    RefusalReason,
    Refuse,
    Weighed,
)
from monarchfs.cache.placement.placement import PARTIAL_MIN_BYTES, Placement
from monarchfs.cache.readers import Readers
from monarchfs.cache.reasons import Cause, ReasonLog
from monarchfs.cache.reconciliation import Reconciliation
from monarchfs.cache.record_lookup import RecordLookup
from monarchfs.cache.removals import Removals
from monarchfs.cache.replicas import OpenReplica
from monarchfs.cache.segments import SegmentRecords, Written
from monarchfs.cache.store.allocator import SMALL_BYTES
from monarchfs.cache.store.checksum import checksum, combine
from monarchfs.cache.store.read import read_full
from monarchfs.cache.store.tier import Tier
from monarchfs.cache.tier_threads import TierThreads
from monarchfs.cache.tiers import Tiers
from monarchfs.cache.usage import TierUsage
from monarchfs.metrics import Metrics
from monarchfs.system.listeners import Listeners
from monarchfs.system.memory import MemoryHeadroom, MemoryProbe
from monarchfs.types import (
    EvictionPolicy,
    IndexWriteError,
    Node,
    Replica,
    ReplicaLost,
    ReplicaState,
    TierSize,
)

log = logging.getLogger(__name__)

MOVE_BYTES = 1 << 20
CLOSED_SECONDS = 10.0
"""A replica that stays open for so long stays where it is: its old blocks would stay occupied."""


class ReplicaHolder:
    """A part that opens replicas without ``OpenReplica``. Its methods raise nothing. This one opens
    none: in some mounts only this process opens and reads replicas."""

    def stored(self, ino: int) -> None:
        """It has become resident, in a file of its own."""

    def let_go(self, ino: int) -> trio.Event | None:
        """The replica's file is being removed. The event is set when the file is no longer kept
        open here; None if it is not kept open."""
        return None

    def withdraw(self, ino: int) -> None:
        """The replica is going: open it no more, but where the kernel allows nothing else. Until
        that ends there is an ``OpenReplica``."""


class Accounts:
    """What filling, moving and reading replicas share.

    Constant: ``index``, ``tiers`` by their numbers, ``eviction``. Changing: ``reasons``, the
    replicas that are open by inode, the inodes (and names) of replicas that are being copied or
    moved; ``bad``, by inode, the records that could not be removed of corrupt replicas.
    """

    def __init__(
        self,
        index: Index,
        tiers: Sequence[tuple[Tier, TierSize]],
        metrics: Metrics,
        threads: TierThreads,
        nursery: trio.Nursery,
        readers: Readers,
        *,
        eviction: EvictionPolicy,
        reserve_percent: float,
        partial_min_bytes: int = PARTIAL_MIN_BYTES,
        shared_bytes: int = SMALL_BYTES,
        keeps_foreign: bool = True,
        headroom: Callable[[], MemoryHeadroom] | None = None,
        owns: Callable[[bytes, int], bool] | None = None,
        awaited: Callable[[int], bool] = lambda ino: False,
    ) -> None:
        """``readers`` read replicas without asking. Replicas of up to ``shared_bytes`` share files
        with others; ``keeps_foreign``: whether files that other nodes own are kept. ``headroom``
        says how much memory is left for tiers in memory; for ``owns`` and ``awaited`` see
        ``RecordLookup``."""
        self.index = index
        self.threads = threads
        self.readers = readers
        self.reasons = ReasonLog()
        self.on_outdated: Listeners[[int]] = Listeners()
        """Hear of each inode whose version the source was seen not to have any more."""
        self.on_corrupt: Listeners[[int]] = Listeners()
        """Hear of each inode of which the kernel may have read wrong bytes."""
        self.on_room: Listeners[[]] = Listeners()
        """Hear when files that found no tier may find one now."""
        self.on_replaced: Listeners[[int]] = Listeners()
        """Hear of each tier whose directory is another one now, without the parts of copies."""
        self.holder = ReplicaHolder()
        self.opened: dict[int, OpenReplica] = {}
        self.busy: dict[int, bytes] = {}
        self.bad: dict[int, Replica] = {}
        self.lookup = RecordLookup(index, self.opened, self.busy, self.readers, owns, awaited)
        self.placement = Placement(
            [tier.id for tier, _size in tiers],
            self.lookup,
            eviction=eviction,
            partial_min_bytes=partial_min_bytes,
            reserve_percent=reserve_percent,
        )
        self.eviction = eviction
        self.keeps_foreign = keeps_foreign
        self.metrics = metrics
        self.nursery = nursery
        self.all_tiers = Tiers(
            tiers,
            index,
            self.placement,
            self.handle,
            metrics,
            headroom or MemoryProbe().read,
            reserve_percent,
            self.readers,
        )
        self.tiers = self.all_tiers.by_id
        self.durability = Durability(
            index, self.all_tiers, self.placement, self.handle, self.corrupt
        )
        self.sync_loop, self.sync = self.durability.sync_loop, self.durability.sync
        self.segments = SegmentRecords(
            index,
            self.all_tiers,
            self.readers,
            threads,
            self.placement,
            most_bytes=shared_bytes,
        )
        self.removals = Removals(
            index,
            self.all_tiers,
            self.handle,
            threads,
            nursery,
            self.segments,
            let_go=lambda ino: self.holder.let_go(ino),
        )
        self._mover = Mover(self)
        self.usage = TierUsage(index, self.all_tiers, self.placement, self.removals)
        self.reconciliation = Reconciliation(
            index,
            self.all_tiers,
            self.handle,
            metrics,
            threads,
            nursery,
            self.segments,
            self.removals,
            self.readers,
            on_done=self.on_room,
        )

    def bind(self, holder: ReplicaHolder) -> None:
        """``holder`` opens replicas, too. It needs the cache to be made."""
        self.holder = holder

    def state(self, ino: int) -> Replica | None:
        """The record of its replica; None for one in a tier that this mount does not have."""
        record = self.index.replicas.replica(ino)
        return record if record is None or record.tier in self.tiers else None

    def states(self, inos: Sequence[int]) -> dict[int, Replica]:
        """``state`` of each, where there is one."""
        records = self.index.replicas.replicas_of(inos)
        return {ino: record for ino, record in records.items() if record.tier in self.tiers}

    # -- replicas that go

    def drop(self, ino: int, reason: str, cause: Cause = Cause.LOST) -> bool:
        """Remove the replica of ``ino`` and its record. Nobody opens it any more; readers that have
        it open keep it. False if there is none, or the record cannot be removed."""
        self.holder.withdraw(ino)
        record = self.index.replicas.replica(ino)
        if record is None or ino in self.busy or not self.forget([(ino, record.tier)]):
            return False
        self.readers.invalidate(ino)
        self.reasons.put(ino, cause, reason)
        if record.tier not in self.tiers:
            return True
        opened = self.opened.pop(ino, None)
        if opened is None:
            self.handle(Dropped(ino, record.tier, record.allocated_bytes))
        self.removals.start(ino, record, opened)
        return True

    def corrupt(self, ino: int) -> None:
        """The replica's bytes are not those that were copied: nobody gets any more of them."""
        self.metrics.replicas_corrupt += 1
        self.holder.withdraw(ino)
        replica = self.opened.get(ino)
        if replica is not None:
            replica.bad = True
        self.readers.invalidate(ino)
        record = self.index.replicas.replica(ino)
        if not self.drop(ino, "its replica was corrupt") and record is not None:
            self.bad[ino] = record
        self.on_corrupt(ino)

    def forget(self, replicas: Sequence[tuple[int, int]]) -> bool:
        """Remove the records of (inode, tier), in one commit. False if the index cannot be written:
        they then stay, and count."""
        try:
            self.index.replicas.drop_replicas([ino for ino, _ in replicas])
        except IndexWriteError as exc:
            inos = ", ".join(str(ino) for ino, _ in replicas)
            log.warning("the replicas of inodes %s stay recorded: %s", inos, exc)
            return False
        for ino, _tier in replicas:
            self.durability.changed(ino)
        return True

    # -- placement's answers

    def handle(self, event: PlacementEvent) -> list[Action]:
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
                    self.handle(MoveFailed(action.ino))  # there is no room for it
                else:
                    self._mover.begin_move(action)
            elif not isinstance(action, Evict):
                answers.append(action)
        return self._withdraw(answers, stay) if stay else answers

    def _withdraw(self, answers: list[Action], stay: Sequence[Evict]) -> list[Action]:
        """Some replicas stay, so the last of the files that were placed lack room: refuse them."""
        files, size = len(stay), sum(eviction.allocated_bytes for eviction in stay)
        for n in reversed(range(len(answers))):
            action = answers[n]
            if isinstance(action, Place) and (files > 0 or size > 0):
                self.handle(Abandoned(action.ino))
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
        if not self.forget([(action.ino, record.tier) for action, record in going]):
            going = []
        for action, _ in going:
            match action.reason:
                case EvictionReason.OUTDATED:
                    self.metrics.evictions_outdated += 1
                case EvictionReason.POLICY:
                    self.metrics.evictions_policy += 1
                case EvictionReason.PRESSURE:
                    self.metrics.evictions_pressure += 1
            self.reasons.put(action.ino, Cause.EVICTED, action.reason.value)
        self.removals.start_each([(action.ino, record) for action, record in going])
        gone = {action.ino for action, _ in going}
        stay = [action for action in actions if action.ino not in gone]
        for action in stay:
            self.handle(EvictionFailed(action.ino, action.tier))
        return stay

    # -- replicas that are taken over

    def claim(self, node: Node) -> Replica | None:
        """The record of the node's replica; also one that an earlier index, or an earlier number
        of the same version, left in a tier."""
        return self.index.replicas.replica(node.ino) or self.adopt(node)

    def adopt(self, node: Node) -> Replica | None:
        """The record that an earlier index, or an earlier number of the same version, left."""
        if not self.index.replicas.claimable or not node.stat.is_regular:
            return None
        try:
            record = self.index.replicas.claim(
                node.ino, node.stat.version.replica_name, node.stat.size
            )
        except IndexWriteError:
            return None
        if record is not None:
            self.metrics.replicas_adopted += 1
            self.readers.stored([(node, record)])  # who read the source until now has it here
        return record

    def weigh(self, weights: Sequence[tuple[int, float]], *, replace: bool) -> None:
        """Users gave these files (number, weight) weights."""
        self.handle(Weighed(weights, replace))


class Mover:
    """Moves complete replicas between tiers: promotion and demotion.

    The bytes are checked on their way against the checksum that was taken when they came from the
    source. Until the index says that the new copy is the replica, readers have the old one.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def begin_move(self, action: Move) -> None:
        record = self._accounts.index.replicas.replica(action.ino)
        if (
            record is None
            or record.state is not ReplicaState.RESIDENT
            or record.tier != action.tier
            or action.ino in self._accounts.busy
        ):
            self._accounts.handle(MoveFailed(action.ino))
            return
        self._accounts.busy[action.ino] = record.name
        self._accounts.nursery.start_soon(self._move, action, record)

    async def _move(self, action: Move, record: Replica) -> None:
        ino, to = action.ino, self._accounts.tiers[action.to]
        corrupt = moved = False
        try:
            for removal in self._accounts.removals.pending(to.id):
                await removal.done.wait()
            shares = bool(record.segment) and self._accounts.segments.takes(to.id, record.size)
            if not shares:
                self._accounts.index.replicas.begin_copies([(ino, to.id, record.name)])
            moved = await self._copy_and_commit(ino, record, to, shares=shares)
        except ReplicaLost as exc:
            corrupt = True
            log.warning("inode %d is not moved: %s", ino, exc)
        except IndexWriteError as exc:
            log.warning("inode %d is not moved: %s", ino, exc)
        except _NotOpened as exc:
            source = self._accounts.tiers[record.tier]
            self._accounts.all_tiers.failed(source, "moving a replica away", exc, reading=True)
        except OSError as exc:
            self._accounts.all_tiers.failed(to, "moving a replica there", exc)
        finally:
            self._accounts.busy.pop(ino, None)
        if moved:
            return
        self._accounts.handle(MoveFailed(ino))
        if corrupt:
            self._accounts.corrupt(ino)

    async def _copy_and_commit(self, ino: int, record: Replica, to: Tier, *, shares: bool) -> bool:
        """Raises OSError of the tiers, ReplicaLost where the replica is not what it was."""
        source = self._accounts.tiers[record.tier]
        written: Written | None = None
        try:
            if shares:
                data = await self._accounts.threads.run(_read, source, record)
                (result,) = await self._accounts.segments.write_each(to, [data])
                if isinstance(result, OSError):
                    raise result
                written = result
                allocated = written.allocated_bytes
            else:
                allocated = await self._accounts.threads.run(_copy, source, to, record)
            if not await self._closed(ino):
                raise OSError(errno.EBUSY, "it stays open")
            # No checkpoint between the index commit and placement.
            replica = record._replace(
                tier=to.id,
                allocated_bytes=allocated,
                durable=False,
                created_ns=time.time_ns(),
                segment=0 if written is None else written.segment,
                offset=0 if written is None else written.offset,
            )
            self._accounts.index.replicas.put_replica(ino, replica)
        except BaseException:
            with trio.CancelScope(shield=True):
                if written is not None:
                    await self._accounts.segments.discard(to, [written])
                elif not shares:
                    await self._accounts.threads.run(to.files.discard, record.name)
                    self._accounts.removals.gone(to.id, record.name)
            raise
        if written is not None:
            self._accounts.segments.recorded(replica)
        self._accounts.durability.changed(ino)
        self._accounts.durability.stored(ino, replica)
        self._accounts.metrics.replicas_moved += 1
        self._accounts.handle(Moved(ino, allocated))
        node = self._accounts.index.nodes.node(ino)
        if node is None:
            self._accounts.readers.invalidate(ino)
        else:
            self._accounts.readers.stored([(node, replica)])
        self._accounts.removals.start(ino, record)
        if written is None:
            self._accounts.holder.stored(ino)
        return True

    async def _closed(self, ino: int) -> bool:
        """Wait until nobody has the replica open, within limits."""
        with trio.move_on_after(CLOSED_SECONDS):
            while True:
                self._accounts.holder.withdraw(ino)  # each time: it may have been backed anew
                if (replica := self._accounts.opened.get(ino)) is None:
                    return True
                closed = trio.Event()
                replica.then.append(closed.set)
                await closed.wait()
        return False


class _NotOpened(OSError):
    """An error of the tier that has the replica."""


def _open(source: Tier, record: Replica) -> int:
    try:
        return source.open_complete(record)
    except ReplicaLost:
        raise
    except OSError as error:
        raise _NotOpened(error.errno, error.strerror) from error


def _read(source: Tier, record: Replica) -> bytes:
    """All of a replica that shares its file. For a thread. Raises as ``_copy``."""
    fd = _open(source, record)
    try:
        data = read_full(fd, record.offset, record.size)
    except OSError as error:
        raise ReplicaLost(source.path, str(error)) from error
    finally:
        os.close(fd)
    if checksum(data) != record.checksum:
        raise ReplicaLost(source.path, "A replica's checksum is wrong")
    return data


def _copy(source: Tier, to: Tier, record: Replica) -> int:
    """Copy a replica under its name; its allocated bytes there. For a thread. Leaves what it wrote
    behind where it fails. Raises ReplicaLost where the bytes are not those of its checksum."""
    fd = _open(source, record)
    try:
        to.files.discard(record.name)
        part = to.files.create_part(record.name, record.size)
        try:
            digests = bytearray()
            for at in range(0, record.size, MOVE_BYTES):
                try:
                    data = read_full(fd, record.offset + at, min(MOVE_BYTES, record.size - at))
                except OSError as error:
                    raise ReplicaLost(source.path, str(error)) from error
                digests += to.files.write(part, at, data)
            if combine(digests) != record.checksum:
                raise ReplicaLost(source.path, "A replica's checksum is wrong")
            try:
                return to.files.finish_part(part, record.name, record.checksum)
            except ReplicaLost as error:  # of the part: nothing is wrong with the replica
                raise OSError(errno.EBUSY, str(error), to.path) from error
        finally:
            os.close(part)
    finally:
        os.close(fd)
