"""Nodes of versions that the source no longer has: since when, and their end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from monarchfs.index.pins import Pins
from monarchfs.index.records import (
    ENTRY,
    ID,
    ID_PAIR,
    STALE,
    TIER_INO,
    node_identity,
    node_outdated,
    outdated_node,
    replica_head,
)

_EXAMINED_PER_PURGED = 8


class Outdated(Pins):
    """Makes nodes outdated, in the transaction of the change that makes them so.

    Changing: the number that ``purge_outdated`` has reached.
    """

    _purged_to = b""

    def mark_outdated(self, ino: int, now_ns: int | None = None) -> None:
        """The source no longer has the version that ``ino`` stands for, since ``now_ns`` (by
        default: now). An unknown number is ignored.
        """
        since = time.time_ns() if now_ns is None else now_ns

        def mark(txn: Any) -> None:
            key = ID.pack(ino)
            value = txn.get(key, None, self._db.nodes)
            if value is not None:
                self._outdate(txn, key, value, since)

        self._write(mark)

    def renumber(self, ino: int) -> None:
        """Make ``ino`` outdated: from the next look-up by name on, another number stands for its
        version. An unknown number is ignored."""
        now_ns = time.time_ns()

        def renumber(txn: Any) -> None:
            key = ID.pack(ino)
            value = txn.get(key, None, self._db.nodes)
            if value is None:
                return
            source = ID_PAIR.pack(*node_identity(value))
            if txn.get(source, None, self._db.by_source) == key:
                txn.delete(source, db=self._db.by_source)
            self._outdate(txn, key, value, now_ns)

        self._write(renumber)

    def purge_outdated(self, before_ns: int, limit: int) -> int:
        """Forget nodes that became outdated before ``before_ns`` and have no replica.

        At most ``limit`` in one transaction (about 10 us each); returns how many. Each call goes
        on where the last one ended and examines a bounded number, so a call may find none and the
        next one some. The numbers are never given out again. A directory with many names takes
        several calls.
        """
        start = self._purged_to
        rows = self._rows(self._db.stale, start, b"", limit * _EXAMINED_PER_PURGED)
        chosen: list[bytes] = []
        reached = b""
        for key, value in rows:
            if STALE.unpack(value)[0] < before_ns and self._get(self._db.replicas, key) is None:
                chosen.append(key)
                if len(chosen) == limit:
                    reached = key
                    break
        else:
            if len(rows) == limit * _EXAMINED_PER_PURGED:
                reached = rows[-1][0]
        purged = 0
        if chosen:
            purged = self._write(lambda txn: self._purge(txn, chosen, limit))
        self._purged_to = reached + b"\0" if reached else b""
        return purged

    def _purge(self, txn: Any, keys: list[bytes], names_limit: int) -> int:
        purged = 0
        for key in keys:
            for entry in _keys(txn.cursor(self._db.entries), key):
                if names_limit == 0:
                    return purged
                names_limit -= 1
                name = txn.pop(entry, self._db.entries)[ENTRY.size :]
                self._on_name(int.from_bytes(key, "big"), name)
                txn.delete(key + name, db=self._db.names)
            txn.delete(key, db=self._db.listings)
            self._forget_xattrs(txn, key)
            # Else the next version of that source file would get this number.
            source_key = ID_PAIR.pack(*node_identity(txn.pop(key, self._db.nodes)))
            if txn.get(source_key, None, self._db.by_source) == key:
                txn.delete(source_key, db=self._db.by_source)
            txn.delete(key, db=self._db.stale)
            txn.delete(key, db=self._db.pins)
            purged += 1
        return purged

    # Within a transaction.

    def _outdate(self, txn: Any, key: bytes, value: bytes, now_ns: int) -> None:
        """``value`` is the packed node. One that is outdated already keeps its time."""
        if node_outdated(value):
            return
        self._on_node(int.from_bytes(key, "big"))
        txn.put(key, outdated_node(value), db=self._db.nodes)
        txn.put(key, STALE.pack(now_ns), db=self._db.stale)
        replica = txn.get(key, None, self._db.replicas)
        if replica is not None:
            tier = replica_head(replica).tier
            self.claimable = True
            txn.put(TIER_INO.pack(tier, ID.unpack(key)[0]), b"", db=self._db.outdated)

    def _revive(self, txn: Any, key: bytes) -> None:
        """The source has that version after all. The caller records the node."""
        txn.delete(key, db=self._db.stale)
        replica = txn.get(key, None, self._db.replicas)
        if replica is not None:
            tier = replica_head(replica).tier
            txn.delete(TIER_INO.pack(tier, ID.unpack(key)[0]), db=self._db.outdated)

    def _forget_xattrs(self, txn: Any, key: bytes) -> None:
        for row in _keys(txn.cursor(self._db.xattrs), key):
            txn.delete(row, db=self._db.xattrs)


def _keys(cursor: Any, prefix: bytes) -> Iterator[bytes]:
    """The keys with a prefix; each may be deleted from the table once it was yielded."""
    while cursor.set_range(prefix) and (key := cursor.key()).startswith(prefix):
        yield key
