"""Where the bytes of a file are."""

from __future__ import annotations

from monarchfs.cache.cache import Cache
from monarchfs.prefetch.copier import Copier
from monarchfs.types import ReplicaState


class Residency:
    """Constant: its parts."""

    def __init__(self, cache: Cache, copies: Copier) -> None:
        self._cache = cache
        self._copies = copies

    def state(self, ino: int) -> str:
        """One of resident, partial, copying, remote."""
        record = self._cache.accounts.state(ino)
        if record is not None and record.state is ReplicaState.RESIDENT:
            return "resident"
        if self._copies.jobs.copying(ino):
            return "copying"
        nonresident = self._copies.files.get(ino)
        local = record is not None or (nonresident is not None and nonresident.copy.partial)
        return "partial" if local else "remote"

    def tier(self, ino: int) -> str | None:
        """The path of the tier that has a replica, whole or partial."""
        record = self._cache.accounts.state(ino)
        return None if record is None else self._cache.tiers[record.tier].path
