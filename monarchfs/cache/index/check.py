"""Walk an index: ``python -I -m monarchfs.cache.index.check [--deep] INDEX_DIRECTORY``.

Exits 0 if it is sound, DAMAGED with lines on stdout if not; LMDB may also end the process by a
signal, and SIGXCPU does if it takes no end. It takes as long as the disk does, and says with empty
lines that it goes on. Other codes: it could not be read, for want of memory or descriptors, which
says nothing.
Writes nothing. Without ``--deep``: every page can be read, also those of the list of free pages;
every table has as many rows as it says, and their keys and values have the right lengths. With it,
also: every record can be decoded, and the records agree with each other. An environment of another
program or schema version is only walked: whoever opens it says that it is not ours.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import struct
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import lmdb

from monarchfs.cache.index import records
from monarchfs.cache.index.environment import DATABASES
from monarchfs.cache.index.records import (
    ENTRY,
    FORMAT,
    ID,
    ID_PAIR,
    PLACE_KEY,
    RECORD_KEY,
    SCHEMA_VERSION,
    SEGMENT,
    SEGMENT_KEY,
    STALE,
    TIER_INO,
    TIER_KEY,
)
from monarchfs.cache.index.recovery import DAMAGED
from monarchfs.types import ReplicaState

T = TypeVar("T")
Tables = dict[bytes, Any]
Rows = Callable[[Any], Iterator[tuple[Any, Any]]]

MAX_LINES = 100

STEP_ROWS = 10_000
"""So many are walked between two signs that the check goes on: at most some seconds of a disk."""

STEP_SECONDS = 20
"""So much of the processor a step may take; thousands of times what it needs."""

_TAKEN_BYTES = 16 << 20
"""Larger than any run of free pages, so that LMDB reads the whole list of them."""

_DAMAGE = (lmdb.Error, struct.error, zlib.error, LookupError, ValueError, TypeError)
"""What decoding a damaged record may raise."""

_WANT = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE})
"""Errors that are about this process."""

_KEY_BYTES = {
    b"nodes": ID.size,
    b"by_source": ID_PAIR.size,
    b"entries": ID_PAIR.size,
    b"listings": ID.size,
    b"replicas": ID.size,
    b"files": PLACE_KEY.size,
    b"segments": SEGMENT_KEY.size,
    b"records": RECORD_KEY.size,
    b"journal": PLACE_KEY.size,
    b"stale": ID.size,
    b"outdated": TIER_INO.size,
    b"pins": ID.size,
}
_VALUE_BYTES = {
    b"by_source": ID.size,
    b"names": ID.size,
    b"files": ID.size,
    b"segments": SEGMENT.size,
    b"records": ID.size,
    b"journal": ID.size,
    b"stale": STALE.size,
    b"outdated": 0,
    b"pins": 0,
}


def check(path: str, *, deep: bool) -> Iterator[str]:
    """What is wrong, one line each. May raise any of ``_DAMAGE``, or not return at all."""
    env = lmdb.open(
        path, readonly=True, create=False, lock=False, max_dbs=64, readahead=True, map_size=0
    )
    with env.begin() as txn:
        deque(steps(islice(txn.cursor(), txn.stat()["entries"])), maxlen=0)
        if not _is_ours(env, txn):
            return
        tables = {name: env.open_db(name, txn=txn, create=False) for name in DATABASES}
        sound = True
        for name, table in tables.items():
            for line in _walk(txn, name, table):
                sound = False
                yield line
        # Records of a table that cannot be walked say nothing.
        if deep and sound:
            yield from inconsistencies(txn, tables, lambda table: steps(txn.cursor(table)))
    env.close()
    _go_on()
    _walk_free_pages(path)


def steps(rows: Iterable[T]) -> Iterator[T]:
    for count, row in enumerate(rows):
        if count % STEP_ROWS == 0:
            _go_on()
        yield row


def _go_on() -> None:
    """Say so. What takes the processor without an end is damaged, what waits for a disk is not."""
    os.write(sys.stdout.fileno(), b"\n")
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    end = math.ceil(time.process_time()) + STEP_SECONDS
    end = end if most == resource.RLIM_INFINITY else min(end, most)
    resource.setrlimit(resource.RLIMIT_CPU, (end, most))


def _walk_free_pages(path: str) -> None:
    """Have LMDB read its list of free pages, by a write that is aborted.

    LMDB reads that list only when something is written (``mdb_page_alloc`` in mdb.c).
    """
    try:
        env = lmdb.open(path, create=False, lock=False, sync=False, readahead=False, map_size=0)
    except lmdb.Error as error:
        if getattr(error, "code", None) in (errno.EROFS, errno.EACCES):
            return  # nothing will be written to it
        raise
    env.set_mapsize(env.info()["map_size"] + 2 * _TAKEN_BYTES)
    txn = env.begin(write=True)
    try:
        txn.put(b"room", bytes(_TAKEN_BYTES))
    finally:
        txn.abort()


def _walk(txn: Any, name: bytes, table: Any) -> Iterator[str]:
    """Touch every page, at the speed of C (0.1 us a row for each of the two walks)."""
    entries = txn.stat(table)["entries"]
    whats: tuple[tuple[str, Callable[[], Any], dict[bytes, int]], ...] = (
        ("keys", lambda: txn.cursor(table).iternext(True, False), _KEY_BYTES),
        # Also those of pages of their own.
        ("values", lambda: txn.cursor(table).iternext(False, True), _VALUE_BYTES),
    )
    for what, walk, sizes in whats:
        # One more says that it is damaged: there may be a page with many parents.
        rows, lengths, before = islice(walk(), entries + 1), Counter[int](), -1
        while lengths.total() > before:
            before = lengths.total()
            _go_on()
            lengths.update(map(len, islice(rows, STEP_ROWS)))
        if lengths.total() != entries:
            yield f"table {name.decode()} has {lengths.total()} {what} instead of {entries}"
        size = sizes.get(name)
        if size is not None and any(length != size for length in lengths):
            yield f"table {name.decode()} has {what} of a wrong length"


def _is_ours(env: Any, txn: Any) -> bool:
    try:
        meta = env.open_db(b"meta", txn=txn, create=False)
    except (lmdb.NotFoundError, lmdb.IncompatibleError):
        return False
    return bool(
        txn.get(records.META_FORMAT, db=meta) == FORMAT
        and txn.get(records.META_SCHEMA, db=meta) == ID.pack(SCHEMA_VERSION)
    )


def inconsistencies(txn: Any, tables: Tables, rows: Rows) -> Iterator[str]:
    """Where the records contradict each other, one line each: about 20 us a file in all. ``rows``
    walks a table. Raises what decoding a damaged record raises."""
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


def _report(path: str, *, deep: bool) -> Iterator[str]:
    try:
        yield from check(path, deep=deep)
    except _DAMAGE as error:
        if getattr(error, "code", None) in _WANT:
            raise
        yield f"a page or record of the index cannot be read: {error}"


def main(arguments: list[str]) -> int:
    deep = "--deep" in arguments
    paths = [argument for argument in arguments if argument != "--deep"]
    if len(paths) != 1:
        print(
            "usage: python -m monarchfs.cache.index.check [--deep] INDEX_DIRECTORY", file=sys.stderr
        )
        return 2
    # A crash is an answer here, no reason for a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = list(islice(_report(paths[0], deep=deep), MAX_LINES))
    for line in lines:
        print(line)
    return DAMAGED if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
