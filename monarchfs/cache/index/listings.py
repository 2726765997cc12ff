"""Directory listings: recorded in batches, read in the order of cookies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from monarchfs.cache.index.environment import Environment
from monarchfs.cache.index.records import (
    ENTRY,
    FILE_TYPES,
    ID,
    ID_PAIR,
    LISTED,
    LOOKED_UP,
    META_NEXT,
    TYPE,
    node_identity,
    node_place,
    node_type,
    pack_entry,
    pack_listing,
    unpack_dirent,
    unpack_listing,
    unpack_node,
)
from monarchfs.types import Dirent, FileType, Listing, Node

FoundName = tuple[bytes, FileType, int, int]
"""A name as readdir gives it: name, type, source ino, device."""

_SWEEP = 500
"""Entries examined in one step of ``finish_listing``: about half a millisecond."""


class Listings:
    """Listings of whole directories.

    A listing is recorded by ``begin_listing``, ``add_entries`` for each batch, and
    ``finish_listing``. Until then the earlier ``Listing`` is valid. A process that dies in between
    leaves names that are true, and the earlier listing.
    """

    def __init__(self, environment: Environment) -> None:
        self._env = environment

    def listing(self, parent: int) -> Listing | None:
        """The listing of a directory whose entries are all recorded; else None."""
        value = self._env.get(self._env.db.listings, ID.pack(parent))
        return None if value is None else unpack_listing(value)

    def entries(
        self, parent: int, after_cookie: int, limit: int, *, only_listed: bool = False
    ) -> list[tuple[Dirent, Node | None]]:
        """At most ``limit`` entries with cookies above ``after_cookie``, by rising cookie.

        The node is None where nobody has looked the name up. ``only_listed``: those that a listing
        had.
        """
        prefix = ID.pack(parent)
        start = prefix + ID.pack(after_cookie + 1)
        rows = self._env.rows(self._env.db.entries, start, prefix, limit)
        while only_listed and (hidden := [row for row in rows if not row[1][0] & LISTED]):
            start = rows[-1][0] + b"\0"
            more = self._env.rows(self._env.db.entries, start, prefix, len(hidden))
            rows = [row for row in rows if row[1][0] & LISTED] + more
        found: list[tuple[Dirent, Node | None]] = []
        get, nodes, pack = self._env.get, self._env.db.nodes, ID.pack
        for key, value in rows:
            dirent = unpack_dirent(int.from_bytes(key[8:], "big"), value)
            node = get(nodes, pack(dirent.ino)) if dirent.ino else None
            found.append((dirent, None if node is None else unpack_node(dirent.ino, node)))
        return found

    def count_entries(self, parent: int, most: int) -> int:
        """How many entries there are, counted up to ``most``: a quarter of a microsecond each."""
        return self._env.count_keys(self._env.db.entries, ID.pack(parent), most)

    # Recording a listing.

    def begin_listing(self) -> int:
        """The sequence number of a listing that starts now.

        Call it before the source's directory is opened: then ``finish_listing`` does not remove
        names that ``record_found_each`` records meanwhile.
        """
        return self._env.write(self._env.new_ids)

    def add_entries(
        self, parent: int, sequence: int, found: Sequence[FoundName], now_ns: int
    ) -> None:
        """Record a batch of names in one transaction (about 5 us a name: a few hundred at most).

        A name is confirmed if a look-up under this very name found the inode number that the
        listing says. If it found another one, the name is doubted: its number stays, and is not to
        be believed before the next look-up. A new name stands for nothing: what a listing says of
        it is only shown, because d_ino may be the st_ino of any other file.
        """
        self._env.write(lambda txn: self._add(txn, parent, sequence, found, now_ns))

    def _add(
        self, txn: Any, parent: int, sequence: int, found: Sequence[FoundName], now_ns: int
    ) -> None:
        names, entries, by_source = self._env.db.names, self._env.db.entries, self._env.db.by_source
        get, put, pack = txn.get, txn.put, ID.pack
        prefix = pack(parent)
        next_id = self._env.next_id
        for name, type_, source_ino, device in found:
            source = device, source_ino
            cookie = get(prefix + name, None, names)
            seen = sequence
            fresh = None
            if cookie is None:
                # Also the number of the file, if it is new: see ``_put_name``.
                cookie = fresh = pack(next_id)
                next_id += 1
                put(prefix + name, cookie, db=names)
            else:
                known = get(prefix + cookie, None, entries)
                known_type, _, _, known_seen = ENTRY.unpack_from(known)
                if type_ == FileType.UNKNOWN:
                    type_ = FILE_TYPES[known_type & TYPE]
                if known_type & LOOKED_UP:
                    if known_seen >= sequence:
                        # Who found it since this listing began knows better what it stands for.
                        row = bytes([known_type | LISTED]) + bytes(known[1:])
                        put(prefix + cookie, row, db=entries)
                        continue
                    again = self._listed_again(txn, parent, known, type_, source, now_ns)
                    if again is not None:
                        put(prefix + cookie, pack_entry(*again, sequence, name), db=entries)
                        continue
                seen = max(known_seen, sequence)
            source_key = ID_PAIR.pack(*source)
            number = get(source_key, None, by_source)
            if number is None:
                if fresh is None:
                    fresh = pack(next_id)
                    next_id += 1
                number = fresh
                put(source_key, number, db=by_source)
            shown = int.from_bytes(number, "big")
            put(prefix + cookie, pack_entry(type_ | LISTED, shown, now_ns, seen, name), db=entries)
        put(META_NEXT, pack(next_id), db=self._env.db.meta)
        self._env.next_id = next_id

    def _listed_again(
        self,
        txn: Any,
        parent: int,
        row: bytes,
        type_: FileType,
        source: tuple[int, int],
        now_ns: int,
    ) -> tuple[int, int, int] | None:
        """The entry (type, ino, checked_ns) of a name that was looked up, and that a listing has
        with this type and number; None if what it stood for is forgotten."""
        _, ino, checked_ns, _ = ENTRY.unpack_from(row)
        name = row[ENTRY.size :]
        node = txn.get(ID.pack(ino), None, self._env.db.nodes)
        if node is None:
            return None
        if node_type(node) != type_ or node_identity(node) != source:
            # It was replaced; or its d_ino is not its st_ino.
            self._env.on_name(parent, name)
            checked_ns = 0
        elif checked_ns and node_place(node) == (parent, name):
            checked_ns = now_ns
        return type_ | LOOKED_UP | LISTED, ino, checked_ns

    def finish_listing(
        self, parent: int, sequence: int, listing: Listing
    ) -> Iterator[list[Dirent]]:
        """Remove the names that the listing did not see, then record it as complete.

        Names that no listing ever had stay, unless this one has all that there are.

        The times are the directory's, from before its first entry was read.
        A generator: each step takes about half a millisecond, so that other tasks can run in
        between, and yields what it removed. The last step records the listing, so exhaust it.
        """
        prefix = ID.pack(parent)
        start = prefix
        while rows := self._env.rows(self._env.db.entries, start, prefix, _SWEEP):
            gone = {
                key: value
                for key, value in rows
                if ENTRY.unpack_from(value)[3] < sequence
                and (listing.lists_all or value[0] & LISTED)
            }
            if gone:
                self._remove_entries(gone)
            start = rows[-1][0] + b"\0"
            yield [unpack_dirent(ID.unpack(key[8:])[0], value) for key, value in gone.items()]
        self._env.write(
            lambda txn: txn.put(prefix, pack_listing(listing), db=self._env.db.listings)
        )

    def _remove_entries(self, keys: Iterable[bytes]) -> None:
        # There is no checkpoint between reading these entries and removing them.
        def remove(txn: Any) -> None:
            for key in keys:
                name = txn.pop(key, self._env.db.entries)[ENTRY.size :]
                self._env.on_name(int.from_bytes(key[:8], "big"), name)
                txn.delete(key[:8] + name, db=self._env.db.names)

        self._env.write(remove)
