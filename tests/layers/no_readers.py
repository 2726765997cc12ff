"""Readers without threads."""

from __future__ import annotations

from collections.abc import Sequence

from monarchfs.cache.readers import NonresidentReads
from monarchfs.types import Node, Replica


class NoReaders:
    """Where all reads come to Python. As Readers."""

    def __init__(self) -> None:
        self.nonresident = NonresidentReads()

    def stored(self, replicas: Sequence[tuple[Node, Replica]]) -> None: ...
    def invalidate(self, ino: int) -> None: ...
    def expire(self, ino: int) -> None: ...
    def serve(self, tier_id: int, dir_fd: int | None) -> None: ...
    def catch_up(self) -> None: ...

    def try_remove(self, ino: int) -> bool:
        return True

    def reading(self, ino: int) -> bool:
        return False

    def used(self, ino: int) -> bool:
        return False

    def exclude(self, ino: int, *, excluded: bool) -> bool:
        return False
