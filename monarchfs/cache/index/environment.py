"""The open LMDB environment of the index: creating it or recognising it as ours,
transactions, growth, numbers, syncing, failing disks.

The environment is opened without LMDB's own lock file: the state directory's lock keeps other
processes out, and one thread does all reading and writing. In a reader table, a killed process that
cannot be reaped yet would pin old pages.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import lmdb

from monarchfs.cache.index import disk, records, recovery
from monarchfs.cache.index.disk import DATA_FILE, Preallocation
from monarchfs.cache.index.records import FIRST_ID, FORMAT, ID, SCHEMA_VERSION
from monarchfs.types import IndexUnusable, IndexWriteError

T = TypeVar("T")

log = logging.getLogger(__name__)

_COMMITS_PER_LOOK = 64
"""Commits between two checks of the headroom: a batch of names is some 100 KB, 64 are 6 MB."""

_NUMBER_NS = 64
"""Numbers are assumed to be given out at this interval at least (a commit takes 5000 ns)."""

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


class OnChange(NamedTuple):
    """Called before a change is committed: nobody has seen it yet, and the commit may fail.
    ``name`` gets each (directory, name) that gets another inode or is removed; ``node`` each inode
    number whose record changes; ``record`` the name of each replica that enters or leaves a
    segment."""

    name: Callable[[int, bytes], object] = lambda parent, name: None
    node: Callable[[int], object] = lambda ino: None
    record: Callable[[bytes], object] = lambda name: None


class Environment:
    """The open environment, and what every kind of record needs of it.

    Changing: ``_lmdb``, ``db`` and ``_data`` (the data file, to sync it), once, when the disk
    fails; ``next_id`` (the lowest number that was not given out); ``_reader`` and ``_looker``;
    ``_unsynced``, why a sync failed: the next write freezes the index.

    A read transaction stays open between reads (a read then costs half) and is ended before every
    write: LMDB may reuse a page only once no reader can see it. A second one shows values where
    they lie.
    """

    def __init__(
        self,
        path: str,
        source_id: str,
        map_bytes: int,
        on_change: OnChange,
        frozen: str | None = None,
    ) -> None:
        """The environment in the directory ``path``, created if that is empty. ``frozen``: why
        nothing is to be written to the disk.

        Raises IndexUnusable if it is damaged, foreign or of another version, IndexWriteError if the
        disk or the permissions forbid opening it.
        """
        self._lmdb, self.db, self.next_id = _open(path, source_id, map_bytes)
        self._data = os.open(os.path.join(path, DATA_FILE), os.O_RDWR | os.O_CLOEXEC)
        self._headroom = Preallocation(self._data)
        self._state_directory = os.path.dirname(path)
        self._source_id = source_id
        self._reader: Any = None
        self._looker: Any = None
        self._commits = 0
        self._frozen = frozen
        self._unsynced: str | None = None
        self._retired: list[int] = []
        self._closing = threading.Lock()
        self._is_open = True
        self.on_name, self.on_node, self.on_record = on_change

    @property
    def frozen(self) -> str | None:
        """Why the index can write nothing to the disk any more, or None.

        The disk below the index is full, fails or became read-only. The index then lives in memory
        until it is closed. It still records and reads what the source says. A change that would
        make the index on the disk wrong about the tiers raises IndexWriteError.
        """
        return self._frozen

    # Transactions.

    def _begin_read(self) -> Any:
        self._reader = self._lmdb.begin()
        return self._reader

    def _end_read(self) -> None:
        if self._reader is not None:
            self._reader.abort()
            self._reader = None
        if self._looker is not None:
            self._looker.abort()
            self._looker = None

    def _begin_looking(self) -> Any:
        self._looker = self._lmdb.begin(buffers=True)
        return self._looker

    def get(self, table: Any, key: bytes) -> Any:
        """The value of one row, or None. Raises IndexUnusable."""
        try:
            return (self._reader or self._begin_read()).get(key, None, table)
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error

    def look(self, table: Any, key: bytes) -> memoryview | None:
        """``get`` without a copy: a value may be large. It may be used until the next write."""
        try:
            view: memoryview | None = (self._looker or self._begin_looking()).get(key, None, table)
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error
        return view

    def get_each(self, table: Any, inos: Iterable[int]) -> list[tuple[int, Any]]:
        """The rows of these inode numbers that exist."""
        try:
            get, pack = (self._reader or self._begin_read()).get, ID.pack
            rows = [(ino, get(pack(ino), None, table)) for ino in inos]
            return [row for row in rows if row[1] is not None]
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error

    def rows(self, table: Any, start: bytes, prefix: bytes, limit: int) -> list[tuple[Any, Any]]:
        """At most ``limit`` rows with keys from ``start`` on that begin with ``prefix``."""
        return self._rows(self._reader or self._begin_read(), table, start, prefix, limit)

    def look_at_rows(self, table: Any, start: bytes, limit: int) -> list[tuple[Any, Any]]:
        """At most ``limit`` rows with keys from ``start`` on, as of ``look``."""
        return self._rows(self._looker or self._begin_looking(), table, start, b"", limit)

    def _rows(
        self, txn: Any, table: Any, start: bytes, prefix: bytes, limit: int
    ) -> list[tuple[Any, Any]]:
        rows: list[tuple[Any, Any]] = []
        try:
            cursor = txn.cursor(table)
            if limit > 0 and cursor.set_range(start):
                for row in cursor:
                    if prefix and not row[0].startswith(prefix):
                        break
                    rows.append(row)
                    if len(rows) == limit:
                        break
            cursor.close()
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error
        return rows

    def count_keys(self, table: Any, prefix: bytes, limit: int) -> int:
        """How many rows have keys that begin with ``prefix``, counted up to ``limit``."""
        count = 0
        try:
            with (self._reader or self._begin_read()).cursor(table) as cursor:
                if cursor.set_range(prefix):
                    for key in cursor.iternext(keys=True, values=False):
                        if count == limit or not key.startswith(prefix):
                            break
                        count += 1
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error
        return count

    def count_rows(self, table: Any) -> int:
        try:
            return int((self._reader or self._begin_read()).stat(table)["entries"])
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error

    def size_bytes(self) -> int:
        """How large the index's data are, in memory or on the disk. Raises IndexUnusable."""
        try:
            pages = int(self._lmdb.info()["last_pgno"]) + 1
            return pages * int(self._lmdb.stat()["psize"])
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error

    def write(self, work: Callable[[Any], T], *, of_tiers: bool = False, looks: bool = False) -> T:
        """Run ``work`` in a write transaction and commit it, unsynced.

        ``work`` runs again from the start if the map was full or the index moved to memory. So it
        must change only the transaction (and ``next_id``, where a gap does no harm), and take its
        tables from ``db`` itself. ``of_tiers``: it records what lies in the tiers, which a frozen
        index refuses; ``looks``: it gets values without a copy, to be used until it changes
        something. If this raises IndexWriteError, nothing was changed.
        """
        self._end_read()
        if self._unsynced is not None and self._frozen is None:
            self.freeze(self._unsynced)
        while True:
            if of_tiers:
                self.refuse_if_frozen()
            try:
                with self._lmdb.begin(write=True, buffers=looks) as txn:
                    done = work(txn)
                break
            except lmdb.MapFullError:
                self._grow()
            except lmdb.Error as error:
                why = disk.trouble(error)
                if why is None or self._frozen is not None:
                    raise IndexWriteError(f"writing the index failed: {error}") from error
                self.freeze(why)
        self._commits += 1
        if self._commits % _COMMITS_PER_LOOK == 0:
            self.keep_headroom()
        return done

    def refuse_if_frozen(self) -> None:
        if self._frozen is not None:
            raise IndexWriteError(self._frozen)

    def _grow(self) -> None:
        # No transaction is open here, as set_mapsize demands.
        try:
            self._lmdb.set_mapsize(self._lmdb.info()["map_size"] * 2)
        except lmdb.Error as error:
            raise IndexWriteError(f"the index cannot grow: {error}") from error

    # The disk.

    def keep_headroom(self) -> None:
        if self._frozen is None:
            used = (self._lmdb.info()["last_pgno"] + 1) * self._lmdb.stat()["psize"]
            self._headroom.keep(used)

    def freeze(self, why: str) -> None:
        """Go on in memory. Blocks while the index is copied: about a second per gigabyte.

        If this raises IndexWriteError, all is as before.
        """
        self._end_read()
        old_env, old_data = self._lmdb, self._data
        try:
            with disk.memory_copy(
                lambda to: disk.copy_environment(old_env, old_data, to)
            ) as directory:
                map_bytes = old_env.info()["map_size"]
                env, databases, _ = _open(directory, self._source_id, map_bytes)
                try:
                    data = os.open(os.path.join(directory, DATA_FILE), os.O_RDWR | os.O_CLOEXEC)
                except OSError:
                    env.close()
                    raise
        except (OSError, IndexUnusable) as error:
            raise IndexWriteError(
                f"writing the index failed ({why}), and so did moving it to memory: {error}"
            ) from error
        self._lmdb, self.db, self._data = env, databases, data
        # A sync of another thread may be using it.
        self._retired.append(old_data)
        old_env.close()
        self._frozen = f"the index cannot be written any more: {why}"
        log.warning("%s; it goes on in memory", self._frozen)

    def new_ids(self, txn: Any, count: int = 1) -> int:
        """The first of ``count`` numbers that were never given out before.

        The counter is committed with the transaction that uses them. An aborted transaction
        leaves a gap.
        """
        first = self.next_id
        self.next_id += count
        txn.put(records.META_NEXT, ID.pack(self.next_id), db=self.db.meta)
        return first

    def skip_numbers_after(self, number: int) -> None:
        """Never give out a number that another process may have given out unrecorded since the
        machine was started, if it began with ``number``. Raises IndexWriteError.

        A mount, and so the kernel, may know numbers from an index that was lost, frozen or set
        aside. So each process starts above that number by the age of the boot in units of
        ``_NUMBER_NS``. Until the next process starts, it gives out fewer numbers than that.
        """
        # Recorded at once, because later records rely on it.
        skipped = number + _most_since_boot() - self.next_id
        if skipped > 0:
            self.write(lambda txn: self.new_ids(txn, skipped))

    # Durability.

    def sync(self) -> None:
        """Make everything committed so far durable.

        Blocks for the disk, so call it from another thread; the one that reads and writes may go
        on. A no-op once the index is closed. Raises IndexWriteError, also if the index is frozen.
        """
        with self._closing:
            if self._is_open:
                self.refuse_if_frozen()
                self._sync_data()

    def _sync_data(self) -> None:
        # mdb_env_sync does the same without writemap. But it also looks at the map, which the other
        # thread may be replacing by a larger one.
        try:
            if self._unsynced is None:
                os.fdatasync(self._data)
        except OSError as error:
            # The kernel has dropped what it could not write, and the next sync would succeed.
            self._unsynced = error.strerror
            recovery.remove_mark(self._state_directory)
        if self._unsynced is not None:
            raise IndexWriteError(f"syncing the index failed: {self._unsynced}")

    def close(self, *, sync: bool) -> bool:
        """Wait until no other thread is in ``sync``, then close. False if it was closed before."""
        with self._closing:
            if not self._is_open:
                return False
            self._is_open = False
            self._end_read()
            self._lmdb.close()
            try:
                if sync and self._frozen is None:
                    self._headroom.release()
                    self._sync_data()
            finally:
                for fd in (self._data, *self._retired):
                    os.close(fd)
            return True


def _most_since_boot() -> int:
    """More numbers than a process can have given out since the machine was started."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // _NUMBER_NS


def _open(path: str, source_id: str, map_bytes: int) -> tuple[Any, Databases, int]:
    """The environment in the directory ``path`` (created if that is empty), its handles, and the
    next id.

    Raises as ``Environment`` does.
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
            max_spare_txns=2,
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


def keys_with(cursor: Any, prefix: bytes) -> Iterator[bytes]:
    """The keys with a prefix; each may be deleted from the table once it was yielded."""
    while cursor.set_range(prefix) and (key := cursor.key()).startswith(prefix):
        yield key
