"""Words shared by all modules: identities, versions, places, and domain errors.

Imports nothing of the package. Times are nanoseconds since the epoch, sizes are bytes; names and
paths of files are ``bytes``, because the kernel promises nothing about their encoding.
"""

from __future__ import annotations

import errno
import os
import stat as stat_module
from dataclasses import dataclass
from enum import Enum, IntEnum
from hashlib import blake2b
from typing import NamedTuple

ROOT_INO = 1
"""The inode number of the mount's root, fixed by FUSE (FUSE_ROOT_ID in linux/fuse.h)."""


Data = bytes | bytearray | memoryview
"""Bytes of a file, in whatever holds them without another copy."""


class FileType(IntEnum):
    """The d_type values of readdir(3)."""

    UNKNOWN = 0
    FIFO = 1
    CHARACTER = 2
    DIRECTORY = 4
    BLOCK = 6
    REGULAR = 8
    SYMLINK = 10
    SOCKET = 12

    @classmethod
    def of_mode(cls, mode: int) -> FileType:
        return cls(stat_module.S_IFMT(mode) >> 12)


class SourceVersion(NamedTuple):
    """What proves that two readings of a source file saw the same bytes.

    ``device`` is 0 on the file system of the source's root and st_dev on file systems mounted
    below it: st_dev of the source itself changes with every mount of it.
    """

    device: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def replica_name(self) -> bytes:
        """What a replica of this version is named after: 16 bytes, the same in every release.

        Of decimal text rather than fixed fields: a time in nanoseconds need not fit in 64 bits.
        """
        return blake2b(b"%d %d %d %d %d" % self, digest_size=16).digest()

    def past_racy_window(self, now_ns: int) -> bool:
        """Whether a write after ``now_ns`` would show as another version.

        A file that was changed within the tick of its file system's clock that is passing at
        ``now_ns`` may be changed again without a trace (git calls that racy). A tick is taken to
        be a second where the time of change has no fraction of one, else 20 ms (the kernel's are
        at most 10 ms: current_time in fs/inode.c). A time more than a minute ahead says that the
        source's clock is not ours, and nothing else.
        """
        tick_ns = 1_000_000_000 if self.ctime_ns % 1_000_000_000 == 0 else 20_000_000
        return not now_ns - tick_ns <= self.ctime_ns < now_ns + 60_000_000_000


SPARSE_MIN_BYTES = 1 << 20
"""Holes of smaller files, which are written in one go, are not looked for."""


