"""Small values, and the paths of the tiers."""

from __future__ import annotations

import hashlib
import os

from monarchfs.cache.index.environment import Environment
from monarchfs.cache.index.records import META_LONG, META_PATH, META_USER, TIER_KEY

_USER_KEY_BYTES = 400


class Meta:
    """Numbers of tiers, and small values of callers."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment

    def tier_number(self, path: str) -> int:
        """The number of the tier at ``path``, the same for the life of the index. From 1 on."""
        for number, known in self.tier_paths().items():
            if known == path:
                return number
        number = max(self.tier_paths(), default=0) + 1
        key = META_PATH + TIER_KEY.pack(number)
        self._env.write(lambda txn: txn.put(key, os.fsencode(path), db=self._env.db.meta))
        return number

    def tier_paths(self) -> dict[int, str]:
        """The paths of all tiers that ever had a number."""
        rows = self._env.rows(self._env.db.meta, META_PATH, META_PATH, 1 << 16)
        return {
            TIER_KEY.unpack(key[len(META_PATH) :])[0]: os.fsdecode(value) for key, value in rows
        }

    def suspect(self, tier: int) -> None:
        """What is recorded of the tier may be wrong: the next mount that has it looks at it."""
        self.put(stock(tier), b"")

    # Small values of callers.

    def get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._env.get(self._env.db.meta, _user_key(key))
        return value

    def put(self, key: bytes, value: bytes) -> None:
        """Keep ``value`` (at most a few kilobytes) under ``key`` (of any length)."""
        self._env.write(lambda txn: txn.put(_user_key(key), value, db=self._env.db.meta))


def stock(tier: int) -> bytes:
    """The key of what the records of a tier were compared with."""
    return b"stock:%d" % tier


def _user_key(key: bytes) -> bytes:
    # LMDB's keys end at 511 bytes; a path may be longer.
    if len(key) <= _USER_KEY_BYTES:
        return META_USER + key
    return META_LONG + hashlib.sha256(key).digest()
