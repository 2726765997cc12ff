"""How the index's records are laid out: keys, values and schema version, packed with ``struct``.

All keys are big-endian, so that LMDB's order of bytes is the order of numbers; all values are
little-endian without padding. A change of any layout here raises ``SCHEMA_VERSION``.

Databases (LMDB's named databases, one environment):

===========  =======================  =========================================================
name         key                      value
===========  =======================  =========================================================
meta         a word, see ``META_*``   see ``META_*``
nodes        ino                      ``NODE``, name, target, and ``WIDE`` where needed
by_source    device, source ino       ino: the newest number of that source file
names        parent, name             cookie
entries      parent, cookie           ``ENTRY``, name
listings     ino                      ``LISTING``
replicas     ino                      ``REPLICA``, the bitmap compressed, the digests
xattrs       ino, name of the xattr   ``XATTR``, value
files        ``PLACE_KEY``            ino: its replica is the file of that name in that tier
segments     ``SEGMENT_KEY``          ``SEGMENT``: this segment may lie in the tier
records      ``RECORD_KEY``           ino: its replica lies at that offset of that segment
journal      ``PLACE_KEY``            the file may lie in the tier without a record: ino of
                                      a copy that was begun, 0 of a removal
stale        ino                      ``STALE``: since when the node is outdated
outdated     tier, ino                nothing: the replica is FOUND, or its node outdated
pins         ino                      nothing
===========  =======================  =========================================================
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from monarchfs.types import Data, Dirent, FileType, Listing, Node, Replica, ReplicaState, SourceStat

FORMAT = b"monarchfs index"
SCHEMA_VERSION = 4

# Rows of the meta database.
META_FORMAT = b"format"  # FORMAT: says that the environment is ours
META_SCHEMA = b"schema"  # ID: SCHEMA_VERSION
META_SOURCE = b"source"  # the identity of the mirrored source, as the opener named it (UTF-8)
META_NEXT = b"next"  # ID: the lowest number not given out yet, for inodes, cookies and sequences
META_TIER = b"tier"  # + TIER_KEY: TOTALS, the sums over the replicas of one tier
META_PATH = b"path"  # + TIER_KEY: the path of the tier with that number
META_BOOT_ID = b"boot_id"  # the kernel's name of the boot in which it was last open, or empty
META_BOOT = b"boot"  # BOOT: that boot's number; each boot seen has a higher one
META_SWEPT = b"swept"  # BOOT: the last boot for which all lost replicas were looked for
META_USER = b"user:"  # + a caller's key: a caller's value
META_LONG = b"long:"  # + the SHA-256 of a caller's key that is too long: likewise

FIRST_ID = 16
"""The lowest number given out. 1 is the root's inode; 1 and 2 are the cookies of "." and ".."."""

ID = struct.Struct(">Q")
ID_PAIR = struct.Struct(">QQ")
TIER_KEY = struct.Struct(">H")
PLACE_KEY = struct.Struct(">H16s")
"""Where a replica's file lies: tier, name."""
SEGMENT_KEY = struct.Struct(">HQ")
"""Tier, segment."""
RECORD_KEY = struct.Struct(">HQQ")
"""Tier, segment, offset in bytes."""
SEGMENT = struct.Struct("<B")
"""1: it may have bytes without a record, because it is being written or a record was removed. 0: it
has none."""
TIER_INO = struct.Struct(">HQ")
BOOT = struct.Struct("<I")
STALE = struct.Struct("<q")

TOTALS = struct.Struct(
    "<"
    "Q"  # replicas in state RESIDENT
    "Q"  # replicas in state PARTIAL
    "Q"  # replicas in state FOUND
    "Q"  # allocated_bytes of all
)

NODE = struct.Struct(
    "<"
    "Q"  # parent: an inode number, the root's own for the root
    "q"  # fetched_ns
    "B"  # flags: _OUTDATED, _WIDE
    "B"  # length of the name that follows (0 for the root)
    # SourceStat, in its order:
    "Q"  # device (0 on the source's own file system)
    "Q"  # ino
    "Q"  # size
    "q"  # mtime_ns, its low 64 bits where _WIDE is set
    "q"  # ctime_ns, likewise
    "q"  # atime_ns, likewise
    "I"  # mode
    "I"  # nlink
    "I"  # uid
    "I"  # gid
    "Q"  # rdev
    "Q"  # blocks
    "I"  # blksize
)
PLACE = struct.Struct("<QqBB")
"""The first four fields of NODE."""
WIDE = struct.Struct(
    "<"
    "i"  # the bits of mtime_ns above the low 64
    "i"  # of ctime_ns
    "i"  # of atime_ns
)
_FLAGS_OFFSET = struct.calcsize("<Qq")
_MODE = struct.Struct("<I")
_MODE_OFFSET = struct.calcsize("<QqBBQQQqqq")
_IDENTITY = struct.Struct("<QQ")
_IDENTITY_OFFSET = PLACE.size
_OUTDATED = 1
_WIDE = 2  # a time outside the years 1678 to 2262 does not fit 64 bits: WIDE ends the record

