"""Segments: which ones may lie in a tier, and which replicas lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarchfs.cache.index.environment import Environment
from monarchfs.cache.index.records import RECORD_KEY, SEGMENT, SEGMENT_KEY, TIER_KEY

_BATCH = 256


class Segments:
    """The tables ``segments`` and ``records``; replicas enter and leave the latter."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment

    def segments(self, tier: int) -> dict[int, bool]:
        """The segments that may lie in ``tier``, and whether each may have unrecorded bytes."""
        prefix = TIER_KEY.pack(tier)
        most = self._env.count_rows(self._env.db.segments)
        rows = self._env.rows(self._env.db.segments, prefix, prefix, most)
        return {SEGMENT_KEY.unpack(key)[1]: bool(value[0]) for key, value in rows}

    def segment_empty(self, tier: int, segment: int) -> bool:
        """Whether no replica lies in a segment."""
        prefix = SEGMENT_KEY.pack(tier, segment)
        return not self._env.rows(self._env.db.records, prefix, prefix, 1)

    def segment_records(self, tier: int, segment: int) -> list[tuple[int, int]]:
        """Offset and inode number of each replica that lies in a segment, by rising offset; lost
        ones, too."""
        prefix = SEGMENT_KEY.pack(tier, segment)
        found: list[tuple[int, int]] = []
        start = prefix
        while rows := self._env.rows(self._env.db.records, start, prefix, _BATCH):
            found += [(RECORD_KEY.unpack(key)[2], int.from_bytes(ino, "big")) for key, ino in rows]
            start = rows[-1][0] + b"\0"
        return found

    def segment_replicas(self) -> int:
        """How many replicas lie in segments; lost ones, too."""
        return self._env.count_rows(self._env.db.records)

    # Writing. All but segment_gone raise IndexWriteError where the index is frozen.

    def begin_segments(self, tier: int, segments: Sequence[int]) -> None:
        """Files of these segments may lie in the tier from now on, until ``segment_gone``."""
        keys = [SEGMENT_KEY.pack(tier, segment) for segment in segments]

        def put(txn: Any) -> None:
            for key in keys:
                txn.put(key, SEGMENT.pack(1), db=self._env.db.segments)

        self._env.write(put, of_tiers=True)

    def segment_clean(self, tier: int, segment: int) -> None:
        """All its bytes belong to records, and no others will come."""
        key = SEGMENT_KEY.pack(tier, segment)

        def put(txn: Any) -> None:
            if txn.get(key, None, self._env.db.segments) is not None:
                txn.put(key, SEGMENT.pack(0), db=self._env.db.segments)

        self._env.write(put, of_tiers=True)

    def segment_gone(self, tier: int, segment: int) -> None:
        """Its file is not in the tier any more."""
        key = SEGMENT_KEY.pack(tier, segment)
        self._env.write(lambda txn: txn.delete(key, db=self._env.db.segments))
