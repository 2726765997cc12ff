"""A kernel that remembers what it was told to forget."""

from __future__ import annotations

import trio


class RecordingKernel:
    def __init__(self) -> None:
        self.pages: list[int] = []
        self.attributes: list[int] = []
        self.entries: list[tuple[int, bytes]] = []
        self.pauses = 0

    def invalidate_inode(self, ino: int, *, attributes_only: bool = False) -> None:
        (self.attributes if attributes_only else self.pages).append(ino)

    async def forget_attributes(self, ino: int) -> None:
        self.attributes.append(ino)
        await trio.lowlevel.checkpoint()

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self.entries.append((parent, name))

    async def room(self) -> None:
        self.pauses += 1
        await trio.lowlevel.checkpoint()

    def clear(self) -> None:
        for told in (self.pages, self.attributes, self.entries):
            told.clear()
