"""Directory listings: recorded in batches, read in the order of cookies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from monarchfs.index.records import (
    ENTRY,
    FILE_TYPES,
    ID,
    ID_PAIR,
    META_NEXT,
    node_type,
    pack_entry,
    pack_listing,
    unpack_dirent,
    unpack_listing,
    unpack_node,
)
from monarchfs.index.tree import TreeTables
from monarchfs.types import Dirent, FileType, Listing, Node

FoundName = tuple[bytes, FileType, int, int]
"""A name as readdir gives it: name, type, source ino, device."""

_SWEEP = 500
"""Entries examined in one step of ``finish_listing``: about half a millisecond."""


class Listings(TreeTables):
    """Listings of whole directories.

    A listing is recorded by ``begin_listing``, ``add_entries`` for each batch, and
    ``finish_listing``. Until then the earlier ``Listing`` is valid. A process that dies in between
    leaves names that are true, and the earlier listing.
    """

    def listing(self, parent: int) -> Listing | None:
        """The listing of a directory whose entries are all recorded; else None."""
        value = self._get(self._db.listings, ID.pack(parent))
        return None if value is None else unpack_listing(value)

    def entries(
        self, parent: int, after_cookie: int, limit: int
    ) -> list[tuple[Dirent, Node | None]]:
        """At most ``limit`` entries with cookies above ``after_cookie``, by rising cookie.

        The node is None where only the name is known (from a listing).
        """
        prefix = ID.pack(parent)
        rows = self._rows(self._db.entries, prefix + ID.pack(after_cookie + 1), prefix, limit)
        found: list[tuple[Dirent, Node | None]] = []
        get, nodes, pack = self._get, self._db.nodes, ID.pack
        for key, value in rows:
            dirent = unpack_dirent(int.from_bytes(key[8:], "big"), value)
            node = get(nodes, pack(dirent.ino))
            found.append((dirent, None if node is None else unpack_node(dirent.ino, node)))
        return found

    def count_entries(self, parent: int, most: int) -> int:
        """How many entries there are, counted up to ``most``: a quarter of a microsecond each."""
        return self._count_keys(self._db.entries, ID.pack(parent), most)

    # Recording a listing.

    def begin_listing(self, parent: int) -> int:
        """The sequence number of a listing of ``parent`` that starts now.

        Call it before the source's directory is opened: then ``finish_listing`` does not remove
        names that ``record_found_each`` records meanwhile.
        """
        return self._write(self._new_ids)

    def add_entries(
        self, parent: int, sequence: int, found: Sequence[FoundName], now_ns: int
    ) -> None:
        """Record a batch of names in one transaction (about 5 us a name: a few hundred at most).

        A name that stands for the same source file as before keeps its cookie and number. Other
        files get the number they are known by elsewhere, or a new one without a node.
        """
        self._write(lambda txn: self._add(txn, parent, sequence, found, now_ns))

    def _add(
        self, txn: Any, parent: int, sequence: int, found: Sequence[FoundName], now_ns: int
    ) -> None:
        names, entries, by_source = self._db.names, self._db.entries, self._db.by_source
        get, put, pack = txn.get, txn.put, ID.pack
        prefix = pack(parent)
        next_id = self._next_id
        for name, type_, source_ino, device in found:
            source_key = ID_PAIR.pack(device, source_ino)
            number = get(source_key, None, by_source)
            cookie = get(prefix + name, None, names)
            seen = sequence
            known = fresh = None
            if cookie is None:
                # Also the number of the file, if it is new: see ``_put_name``.
                cookie = fresh = pack(next_id)
                next_id += 1
                put(prefix + name, cookie, db=names)
            else:
                known_type, known_ino, _, known_seen = ENTRY.unpack_from(
                    get(prefix + cookie, None, entries)
                )
                known = pack(known_ino)
                seen = max(known_seen, sequence)
                if type_ == FileType.UNKNOWN and known == number:
                    type_ = FILE_TYPES[known_type]
            if number is not None and self._contradicts(txn, number, type_, now_ns):
                number = None
            if number is None:
                if fresh is None:
                    fresh = pack(next_id)
                    next_id += 1
                number = fresh
                put(source_key, number, db=by_source)
            if known is not None and known != number:
                self._on_name(parent, name)
                self._move_pin_of_name(txn, parent, name, known, number)
            ino = int.from_bytes(number, "big")
            put(prefix + cookie, pack_entry(type_, ino, now_ns, seen, name), db=entries)
        put(META_NEXT, pack(next_id), db=self._db.meta)
        self._next_id = next_id

    def _contradicts(self, txn: Any, key: bytes, type_: FileType, now_ns: int) -> bool:
        """Whether the number is recorded for a file of another type. If so, it becomes outdated.

        The source has reused the inode of a deleted file.
        """
        value = txn.get(key, None, self._db.nodes)
        if value is None or type_ == FileType.UNKNOWN:
            return False
        if node_type(value) == type_:
            return False
        self._outdate(txn, key, value, now_ns)
        return True

    def finish_listing(
        self, parent: int, sequence: int, mtime_ns: int, ctime_ns: int, now_ns: int
    ) -> Iterator[None]:
        """Remove the names that the listing did not see, then record it as complete.

        ``mtime_ns`` and ``ctime_ns`` are the directory's, from before its first entry was read.
        A generator: each step takes about half a millisecond, so that other tasks can run in
        between. The last step records the listing, so exhaust it.
        """
        prefix = ID.pack(parent)
        start = prefix
        while rows := self._rows(self._db.entries, start, prefix, _SWEEP):
            gone = [key for key, value in rows if ENTRY.unpack_from(value)[3] < sequence]
            if gone:
                self._remove_entries(gone)
            start = rows[-1][0] + b"\0"
            yield
        listing = Listing(mtime_ns, ctime_ns, now_ns)
        self._write(lambda txn: txn.put(prefix, pack_listing(listing), db=self._db.listings))

    def _remove_entries(self, keys: list[bytes]) -> None:
        # There is no checkpoint between reading these entries and removing them.
        def remove(txn: Any) -> None:
            for key in keys:
                name = txn.pop(key, self._db.entries)[ENTRY.size :]
                self._on_name(int.from_bytes(key[:8], "big"), name)
                txn.delete(key[:8] + name, db=self._db.names)

        self._write(remove)
