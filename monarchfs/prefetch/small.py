"""Small files that are copied together, as far as ``Copier`` has to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from monarchfs.cache.replicas import Reservation
from monarchfs.prefetch.queue import Priority
from monarchfs.types import Node


@dataclass(eq=False, slots=True)
class Batch:
    """Files that the copier wants together. ``left``: so many are not stored or given up yet;
    ``unread``: nor is anything known of them. Of those that were read: how long that took, and
    their sizes."""

    nodes: Sequence[Node]
    left: int
    unread: int
    took_ns: int = 0
    sizes: list[int] = field(default_factory=list)
    done: trio.Event = field(default_factory=trio.Event)


class SmallFiles(Protocol):
    """Who reads small files as a whole, and puts them where there is room for them."""

    def want(self, places: Sequence[Reservation], priority: Priority) -> Batch:
        """A batch for ``copy``. No checkpoint."""

    async def copy(self, batch: Batch) -> tuple[float, list[int]]:
        """Have its files read, and store each at its place. Raises nothing. Returns how long the
        source took, and for files of which sizes."""

    def leave(self, ino: int) -> None:
        """Do nothing more for a file that no thread has begun to read. No checkpoint."""

    def suspend(self) -> None:
        """At the end of the mount: nothing more comes."""
