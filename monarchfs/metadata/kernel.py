"""Invalidating what the kernel caches of this mount."""

from __future__ import annotations

from typing import Protocol


class Kernel(Protocol):
    """Invalidating what the kernel does not have passes."""

    def invalidate_inode(self, ino: int, *, attributes_only: bool = False) -> None:
        """Forget the attributes of an inode and, unless ``attributes_only``, its pages, mapped
        ones too. Done soon, in a thread: never blocks."""

    async def forget_attributes(self, ino: int) -> None:
        """Forget the attributes of an inode before this returns, or soon where that takes long. May
        be called by requests, because the kernel waits for nothing to do it. Raises nothing."""

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Forget what ``name`` stands for, or that it stands for nothing. Never blocks."""

    async def room(self) -> None:
        """Wait until few invalidations are left to be done. Never to be called by a request: the
        kernel may be waiting for its answer before it can invalidate."""
