"""The LMDB environment of the index: opening it, transactions, growth, numbers, syncing.

Two processes never have it open at once (the state directory's lock sees to that) and one thread
does all reading and writing, so the environment is opened without LMDB's own lock file: a reader
table would let the corpse of a killed process pin old pages for as long as it cannot die.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import lmdb

from monarchfs.index import records
from monarchfs.index.records import DATABASES, FIRST_ID, FORMAT, ID, SCHEMA_VERSION
from monarchfs.types import IndexUnusable, IndexWriteError

T = TypeVar("T")

DATA_FILE = "data.mdb"
"""The name that LMDB gives to the file of an environment."""

MAP_BYTES = 1 << 30
"""Address space mapped at first; doubled whenever it is full. Costs neither memory nor disk."""

_USER_KEY_BYTES = 400

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
    """The handles of LMDB's named databases, in the order of ``records.DATABASES``."""

    meta: Any
    nodes: Any
    by_source: Any
    names: Any
    entries: Any
    listings: Any
    replicas: Any
    xattrs: Any


class Tables:
    """The open environment, and what every kind of record needs of it.

    Constant: ``_env``, ``_db``, ``_data`` (the data file, to sync it). Changing: ``_next_id``
    (never below what a committed record uses), ``_reader``.

    A read transaction stays open between reads (a read then costs half) and is ended before every
    write: LMDB may reuse a page only once no reader can see it.
    """

    def __init__(self, env: Any, databases: Databases, next_id: int) -> None:
        self._env = env
        self._data = os.open(os.path.join(env.path(), DATA_FILE), os.O_RDONLY)
        self._db = databases
        self._next_id = next_id
        self._reader: Any = None
        self._closing = threading.Lock()
        self._is_open = True

    # Transactions.

    def _begin_read(self) -> Any:
        self._reader = self._env.begin()
        return self._reader

    def _end_read(self) -> None:
        if self._reader is not None:
            self._reader.abort()
            self._reader = None

    def _get(self, table: Any, key: bytes) -> Any:
        """The value of one row, or None. Raises IndexUnusable."""
        try:
            return (self._reader or self._begin_read()).get(key, None, table)
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error

    def _rows(self, table: Any, start: bytes, prefix: bytes, limit: int) -> list[tuple[Any, Any]]:
        """At most ``limit`` rows with keys from ``start`` on that begin with ``prefix``."""
        rows: list[tuple[Any, Any]] = []
        try:
            cursor = (self._reader or self._begin_read()).cursor(table)
            if limit > 0 and cursor.set_range(start):
                for row in cursor:
                    if not row[0].startswith(prefix):
                        break
                    rows.append(row)
                    if len(rows) == limit:
                        break
            cursor.close()
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error
        return rows

    def _write(self, work: Callable[[Any], T]) -> T:
        """Run ``work`` in a write transaction and commit it, unsynced.

        ``work`` runs again from the start when the map was full; so it must have no effect but on
        the transaction (and ``_next_id``, where a gap does no harm). Raises IndexWriteError, and
        then nothing was changed.
        """
        self._end_read()
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    return work(txn)
            except lmdb.MapFullError:
                self._grow()
            except lmdb.Error as error:
                raise IndexWriteError(f"writing the index failed: {error}") from error

    def _grow(self) -> None:
        # No transaction is open here, as set_mapsize demands.
        try:
            self._env.set_mapsize(self._env.info()["map_size"] * 2)
        except lmdb.Error as error:
            raise IndexWriteError(f"the index cannot grow: {error}") from error

    def _new_ids(self, txn: Any, count: int = 1) -> int:
        """The first of ``count`` numbers that were never given out before.

        The counter is committed with the transaction that uses them. An aborted transaction
        leaves a gap.
        """
        first = self._next_id
        self._next_id += count
        txn.put(records.META_NEXT, ID.pack(self._next_id), db=self._db.meta)
        return first

    # Small values of callers.

    def meta_get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._get(self._db.meta, _user_key(key))
        return value

    def meta_put(self, key: bytes, value: bytes) -> None:
        """Keep ``value`` (at most a few kilobytes) under ``key`` (of any length)."""
        meta = self._db.meta
        self._write(lambda txn: txn.put(_user_key(key), value, db=meta))

    # Durability.

    def sync(self) -> None:
        """Make everything committed so far durable.

        Blocks for the disk: call it from a thread other than the one that reads and writes, which
        may go on meanwhile. A no-op once the index is closed. Raises IndexWriteError.
        """
        with self._closing:
            if self._is_open:
                self._sync_data()

    def _sync_data(self) -> None:
        # What mdb_env_sync does of an environment without writemap, but for its look at the map,
        # which the other thread may be replacing by a larger one.
        try:
            os.fdatasync(self._data)
        except OSError as error:
            raise IndexWriteError(f"syncing the index failed: {error.strerror}") from error

    def _close_environment(self, *, sync: bool) -> bool:
        """Close it once no ``sync`` of another thread is under way; False if it was closed."""
        with self._closing:
            if not self._is_open:
                return False
            self._is_open = False
            self._end_read()
            self._env.close()
            try:
                if sync:
                    self._sync_data()
            finally:
                os.close(self._data)
            return True


def open_environment(path: str, source_id: str, map_bytes: int) -> tuple[Any, Databases, int]:
    """The environment in the directory ``path``, made there if it is empty; its handles; next id.

    Raises IndexUnusable where it is damaged, foreign or newer, IndexWriteError where the disk or
    permissions forbid.
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
    except _DAMAGE as error:
        _close(env)
        raise IndexUnusable(f"the index in {path} is damaged: {error}") from error
    except lmdb.Error as error:
        _close(env)
        if getattr(error, "code", None) == errno.EACCES:
            detail = os.strerror(errno.EACCES)
        else:
            detail = str(error)
        raise IndexWriteError(f"the index in {path} cannot be opened: {detail}") from error
    except IndexUnusable:
        _close(env)
        raise
    return env, databases, next_id


def _user_key(key: bytes) -> bytes:
    # LMDB's keys end at 511 bytes; a path may be longer.
    if len(key) <= _USER_KEY_BYTES:
        return records.META_USER + key
    return records.META_LONG + hashlib.sha256(key).digest()


def _close(env: Any) -> None:
    if env is not None:
        env.close()


def _is_empty(env: Any) -> bool:
    with env.begin() as txn:
        return bool(txn.stat()["entries"] == 0)


def _create(env: Any, source_id: str) -> tuple[Databases, int]:
    # One transaction: a process killed here leaves an empty environment, which is made anew.
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
