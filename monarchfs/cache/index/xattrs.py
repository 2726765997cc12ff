"""Extended attributes of the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarchfs.cache.index.environment import Environment, keys_with
from monarchfs.cache.index.records import ID, pack_xattr, unpack_xattr


class XattrTables:
    """What the source answered when it was asked for extended attributes."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment

    def xattr(self, ino: int, name: bytes) -> bytes | int | None:
        """The value, or the errno that the source answered, or None if it was never asked.

        The name ``b""`` is free for the list of names. A directory's are forgotten when its ctime
        changes (setting one changes it); of anything else the next version is another number.
        """
        value = self._env.get(self._env.db.xattrs, ID.pack(ino) + name)
        return None if value is None else unpack_xattr(value)

    def put_xattr(self, ino: int, name: bytes, answer: bytes | int) -> None:
        """Remember a value, or an errno (a positive number)."""
        key, value = ID.pack(ino) + name, pack_xattr(answer)
        self._env.write(lambda txn: txn.put(key, value, db=self._env.db.xattrs))

    def put_xattrs(self, answers: Sequence[tuple[int, bytes, bytes]]) -> None:
        """``put_xattr`` of each (ino, name, value), in one transaction: a hundred at most."""
        rows = [(ID.pack(ino) + name, pack_xattr(value)) for ino, name, value in answers]
        if rows:
            self._env.write(
                lambda txn: [txn.put(key, value, db=self._env.db.xattrs) for key, value in rows]
            )

    # Within a transaction.

    def forget(self, txn: Any, ino: bytes) -> None:
        """All of ``ino``, which is packed."""
        for row in keys_with(txn.cursor(self._env.db.xattrs), ino):
            txn.delete(row, db=self._env.db.xattrs)