class SourceStat(NamedTuple):
    """The attributes of one file of the source, as stat(2) gives them (``blocks`` of 512 bytes)."""

    device: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int
    atime_ns: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    blocks: int
    blksize: int

    @property
    def version(self) -> SourceVersion:
        return SourceVersion(self.device, self.ino, self.size, self.mtime_ns, self.ctime_ns)

    @property
    def occupied_bytes(self) -> int:
        """What a copy is expected to occupy: less than the size where the file has holes. A guess,
        as the source may compress, or not have counted what was just written.

        With a 4096th for the blocks in which a file system notes where the pieces lie (ext4: one
        for 340 of them, and pieces of a replica have 64 KiB or more).
        """
        if self.size <= SPARSE_MIN_BYTES:
            return self.size
        return min(self.size, self.blocks * 512 * 4097 // 4096)

    @property
    def is_directory(self) -> bool:
        return stat_module.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat_module.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat_module.S_ISLNK(self.mode)

    @classmethod
    def of(cls, st: os.stat_result, root_device: int) -> SourceStat:
        """Of a stat result, where ``root_device`` is st_dev of the source's root."""
        return cls(
            0 if st.st_dev == root_device else st.st_dev,
            st.st_ino,
            st.st_size,
            st.st_mtime_ns,
            st.st_ctime_ns,
            st.st_atime_ns,
            st.st_mode,
            st.st_nlink,
            st.st_uid,
            st.st_gid,
            st.st_rdev,
            st.st_blocks,
            st.st_blksize,
        )


class Node(NamedTuple):
    """An inode number of the mount and what it stands for.

    Of a regular file, symlink or special file it stands for *one version*; a directory keeps its
    number while its contents change. ``parent`` and ``name`` are one place where it was found (a
    hard link has others). ``fetched_ns`` is when the source was last asked for the attributes.
    ``outdated`` is set once the source was seen to hold another version. ``target`` is a symbolic
    link's.
    """

    ino: int
    stat: SourceStat
    parent: int
    name: bytes
    fetched_ns: int
    outdated: bool
    target: bytes


class Dirent(NamedTuple):
    """One name in a directory of the mount.

    ``cookie`` is the readdir offset *of* this entry: it never changes while the name exists and is
    never used again, so that a listing can go on from it in another process. ``ino`` is what the
    name stands for, as a look-up said; 0 where only a listing has the name. ``checked_ns`` is when
    the source last confirmed that; 0 where a listing gave reason to doubt it. ``shown_ino`` is what
    a listing of the mount shows as d_ino: ``ino``, or a number of which nothing follows.
    """

    cookie: int
    name: bytes
    type: FileType
    ino: int
    checked_ns: int
    shown_ino: int


class Listing(NamedTuple):
    """A directory's entries are all in the index, as of the directory's times then.

    ``lists_all``: the source's listings name all that a look-up finds. So what is not in the index
    is not there.
    """

    mtime_ns: int
    ctime_ns: int
    fetched_ns: int
    lists_all: bool


class PeerNames(NamedTuple):
    """Names of a directory that another node of the job knows, with attributes and targets of
    links, as the source said at most ``age_ns`` before that node was asked."""

    age_ns: int
    found: list[tuple[bytes, SourceStat, bytes]]


MOST_LISTED = 4096
"""Entries of a listing that nodes share. Larger ones cost few calls for each name."""


class PeerListing(NamedTuple):
    """All entries of a directory (name, type, source ino), as the source said at most ``age_ns``
    before the node that knows them was asked. Times (ns): the directory's, from before that.
    ``lists_all`` as of ``Listing``."""

    age_ns: int
    mtime_ns: int
    ctime_ns: int
    lists_all: bool
    entries: list[tuple[bytes, FileType, int]]


class DirRef(NamedTuple):
    """A directory of the source: its path relative to the root (``b""`` is the root), its st_ino
    and its device (as of ``SourceVersion``), by which whoever opens it can tell that it is still
    the same one: all subvolumes of btrfs begin with the same st_ino."""

    path: bytes
    ino: int
    device: int = 0


class ReplicaState(IntEnum):
    PARTIAL = 1
    RESIDENT = 2
    FOUND = 3
    """A complete replica that lies in a tier, and no known file of the source is its: an earlier
    index knew. Its number stands for nothing else."""


class Replica(NamedTuple):
    """A local copy of one version of a file, as the index records it.

    ``name`` is its version's ``replica_name``, ``size`` the file's. ``allocated_bytes`` are the
    blocks it occupies in its tier. ``durable`` says that its data were synced before this record
    was, so that it counts after a reboot. ``checksum`` (64 bits, see ``cache.store.checksum``) is a
    complete replica's. ``chunk_bytes``, ``present`` (one byte a chunk, 1 where it is there) and
    ``digests`` (8 bytes a block, see ``store.checksum``) describe a partial replica; they are 0 and
    empty for others. The index gives the latter two only to who asks for them (``Replicas.part``).
    ``segment`` (64 bits; 0: the replica is a file of its own) and ``offset`` in bytes say where a
    complete replica lies that shares a file with others (``store.segments``).
    """

    tier: int
    state: ReplicaState
    name: bytes
    size: int
    allocated_bytes: int
    durable: bool
    created_ns: int
    checksum: int = 0
    chunk_bytes: int = 0
    present: bytes = b""
    digests: bytes = b""
    segment: int = 0
    offset: int = 0

    @classmethod
    def found(cls, tier: int, file: TierFile) -> Replica:
        """One that lies in a tier, and that no record knows."""
        return cls(
            tier,
            ReplicaState.FOUND,
            file.name,
            file.size,
            file.allocated_bytes,
            file.synced,
            file.made_ns,
            file.checksum,
            segment=file.segment,
            offset=file.offset,
        )


class TierFile(NamedTuple):
    """A replica that lies in a tier, as a file of its own or in a segment (as of ``Replica``).
    ``synced``: its data reached the disk. ``made_ns`` is when its last byte was written, since the
    epoch."""

    name: bytes
    checksum: int
    size: int
    allocated_bytes: int
    synced: bool
    made_ns: int = 0
    segment: int = 0
    offset: int = 0


class TierTotals(NamedTuple):
    """The replicas of one tier: how many in which state, and the blocks of all of them."""

    resident: int = 0
    partial: int = 0
    found: int = 0
    allocated_bytes: int = 0


class Space(NamedTuple):
    """A file system's room, from statvfs(3): what an unprivileged process may use."""

    total_bytes: int
    free_bytes: int
    total_inodes: int
    free_inodes: int


class Lane(Enum):
    """Who waits for an operation: a reader (``DEMAND``) or nobody yet (``BACKGROUND``)."""

    DEMAND = "demand"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier's capacity: bytes, or percent of the file system it lies on (exactly one is set)."""

    bytes: int | None = None
    percent: float | None = None

    def resolve(self, total_bytes: int) -> int:
        if self.bytes is not None:
            return self.bytes
        assert self.percent is not None
        return int(total_bytes * self.percent / 100)


class FreshnessMode(Enum):
    """When the source is asked again about what is already known."""

    IMMUTABLE = "immutable"
    TTL = "ttl"
    OPEN = "open"


class EvictionPolicy(Enum):
    """What is done when a file that somebody opened fits nowhere."""

    KEEP = "keep"
    """Nothing: what is there stays."""
    LRU = "lru"
    """The replica that was opened least recently goes."""
    SIEVE = "sieve"
    """The oldest replica that was not opened since it was last looked at goes (SIEVE, Zhang et al.,
    NSDI'24): better than LRU where most files are opened once."""
    WEIGHTED = "weighted"
    """The replica that weighs least goes, by weights that users give or by how often files are
    opened, if it weighs less than the file that was opened."""


class MonarchError(Exception):
    """Base of the errors that this package raises for others to handle."""


class UsageError(MonarchError):
    """The user asked for something that cannot be; the message names it and the remedy (exit 2)."""


class OperationError(MonarchError):
    """Something failed at run time; the message names it and the remedy (exit 1)."""


class SourceChanged(MonarchError):
    """The source holds another version of a file than the one that was asked for."""


class DirectoryChanged(SourceChanged):
    """The directory that something was found in lies elsewhere now, or nowhere."""


class Archived(OSError):
    """The file's bytes are in an archive, perhaps on tape, and are not to be brought back for a
    copy that nobody waits for."""


class ReplicaLost(OSError):
    """A replica is missing, or is not the file that was written (errno ESTALE): the index is wrong
    about it. Any other OSError of the store is about the tier."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(errno.ESTALE, reason, name)


class IndexUnusable(MonarchError):
    """The index cannot be read: damaged, foreign or written by a newer version."""


class IndexWriteError(MonarchError):
    """The index could not be written (a full disk, say); nothing was changed by the call."""
