"""Nodes and names: which inode number stands for which version of which source file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from monarchfs.cache.index.environment import Environment, keys_with
from monarchfs.cache.index.pins import Pins
from monarchfs.cache.index.records import (
    ENTRY,
    FILE_TYPES,
    ID,
    ID_PAIR,
    LISTED,
    LOOKED_UP,
    NODE,
    PLACE,
    STALE,
    node_identity,
    node_outdated,
    outdated_node,
    pack_entry,
    pack_node,
    unpack_dirent,
    unpack_node,
)
from monarchfs.cache.index.replicas import Replicas
from monarchfs.cache.index.xattrs import XattrTables
from monarchfs.types import ROOT_INO, Dirent, DirRef, IndexUnusable, Node, SourceStat

_EXAMINED_PER_PURGED = 8


class NodeTables:
    """What was found in the source, by name and by number.

    A number is given out in the transaction that records what it stands for, and is never given
    out again. Regular files, symlinks and special files get a new number with each version; a
    directory keeps its number for as long as its identity in the source. A node of a version that
    the source no longer has is outdated, in the transaction of the change that makes it so.

    Changing: the number that ``purge_outdated`` has reached.
    """

    def __init__(
        self, environment: Environment, replicas: Replicas, pins: Pins, xattrs: XattrTables
    ) -> None:
        self._env = environment
        self._replicas = replicas
        self._pins = pins
        self._xattrs = xattrs
        self._purged_to = b""

    # Reading.

    def node(self, ino: int) -> Node | None:
        """What ``ino`` stands for; None if it was never found (or only in a listing)."""
        value = self._env.get(self._env.db.nodes, ID.pack(ino))
        return None if value is None else unpack_node(ino, value)

    def nodes_of(self, inos: Sequence[int]) -> dict[int, Node]:
        """``node`` of each, where there is one."""
        rows = self._env.get_each(self._env.db.nodes, inos)
        return {ino: unpack_node(ino, value) for ino, value in rows}

    def count_nodes(self) -> int:
        """How many nodes are recorded, outdated ones included."""
        return self._env.count_rows(self._env.db.nodes)

    def dirent(self, parent: int, name: bytes) -> Dirent | None:
        key = ID.pack(parent)
        cookie = self._env.get(self._env.db.names, key + name)
        if cookie is None:
            return None
        value = self._env.get(self._env.db.entries, key + cookie)
        return unpack_dirent(int.from_bytes(cookie, "big"), value)

    def named(self, parent: int, name: bytes) -> Node | None:
        """What a name stands for; None if no look-up has found that."""
        dirent = self.dirent(parent, name)
        return None if dirent is None else self.node(dirent.ino)

    def dirref(self, ino: int) -> DirRef | None:
        """The directory ``ino`` as the source knows it; None if an ancestor is not recorded.

        The path is where it was last found: compare the source's inode number after opening it.
        Costs about a microsecond per component.
        """
        value = self._env.get(self._env.db.nodes, ID.pack(ino))
        if value is None:
            return None
        device, source_ino = node_identity(value)
        names: list[bytes] = []
        climbed: set[int] = set()
        while ino != ROOT_INO:
            if value is None or ino in climbed:
                # A directory was moved below its former descendant, and only half of this is known.
                return None
            climbed.add(ino)
            ino, _, _, length = PLACE.unpack_from(value)
            names.append(value[NODE.size : NODE.size + length])
            value = self._env.get(self._env.db.nodes, ID.pack(ino))
        names.reverse()
        return DirRef(b"/".join(names), source_ino, device)

    # Recording what the source said.

    def record_root(self, stat: SourceStat, now_ns: int) -> Node:
        """The root of the source, under number 1.

        Raises IndexUnusable if the index has another directory as its root: what it knows is then
        not about this source.
        """
        return self._env.write(lambda txn: self._root(txn, stat, now_ns))

    def _root(self, txn: Any, stat: SourceStat, now_ns: int) -> Node:
        value = txn.get(ID.pack(ROOT_INO), None, self._env.db.nodes)
        if value is not None:
            known = unpack_node(ROOT_INO, value)
            if _identity(known.stat) != _identity(stat):
                raise IndexUnusable("the index is of another source: its root is another directory")
            return self._refresh(txn, known, stat, now_ns)
        txn.put(ID_PAIR.pack(stat.device, stat.ino), ID.pack(ROOT_INO), db=self._env.db.by_source)
        return self._put_node(txn, Node(ROOT_INO, stat, ROOT_INO, b"", now_ns, False, b""))

    def record_found_each(
        self, parent: int, found: Sequence[tuple[bytes, SourceStat, bytes]], now_ns: int
    ) -> list[tuple[Node, int | None]]:
        """Record each (name, attributes, target of a symlink) that was found in ``parent``.

        A known version keeps its number, also under another name (a hard link, a rename). A new
        version gets a new number, and the old node is outdated. A pin moves to the new number,
        whether the file changed or the name now stands for another file. Each node comes with the
        number for which the name stood before, if any; 0: listings showed the name with another
        number than the node's. One transaction takes about 8 us a name: give a hundred names at
        most.
        """
        return self._env.write(
            lambda txn: [
                self._found(txn, parent, name, stat, target, now_ns) for name, stat, target in found
            ]
        )

    def _found(
        self, txn: Any, parent: int, name: bytes, stat: SourceStat, target: bytes, now_ns: int
    ) -> tuple[Node, int | None]:
        source_key = ID_PAIR.pack(stat.device, stat.ino)
        # It may have been shown in listings only: then this file is the first that it stands for.
        number = txn.get(source_key, None, self._env.db.by_source)
        value = None if number is None else txn.get(number, None, self._env.db.nodes)
        changed = None
        if value is not None:
            known = unpack_node(int.from_bytes(number, "big"), value)
            if _stands_for(known, stat) and known.target == target:
                self._forget_changed_xattrs(txn, known, stat)
                if known.outdated:
                    self._revive(txn, number)
            else:
                self._outdate(txn, number, value, now_ns)
                changed, number = number, None
        fresh = None
        if number is None:
            number = fresh = ID.pack(self._env.new_ids(txn))
            txn.put(source_key, number, db=self._env.db.by_source)
            if changed is not None:
                self._pins.move(txn, changed, number)
        ino = int.from_bytes(number, "big")
        # The source's root may be mounted below itself again; the root stays where it is.
        place = (ROOT_INO, b"") if ino == ROOT_INO else (parent, name)
        node = self._put_node(txn, Node(ino, stat, *place, now_ns, False, target))
        type_ = FILE_TYPES[stat.mode >> 12 & 15]
        return node, self._put_name(txn, parent, name, type_, ino, now_ns, fresh)

    def record_missing(self, parent: int, names: Sequence[bytes]) -> list[int | None]:
        """Record that ``parent`` has no such names. Returns the numbers for which they stood (0:
        only listings had the name), if any: those may have other names."""
        return self._env.write(lambda txn: [self._remove_name(txn, parent, name) for name in names])

    def mark_outdated(self, ino: int, now_ns: int | None = None) -> None:
        """The source no longer has the version that ``ino`` stands for, since ``now_ns`` (by
        default: now). An unknown number is ignored.
        """
        since = time.time_ns() if now_ns is None else now_ns

        def mark(txn: Any) -> None:
            key = ID.pack(ino)
            value = txn.get(key, None, self._env.db.nodes)
            if value is not None:
                self._outdate(txn, key, value, since)

        self._env.write(mark)

    def renumber(self, ino: int) -> None:
        """Make ``ino`` outdated: from the next look-up by name on, another number stands for its
        version. An unknown number is ignored."""
        now_ns = time.time_ns()

        def renumber(txn: Any) -> None:
            key = ID.pack(ino)
            value = txn.get(key, None, self._env.db.nodes)
            if value is None:
                return
            source = ID_PAIR.pack(*node_identity(value))
            if txn.get(source, None, self._env.db.by_source) == key:
                txn.delete(source, db=self._env.db.by_source)
            self._outdate(txn, key, value, now_ns)

        self._env.write(renumber)

    def purge_outdated(self, before_ns: int, limit: int) -> int:
        """Forget nodes that became outdated before ``before_ns`` and have no replica.

        At most ``limit`` in one transaction (about 10 us each); returns how many. Each call goes
        on where the last one ended and examines a bounded number, so a call may find none and the
        next one some, until ``purging`` is false. The numbers are never given out again. A
        directory with many names takes several calls.
        """
        start = self._purged_to
        rows = self._env.rows(self._env.db.stale, start, b"", limit * _EXAMINED_PER_PURGED)
        chosen: list[bytes] = []
        reached = b""
        for key, value in rows:
            if (
                STALE.unpack(value)[0] < before_ns
                and self._env.get(self._env.db.replicas, key) is None
            ):
                chosen.append(key)
                if len(chosen) == limit:
                    reached = key
                    break
        else:
            if len(rows) == limit * _EXAMINED_PER_PURGED:
                reached = rows[-1][0]
        purged = 0
        if chosen:
            purged = self._env.write(lambda txn: self._purge(txn, chosen, limit))
        self._purged_to = reached + b"\0" if reached else b""
        if purged < len(chosen):  # a directory, which has names left
            self._purged_to = chosen[purged]
        return purged

    @property
    def purging(self) -> bool:
        """Whether ``purge_outdated`` has not come to the end of what there is to examine."""
        return bool(self._purged_to)

    def _purge(self, txn: Any, keys: list[bytes], names_limit: int) -> int:
        purged = 0
        for key in keys:
            for entry in keys_with(txn.cursor(self._env.db.entries), key):
                if names_limit == 0:
                    return purged
                names_limit -= 1
                name = txn.pop(entry, self._env.db.entries)[ENTRY.size :]
                self._env.on_name(int.from_bytes(key, "big"), name)
                txn.delete(key + name, db=self._env.db.names)
            txn.delete(key, db=self._env.db.listings)
            self._xattrs.forget(txn, key)
            # Else the next version of that source file would get this number.
            source_key = ID_PAIR.pack(*node_identity(txn.pop(key, self._env.db.nodes)))
            if txn.get(source_key, None, self._env.db.by_source) == key:
                txn.delete(source_key, db=self._env.db.by_source)
            txn.delete(key, db=self._env.db.stale)
            txn.delete(key, db=self._env.db.pins)
            purged += 1
        return purged

    # Within a transaction.

    def _outdate(self, txn: Any, key: bytes, value: bytes, now_ns: int) -> None:
        """``value`` is the packed node. One that is outdated already keeps its time."""
        if node_outdated(value):
            return
        self._env.on_node(int.from_bytes(key, "big"))
        txn.put(key, outdated_node(value), db=self._env.db.nodes)
        txn.put(key, STALE.pack(now_ns), db=self._env.db.stale)
        self._replicas.note_outdated(txn, key)

    def _revive(self, txn: Any, key: bytes) -> None:
        """The source has that version after all. The caller records the node."""
        txn.delete(key, db=self._env.db.stale)
        self._replicas.note_revived(txn, key)

    def _put_node(self, txn: Any, node: Node) -> Node:
        self._env.on_node(node.ino)
        txn.put(ID.pack(node.ino), pack_node(node), db=self._env.db.nodes)
        return node

    def _refresh(self, txn: Any, node: Node, stat: SourceStat, now_ns: int) -> Node:
        # An outdated node stays so: only a look-up by name tells that its version is back.
        self._forget_changed_xattrs(txn, node, stat)
        return self._put_node(txn, node._replace(stat=stat, fetched_ns=now_ns))

    def _forget_changed_xattrs(self, txn: Any, node: Node, stat: SourceStat) -> None:
        """Setting an xattr changes ctime. This gives anything but a directory a new number."""
        if node.stat.ctime_ns != stat.ctime_ns:
            self._xattrs.forget(txn, ID.pack(node.ino))

    def _put_name(
        self,
        txn: Any,
        parent: int,
        name: bytes,
        type_: int,
        ino: int,
        checked_ns: int,
        fresh: bytes | None,
    ) -> int | None:
        """Make ``name`` stand for ``ino``, with the cookie it has or a new one: ``fresh`` (the
        inode's own number, if it is new), or another. Numbers of new files then follow each other,
        and so do their rows. Returns the number for which the name stood before; None if there was
        no such name, and 0 if listings showed it with another number."""
        key = ID.pack(parent)
        # No listing under way removes the name: each began before the last number was given out.
        seen = self._env.next_id - 1
        before: int | None = None
        listed = 0
        cookie = txn.get(key + name, None, self._env.db.names)
        if cookie is None:
            cookie = fresh or ID.pack(self._env.new_ids(txn))
            txn.put(key + name, cookie, db=self._env.db.names)
        else:
            flags, before, _, _ = ENTRY.unpack_from(
                txn.get(key + cookie, None, self._env.db.entries)
            )
            listed = flags & LISTED
            if before != ino:
                self._env.on_name(parent, name)
                if not flags & LOOKED_UP:
                    before = 0
                else:
                    self._pins.move_of_name(txn, parent, name, ID.pack(before), ID.pack(ino))
        value = pack_entry(type_ | LOOKED_UP | listed, ino, checked_ns, seen, name)
        txn.put(key + cookie, value, db=self._env.db.entries)
        return before

    def _remove_name(self, txn: Any, parent: int, name: bytes) -> int | None:
        key = ID.pack(parent)
        cookie = txn.pop(key + name, self._env.db.names)
        if cookie is None:
            return None
        self._env.on_name(parent, name)
        flags, ino, _, _ = ENTRY.unpack_from(txn.pop(key + cookie, self._env.db.entries))
        return ino if flags & LOOKED_UP else 0


def _identity(stat: SourceStat) -> tuple[int, int]:
    return stat.device, stat.ino


def _stands_for(node: Node, stat: SourceStat) -> bool:
    """Whether the node's number still stands for what now has these attributes."""
    if node.stat.is_directory:
        return stat.is_directory and _identity(node.stat) == _identity(stat)
    return not stat.is_directory and node.stat.version == stat.version
