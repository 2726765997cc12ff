"""Replicas: which inode each file in a tier belongs to, the journal of files without a record, and
the totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from monarchfs.cache.index.environment import Environment
from monarchfs.cache.index.records import (
    BOOT,
    ID,
    META_BOOT,
    META_BOOT_ID,
    META_SWEPT,
    META_TIER,
    PLACE_KEY,
    RECORD_KEY,
    SEGMENT,
    SEGMENT_KEY,
    TIER_KEY,
    TOTALS,
    durable_replica,
    node_outdated,
    pack_replica,
    replica_counts,
    replica_head,
    replica_present,
    unpack_part,
    unpack_replica,
)
from monarchfs.types import Replica, ReplicaState, TierFile, TierTotals

_BATCH = 256
_SWEEP = 512

_COLUMN: dict[int, int] = {
    ReplicaState.RESIDENT: 0,
    ReplicaState.PARTIAL: 1,
    ReplicaState.FOUND: 2,
}
"""The field of TOTALS that counts the replicas in each state."""

_REMOVAL = ID.pack(0)
"""In the journal, in place of an inode number. Nobody wants what was removed, by hand perhaps."""


class Replicas:
    """Records of replicas. At any moment, every file that this program has in a tier has a record
    or is in the journal, unless the index that knew it is gone.

    A record *counts* if it is durable or of the current boot. Others are lost: their files may have
    the right size without the data. All writing calls but ``file_gone`` raise IndexWriteError if
    the index is frozen.

    Only ``part`` gives, and ``put_replica`` takes, a partial replica's ``present`` and ``digests``:
    of a file of 1 TiB they are 68 MB. Others leave them empty.

    Changing: ``_boot`` (the number of the boot, packed as in records), ``_tiers`` (those that ever
    held a replica), ``_swept_to`` (where ``lost_in_reboot`` goes on; None once it is through),
    ``claimable``.
    """

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self._boot: bytes = environment.get(environment.db.meta, META_BOOT) or BOOT.pack(0)
        rows = environment.rows(environment.db.meta, META_TIER, META_TIER, 1 << 16)
        self._tiers = {TIER_KEY.unpack(key[len(META_TIER) :])[0] for key, _ in rows}
        swept = environment.get(environment.db.meta, META_SWEPT) or BOOT.pack(0)
        self._swept_to = None if swept == self._boot else b""
        self.claimable = environment.count_rows(environment.db.outdated) > 0
        """Whether there may be a replica under a number for which nobody will ask."""

    def begin_boot(self, boot_id: bytes) -> bool:
        """Call it once after the index was opened, with the kernel's boot_id.

        True if the machine was restarted since the last call on this index: then replicas that are
        not durable count no more.
        """
        known = self._env.get(self._env.db.meta, META_BOOT_ID)
        if known == boot_id:
            return False
        boot = BOOT.pack(BOOT.unpack(self._boot)[0] + 1)

        def begin(txn: Any) -> None:
            txn.put(META_BOOT_ID, boot_id, db=self._env.db.meta)
            txn.put(META_BOOT, boot, db=self._env.db.meta)

        self._env.write(begin)
        self._boot = boot
        self._swept_to = b""
        return known is not None

    def end_boot(self) -> None:
        """Pages may be lost: the next ``begin_boot`` says that the machine was restarted, whether
        it was or not."""
        if self._env.get(self._env.db.meta, META_BOOT_ID) is not None:
            self._env.write(lambda txn: txn.put(META_BOOT_ID, b"", db=self._env.db.meta))

    def replica(self, ino: int) -> Replica | None:
        """The replica of ``ino``, if there is one that counts."""
        value = self._look(ID.pack(ino))
        return None if value is None else unpack_replica(value)

    def part(self, ino: int) -> Replica | None:
        """``replica``, and what is there of a partial one."""
        value = self._look(ID.pack(ino))
        return None if value is None else unpack_part(value)

    def present_bytes(self, ino: int) -> int:
        """How much of the file a partial replica has; else 0."""
        value = self._look(ID.pack(ino))
        if value is None:
            return 0
        replica = unpack_replica(value)
        return min(replica.size, replica_present(value).count(1) * replica.chunk_bytes)

    def _look(self, key: bytes) -> memoryview | None:
        """The record, until the next write; None if it does not count."""
        value = self._env.look(self._env.db.replicas, key)
        return value if value is not None and replica_counts(value, self._boot) else None

    def replicas_of(self, inos: Sequence[int]) -> dict[int, Replica]:
        """``replica`` of each, where there is one."""
        found = ((ino, self.replica(ino)) for ino in inos)
        return {ino: replica for ino, replica in found if replica is not None}

    def all(self) -> Iterator[tuple[int, Replica]]:
        """All that count, by rising inode number. Records may change meanwhile: each is seen as it
        is when it is reached."""
        for batch in self._batches(_BATCH):
            yield from batch

    def not_durable(self) -> Iterator[list[tuple[int, Replica]]]:
        """Those of ``all`` that are not durable, a batch at a time, which may be empty."""
        return self._batches(_SWEEP, durable=False)

    def _batches(
        self, rows_each: int, *, durable: bool = True
    ) -> Iterator[list[tuple[int, Replica]]]:
        """``all``, by so many rows that are looked at; not ``durable``: without those that are."""
        start = b""
        while rows := self._env.look_at_rows(self._env.db.replicas, start, rows_each):
            start = b"%b\0" % rows[-1][0]
            yield [
                (int.from_bytes(key, "big"), unpack_replica(value))
                for key, value in rows
                if (durable or not value[0]) and replica_counts(value, self._boot)
            ]

    def names(self, tier: int, prefix: bytes, after: bytes, limit: int) -> list[tuple[bytes, int]]:
        """At most ``limit`` names of replicas in ``tier`` that count, each with its inode number.

        Names that begin with ``prefix`` and come after ``after``, rising. If fewer than ``limit``
        come, they are the last ones. About 2 us each.
        """
        tier_key = TIER_KEY.pack(tier)
        prefix = tier_key + prefix
        start = max(prefix, tier_key + after + b"\0") if after else prefix
        rows = self._counting(self._env.db.files, start, prefix, limit, lambda row: row[1])
        return [(key[TIER_KEY.size :], int.from_bytes(ino, "big")) for key, ino in rows]

    def owner(self, tier: int, name: bytes) -> int | None:
        """The inode number whose replica is the file ``name`` in ``tier``; None if none counts."""
        ino = self._env.get(self._env.db.files, PLACE_KEY.pack(tier, name))
        if ino is None or self._look(ino) is None:
            return None
        return int.from_bytes(ino, "big")

    def outdated_replicas(self, tier: int, limit: int) -> list[int]:
        """At most ``limit`` numbers whose replicas in ``tier`` nobody will ask for: those in state
        FOUND, and those of versions that the source no longer has."""
        prefix = TIER_KEY.pack(tier)
        rows = self._counting(
            self._env.db.outdated, prefix, prefix, limit, lambda row: row[0][TIER_KEY.size :]
        )
        return [int.from_bytes(ino, "big") for _key, ino in rows]

    def _counting(
        self,
        table: Any,
        start: bytes,
        prefix: bytes,
        limit: int,
        ino_of: Callable[[tuple[bytes, bytes]], bytes],
    ) -> list[tuple[bytes, bytes]]:
        """At most ``limit`` rows whose replicas count: each key, and the packed inode number."""
        found: list[tuple[bytes, bytes]] = []
        while len(found) < limit:
            wanted = limit - len(found)
            rows = self._env.rows(table, start, prefix, wanted)
            for row in rows:
                ino = ino_of(row)
                if self._look(ino) is not None:
                    found.append((row[0], ino))
            if len(rows) < wanted:
                break
            start = rows[-1][0] + b"\0"
        return found

    def tier_totals(self) -> dict[int, TierTotals]:
        """The totals of each tier that holds a replica. Lost ones count until they are dropped,
        because their files are still there."""
        totals = {}
        for key, value in self._env.rows(self._env.db.meta, META_TIER, META_TIER, 1 << 16):
            of_tier = TierTotals(*TOTALS.unpack(value))
            if of_tier.resident or of_tier.partial or of_tier.found:
                totals[TIER_KEY.unpack(key[len(META_TIER) :])[0]] = of_tier
        return totals

    def journal(self) -> list[tuple[int, bytes]]:
        """Tier and name of every file that may lie there without a record: copies and removals that
        were begun and have not ended."""
        return [PLACE_KEY.unpack(key) for key, _ in self._journal_rows()]

    def under_way(self) -> list[int]:
        """The inode numbers of the copies in the ``journal``."""
        inos = (int.from_bytes(value, "big") for _, value in self._journal_rows())
        return [ino for ino in inos if ino]

    def _journal_rows(self) -> list[tuple[bytes, bytes]]:
        return self._env.rows(
            self._env.db.journal, b"", b"", self._env.count_rows(self._env.db.journal)
        )

    def lost_in_reboot(self, limit: int) -> list[tuple[int, Replica]]:
        """At most ``limit`` records that do not count any more, to be dropped; empty at the end.

        Each call continues where the last one ended. After a reboot, the calls walk all records
        once (about 0.3 s a million, each call until it has ``limit`` lost ones); otherwise they
        cost nothing. A record that could not be dropped comes again after the next reboot.
        """
        lost: list[tuple[int, Replica]] = []
        while self._swept_to is not None and len(lost) < limit:
            rows = self._env.look_at_rows(self._env.db.replicas, self._swept_to, _SWEEP)
            if not rows:
                if lost:
                    # The end is recorded only after the caller has dropped these, too.
                    break
                self._env.write(lambda txn: txn.put(META_SWEPT, self._boot, db=self._env.db.meta))
                self._swept_to = None
                break
            boot = self._boot
            for key, value in rows:
                if not value[0] and not replica_counts(value, boot):
                    lost.append((int.from_bytes(key, "big"), unpack_replica(value)))
                    if len(lost) == limit:
                        break
            self._swept_to = b"%b\0" % key
        return lost

    # Writing.

    def begin_copies(self, copies: Sequence[tuple[int, int, bytes]]) -> None:
        """A file of each (number, tier, name) may lie in the tier from now on, until
        ``put_replica`` records it or ``file_gone`` says that it does not. One transaction."""
        rows = [(PLACE_KEY.pack(tier, name), ID.pack(ino)) for ino, tier, name in copies]

        def put(txn: Any) -> None:
            for place, key in rows:
                txn.put(place, key, db=self._env.db.journal)

        self._env.write(put, of_tiers=True)

    def file_gone(self, tier: int, name: bytes) -> None:
        """The tier has no file of this name, complete or not, except one with a record."""
        place = PLACE_KEY.pack(tier, name)
        self._env.write(lambda txn: txn.delete(place, db=self._env.db.journal))

    def put_replica(self, ino: int, replica: Replica, in_flight: bool = False) -> None:
        """Record a replica in place of the former one, and update the totals of both tiers.

        Ends the journal entry of ``begin_copies``, unless the replica is ``in_flight``: still being
        written, so that a crash may leave it other than recorded. If the former replica has another
        file, journals that. If another number has this file (two of one version), removes that
        number's record.

        That of a file of 1 TiB takes about 0.1 s, mostly for its digests.
        """

        def put(txn: Any) -> None:
            self._put(txn, ID.pack(ino), replica)
            if not in_flight and not replica.segment:
                place = PLACE_KEY.pack(replica.tier, replica.name)
                txn.delete(place, db=self._env.db.journal)

        self._env.write(put, of_tiers=True, looks=True)

    def put_replicas(self, replicas: Sequence[tuple[int, Replica]]) -> set[int]:
        """``put_replica`` of each, in one transaction: all are recorded, or none. Ends their
        journal entries. About 5 us each: a few hundred at most. Returns those with an outdated or
        unknown node."""
        rows = [
            (ID.pack(ino), PLACE_KEY.pack(replica.tier, replica.name), replica)
            for ino, replica in replicas
        ]

        def put(txn: Any) -> set[int]:
            db, (boot,) = self._env.db, BOOT.unpack(self._boot)
            totals: dict[tuple[int, int], list[int]] = {}
            outdated: set[int] = set()

            def count() -> None:
                for (tier, state), (number, allocated) in totals.items():
                    self._count(txn, tier, state, number, allocated)
                totals.clear()

            for (ino, _), (key, place, replica) in zip(replicas, rows, strict=True):
                # Nearly always there is no other record, neither of the number nor of the file.
                if not txn.put(place, key, overwrite=False, db=db.files):
                    count()  # this one may replace one of them
                    self._put(txn, key, replica)
                elif not txn.put(key, pack_replica(replica, boot), overwrite=False, db=db.replicas):
                    txn.delete(place, db=db.files)
                    count()
                    self._put(txn, key, replica)
                else:
                    if replica.segment:
                        self._put_record(txn, key, replica)
                    total = totals.setdefault((replica.tier, replica.state), [0, 0])
                    total[0] += 1
                    total[1] += replica.allocated_bytes
                if self._note_outdated(txn, key, replica):
                    outdated.add(ino)
                if not replica.segment:
                    txn.delete(place, db=db.journal)
            count()
            return outdated

        return self._env.write(put, of_tiers=True)

    def drop_replicas(self, inos: Sequence[int]) -> None:
        """Remove their records, even lost ones, in one transaction; their files are in the journal
        until ``file_gone``.

        No record is no error. If this raises, the records stay, and so must the files.
        """
        keys = [ID.pack(ino) for ino in inos]

        def drop(txn: Any) -> None:
            for key in keys:
                self._forget(txn, key, lies_there=True)

        if keys:
            self._env.write(drop, of_tiers=True, looks=True)

    def mark_durable(self, inos: Iterable[int]) -> None:
        """Record that their data are on the disk. Skips those without a record, and lost ones.

        One transaction. The records must not have changed since the data were synced.
        """
        keys = [ID.pack(ino) for ino in inos]

        def mark(txn: Any) -> None:
            for key in keys:
                value = txn.get(key, None, self._env.db.replicas)
                if value is not None and not value[0] and replica_counts(value, self._boot):
                    txn.put(key, durable_replica(value), db=self._env.db.replicas)

        self._env.write(mark, of_tiers=True)

    def record_found_files(self, tier: int, files: Sequence[TierFile]) -> list[int]:
        """Record complete files that lie in ``tier`` as replicas in state FOUND, each under a new
        number, durable if it is synced; returns the numbers.

        Skips files with a record or a journal entry. One transaction, about 10 us a file. A file
        that is not synced must have been written in this boot; otherwise its data may be missing.
        """

        def record(txn: Any) -> list[int]:
            places = [(file, PLACE_KEY.pack(tier, file.name)) for file in files]
            new = [
                file
                for file, place in places
                if txn.get(place, None, self._env.db.files) is None
                and txn.get(place, None, self._env.db.journal) is None
            ]
            if not new:
                return []
            first = self._env.new_ids(txn, len(new))
            for ino, file in enumerate(new, first):
                self._put(txn, ID.pack(ino), Replica.found(tier, file))
            return list(range(first, first + len(new)))

        return self._env.write(record, of_tiers=True)

    def claim(self, ino: int, name: bytes, size: int) -> Replica | None:
        """Give ``ino`` a complete replica that nobody uses, as RESIDENT, and return it.

        The replica has that name and size, in any tier. It is in state FOUND or belongs to an
        outdated number, which then has none. None if no such replica counts, or ``ino`` has one.
        Costs a look-up per tier, and a transaction if there may be one.
        """
        self._env.refuse_if_frozen()
        places = [PLACE_KEY.pack(tier, name) for tier in sorted(self._tiers)]
        if all(self._env.get(self._env.db.files, place) is None for place in places):
            return None
        return self._env.write(
            lambda txn: self._claim(txn, ID.pack(ino), places, size), of_tiers=True
        )

    def _claim(self, txn: Any, key: bytes, places: list[bytes], size: int) -> Replica | None:
        own = txn.get(key, None, self._env.db.replicas)
        if own is not None and replica_counts(own, self._boot):
            return None
        for place in places:
            owner = txn.get(place, None, self._env.db.files)
            if owner is None:
                continue
            value = txn.get(owner, None, self._env.db.replicas)
            if not replica_counts(value, self._boot):
                continue
            replica = unpack_replica(value)
            if replica.size == size and self._is_free(txn, owner, replica.state):
                claimed = replica._replace(state=ReplicaState.RESIDENT)
                self._put(txn, key, claimed)
                return claimed
        return None

    def _is_free(self, txn: Any, owner: bytes, state: ReplicaState) -> bool:
        if state is ReplicaState.RESIDENT:
            node = txn.get(owner, None, self._env.db.nodes)
            return node is not None and node_outdated(node)
        return state is ReplicaState.FOUND

    # Within a transaction.

    def note_outdated(self, txn: Any, ino: bytes) -> None:
        """The node of ``ino``, which is packed, becomes outdated."""
        replica = txn.get(ino, None, self._env.db.replicas)
        if replica is not None:
            tier = replica_head(replica).tier
            self.claimable = True
            txn.put(TIER_KEY.pack(tier) + ino, b"", db=self._env.db.outdated)

    def note_revived(self, txn: Any, ino: bytes) -> None:
        """The source has that version after all."""
        replica = txn.get(ino, None, self._env.db.replicas)
        if replica is not None:
            tier = replica_head(replica).tier
            txn.delete(TIER_KEY.pack(tier) + ino, db=self._env.db.outdated)

    def _put(self, txn: Any, key: bytes, replica: Replica) -> None:
        place = PLACE_KEY.pack(replica.tier, replica.name)
        owner = txn.get(place, None, self._env.db.files)
        if owner != key:
            if owner is not None:
                # Both have the same file, unless the new one is in a segment.
                self._forget(txn, bytes(owner), lies_there=bool(replica.segment))
            self._forget(txn, key, lies_there=True)
        else:
            self._forget(txn, key, lies_there=bool(replica.segment))
        self._count(txn, replica.tier, replica.state, 1, replica.allocated_bytes)
        (boot,) = BOOT.unpack(self._boot)
        txn.put(key, pack_replica(replica, boot), db=self._env.db.replicas)
        txn.put(place, key, db=self._env.db.files)
        if replica.segment:
            self._put_record(txn, key, replica)
        self._note_outdated(txn, key, replica)

    def _put_record(self, txn: Any, key: bytes, replica: Replica) -> None:
        record = RECORD_KEY.pack(replica.tier, replica.segment, replica.offset)
        txn.put(record, key, db=self._env.db.records)
        self._env.on_record(replica.name)

    def _note_outdated(self, txn: Any, key: bytes, replica: Replica) -> bool:
        """Note if nobody will ask for it. Returns whether its node is outdated, or unknown."""
        node = txn.get(key, None, self._env.db.nodes)
        if node is not None and not node_outdated(node):
            return False
        if replica.state is ReplicaState.FOUND or node is not None:
            self.claimable = True
            txn.put(TIER_KEY.pack(replica.tier) + key, b"", db=self._env.db.outdated)
        return True

    def _forget(self, txn: Any, key: bytes, *, lies_there: bool) -> None:
        """Remove a record, if there is one. ``lies_there``: its file may still be there."""
        value = txn.get(key, None, self._env.db.replicas)
        if value is None:
            return
        head = replica_head(value)
        txn.delete(key, db=self._env.db.replicas)
        self._count(txn, head.tier, head.state, -1, -head.allocated_bytes)
        txn.delete(head.place, db=self._env.db.files)
        txn.delete(TIER_KEY.pack(head.tier) + key, db=self._env.db.outdated)
        if head.segment:
            txn.delete(head.record, db=self._env.db.records)
            self._env.on_record(head.place[TIER_KEY.size :])
            txn.put(head.record[: SEGMENT_KEY.size], SEGMENT.pack(1), db=self._env.db.segments)
        elif lies_there:
            txn.put(head.place, _REMOVAL, db=self._env.db.journal)

    def _count(self, txn: Any, tier: int, state: int, number: int, allocated: int) -> None:
        self._tiers.add(tier)
        key = META_TIER + TIER_KEY.pack(tier)
        totals = list(TOTALS.unpack(txn.get(key, bytes(TOTALS.size), self._env.db.meta)))
        totals[_COLUMN[state]] += number
        totals[3] += allocated
        txn.put(key, TOTALS.pack(*totals), db=self._env.db.meta)