ENTRY = struct.Struct(
    "<"
    "B"  # type: a FileType, LOOKED_UP, LISTED
    "Q"  # ino: what the name stands for if LOOKED_UP is set, else a number for listings to show
    "q"  # checked_ns
    "Q"  # seen: compared with the sequence of a listing, which removes what it did not see
)

TYPE = 0x0F
"""The bits of an entry's type that are a FileType."""
LISTED = 0x40
"""In an entry's type: a listing had the name. Some names only a look-up finds (.snapshot)."""
LOOKED_UP = 0x80
"""In an entry's type: a look-up (stat) said what the name stands for. A listing alone does not: its
d_ino may be another file's st_ino, as in overlays of several file systems, and where a subvolume of
btrfs or another file system begins."""

_TIMES = "qI"  # whole seconds and nanoseconds: any time of any file system
LISTING = struct.Struct(
    "<"
    f"{_TIMES}"  # mtime_ns
    f"{_TIMES}"  # ctime_ns
    "q"  # fetched_ns
    "B"  # lists_all: 0 or 1
)
REPLICA = struct.Struct(
    "<"
    "B"  # durable: 0 or 1 (first, so that it can be set without decoding the rest)
    "I"  # boot: the number of the boot in which it was recorded
    "H"  # tier
    "B"  # state: a ReplicaState
    "16s"  # name
    "Q"  # size
    "Q"  # allocated_bytes
    "Q"  # checksum
    "q"  # created_ns
    "Q"  # segment
    "Q"  # offset in it
    "I"  # chunk_bytes, 0 for a complete replica
    "I"  # length of the compressed bitmap that follows; the digests follow that
)
_BOOT_END = 1 + BOOT.size
XATTR = struct.Struct(
    "<i"  # 0: the value follows; else the errno that the source answered
)

FILE_TYPES = {int(t): t for t in FileType}
"""The FileType of each number: several times faster than calling the enum."""

_SECOND = 1_000_000_000
_STATES = {int(s): s for s in ReplicaState}


def pack_node(node: Node) -> bytes:
    try:
        head = NODE.pack(
            node.parent, node.fetched_ns, int(node.outdated), len(node.name), *node.stat
        )
    except struct.error:
        return _pack_wide_node(node)
    return head + node.name + node.target


