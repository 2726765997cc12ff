"""What the kernel allows on an inode that is open (fs/fuse/iomode.c, Linux 6.9 and later).

An inode is read either through the daemon (its pages are cached) or from one backing file. Whatever
an open is answered with, it must be what the inode's other opens were answered with: another mode,
or another backing id, makes open(2) fail with EIO. A mode lasts from the inode's first open to its
last release; the kernel ends it before it sends the RELEASE, so who goes by what was released is on
the safe side. Pure: no I/O, no clock.
"""

from __future__ import annotations

CACHED = 0
"""The mode of an inode that is read through the daemon; others are the backing id."""


class IoModes:
    """Changing: the mode of each open inode, and how often it is open."""

    def __init__(self) -> None:
        self._modes: dict[int, int] = {}
        self._opens: dict[int, int] = {}

    def __len__(self) -> int:
        """How many inodes are open."""
        return len(self._modes)

    def get(self, ino: int) -> int | None:
        """What the next open must be answered with; None for an inode that is not open."""
        return self._modes.get(ino)

    def note_open(self, ino: int, mode: int) -> bool:
        """An open is about to be answered, or was by an earlier worker; whether it is the first of
        this inode. Raises ValueError for one that the kernel would refuse."""
        known = self._modes.setdefault(ino, mode)
        if known != mode:
            raise ValueError(f"inode {ino} is open in mode {known}, not {mode}")
        opens = self._opens[ino] = self._opens.get(ino, 0) + 1
        return opens == 1

    def closed(self, ino: int) -> int | None:
        """One of its opens was released; the mode that the inode was in if that was the last, else
        None. Raises KeyError for one that is not open."""
        left = self._opens[ino] - 1
        if left:
            self._opens[ino] = left
            return None
        del self._opens[ino]
        return self._modes.pop(ino)
