"""The open LMDB environment of the index: transactions, growth, numbers, syncing, failing disks.

The environment is opened without LMDB's own lock file: the state directory's lock keeps other
processes out, and one thread does all reading and writing. In a reader table, a killed process that
cannot be reaped yet would pin old pages.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import lmdb

from monarchfs.index import disk, records
from monarchfs.index.disk import DATA_FILE, Preallocation
from monarchfs.index.environment import Databases, open_environment
from monarchfs.index.records import ID
from monarchfs.types import IndexUnusable, IndexWriteError

T = TypeVar("T")

log = logging.getLogger(__name__)

_COMMITS_PER_LOOK = 64
"""Commits between two checks of the headroom: a batch of names is some 100 KB, 64 are 6 MB."""


class OnChange(NamedTuple):
    """Called before a change is committed: nobody has seen it yet, and the commit may fail.
    ``name`` gets each (directory, name) that gets another inode or is removed; ``node`` each inode
    number whose record changes; ``record`` the name of each replica that enters or leaves a
    segment."""

    name: Callable[[int, bytes], object] = lambda parent, name: None
    node: Callable[[int], object] = lambda ino: None
    record: Callable[[bytes], object] = lambda name: None


class Tables:
    """The open environment, and what every kind of record needs of it.

    Changing: ``_env``, ``_db`` and ``_data`` (the data file, to sync it), once, when the disk
    fails; ``_next_id`` (never below what a committed record uses); ``_reader``.

    A read transaction stays open between reads (a read then costs half) and is ended before every
    write: LMDB may reuse a page only once no reader can see it.
    """

    def __init__(
        self, env: Any, databases: Databases, next_id: int, source_id: str, on_change: OnChange
    ) -> None:
        self._env = env
        self._data = os.open(os.path.join(env.path(), DATA_FILE), os.O_RDWR | os.O_CLOEXEC)
        self._headroom = Preallocation(self._data)
        self._db = databases
        self._next_id = next_id
        self._source_id = source_id
        self._reader: Any = None
        self.claimable = False
        """Whether there may be a replica under a number for which nobody will ask."""
        self._commits = 0
        self._frozen: str | None = None
        self._retired: list[int] = []
        self._closing = threading.Lock()
        self._is_open = True
        self._on_name, self._on_node, self._on_record = on_change

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

    def _get_each(self, table: Any, inos: Iterable[int]) -> list[tuple[int, Any]]:
        """The rows of these inode numbers that exist."""
        try:
            get, pack = (self._reader or self._begin_read()).get, ID.pack
            rows = [(ino, get(pack(ino), None, table)) for ino in inos]
            return [row for row in rows if row[1] is not None]
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

    def _count_keys(self, table: Any, prefix: bytes, limit: int) -> int:
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

    def _count_rows(self, table: Any) -> int:
        try:
            return int((self._reader or self._begin_read()).stat(table)["entries"])
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error

    def size_bytes(self) -> int:
        """How large the index's data are, in memory or on the disk. Raises IndexUnusable."""
        try:
            pages = int(self._env.info()["last_pgno"]) + 1
            return pages * int(self._env.stat()["psize"])
        except lmdb.Error as error:
            raise IndexUnusable(f"reading the index failed: {error}") from error

    def _write(self, work: Callable[[Any], T], *, of_tiers: bool = False) -> T:
        """Run ``work`` in a write transaction and commit it, unsynced.

        ``work`` runs again from the start if the map was full or the index moved to memory. So it
        must change only the transaction (and ``_next_id``, where a gap does no harm), and take its
        tables from ``_db`` itself. ``of_tiers``: it records what lies in the tiers, which a frozen
        index refuses. If this raises IndexWriteError, nothing was changed.
        """
        self._end_read()
        while True:
            if of_tiers:
                self._refuse_if_frozen()
            try:
                with self._env.begin(write=True) as txn:
                    done = work(txn)
                break
            except lmdb.MapFullError:
                self._grow()
            except lmdb.Error as error:
                why = disk.trouble(error)
                if why is None or self._frozen is not None:
                    raise IndexWriteError(f"writing the index failed: {error}") from error
                self._freeze(why)
        self._commits += 1
        if self._commits % _COMMITS_PER_LOOK == 0:
            self._keep_headroom()
        return done

    def _refuse_if_frozen(self) -> None:
        if self._frozen is not None:
            raise IndexWriteError(self._frozen)

    def _grow(self) -> None:
        # No transaction is open here, as set_mapsize demands.
        try:
            self._env.set_mapsize(self._env.info()["map_size"] * 2)
        except lmdb.Error as error:
            raise IndexWriteError(f"the index cannot grow: {error}") from error

    # The disk.

    def _keep_headroom(self) -> None:
        if self._frozen is None:
            used = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            self._headroom.keep(used)

    def _freeze(self, why: str) -> None:
        """Go on in memory. Blocks while the index is copied: about a second per gigabyte.

        If this raises IndexWriteError, all is as before.
        """
        self._end_read()
        old_env, old_data = self._env, self._data
        try:
            with disk.memory_copy(
                lambda to: disk.copy_environment(old_env, old_data, to)
            ) as directory:
                map_bytes = old_env.info()["map_size"]
                env, databases, _ = open_environment(directory, self._source_id, map_bytes)
                try:
                    data = os.open(os.path.join(directory, DATA_FILE), os.O_RDWR | os.O_CLOEXEC)
                except OSError:
                    env.close()
                    raise
        except (OSError, IndexUnusable) as error:
            raise IndexWriteError(
                f"writing the index failed ({why}), and so did moving it to memory: {error}"
            ) from error
        self._env, self._db, self._data = env, databases, data
        # A sync of another thread may be using it.
        self._retired.append(old_data)
        old_env.close()
        self._frozen = f"the index cannot be written any more: {why}"
        log.warning("%s; it goes on in memory", self._frozen)

    def _new_ids(self, txn: Any, count: int = 1) -> int:
        """The first of ``count`` numbers that were never given out before.

        The counter is committed with the transaction that uses them. An aborted transaction
        leaves a gap.
        """
        first = self._next_id
        self._next_id += count
        txn.put(records.META_NEXT, ID.pack(self._next_id), db=self._db.meta)
        return first

    # Durability.

    def sync(self) -> None:
        """Make everything committed so far durable.

        Blocks for the disk, so call it from another thread; the one that reads and writes may go
        on. A no-op once the index is closed. Raises IndexWriteError, also if the index is frozen.
        """
        with self._closing:
            if self._is_open:
                self._refuse_if_frozen()
                self._sync_data()

    def _sync_data(self) -> None:
        # mdb_env_sync does the same without writemap. But it also looks at the map, which the other
        # thread may be replacing by a larger one.
        try:
            os.fdatasync(self._data)
        except OSError as error:
            raise IndexWriteError(f"syncing the index failed: {error.strerror}") from error

    def _close_environment(self, *, sync: bool) -> bool:
        """Wait until no other thread is in ``sync``, then close. False if it was closed before."""
        with self._closing:
            if not self._is_open:
                return False
            self._is_open = False
            self._end_read()
            self._env.close()
            try:
                if sync and self._frozen is None:
                    self._headroom.release()
                    self._sync_data()
            finally:
                for fd in (self._data, *self._retired):
                    os.close(fd)
            return True
