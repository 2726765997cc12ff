"""Replicas, and the totals of each tier kept in step with them; extended attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from monarchfs.index.records import (
    ID,
    META_TIER,
    TIER_KEY,
    TOTALS,
    durable_replica,
    pack_replica,
    pack_xattr,
    unpack_replica,
    unpack_xattr,
)
from monarchfs.index.tables import Tables
from monarchfs.types import Replica, ReplicaState

_BATCH = 256


class Replicas(Tables):
    """Which local copies there are."""

    def replica(self, ino: int) -> Replica | None:
        value = self._get(self._db.replicas, ID.pack(ino))
        return None if value is None else unpack_replica(value)

    def replicas(self) -> Iterator[tuple[int, Replica]]:
        """All of them, by rising inode number. They may be changed meanwhile: what was not
        reached yet is then seen as it is when reached."""
        start = b""
        while rows := self._rows(self._db.replicas, start, b"", _BATCH):
            for key, value in rows:
                yield int.from_bytes(key, "big"), unpack_replica(value)
            start = rows[-1][0] + b"\0"

    def put_replica(self, ino: int, replica: Replica) -> None:
        """Record a replica in place of the one that was recorded, and the totals of both tiers.

        A bitmap of a million chunks takes a few milliseconds.
        """
        value = pack_replica(replica)
        self._write(lambda txn: self._replace(txn, ino, replica, value))

    def drop_replica(self, ino: int) -> None:
        """Forget it. One that is not recorded passes."""
        self._write(lambda txn: self._replace(txn, ino, None, b""))

    def mark_durable(self, inos: Iterable[int]) -> None:
        """Their data are on the disk as their records say. Those not recorded pass.

        One transaction. The records must not have changed since the data were synced.
        """
        keys = [ID.pack(ino) for ino in inos]
        self._write(lambda txn: self._set_durable(txn, keys))

    def _set_durable(self, txn: Any, keys: list[bytes]) -> None:
        for key in keys:
            value = txn.get(key, None, self._db.replicas)
            if value is not None:
                txn.put(key, durable_replica(value), db=self._db.replicas)

    def tier_totals(self) -> dict[int, tuple[int, int, int]]:
        """Of each tier that holds any: resident files, partial files, allocated bytes of both."""
        totals = {}
        for key, value in self._rows(self._db.meta, META_TIER, META_TIER, 1 << 16):
            resident, partial, allocated = TOTALS.unpack(value)
            if resident or partial:
                (tier,) = TIER_KEY.unpack(key[len(META_TIER) :])
                totals[tier] = (resident, partial, allocated)
        return totals

    def _replace(self, txn: Any, ino: int, replica: Replica | None, value: bytes) -> None:
        key = ID.pack(ino)
        old = txn.get(key, None, self._db.replicas)
        if old is not None:
            self._count(txn, unpack_replica(old), -1)
        if replica is not None:
            self._count(txn, replica, 1)
            txn.put(key, value, db=self._db.replicas)
        elif old is not None:
            txn.delete(key, db=self._db.replicas)

    def _count(self, txn: Any, replica: Replica, sign: int) -> None:
        key = META_TIER + TIER_KEY.pack(replica.tier)
        resident, partial, allocated = TOTALS.unpack(
            txn.get(key, bytes(TOTALS.size), self._db.meta)
        )
        if replica.state is ReplicaState.RESIDENT:
            resident += sign
        else:
            partial += sign
        allocated += sign * replica.allocated_bytes
        txn.put(key, TOTALS.pack(resident, partial, allocated), db=self._db.meta)

    # Extended attributes of the source.

    def xattr(self, ino: int, name: bytes) -> bytes | int | None:
        """The value, or the errno that the source answered, or None if it was never asked.

        The name ``b""`` is free for the list of names. A directory's are forgotten when its ctime
        changes (setting one changes it); of anything else the next version is another number.
        """
        value = self._get(self._db.xattrs, ID.pack(ino) + name)
        return None if value is None else unpack_xattr(value)

    def put_xattr(self, ino: int, name: bytes, answer: bytes | int) -> None:
        """Remember a value, or an errno (a positive number)."""
        key, value = ID.pack(ino) + name, pack_xattr(answer)
        self._write(lambda txn: txn.put(key, value, db=self._db.xattrs))
