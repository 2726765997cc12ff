"""What the index knows of the machine: its boots, and the paths of the tiers."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

from monarchfs.index.records import (
    BOOT,
    META_BOOT,
    META_BOOT_ID,
    META_LONG,
    META_PATH,
    META_USER,
    TIER_KEY,
)
from monarchfs.index.replicas import Replicas

_USER_KEY_BYTES = 400

_NUMBER_NS = 64
"""Numbers are assumed to be given out at this interval at least (a commit takes 5000 ns)."""


class Machine(Replicas):
    """Boots and tiers, and small values of callers."""

    def begin_boot(self, boot_id: bytes) -> bool:
        """Call it once after the index was opened, with the kernel's boot_id.

        True if the machine was restarted since the last call on this index: then replicas that are
        not durable count no more.
        """
        known = self._get(self._db.meta, META_BOOT_ID)
        if known == boot_id:
            return False
        boot = BOOT.pack(BOOT.unpack(self._boot)[0] + 1)

        def begin(txn: Any) -> None:
            txn.put(META_BOOT_ID, boot_id, db=self._db.meta)
            txn.put(META_BOOT, boot, db=self._db.meta)

        self._write(begin)
        self._boot = boot
        self._swept_to = b""
        return known is not None

    def tier_number(self, path: str) -> int:
        """The number of the tier at ``path``, the same for the life of the index. From 1 on."""
        for number, known in self.tier_paths().items():
            if known == path:
                return number
        number = max(self.tier_paths(), default=0) + 1
        key = META_PATH + TIER_KEY.pack(number)
        self._write(lambda txn: txn.put(key, os.fsencode(path), db=self._db.meta))
        return number

    def tier_paths(self) -> dict[int, str]:
        """The paths of all tiers that ever had a number."""
        rows = self._rows(self._db.meta, META_PATH, META_PATH, 1 << 16)
        return {
            TIER_KEY.unpack(key[len(META_PATH) :])[0]: os.fsdecode(value) for key, value in rows
        }

    # Small values of callers.

    def meta_get(self, key: bytes) -> bytes | None:
        value: bytes | None = self._get(self._db.meta, _user_key(key))
        return value

    def meta_put(self, key: bytes, value: bytes) -> None:
        """Keep ``value`` (at most a few kilobytes) under ``key`` (of any length)."""
        self._write(lambda txn: txn.put(_user_key(key), value, db=self._db.meta))

    # Numbers.

    def _skip_numbers(self) -> None:
        """Never give out again a number that an earlier process may have given out unrecorded.

        A mount, and so the kernel, may know numbers from an index that was frozen or set aside. So
        each process starts above the recorded number by the age of the boot in units of
        ``_NUMBER_NS``. Until the next process starts, it gives out fewer numbers than that.
        """
        # Recorded at once, because later records rely on it.
        self._write(lambda txn: self._new_ids(txn, _most_since_boot()))

    @property
    def next_number(self) -> int:
        """The lowest inode number that this index has not given out."""
        return self._next_id

    def skip_numbers_after(self, number: int) -> None:
        """Never give out a number that another process may have given out since the machine was
        started, if it began with ``number``: its index may be lost. Raises IndexWriteError."""
        skipped = number + _most_since_boot() - self._next_id
        if skipped > 0:
            self._write(lambda txn: self._new_ids(txn, skipped))


def _most_since_boot() -> int:
    """More numbers than a process can have given out since the machine was started."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // _NUMBER_NS


def _user_key(key: bytes) -> bytes:
    # LMDB's keys end at 511 bytes; a path may be longer.
    if len(key) <= _USER_KEY_BYTES:
        return META_USER + key
    return META_LONG + hashlib.sha256(key).digest()
