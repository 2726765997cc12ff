"""Reads the records of replicas, the journal of files without a record, and the totals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from monarchfs.index.records import (
    BOOT,
    ID,
    META_BOOT,
    META_SWEPT,
    META_TIER,
    PLACE_KEY,
    TIER_KEY,
    TOTALS,
    replica_counts,
    unpack_replica,
)
from monarchfs.index.segments import SegmentTables
from monarchfs.types import Replica, TierTotals

_BATCH = 256
_SWEEP = 512


class ReplicaRows(SegmentTables):
    """A record *counts* if it is durable or of the current boot. Others are lost: their files may
    have the right size without the data.

    Changing: ``_boot`` (the number of the boot, packed as in records), ``_tiers`` (those that ever
    held a replica), ``_swept_to`` (where ``lost_in_reboot`` goes on; None once it is through).
    """

    _boot: bytes
    _tiers: set[int]
    _swept_to: bytes | None

    def _load_replicas(self) -> None:
        """Call this once, when the index was opened."""
        self._boot = self._get(self._db.meta, META_BOOT) or BOOT.pack(0)
        rows = self._rows(self._db.meta, META_TIER, META_TIER, 1 << 16)
        self._tiers = {TIER_KEY.unpack(key[len(META_TIER) :])[0] for key, _ in rows}
        swept = self._get(self._db.meta, META_SWEPT) or BOOT.pack(0)
        self._swept_to = None if swept == self._boot else b""
        self.claimable = self._count_rows(self._db.outdated) > 0

    def replica(self, ino: int) -> Replica | None:
        """The replica of ``ino``, if there is one that counts."""
        value = self._get(self._db.replicas, ID.pack(ino))
        if value is None or not replica_counts(value, self._boot):
            return None
        return unpack_replica(value)

    def replicas_of(self, inos: Sequence[int]) -> dict[int, Replica]:
        """``replica`` of each, where there is one."""
        rows = self._get_each(self._db.replicas, inos)
        return {
            ino: unpack_replica(value) for ino, value in rows if replica_counts(value, self._boot)
        }

    def replicas(self) -> Iterator[tuple[int, Replica]]:
        """All that count, by rising inode number. Records may change meanwhile: each is seen as it
        is when it is reached."""
        start = b""
        while rows := self._rows(self._db.replicas, start, b"", _BATCH):
            for key, value in rows:
                if replica_counts(value, self._boot):
                    yield int.from_bytes(key, "big"), unpack_replica(value)
            start = rows[-1][0] + b"\0"

    def names(self, tier: int, prefix: bytes, after: bytes, limit: int) -> list[tuple[bytes, int]]:
        """At most ``limit`` names of replicas in ``tier`` that count, each with its inode number.

        Names that begin with ``prefix`` and come after ``after``, rising. If fewer than ``limit``
        come, they are the last ones. About 2 us each.
        """
        tier_key = TIER_KEY.pack(tier)
        prefix = tier_key + prefix
        start = max(prefix, tier_key + after + b"\0") if after else prefix
        rows = self._counting(self._db.files, start, prefix, limit, lambda row: row[1])
        return [(key[TIER_KEY.size :], int.from_bytes(ino, "big")) for key, ino in rows]

    def owner(self, tier: int, name: bytes) -> int | None:
        """The inode number whose replica is the file ``name`` in ``tier``; None if none counts."""
        ino = self._get(self._db.files, PLACE_KEY.pack(tier, name))
        if ino is None or not replica_counts(self._get(self._db.replicas, ino), self._boot):
            return None
        return int.from_bytes(ino, "big")

    def outdated_replicas(self, tier: int, limit: int) -> list[int]:
        """At most ``limit`` numbers whose replicas in ``tier`` nobody will ask for: those in state
        FOUND, and those of versions that the source no longer has."""
        prefix = TIER_KEY.pack(tier)
        rows = self._counting(
            self._db.outdated, prefix, prefix, limit, lambda row: row[0][TIER_KEY.size :]
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
            rows = self._rows(table, start, prefix, wanted)
            for row in rows:
                ino = ino_of(row)
                if replica_counts(self._get(self._db.replicas, ino), self._boot):
                    found.append((row[0], ino))
            if len(rows) < wanted:
                break
            start = rows[-1][0] + b"\0"
        return found

    def tier_totals(self) -> dict[int, TierTotals]:
        """The totals of each tier that holds a replica. Lost ones count until they are dropped,
        because their files are still there."""
        totals = {}
        for key, value in self._rows(self._db.meta, META_TIER, META_TIER, 1 << 16):
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
        return self._rows(self._db.journal, b"", b"", self._count_rows(self._db.journal))

    def lost_in_reboot(self, limit: int) -> list[tuple[int, Replica]]:
        """At most ``limit`` records that do not count any more, to be dropped; empty at the end.

        Each call continues where the last one ended. After a reboot, the calls walk all records
        once (about 0.3 s a million, each call until it has ``limit`` lost ones); otherwise they
        cost nothing. A record that could not be dropped comes again after the next reboot.
        """
        lost: list[tuple[int, Replica]] = []
        while self._swept_to is not None and len(lost) < limit:
            rows = self._rows(self._db.replicas, self._swept_to, b"", _SWEEP)
            if not rows:
                if lost:
                    # The end is recorded only after the caller has dropped these, too.
                    break
                self._write(lambda txn: txn.put(META_SWEPT, self._boot, db=self._db.meta))
                self._swept_to = None
                break
            boot = self._boot
            for key, value in rows:
                if not value[0] and not replica_counts(value, boot):
                    lost.append((int.from_bytes(key, "big"), unpack_replica(value)))
                    if len(lost) == limit:
                        break
            self._swept_to = key + b"\0"
        return lost
