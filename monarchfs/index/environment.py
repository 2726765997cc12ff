"""Opening the LMDB environment of an index: creating it, or recognising it as ours."""

from __future__ import annotations

import errno
import os
from typing import Any, NamedTuple

import lmdb

from monarchfs.index import records
from monarchfs.index.records import FIRST_ID, FORMAT, ID, SCHEMA_VERSION
from monarchfs.types import IndexUnusable, IndexWriteError

MAP_BYTES = 1 << 30
"""Address space mapped at first; doubled when it is full. It costs neither memory nor disk."""

_DAMAGE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
)


class Databases(NamedTuple):
    """The handles of LMDB's named databases."""

    meta: Any
    nodes: Any
    by_source: Any
    names: Any
    entries: Any
    listings: Any
    replicas: Any
    xattrs: Any
    files: Any
    segments: Any
    records: Any
    journal: Any
    stale: Any
    outdated: Any
    pins: Any


DATABASES = tuple(name.encode() for name in Databases._fields)


def open_environment(path: str, source_id: str, map_bytes: int) -> tuple[Any, Databases, int]:
    """The environment in the directory ``path`` (created if that is empty), its handles, and the
    next id.

    Raises IndexUnusable if it is damaged, foreign or of another version, IndexWriteError if the
    disk or the permissions forbid opening it.
    """
    env: Any = None
    try:
        env = lmdb.open(
            path,
            map_size=map_bytes,
            mode=0o600,
            max_dbs=len(DATABASES),
            # No writemap: writing to a mapped file on a full disk is SIGBUS, not an error.
            sync=False,
            readahead=False,
            lock=False,
            max_spare_txns=1,
        )
        if _is_empty(env):
            databases, next_id = _create(env, source_id)
        else:
            databases, next_id = _recognise(env, source_id)
    except (lmdb.Error, IndexUnusable) as error:
        if env is not None:
            env.close()
        if isinstance(error, IndexUnusable):
            raise
        if isinstance(error, _DAMAGE):
            raise IndexUnusable(f"the index in {path} is damaged: {error}") from error
        denied = getattr(error, "code", None) == errno.EACCES
        detail = os.strerror(errno.EACCES) if denied else str(error)
        raise IndexWriteError(f"the index in {path} cannot be opened: {detail}") from error
    return env, databases, next_id


def _is_empty(env: Any) -> bool:
    with env.begin() as txn:
        return bool(txn.stat()["entries"] == 0)


def _create(env: Any, source_id: str) -> tuple[Databases, int]:
    # One transaction: a process killed here leaves an empty environment, to be created again.
    with env.begin(write=True) as txn:
        databases = Databases(*(env.open_db(name, txn=txn) for name in DATABASES))
        meta = databases.meta
        txn.put(records.META_FORMAT, FORMAT, db=meta)
        txn.put(records.META_SCHEMA, ID.pack(SCHEMA_VERSION), db=meta)
        txn.put(records.META_SOURCE, _source_bytes(source_id), db=meta)
        txn.put(records.META_NEXT, ID.pack(FIRST_ID), db=meta)
    return databases, FIRST_ID


def _recognise(env: Any, source_id: str) -> tuple[Databases, int]:
    """The handles and counter of an existing index, or IndexUnusable; writes nothing."""
    try:
        meta = env.open_db(b"meta", create=False)
    except (lmdb.NotFoundError, lmdb.IncompatibleError) as error:
        raise IndexUnusable("the index directory holds a database that is not ours") from error
    with env.begin(db=meta) as txn:
        if txn.get(records.META_FORMAT) != FORMAT:
            raise IndexUnusable("the index directory holds a database that is not ours")
        schema = _number(txn.get(records.META_SCHEMA))
        if schema != SCHEMA_VERSION:
            raise IndexUnusable(
                f"the index has schema version {schema}; this program reads {SCHEMA_VERSION}"
            )
        recorded = txn.get(records.META_SOURCE, b"")
        if recorded != _source_bytes(source_id):
            other = recorded.decode("utf-8", "backslashreplace")
            raise IndexUnusable(f"the index is of another source: {other!r}, not {source_id!r}")
        next_id = _number(txn.get(records.META_NEXT))
    others = (env.open_db(name, create=False) for name in DATABASES[1:])
    return Databases(meta, *others), next_id


def _number(value: bytes | None) -> int:
    if value is None or len(value) != ID.size:
        raise IndexUnusable("the index is damaged: a number is missing in its meta database")
    return int.from_bytes(value, "big")


def _source_bytes(source_id: str) -> bytes:
    return source_id.encode("utf-8", "surrogateescape")
