"""FUSE_INIT on the wire: reading the kernel's request and amending libfuse's reply.

Layouts and bits are those of the kernel's include/uapi/linux/fuse.h; numbers are in the byte order
of the machine. Pure: no I/O.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntFlag
from typing import NamedTuple

FUSE_INIT = 26
FUSE_NOTIFY_RESEND = 7

LOOKUP, GETATTR, READLINK, OPEN, READ, STATFS, RELEASE = 1, 3, 5, 14, 15, 17, 18
GETXATTR, LISTXATTR, OPENDIR, RELEASEDIR, FSYNCDIR, ACCESS, READDIRPLUS = 22, 23, 27, 29, 30, 34, 44
"""Of enum fuse_opcode: what ``Answerer`` answers; ENOSYS to all others, FLUSH included."""
AHEAD = 0xFFFE
"""None of the kernel's, from the C part: a note that a file has been read so far (_relay.h)."""

MAX_WRITE = 4096
"""Nothing is ever written; the kernel wants every buffer for requests to be larger than this
(fs/fuse/dev.c, fuse_dev_do_read), so that thousands of waiting requests stay small."""

MAX_PAGES = (1 << 20) // mmap.PAGESIZE
"""Pages of one READ: 1 MiB, for which the threads have buffers (MOST_READ_BYTES in core/_reply.h).
With pages of 4 KiB these are 256, the most that kernels take by default (fs/fuse/fuse_i.h)."""
MAX_BACKGROUND = 1024
"""Readahead and asynchronous requests in flight. With libfuse's 12, those that wait for a hung
source keep all others from being sent."""
CONGESTION_THRESHOLD = 768

IN_HEADER = struct.Struct("=IIQQIIIHH")
"""fuse_in_header: len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding."""
OUT_HEADER = struct.Struct("=IiQ")
"""fuse_out_header: len, error, unique."""
INIT_IN = struct.Struct("=IIII")
"""fuse_init_in up to Linux 5.16: major, minor, max_readahead, flags."""
INIT_IN_FLAGS2 = struct.Struct("=I")
"""What follows in longer requests: flags2 (the upper half of the flags); the rest is unused."""
INIT_OUT = struct.Struct("=IIIIHHIIHHII6I")
"""fuse_init_out: major, minor, max_readahead, flags, max_background, congestion_threshold,
max_write, time_gran, max_pages, map_alignment, flags2, max_stack_depth, unused."""


RESEND = OUT_HEADER.pack(OUT_HEADER.size, FUSE_NOTIFY_RESEND, 0)
"""Written to the device, it has the kernel hand out again, with bit 63 of ``unique`` set, all
requests that were taken and not answered (Linux 6.9; fs/fuse/dev.c, fuse_resend)."""


class InitFlag(IntFlag):
    """Bits of ``flags`` (0 to 31) and, shifted up by 32, of ``flags2``."""

    ASYNC_READ = 1 << 0
    EXPORT_SUPPORT = 1 << 4
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    WRITEBACK_CACHE = 1 << 16
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    POSIX_ACL = 1 << 20
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37
    NO_EXPORT_SUPPORT = 1 << 38
    HAS_RESEND = 1 << 39


_WANTED = (
    InitFlag.ASYNC_READ
    | InitFlag.ASYNC_DIO
    # Without it a LOOKUP that hangs in the source blocks its whole directory.
    | InitFlag.PARALLEL_DIROPS
    | InitFlag.CACHE_SYMLINKS
    | InitFlag.MAX_PAGES
    | InitFlag.INIT_EXT
    # A file that changes while it is being opened is read past the page cache; maps go on working.
    | InitFlag.DIRECT_IO_ALLOW_MMAP
    # Another worker may take a dead one's place.
    | InitFlag.HAS_RESEND
    # What the kernel has forgotten is found by name only, so it gives out no file handles.
    | InitFlag.NO_EXPORT_SUPPORT
)
# A new version of a file is a new inode, so data never need invalidating by attributes; nothing
# is written; and the kernel's guess when to skip readdirplus costs one LOOKUP a name.
_UNWANTED = (
    InitFlag.AUTO_INVAL_DATA
    | InitFlag.WRITEBACK_CACHE
    | InitFlag.READDIRPLUS_AUTO
    | InitFlag.EXPORT_SUPPORT
)


class InitRequest(NamedTuple):
    """A FUSE_INIT request; ``flags`` are those that the kernel offers."""

    unique: int
    major: int
    minor: int
    max_readahead: int
    flags: InitFlag


