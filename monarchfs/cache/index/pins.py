"""Pinned files and directories: a user asked to keep them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from monarchfs.cache.index.environment import Environment
from monarchfs.cache.index.records import ID, PLACE, node_place
from monarchfs.types import ROOT_INO


class Pins:
    """Pins of inode numbers. When a name comes to stand for another number, or a file becomes
    another version, the pin moves with it.

    Changing: ``_pin_count``.
    """

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self._pin_count = 0
        self._count_pins()

    def pin(self, ino: int) -> None:
        """Keep ``ino``: a file, or a directory with all that is or will be below it."""
        self._env.write(lambda txn: txn.put(ID.pack(ino), b"", db=self._env.db.pins))
        self._count_pins()

    def unpin(self, ino: int) -> None:
        """Remove the pins of ``ino`` and of all below it, if there are any."""
        keys = [ID.pack(pin) for pin in self.pins() if ino in self._climb(pin)]

        def remove(txn: Any) -> None:
            for key in keys:
                txn.delete(key, db=self._env.db.pins)

        self._env.write(remove)
        self._count_pins()

    def pins(self) -> list[int]:
        """The pinned numbers, in rising order."""
        rows = self._env.rows(self._env.db.pins, b"", b"", self._pin_count)
        return [int.from_bytes(key, "big") for key, _ in rows]

    def pinned(self, ino: int) -> bool:
        """Whether ``ino`` or a directory above it is pinned.

        Costs about a microsecond a level, and nothing if there is no pin at all. Of a file with
        several names, the one where it was last found counts.
        """
        return bool(self._pin_count) and any(
            self._env.get(self._env.db.pins, ID.pack(one)) is not None for one in self._climb(ino)
        )

    def _climb(self, ino: int) -> Iterator[int]:
        """``ino`` and the directories above it, up to the root or as far as they are known."""
        climbed: set[int] = set()
        while ino not in climbed:  # a directory that was moved below its own descendant, half seen
            yield ino
            if (
                ino == ROOT_INO
                or (value := self._env.get(self._env.db.nodes, ID.pack(ino))) is None
            ):
                return
            climbed.add(ino)
            ino = PLACE.unpack_from(value)[0]

    def _count_pins(self) -> None:
        self._pin_count = self._env.count_rows(self._env.db.pins)

    # Within a transaction. Pins only move here, so the count is never too low. It is too high by
    # one where both numbers were pinned.

    def move(self, txn: Any, old: bytes, new: bytes) -> None:
        if self._pin_count and txn.delete(old, db=self._env.db.pins):
            txn.put(new, b"", db=self._env.db.pins)

    def move_of_name(self, txn: Any, parent: int, name: bytes, old: bytes, new: bytes) -> None:
        """``name`` stood for ``old``, and now stands for ``new``. A file that was found under
        another name since (it was renamed, or has hard links) keeps its pin."""
        if not self._pin_count or old == new:
            return
        value = txn.get(old, None, self._env.db.nodes)
        if value is not None and node_place(value) != (parent, name):
            return
        self.move(txn, old, new)
