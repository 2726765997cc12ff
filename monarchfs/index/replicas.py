"""Records replicas: which inode each file in a tier belongs to, and the totals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from monarchfs.index.records import (
    BOOT,
    ID,
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
    unpack_replica,
)
from monarchfs.index.replica_rows import ReplicaRows
from monarchfs.types import Replica, ReplicaState, TierFile

_COLUMN: dict[int, int] = {
    ReplicaState.RESIDENT: 0,
    ReplicaState.PARTIAL: 1,
    ReplicaState.FOUND: 2,
}
"""The field of TOTALS that counts the replicas in each state."""


_REMOVAL = ID.pack(0)
"""In the journal, in place of an inode number. Nobody wants what was removed, by hand perhaps."""


class Replicas(ReplicaRows):
    """Records replicas. At any moment, every file that this program has in a tier has a record or
    is in the journal, unless the index that knew it is gone.

    All but ``file_gone`` raise IndexWriteError if the index is frozen.
    """

    def begin_copy(self, ino: int, tier: int, name: bytes) -> None:
        """A file of this name may lie in the tier from now on, until ``put_replica`` records it or
        ``file_gone`` says that it does not."""
        self.begin_copies([(ino, tier, name)])

    def begin_copies(self, copies: Sequence[tuple[int, int, bytes]]) -> None:
        """``begin_copy`` of each (number, tier, name), in one transaction."""
        rows = [(PLACE_KEY.pack(tier, name), ID.pack(ino)) for ino, tier, name in copies]

        def put(txn: Any) -> None:
            for place, key in rows:
                txn.put(place, key, db=self._db.journal)

        self._write(put, of_tiers=True)

    def file_gone(self, tier: int, name: bytes) -> None:
        """The tier has no file of this name, complete or not, except one with a record."""
        place = PLACE_KEY.pack(tier, name)
        self._write(lambda txn: txn.delete(place, db=self._db.journal))

    def put_replica(self, ino: int, replica: Replica, in_flight: bool = False) -> None:
        """Record a replica in place of the former one, and update the totals of both tiers.

        Ends the journal entry of ``begin_copy``, unless the replica is ``in_flight``: still being
        written, so that a crash may leave it other than recorded. If the former replica has another
        file, journals that. If another number has this file (two of one version), removes that
        number's record.

        A bitmap of a million chunks takes a few milliseconds, as do digests of 100 GB.
        """

        def put(txn: Any) -> None:
            self._put(txn, ID.pack(ino), replica)
            if not in_flight and not replica.segment:
                place = PLACE_KEY.pack(replica.tier, replica.name)
                txn.delete(place, db=self._db.journal)

        self._write(put, of_tiers=True)

    def put_replicas(self, replicas: Sequence[tuple[int, Replica]]) -> set[int]:
        """``put_replica`` of each, in one transaction: all are recorded, or none. Ends their
        journal entries. About 5 us each: a few hundred at most. Returns those with an outdated or
        unknown node."""
        rows = [
            (ID.pack(ino), PLACE_KEY.pack(replica.tier, replica.name), replica)
            for ino, replica in replicas
        ]

        def put(txn: Any) -> set[int]:
            db, (boot,) = self._db, BOOT.unpack(self._boot)
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

        return self._write(put, of_tiers=True)

    def drop_replica(self, ino: int) -> None:
        """Remove its record, even if it is lost; its file is in the journal until ``file_gone``.

        No record is no error. If this raises, the record stays, and so must the file.
        """
        self.drop_replicas([ino])

    def drop_replicas(self, inos: Sequence[int]) -> None:
        """``drop_replica`` of each, in one transaction."""
        keys = [ID.pack(ino) for ino in inos]

        def drop(txn: Any) -> None:
            for key in keys:
                self._forget(txn, key, lies_there=True)

        if keys:
            self._write(drop, of_tiers=True)

    def mark_durable(self, inos: Iterable[int]) -> None:
        """Record that their data are on the disk. Skips those without a record, and lost ones.

        One transaction. The records must not have changed since the data were synced.
        """
        keys = [ID.pack(ino) for ino in inos]

        def mark(txn: Any) -> None:
            for key in keys:
                value = txn.get(key, None, self._db.replicas)
                if value is not None and not value[0] and replica_counts(value, self._boot):
                    txn.put(key, durable_replica(value), db=self._db.replicas)

        self._write(mark, of_tiers=True)

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
                if txn.get(place, None, self._db.files) is None
                and txn.get(place, None, self._db.journal) is None
            ]
            if not new:
                return []
            first = self._new_ids(txn, len(new))
            for ino, file in enumerate(new, first):
                self._put(txn, ID.pack(ino), Replica.found(tier, file))
            return list(range(first, first + len(new)))

        return self._write(record, of_tiers=True)

    def claim(self, ino: int, name: bytes, size: int) -> Replica | None:
        """Give ``ino`` a complete replica that nobody uses, as RESIDENT, and return it.

        The replica has that name and size, in any tier. It is in state FOUND or belongs to an
        outdated number, which then has none. None if no such replica counts, or ``ino`` has one.
        Costs a look-up per tier, and a transaction if there may be one.
        """
        self._refuse_if_frozen()
        places = [PLACE_KEY.pack(tier, name) for tier in sorted(self._tiers)]
        if all(self._get(self._db.files, place) is None for place in places):
            return None
        return self._write(lambda txn: self._claim(txn, ID.pack(ino), places, size), of_tiers=True)

    def _claim(self, txn: Any, key: bytes, places: list[bytes], size: int) -> Replica | None:
        own = txn.get(key, None, self._db.replicas)
        if own is not None and replica_counts(own, self._boot):
            return None
        for place in places:
            owner = txn.get(place, None, self._db.files)
            if owner is None:
                continue
            value = txn.get(owner, None, self._db.replicas)
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
            node = txn.get(owner, None, self._db.nodes)
            return node is not None and node_outdated(node)
        return state is ReplicaState.FOUND

    # Within a transaction.

    def _put(self, txn: Any, key: bytes, replica: Replica) -> None:
        place = PLACE_KEY.pack(replica.tier, replica.name)
        owner = txn.get(place, None, self._db.files)
        if owner != key:
            if owner is not None:
                # Both have the same file, unless the new one is in a segment.
                self._forget(txn, owner, lies_there=bool(replica.segment))
            self._forget(txn, key, lies_there=True)
        else:
            self._forget(txn, key, lies_there=bool(replica.segment))
        self._count(txn, replica.tier, replica.state, 1, replica.allocated_bytes)
        (boot,) = BOOT.unpack(self._boot)
        txn.put(key, pack_replica(replica, boot), db=self._db.replicas)
        txn.put(place, key, db=self._db.files)
        if replica.segment:
            self._put_record(txn, key, replica)
        self._note_outdated(txn, key, replica)

    def _put_record(self, txn: Any, key: bytes, replica: Replica) -> None:
        record = RECORD_KEY.pack(replica.tier, replica.segment, replica.offset)
        txn.put(record, key, db=self._db.records)
        self._on_record(replica.name)

    def _note_outdated(self, txn: Any, key: bytes, replica: Replica) -> bool:
        """Note if nobody will ask for it. Returns whether its node is outdated, or unknown."""
        node = txn.get(key, None, self._db.nodes)
        if node is not None and not node_outdated(node):
            return False
        if replica.state is ReplicaState.FOUND or node is not None:
            self.claimable = True
            txn.put(TIER_KEY.pack(replica.tier) + key, b"", db=self._db.outdated)
        return True

    def _forget(self, txn: Any, key: bytes, *, lies_there: bool) -> None:
        """Remove a record, if there is one. ``lies_there``: its file may still be there."""
        value = txn.pop(key, self._db.replicas)
        if value is None:
            return
        head = replica_head(value)
        self._count(txn, head.tier, head.state, -1, -head.allocated_bytes)
        txn.delete(head.place, db=self._db.files)
        txn.delete(TIER_KEY.pack(head.tier) + key, db=self._db.outdated)
        if head.segment:
            txn.delete(head.record, db=self._db.records)
            self._on_record(head.place[TIER_KEY.size :])
            txn.put(head.record[: SEGMENT_KEY.size], SEGMENT.pack(1), db=self._db.segments)
        elif lies_there:
            txn.put(head.place, _REMOVAL, db=self._db.journal)

    def _count(self, txn: Any, tier: int, state: int, number: int, allocated: int) -> None:
        self._tiers.add(tier)
        key = META_TIER + TIER_KEY.pack(tier)
        totals = list(TOTALS.unpack(txn.get(key, bytes(TOTALS.size), self._db.meta)))
        totals[_COLUMN[state]] += number
        totals[3] += allocated
        txn.put(key, TOTALS.pack(*totals), db=self._db.meta)
