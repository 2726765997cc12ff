"""Walk an index: ``python -I -m monarchfs.index.check INDEX_DIRECTORY``.

Exits 0 if every page can be read and the records agree with each other, 1 with a line on stderr
if not; LMDB may also end the process by a signal. Reads only. An environment of another program
or of another schema version is walked page by page without looking at its records; that it is
not ours is for the opener to say.
"""

from __future__ import annotations

import resource
import struct
import sys
import zlib
from typing import Any

import lmdb

from monarchfs.index import records
from monarchfs.index.records import DATABASES, ENTRY, FORMAT, ID, ID_PAIR, SCHEMA_VERSION
from monarchfs.types import ReplicaState


class Unsound(Exception):
    """The records contradict each other; the message says where."""


def check(path: str) -> None:
    """Raises Unsound, lmdb.Error, struct.error, or zlib.error; or does not return at all."""
    env = lmdb.open(
        path, readonly=True, create=False, lock=False, max_dbs=64, readahead=True, map_size=0
    )
    with env.begin() as txn:
        _walk(txn.cursor())
        if not _is_ours(env, txn):
            return
        tables = {name: env.open_db(name, txn=txn, create=False) for name in DATABASES}
        for table in tables.values():
            _walk(txn.cursor(table))
        (next_id,) = ID.unpack(txn.get(records.META_NEXT, b"", tables[b"meta"]))
        _check_nodes(txn, tables, next_id)
        _check_names(txn, tables, next_id)
        _check_replicas(txn, tables)


def _walk(cursor: Any) -> None:
    """Touch every page, those of long values too."""
    for _ in cursor:
        pass


def _is_ours(env: Any, txn: Any) -> bool:
    try:
        meta = env.open_db(b"meta", txn=txn, create=False)
    except (lmdb.NotFoundError, lmdb.IncompatibleError):
        return False
    return bool(
        txn.get(records.META_FORMAT, db=meta) == FORMAT
        and txn.get(records.META_SCHEMA, db=meta) == ID.pack(SCHEMA_VERSION)
    )


def _check_nodes(txn: Any, tables: dict[bytes, Any], next_id: int) -> None:
    for key, value in txn.cursor(tables[b"nodes"]):
        (ino,) = ID.unpack(key)
        records.unpack_node(ino, value)
        if ino >= next_id:
            raise Unsound(f"inode {ino} was never given out")
    for _, value in txn.cursor(tables[b"by_source"]):
        if ID.unpack(value)[0] >= next_id:
            raise Unsound("a source file has a number that was never given out")


def _check_names(txn: Any, tables: dict[bytes, Any], next_id: int) -> None:
    entries = names = 0
    for key, value in txn.cursor(tables[b"entries"]):
        parent, cookie = ID_PAIR.unpack(key)
        _, ino, _, _ = ENTRY.unpack_from(value)
        if cookie >= next_id or ino >= next_id:
            raise Unsound(f"directory {parent} has a number that was never given out")
        if txn.get(key[:8] + value[ENTRY.size :], db=tables[b"names"]) != key[8:]:
            raise Unsound(f"directory {parent} has an entry without its name")
        entries += 1
    for key, value in txn.cursor(tables[b"names"]):
        if txn.get(key[:8] + value, b"", tables[b"entries"])[ENTRY.size :] != key[8:]:
            raise Unsound("a name has no entry")
        names += 1
    if entries != names:
        raise Unsound(f"{names} names, but {entries} entries")


def _check_replicas(txn: Any, tables: dict[bytes, Any]) -> None:
    sums: dict[int, list[int]] = {}
    for _, value in txn.cursor(tables[b"replicas"]):
        replica = records.unpack_replica(value)
        total = sums.setdefault(replica.tier, [0, 0, 0])
        total[0 if replica.state is ReplicaState.RESIDENT else 1] += 1
        total[2] += replica.allocated_bytes
    recorded = {}
    cursor = txn.cursor(tables[b"meta"])
    cursor.set_range(records.META_TIER)
    for key, value in cursor:
        if not key.startswith(records.META_TIER):
            break
        (tier,) = records.TIER_KEY.unpack(key[len(records.META_TIER) :])
        recorded[tier] = list(records.TOTALS.unpack(value))
    if sums != {tier: total for tier, total in recorded.items() if any(total)}:
        raise Unsound("the totals of the tiers are not the sums of their replicas")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m monarchfs.index.check INDEX_DIRECTORY", file=sys.stderr)
        return 2
    # A crash is an answer here, no reason for a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        check(arguments[0])
    except (Unsound, lmdb.Error, struct.error, zlib.error, LookupError, ValueError) as error:
        print(f"the index is damaged: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
