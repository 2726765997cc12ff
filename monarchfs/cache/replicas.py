"""What readers and copiers hold of the cache: a complete replica, open, or room for a new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from monarchfs.store.read import read_full, read_nowait
from monarchfs.store.tier import Tier
from monarchfs.types import Data, Node, Replica, SourceVersion


class OpenReplica:
    """A complete replica with its descriptor, shared by all handles of its inode.

    Constant: everything but ``uses``.
    """

    __slots__ = ("fd", "in_memory", "ino", "size", "tier", "uses")

    def __init__(self, ino: int, fd: int, size: int, tier: int, in_memory: bool) -> None:
        self.ino = ino
        self.fd = fd
        self.size = size
        self.tier = tier
        self.in_memory = in_memory
        self.uses = 0

    def read_nowait(self, offset: int, size: int) -> Data | None:
        """The bytes at ``offset``, fewer only at the end of the file; None where the disk would
        have to be waited for. Raises OSError on a tier that fails."""
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        return read_nowait(self.fd, offset, size, memory_backed=self.in_memory)

    def read(self, offset: int, size: int) -> bytes:
        """The same, waiting; for a thread."""
        return read_full(self.fd, offset, max(0, min(size, self.size - offset)))


class Reservation:
    """Room for one replica that is being filled, and the part file's descriptor.

    Constant: ``whole`` says that there is room for all of it, ``resumed`` is the record of what is
    in the part file already. Changing: ``fd``, which the first write opens, ``written`` bytes, and
    ``given_up``, set once its end is ``abandon``. Who holds a reservation ends it with exactly one
    of ``finish``, ``write_all``, ``rest``, ``cancel``, ``abandon``.
    """

    __slots__ = (
        "_unused",
        "_users",
        "fd",
        "given_up",
        "lock",
        "node",
        "resumed",
        "tier",
        "version",
        "whole",
        "written",
    )

    def __init__(
        self,
        node: Node,
        version: SourceVersion,
        tier: Tier,
        *,
        whole: bool,
        resumed: Replica | None = None,
    ) -> None:
        self.node = node
        self.version = version
        self.tier = tier
        self.whole = whole
        self.resumed = resumed
        self.fd = -1
        self.given_up = False
        self.written = 0
        self.lock = trio.Lock()
        self._users = 0
        self._unused = trio.Event()

    @contextmanager
    def using(self) -> Iterator[None]:
        """The part's descriptor is not closed inside: threads may be reading or writing it."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def close(self) -> None:
        """Close the part's descriptor, if it is open, as soon as nobody uses it."""
        while self._users:
            self._unused = trio.Event()
            await self._unused.wait()
        self.close_now()

    def close_now(self) -> None:
        """The same, where nobody uses it."""
        assert not self._users
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def new_part(self) -> int:
        """An empty part file, open; one that was left behind and no record knows is removed first.
        For a thread. Raises OSError of the tier."""
        try:
            return self.tier.create_part(self.version, self.version.size)
        except FileExistsError:
            self.tier.remove_part(self.version)
            return self.tier.create_part(self.version, self.version.size)

    def write_whole(self, data: bytes) -> int:
        """All of the replica at once; returns its allocated bytes. As ``new_part``."""
        try:
            return self.tier.write_whole(self.version, data)
        except FileExistsError:
            self.tier.remove_part(self.version)
            return self.tier.write_whole(self.version, data)