class InitReply(NamedTuple):
    """The reply to FUSE_INIT, in the order of ``INIT_OUT``; ``flags`` are those that are in force
    from then on."""

    unique: int
    major: int
    minor: int
    max_readahead: int
    flags: InitFlag
    max_background: int
    congestion_threshold: int
    max_write: int
    time_gran: int
    max_pages: int
    map_alignment: int
    max_stack_depth: int


class ProtocolError(ValueError):
    """Bytes that are not what the kernel's header file says they are."""


def parse_init_request(request: bytes) -> InitRequest:
    """The fields of a FUSE_INIT request as read from /dev/fuse. Raises ProtocolError."""
    if len(request) < IN_HEADER.size + INIT_IN.size:
        raise ProtocolError(f"a FUSE_INIT request of {len(request)} bytes is too short")
    length, opcode, unique, *_ = IN_HEADER.unpack_from(request)
    if opcode != FUSE_INIT or length != len(request):
        raise ProtocolError(f"expected FUSE_INIT, got opcode {opcode} of {length} bytes")
    major, minor, max_readahead, flags = INIT_IN.unpack_from(request, IN_HEADER.size)
    if flags & InitFlag.INIT_EXT:
        at = IN_HEADER.size + INIT_IN.size
        if len(request) < at + INIT_IN_FLAGS2.size:
            raise ProtocolError("a FUSE_INIT request says INIT_EXT but holds no flags2")
        flags |= INIT_IN_FLAGS2.unpack_from(request, at)[0] << 32
    return InitRequest(unique, major, minor, max_readahead, InitFlag(flags))


def parse_init_reply(reply: bytes) -> InitReply:
    """The fields of a reply to FUSE_INIT. Raises ProtocolError, also for a reply that refuses."""
    if len(reply) < OUT_HEADER.size:
        raise ProtocolError(f"a reply of {len(reply)} bytes is too short")
    length, error, unique = OUT_HEADER.unpack_from(reply)
    if error != 0:
        raise ProtocolError(f"FUSE_INIT was refused with error {-error}")
    if length != len(reply) or length < OUT_HEADER.size + INIT_OUT.size:
        raise ProtocolError(f"a reply to FUSE_INIT of {len(reply)} bytes (says {length})")
    fields = INIT_OUT.unpack_from(reply, OUT_HEADER.size)
    major, minor, max_readahead, flags, *limits, flags2, max_stack_depth = fields[:12]
    if flags & InitFlag.INIT_EXT:
        flags |= flags2 << 32
    return InitReply._make(
        (unique, major, minor, max_readahead, InitFlag(flags), *limits, max_stack_depth)
    )


def build_init_reply(reply: InitReply) -> bytes:
    """The bytes of ``reply``: what `parse_init_reply` takes apart."""
    unique, major, minor, max_readahead, flags, *limits, max_stack_depth = reply
    low, high = flags & 0xFFFFFFFF, flags >> 32
    return OUT_HEADER.pack(OUT_HEADER.size + INIT_OUT.size, 0, unique) + INIT_OUT.pack(
        major, minor, max_readahead, low, *limits, high, max_stack_depth, *(0,) * 6
    )


def amend_init_reply(
    request: bytes, reply: bytes, *, posix_acl: bool, stack_depth: int = 0
) -> bytes:
    """libfuse's ``reply`` with the settings that this file system wants.

    What the kernel did not offer in ``request`` is not set. ``posix_acl`` makes the kernel check
    ACLs itself. ``stack_depth`` above 0 allows passthrough to files that lie on at most so many
    file systems less one: 2 for those on overlayfs (fs/fuse/backing.c). Raises ProtocolError if
    either is not what it should be.
    """
    asked = parse_init_request(request)
    answer = parse_init_reply(reply)
    if answer.unique != asked.unique:
        raise ProtocolError("the reply to FUSE_INIT belongs to another request")
    wanted = _WANTED | InitFlag.POSIX_ACL if posix_acl else _WANTED
    if stack_depth:
        wanted |= InitFlag.PASSTHROUGH
    flags = (answer.flags & ~_UNWANTED & ~InitFlag.PASSTHROUGH | wanted) & asked.flags
    return build_init_reply(
        answer._replace(
            max_readahead=asked.max_readahead,
            flags=flags,
            max_background=MAX_BACKGROUND,
            congestion_threshold=CONGESTION_THRESHOLD,
            max_write=MAX_WRITE,
            time_gran=1,
            max_pages=MAX_PAGES if flags & InitFlag.MAX_PAGES else 0,
            max_stack_depth=stack_depth if flags & InitFlag.PASSTHROUGH else 0,
        )
    )
