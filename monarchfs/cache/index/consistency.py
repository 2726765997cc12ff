"""Whether the records of an index agree with each other: about 20 us a file in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from monarchfs.cache.index import records
from monarchfs.cache.index.records import (
    ENTRY,
    ID,
    ID_PAIR,
    PLACE_KEY,
    RECORD_KEY,
    SEGMENT_KEY,
    TIER_INO,
    TIER_KEY,
)
from monarchfs.types import ReplicaState

Tables = dict[bytes, Any]
Rows = Callable[[Any], Iterator[tuple[Any, Any]]]


def inconsistencies(txn: Any, tables: Tables, rows: Rows) -> Iterator[str]:
    """The contradictions, one line each; ``rows`` walks a table. Raises what decoding a damaged
    record raises."""
    next_value = txn.get(records.META_NEXT, b"", tables[b"meta"])
    (next_id,) = ID.unpack(next_value)
    yield from _nodes(txn, tables, rows, next_id)
    yield from _names(txn, tables, rows, next_id)
    yield from _replicas(txn, tables, rows)
    yield from _files(txn, tables, rows)
    yield from _segments(txn, tables, rows)


def _nodes(txn: Any, tables: Tables, rows: Rows, next_id: int) -> Iterator[str]:
    outdated = 0
    for key, value in rows(tables[b"nodes"]):
        (ino,) = ID.unpack(key)
        node = records.unpack_node(ino, value)
        if ino >= next_id:
            yield f"inode {ino} was never given out"
        if node.outdated:
            outdated += 1
            if txn.get(key, None, tables[b"stale"]) is None:
                yield f"inode {ino} is outdated, but not since when"
    if outdated != txn.stat(tables[b"stale"])["entries"]:
        yield "a time of becoming outdated is recorded for an inode that is not"
    for key, value in rows(tables[b"by_source"]):
        if ID.unpack(value)[0] >= next_id:
            yield f"source file {ID_PAIR.unpack(key)[1]} has a number that was never given out"
    for key, _ in rows(tables[b"pins"]):
        if ID.unpack(key)[0] >= next_id:
            yield f"inode {ID.unpack(key)[0]} is pinned, but was never given out"


def _names(txn: Any, tables: Tables, rows: Rows, next_id: int) -> Iterator[str]:
    for key, value in rows(tables[b"entries"]):
        parent, cookie = ID_PAIR.unpack(key)
        _, ino, _, _ = ENTRY.unpack_from(value)
        if cookie >= next_id or ino >= next_id:
            yield f"directory {parent} has a number that was never given out"
        if txn.get(key[:8] + value[ENTRY.size :], None, tables[b"names"]) != key[8:]:
            yield f"directory {parent} has an entry without its name"
    for key, value in rows(tables[b"names"]):
        if txn.get(key[:8] + value, b"", tables[b"entries"])[ENTRY.size :] != key[8:]:
            yield f"directory {ID.unpack(key[:8])[0]} has a name without its entry"


def _replicas(txn: Any, tables: Tables, rows: Rows) -> Iterator[str]:
    sums: dict[int, dict[str, int]] = {}
    to_go = 0
    for key, value in rows(tables[b"replicas"]):
        (ino,) = ID.unpack(key)
        replica = records.unpack_part(value)
        total = sums.setdefault(
            replica.tier, dict.fromkeys(("resident", "partial", "found", "bytes"), 0)
        )
        total[replica.state.name.lower()] += 1
        total["bytes"] += replica.allocated_bytes
        place = PLACE_KEY.pack(replica.tier, replica.name)
        if txn.get(place, None, tables[b"files"]) != key:
            yield f"the file of the replica of inode {ino} is not recorded as its own"
        node = txn.get(key, None, tables[b"nodes"])
        goes = replica.state is ReplicaState.FOUND or (
            node is not None and records.node_outdated(node)
        )
        to_go += goes
        marked = txn.get(TIER_INO.pack(replica.tier, ino), None, tables[b"outdated"]) is not None
        if goes != marked:
            yield f"the replica of inode {ino} is {'not ' * goes}among those that go first"
    if to_go != txn.stat(tables[b"outdated"])["entries"]:
        yield "what is to go first is not a replica"
    recorded = {}
    cursor = txn.cursor(tables[b"meta"])
    cursor.set_range(records.META_TIER)
    for key, value in cursor:
        if not key.startswith(records.META_TIER):
            break
        (tier,) = TIER_KEY.unpack(key[len(records.META_TIER) :])
        recorded[tier] = list(records.TOTALS.unpack(value))
    if {t: list(total.values()) for t, total in sums.items()} != {
        tier: total for tier, total in recorded.items() if any(total)
    }:
        yield "the totals of the tiers are not the sums of their replicas"


def _files(txn: Any, tables: Tables, rows: Rows) -> Iterator[str]:
    for key, value in rows(tables[b"files"]):
        tier, name = PLACE_KEY.unpack(key)
        replica = txn.get(value, None, tables[b"replicas"])
        if replica is None or records.replica_head(replica).place != key:
            yield f"file {name.hex()} of tier {tier} belongs to a replica that is not recorded"


def _segments(txn: Any, tables: Tables, rows: Rows) -> Iterator[str]:
    before, end = b"", 0
    for key, value in rows(tables[b"records"]):
        tier, segment, offset = RECORD_KEY.unpack(key)
        where = f"offset {offset} of segment {segment:016x} of tier {tier}"
        replica = txn.get(value, None, tables[b"replicas"])
        if replica is None or records.replica_head(replica).record != key:
            yield f"{where} belongs to a replica that is not recorded"
            continue
        place = key[: SEGMENT_KEY.size]
        if txn.get(place, None, tables[b"segments"]) is None:
            yield f"{where} has a replica, but no such segment is known"
        if place == before and offset < end:
            yield f"{where} belongs to two replicas"
        before, end = place, offset + records.replica_head(replica).allocated_bytes
    for key, value in rows(tables[b"replicas"]):
        head = records.replica_head(value)
        if head.segment and txn.get(head.record, None, tables[b"records"]) != key:
            yield f"the record of the replica of inode {ID.unpack(key)[0]} is not its own"
