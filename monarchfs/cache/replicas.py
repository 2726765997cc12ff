"""What the cache hands out: a complete replica, open, or the reservation for a new one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

import trio

from monarchfs.cache.store.checksum import BLOCK_BYTES, DIGEST_BYTES
from monarchfs.cache.store.files import replica_path
from monarchfs.cache.store.read import read_full, read_nowait
from monarchfs.cache.store.tier import Tier
from monarchfs.types import Data, Node, Replica


@dataclass(eq=False, slots=True)
class Removal:
    """One file on its way out. ``failed`` is set before ``done``."""

    done: trio.Event = field(default_factory=trio.Event)
    failed: bool = False


class OpenReplica:
    """A complete replica with the descriptor of the file that it lies in, shared by all handles of
    its inode.

    Constant: all but these. Changing: ``uses``; ``bad``, set once its bytes were found to be wrong:
    nobody reads it any more; ``then``, what is to be done once it is closed.
    """

    __slots__ = (
        "_record",
        "_start",
        "bad",
        "fd",
        "in_memory",
        "ino",
        "size",
        "then",
        "tier",
        "uses",
    )

    def __init__(self, ino: int, fd: int, record: Replica, in_memory: bool) -> None:
        self.ino = ino
        self.fd = fd
        self.size = record.size
        self.tier = record.tier
        self.in_memory = in_memory
        self.uses = 0
        self.bad = False
        self.then: list[Callable[[], object]] = []
        self._record = record
        self._start = record.offset if record.segment else 0

    @property
    def in_segment(self) -> bool:
        """Whether it shares its file with others."""
        return self._record.segment != 0

    @property
    def path(self) -> str:
        """Where it lies in the dataset's directory of its tier. Only of a file of its own."""
        assert not self.in_segment
        return replica_path(self._record.name, self._record.checksum)

    def read_nowait(self, offset: int, size: int) -> Data | None:
        """The bytes at ``offset``, fewer only at the end of the file; None where the disk would
        have to be waited for. Raises OSError on a tier that fails."""
        if self.bad:
            raise OSError(errno.EIO, "the replica is corrupt")
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        return read_nowait(self.fd, self._start + offset, size, memory_backed=self.in_memory)

    def read(self, offset: int, size: int) -> bytes:
        """The same, waiting; for a thread."""
        if self.bad:
            raise OSError(errno.EIO, "the replica is corrupt")
        size = max(0, min(size, self.size - offset))
        return read_full(self.fd, self._start + offset, size)


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for one replica that is being filled, and the part file's descriptor.

    Constant: ``whole`` says that there is room for all of it; ``shares`` that it is to share a file
    with others, until a part of it is written after all; ``resumed`` is the record of what is
    in the part file already; ``sparse``: the file has holes, and each write takes what it needs of
    what is reserved. Changing: ``fd``, which the first write opens, ``written``, the bytes of
    blocks that it took, ``after``, the removals that make the room, and ``given_up``, set once its
    end is ``abandon``. Of a sparse one: ``reserved_bytes``, what its writes ``needed`` so far, also
    those under way; ``tight``: there was no room for one. Who holds a reservation ends it with
    exactly one of ``finish``, ``write_all``, ``rest``, ``cancel``, ``abandon``.
    """

    node: Node
    name: bytes
    tier: Tier
    _: KW_ONLY
    whole: bool
    after: list[Removal]
    shares: bool = False
    reserved_bytes: int = 0
    resumed: Replica | None = None
    needed: int = 0
    tight: bool = False
    fd: int = -1
    given_up: bool = False
    written: int = 0
    sparse: bool = field(init=False)
    _lock: trio.Lock | None = field(default=None, init=False)
    _digests: bytearray | None = field(default=None, init=False)
    _users: int = field(default=0, init=False)
    _unused: trio.Event | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.sparse = self.node.stat.occupied_bytes < self.node.stat.size
        self.whole = self.whole and not self.sparse
        if self.resumed is not None:
            self._digests = bytearray(self.resumed.digests)
            self.resumed = self.resumed._replace(digests=b"")

    @property
    def lock(self) -> trio.Lock:
        """Held while the part file is made."""
        if self._lock is None:
            self._lock = trio.Lock()
        return self._lock

    @property
    def size(self) -> int:
        return self.node.stat.size

    @property
    def digests(self) -> bytearray:
        """The digests of all blocks; zeros for those that were not written."""
        if self._digests is None:
            self._digests = bytearray(-(-self.size // BLOCK_BYTES) * DIGEST_BYTES)
        return self._digests

    def put_digests(self, offset: int, digests: bytes) -> None:
        """Of the blocks from ``offset`` on, a multiple of the block size."""
        start = offset // BLOCK_BYTES * DIGEST_BYTES
        self.digests[start : start + len(digests)] = digests

    async def room(self) -> None:
        """Wait until what had to go for it is gone. Raises OSError where that failed."""
        while self.after:
            removal = self.after[-1]
            await removal.done.wait()
            if removal.failed:
                raise OSError(errno.EBUSY, "its room was not given back")
            if self.after and self.after[-1] is removal:
                self.after.pop()

    @contextmanager
    def using(self) -> Iterator[None]:
        """The part's descriptor is not closed inside: threads may be reading or writing it."""
        self.use()
        try:
            yield
        finally:
            self.unuse()

    def use(self) -> None:
        """Begin ``using``, for who ends it by ``unuse``."""
        self._users += 1

    def unuse(self) -> None:
        self._users -= 1
        if not self._users and self._unused is not None:
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
            return self.tier.files.create_part(self.name, self.size)
        except FileExistsError:
            self.tier.files.remove_part(self.name)
            return self.tier.files.create_part(self.name, self.size)

    def write_whole(self, data: Data) -> tuple[int, int]:
        """All of the replica at once; returns its allocated bytes and checksum. As ``new_part``."""
        try:
            return self.tier.files.write_whole(self.name, data)
        except FileExistsError:
            self.tier.files.remove_part(self.name)
            return self.tier.files.write_whole(self.name, data)
