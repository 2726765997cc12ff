"""The owner of replicas: carries out what placement decides, on the index and the tiers.

Nothing here reads the source. All methods run on the event loop; those that wait are async.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import trio

from monarchfs.cache.accounts import Accounts
from monarchfs.cache.index.index import Index
from monarchfs.cache.placement.events import Accessed, Known
from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import OpenReplica
from monarchfs.cache.reservations import OUT_OF_DESCRIPTORS, Reservations
from monarchfs.cache.store.tier import Tier
from monarchfs.cache.writer import CopyWriter
from monarchfs.types import Data, IndexWriteError, Node, Replica, ReplicaLost, ReplicaState

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
PURGE_BATCH = 256


async def purge(index: Index, before_ns: int) -> None:
    """Forget versions that were outdated before then: before this mount, so that no kernel asks for
    them."""
    try:
        while index.nodes.purge_outdated(before_ns, PURGE_BATCH) or index.nodes.purging:
            await trio.lowlevel.checkpoint()
    except IndexWriteError as exc:
        log.warning("outdated inodes stay recorded: %s", exc)


class Cache:
    """Replicas of one mount: what an earlier one left, those that are read, those to come.

    Constant: its parts.
    """

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self.reservations = Reservations(accounts)
        self.writer = CopyWriter(accounts, self.reservations)
        self.index, self.readers = accounts.index, accounts.readers
        self.tiers, self.usage = accounts.tiers, accounts.usage
        self.reasons, self.lookup = accounts.reasons, accounts.lookup

    # -- start and end

    @property
    def tracks(self) -> bool:
        """Whether it matters what is opened."""
        return self.accounts.placement.tracks or len(self.tiers) > 1

    @property
    def reconciling(self) -> bool:
        """Whether a tier takes nothing only because its files are being compared with the index."""
        return bool(self.accounts.reconciliation.running)

    def load(self, boot_id: bytes, reopen: Callable[[], None] = lambda: None) -> None:
        """Take over what an earlier mount left; ``boot_id`` tells whether the machine was restarted
        since. Takes the same time however much there is: what has to be looked at is looked at in
        the background. ``reopen`` is called before anything may be evicted, to acquire what is in
        use.
        """
        accounts = self.accounts
        rebooted = self.index.replicas.begin_boot(boot_id)
        if rebooted:
            for tier_id in self.index.replicas.tier_totals().keys() - self.tiers.keys():
                self.index.meta.suspect(tier_id)
        accounts.reconciliation.recover()
        for tier in self.tiers.values():
            accounts.reconciliation.load(tier)
            try:
                needed = accounts.reconciliation.needed(tier, rebooted=rebooted)
            except OSError as exc:
                accounts.all_tiers.failed(tier, "looking at what it holds", exc)
                needed = True
            if needed:
                accounts.reconciliation.begin_tier(tier)
            else:
                accounts.all_tiers.serve(tier)
        reopen()
        accounts.all_tiers.measure()
        for tier in self.tiers.values():
            accounts.segments.begin_tier(tier)
            if tier.id not in accounts.reconciliation.running:
                accounts.nursery.start_soon(accounts.reconciliation.settle, tier)
        if not rebooted:
            accounts.nursery.start_soon(accounts.durability.take_over)
        if accounts.placement.tracks:
            accounts.nursery.start_soon(self._announce_known)

    async def _announce_known(self) -> None:
        """Have the policy know the replicas that an earlier mount left."""
        for count, (ino, record) in enumerate(self.index.replicas.all()):
            if record.tier in self.tiers:
                self.accounts.handle(Known(ino, record.tier))
            if count % 256 == 0:
                await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close what is open. Replicas stay."""
        for replica in self.accounts.opened.values():
            os.close(replica.fd)
        self.accounts.opened.clear()

    # -- reading

    def resident(self, node: Node) -> bool:
        """Whether there is a complete replica; one that an earlier index left is taken over."""
        return bool(self.resident_each([node]))

    def resident_each(self, nodes: Sequence[Node]) -> set[int]:
        """The numbers of those that are ``resident``."""
        records = self.index.replicas.replicas_of([node.ino for node in nodes])
        resident = self.accounts.opened.keys() & {node.ino for node in nodes}
        for node in nodes:
            record = records.get(node.ino) or self.accounts.adopt(node)
            if record is None or record.state is not ReplicaState.RESIDENT:
                continue
            if record.tier in self.tiers and record != self.accounts.bad.get(node.ino):
                resident.add(node.ino)
        return resident

    def acquire(self, node: Node, *, accessed: bool = True) -> OpenReplica | None:
        """The complete replica of ``node``, open, or None. Each needs a ``release``. Not
        ``accessed``: it has just been copied, and nobody opened it for that."""
        replica = self.accounts.opened.get(node.ino)
        if replica is None:
            record = self.accounts.claim(node)
            if record is None or record.state is not ReplicaState.RESIDENT:
                return None
            if record == self.accounts.bad.get(node.ino):
                return None
            replica = self._open_replica(node, record)
            if replica is None:
                return None
            self.accounts.opened[node.ino] = replica
        replica.uses += 1
        if self.tracks and accessed:
            self.accounts.handle(Accessed(node.ino, replica.tier))
        return replica

    def gives(self, replica: OpenReplica) -> bool:
        """Whether it is what ``acquire`` gives: it is open, sound and recorded."""
        return self.accounts.opened.get(replica.ino) is replica and not replica.bad

    def accessed(self, ino: int) -> None:
        """It was opened without ``acquire``, or somebody asked for it: others go before it."""
        if not self.tracks:
            return
        record, tier = self.index.replicas.replica(ino), None
        if record is not None and record.state is ReplicaState.RESIDENT:
            tier = record.tier if record.tier in self.tiers else None
        self.accounts.handle(Accessed(ino, tier))

    def release(self, replica: OpenReplica) -> None:
        replica.uses -= 1
        if replica.uses:
            return
        if self.accounts.opened.get(replica.ino) is replica:
            del self.accounts.opened[replica.ino]
        os.close(replica.fd)
        for then in replica.then:
            then()

    async def read(self, replica: OpenReplica, offset: int, size: int) -> Data:
        """``OpenReplica.read`` in a thread, which keeps the descriptor open until it is done.
        Raises OSError of the tier."""
        replica.uses += 1
        try:
            return await self.accounts.threads.run_now(replica.read, offset, size)
        finally:
            self.release(replica)

    def failed_read(self, replica: OpenReplica, exc: OSError) -> None:
        """A tier failed under a reader, who goes to the source: the replica is not used again."""
        if replica.bad:
            return  # that is known, and the tier is not to blame
        self.readers.invalidate(replica.ino)
        self.accounts.all_tiers.failed(self.tiers[replica.tier], "reading", exc, reading=True)
        # Others who read it may have said so already; what is recorded now may be a new one.
        if self.accounts.opened.get(replica.ino) is replica:
            self.accounts.drop(replica.ino, f"the replica could not be read: {exc.strerror}")

    def _open_replica(self, node: Node, record: Replica) -> OpenReplica | None:
        tier = self.tiers.get(record.tier)
        if tier is None or not self.accounts.all_tiers.readable(tier.id):
            return None
        try:
            fd = tier.open_complete(record)
        except ReplicaLost as exc:
            self.accounts.metrics.replicas_lost += 1
            reconciliation = self.accounts.reconciliation
            if tier.id in reconciliation.running:
                reconciliation.lost[tier.id] += 1  # logged with all others, at its end
            else:
                log.warning("replica of inode %d is gone, reading the source: %s", node.ino, exc)
            self.accounts.drop(node.ino, "its replica was lost")
            return None
        except OSError as exc:
            self.accounts.all_tiers.failed(tier, "opening", exc, reading=True)
            if exc.errno not in OUT_OF_DESCRIPTORS:
                self.accounts.drop(node.ino, f"its replica could not be opened: {exc.strerror}")
            return None
        return OpenReplica(node.ino, fd, record, tier.memory_backed)

    # -- what people ask for

    def evict(self, ino: int) -> bool:
        """Remove the replica of ``ino``, unless it is open, pinned or being copied; whether it
        was."""
        if not self.lookup.evictable(ino):
            return False
        if not self.readers.try_remove(ino):
            return False
        if not self.accounts.drop(ino, "evicted by hand", Cause.EVICTED):
            return False
        self.accounts.metrics.evictions_manual += 1
        return True

    # -- upkeep

    async def watch(self) -> None:
        """See to the tiers, for ever: their room, those out of service, what is to be removed."""
        while True:
            await trio.sleep(WATCH_SECONDS)
            await self.maintain()

    async def maintain(self) -> None:
        """``watch``, once."""
        accounts = self.accounts
        accounts.all_tiers.measure()
        for tier in accounts.all_tiers.due():
            error: OSError | None = None
            try:
                if await accounts.threads.run(tier.find_again):
                    self._replaced(tier)
                await accounts.threads.run(tier.probe)
            except OSError as exc:
                error = exc
            if accounts.all_tiers.probed(tier, error):
                accounts.reconciliation.retry(tier)
        accounts.removals.retry(accounts.busy.values())

    def _replaced(self, tier: Tier) -> None:
        """The tier has another directory: what went to the former one, or left it, is not there."""
        accounts = self.accounts
        accounts.on_replaced(tier.id)
        accounts.removals.replaced(tier.id)
        accounts.segments.replaced(tier)
        accounts.reconciliation.begin_tier(tier)