def _pack_wide_node(node: Node) -> bytes:
    times = (node.stat.mtime_ns, node.stat.ctime_ns, node.stat.atime_ns)
    low = [((t + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63) for t in times]
    stat = node.stat._replace(mtime_ns=low[0], ctime_ns=low[1], atime_ns=low[2])
    flags = int(node.outdated) | _WIDE
    head = NODE.pack(node.parent, node.fetched_ns, flags, len(node.name), *stat)
    high = [(t - part) >> 64 for t, part in zip(times, low, strict=True)]
    return head + node.name + node.target + WIDE.pack(*high)


def unpack_node(ino: int, value: bytes) -> Node:
    fields = NODE.unpack_from(value)
    parent, fetched_ns, flags, name_length = fields[:4]
    stat = SourceStat._make(fields[4:])
    name_end = NODE.size + name_length
    target = value[name_end:]
    if flags & _WIDE:
        mtime, ctime, atime = WIDE.unpack(target[-WIDE.size :])
        target = target[: -WIDE.size]
        stat = stat._replace(
            mtime_ns=stat.mtime_ns + (mtime << 64),
            ctime_ns=stat.ctime_ns + (ctime << 64),
            atime_ns=stat.atime_ns + (atime << 64),
        )
    name = value[NODE.size : name_end]
    return Node(ino, stat, parent, name, fetched_ns, bool(flags & _OUTDATED), target)


def node_type(value: bytes) -> int:
    """The FileType, as a number, of a packed node."""
    return int(_MODE.unpack_from(value, _MODE_OFFSET)[0]) >> 12


def node_place(value: bytes) -> tuple[int, bytes]:
    """Parent and name of a packed node."""
    parent, _, _, length = PLACE.unpack_from(value)
    return parent, value[NODE.size : NODE.size + length]


def node_identity(value: bytes) -> tuple[int, int]:
    """The device and number in the source of a packed node."""
    device, ino = _IDENTITY.unpack_from(value, _IDENTITY_OFFSET)
    return device, ino


def node_outdated(value: bytes) -> bool:
    """Whether a packed node has ``outdated`` set."""
    return value[_FLAGS_OFFSET] & _OUTDATED != 0


def outdated_node(value: bytes) -> bytes:
    """The same record with ``outdated`` set."""
    flags = value[_FLAGS_OFFSET] | _OUTDATED
    return b"%b%c%b" % (value[:_FLAGS_OFFSET], flags, value[_FLAGS_OFFSET + 1 :])


def pack_entry(type_: int, ino: int, checked_ns: int, seen: int, name: bytes) -> bytes:
    return ENTRY.pack(type_, ino, checked_ns, seen) + name


def unpack_dirent(cookie: int, value: bytes) -> Dirent:
    flags, shown, checked_ns, _ = ENTRY.unpack_from(value)
    ino = shown if flags & LOOKED_UP else 0
    type_ = FILE_TYPES[flags & TYPE]
    return Dirent(cookie, value[ENTRY.size :], type_, ino, checked_ns, shown)


def pack_listing(listing: Listing) -> bytes:
    mtime, ctime = divmod(listing.mtime_ns, _SECOND), divmod(listing.ctime_ns, _SECOND)
    return LISTING.pack(*mtime, *ctime, listing.fetched_ns, listing.lists_all)


def unpack_listing(value: bytes) -> Listing:
    mtime, mtime_part, ctime, ctime_part, fetched_ns, lists_all = LISTING.unpack(value)
    mtime_ns, ctime_ns = mtime * _SECOND + mtime_part, ctime * _SECOND + ctime_part
    return Listing(mtime_ns, ctime_ns, fetched_ns, bool(lists_all))


def pack_replica(replica: Replica, boot: int) -> bytes:
    # Level 1: a bitmap is long runs, and the event loop waits. Digests do not compress: they are
    # copied once.
    present = zlib.compress(replica.present, 1) if replica.present else b""
    head = REPLICA.pack(
        replica.durable,
        boot,
        replica.tier,
        replica.state,
        replica.name,
        replica.size,
        replica.allocated_bytes,
        replica.checksum,
        replica.created_ns,
        replica.segment,
        replica.offset,
        replica.chunk_bytes,
        len(present),
    )
    return b"".join((head, present, replica.digests)) if replica.chunk_bytes else head


def unpack_replica(value: Data) -> Replica:
    """Without its bitmap and digests, which may be many megabytes."""
    fields = REPLICA.unpack_from(value)
    durable, _, tier, state, name, size, allocated, checksum, created_ns, *place = fields
    segment, offset, chunk_bytes, _ = place
    return Replica(
        tier,
        _STATES[state],
        name,
        size,
        allocated,
        bool(durable),
        created_ns,
        checksum,
        chunk_bytes,
        segment=segment,
        offset=offset,
    )


def replica_present(value: Data) -> bytes:
    """The bitmap of a packed partial replica."""
    length = REPLICA.unpack_from(value)[-1]
    return zlib.decompress(value[REPLICA.size : REPLICA.size + length]) if length else b""


def unpack_part(value: Data) -> Replica:
    """``unpack_replica`` with the bitmap and digests."""
    replica = unpack_replica(value)
    if not replica.chunk_bytes:
        return replica
    digests = bytes(value[REPLICA.size + REPLICA.unpack_from(value)[-1] :])
    return replica._replace(present=replica_present(value), digests=digests)


class ReplicaHead(NamedTuple):
    """What the accounts need of a packed replica, without its bitmap and digests."""

    tier: int
    state: int
    name: bytes
    allocated_bytes: int
    segment: int
    offset: int

    @property
    def record(self) -> bytes:
        return RECORD_KEY.pack(self.tier, self.segment, self.offset)

    @property
    def place(self) -> bytes:
        return PLACE_KEY.pack(self.tier, self.name)


def replica_head(value: Data) -> ReplicaHead:
    _, _, tier, state, name, _, allocated, _, _, segment, offset, *_ = REPLICA.unpack_from(value)
    return ReplicaHead(tier, state, name, allocated, segment, offset)


def replica_counts(value: Data, boot: bytes) -> bool:
    """Whether a packed replica is durable or of the boot with this packed number."""
    return value[0] == 1 or value[1:_BOOT_END] == boot


def durable_replica(value: bytes) -> bytes:
    """The same record with ``durable`` set."""
    return b"\x01" + value[1:]


def pack_xattr(answer: bytes | int) -> bytes:
    return XATTR.pack(answer) if isinstance(answer, int) else XATTR.pack(0) + answer


def unpack_xattr(value: bytes) -> bytes | int:
    (errno,) = XATTR.unpack_from(value)
    return int(errno) if errno else value[XATTR.size :]
