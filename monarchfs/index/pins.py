"""What a user asked to be kept: pinned files and directories."""

from __future__ import annotations

from typing import Any

from monarchfs.index.records import ID, NODE, PLACE
from monarchfs.index.tables import Tables
from monarchfs.types import ROOT_INO


class Pins(Tables):
    """Pins of inode numbers. Where a name comes to stand for another number, or a file becomes
    another version, the pin goes with it.

    Changing: ``_pin_count``.
    """

    _pin_count: int

    def pin(self, ino: int) -> None:
        """Keep ``ino``: a file, or a directory with all that is below it, now or later."""
        self._write(lambda txn: txn.put(ID.pack(ino), b"", db=self._db.pins))
        self._count_pins()

    def unpin(self, ino: int) -> None:
        """Take the pin of ``ino`` itself away. One that is not pinned passes."""
        self._write(lambda txn: txn.delete(ID.pack(ino), db=self._db.pins))
        self._count_pins()

    def pins(self) -> list[int]:
        """The numbers that were pinned, by rising number."""
        rows = self._rows(self._db.pins, b"", b"", self._pin_count)
        return [int.from_bytes(key, "big") for key, _ in rows]

    def pinned(self, ino: int) -> bool:
        """Whether ``ino`` or a directory above it is pinned.

        Costs about a microsecond a level, and nothing where there is no pin at all. Of a file with
        several names, the directories above the one where it was last found count.
        """
        if not self._pin_count:
            return False
        climbed: set[int] = set()
        while ino not in climbed:
            key = ID.pack(ino)
            if self._get(self._db.pins, key) is not None:
                return True
            if ino == ROOT_INO or (value := self._get(self._db.nodes, key)) is None:
                return False
            climbed.add(ino)
            ino = PLACE.unpack_from(value)[0]
        # A directory that was moved below its own former descendant, half seen.
        return False

    def _count_pins(self) -> None:
        self._pin_count = self._count_rows(self._db.pins)

    # Within a transaction. A pin moves, so that the count is never too low; it may be too high
    # by one where both were pinned.

    def _move_pin(self, txn: Any, old: bytes, new: bytes) -> None:
        if self._pin_count and txn.delete(old, db=self._db.pins):
            txn.put(new, b"", db=self._db.pins)

    def _move_pin_of_name(self, txn: Any, parent: int, name: bytes, old: bytes, new: bytes) -> None:
        """``name`` stood for ``old``, and for ``new`` now. What was found elsewhere since (it was
        renamed, or is a hard link) keeps its pin there."""
        if not self._pin_count or old == new:
            return
        value = txn.get(old, None, self._db.nodes)
        if value is not None:
            place, _, _, length = PLACE.unpack_from(value)
            if (place, value[NODE.size : NODE.size + length]) != (parent, name):
                return
        self._move_pin(txn, old, new)
