"""What the kernel remembers of this mount, as far as it can be told to forget it."""

from __future__ import annotations

from typing import Protocol


class Kernel(Protocol):
    """Takes what the kernel is to forget. What it does not know (any more) passes."""

    def invalidate_inode(self, ino: int, *, attributes_only: bool = False) -> None:
        """Forget the attributes of an inode and, unless ``attributes_only``, its pages, mapped
        ones too. Done soon, by somebody else: never blocks."""

    async def forget_attributes(self, ino: int) -> None:
        """Forget the attributes of an inode before this returns, or soon where that takes long.
        For requests: the kernel waits for nothing to do it. Raises nothing."""

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Forget what ``name`` stands for, or that it stands for nothing. Never blocks."""

    async def room(self) -> None:
        """Wait until not too much of that is still to be done. Never to be called by a request:
        the kernel may be waiting for its answer to do it."""
