"""Bodies of requests and of answers, as in linux/fuse.h. Pure."""

from __future__ import annotations

import os
import re
import struct

from monarchfs.metadata.tree import Entry, Missing
from monarchfs.metrics import NS
from monarchfs.types import Dirent, Node

FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_CACHE_DIR = 1 << 3
FOPEN_PASSTHROUGH = 1 << 7
"""Not with FOPEN_KEEP_CACHE: the open fails (fs/fuse/iomode.c, fuse_file_passthrough_open)."""


def drops_listings(release: str) -> bool:
    """Whether a kernel drops the listing that it has of a directory when an OPENDIR is answered
    without FOPEN_KEEP_CACHE. Linux 6.9 to 6.12.9 do not (fs/fuse/dir.c, fuse_dir_open), and EL 8's
    4.18 has errors while it does (fs/fuse/readdir.c, fuse_parse_cache: EIO)."""
    version = tuple(map(int, re.findall(r"\d+", release)[:3]))
    return (5,) <= version < (6, 9) or version >= (6, 12, 10)


CACHES_LISTINGS = drops_listings(os.uname().release)

HANDLE = struct.Struct("=Q")
CHUNKS = struct.Struct("=QQ")
OPEN_IN = struct.Struct("=I")
OPEN_OUT = struct.Struct("=QIi")
READ_IN = struct.Struct("=QQI")
GETXATTR_IN = struct.Struct("=I4x")
ACCESS_IN = struct.Struct("=I")
GETXATTR_OUT = struct.Struct("=I4x")
_U32 = 0xFFFFFFFF
_ATTR = "QQQqqqIIIIIIIIII"
_ATTR_OUT = struct.Struct("=QII" + _ATTR)
_ENTRY_OUT = struct.Struct("=QQQQII" + _ATTR)
_NO_ENTRY_OUT = struct.Struct("=16xQ8xI4x88x")
_STATFS_OUT = struct.Struct("=QQQQQIII28x")
_DIRENTPLUS = struct.Struct("=QQQQII" + _ATTR + "QQII")
_BARE_DIRENTPLUS = struct.Struct("=40xQ52xI24xQQII")
LEAST_DIRENT_BYTES = _DIRENTPLUS.size + 8
_PADDING = [bytes(-length % 8) for length in range(8)]


def _split(seconds: float) -> tuple[int, int]:
    whole = int(seconds)
    return whole, int((seconds - whole) * NS)


def entry(found: Entry | Missing) -> bytes:
    """What a name stands for. Node id 0 lets the kernel remember that there is no such name."""
    if isinstance(found, Missing):
        return _NO_ENTRY_OUT.pack(*_split(found.timeout))
    node, entry_timeout, attr_timeout = found
    entry_seconds, attr_seconds = int(entry_timeout), int(attr_timeout)
    return _ENTRY_OUT.pack(
        node.ino, 0, entry_seconds, attr_seconds,
        int((entry_timeout - entry_seconds) * NS), int((attr_timeout - attr_seconds) * NS),
        *_attributes(node),
    )  # fmt: skip


def attributes(found: Entry) -> bytes:
    return _ATTR_OUT.pack(*_split(found.attr_timeout), 0, *_attributes(found.node))


def _attributes(node: Node) -> tuple[int, ...]:
    """The fields of fuse_attr."""
    _device, _ino, size, mtime, ctime, atime, mode, nlink, uid, gid, rdev, blocks, blksize = (
        node.stat
    )
    return (
        node.ino, size, blocks, atime // NS, mtime // NS, ctime // NS,
        atime % NS, mtime % NS, ctime % NS,
        mode, nlink & _U32, uid, gid, rdev & _U32, blksize, 0,
    )  # fmt: skip


def direntplus(
    dirent: Dirent, node: Node | None, entry_timeout: float, attr_timeout: float
) -> bytes:
    """One entry; without attributes it has node id 0 (fs/fuse/readdir.c, fuse_direntplus_link)."""
    cookie, name, type_, ino, _checked_ns, shown_ino = dirent
    length = len(name)
    if node is None:
        head = _BARE_DIRENTPLUS.pack(shown_ino, type_ << 12, shown_ino, cookie, length, type_)
        return head + name + _PADDING[length % 8]
    # What ``entry`` would do, in one step: there are as many of these as files.
    _device, _ino, size, mtime, ctime, atime, mode, nlink, uid, gid, rdev, blocks, blksize = (
        node.stat
    )
    entry_seconds, attr_seconds = int(entry_timeout), int(attr_timeout)
    head = _DIRENTPLUS.pack(
        ino, 0, entry_seconds, attr_seconds,
        int((entry_timeout - entry_seconds) * NS), int((attr_timeout - attr_seconds) * NS),
        ino, size, blocks, atime // NS, mtime // NS, ctime // NS,
        atime % NS, mtime % NS, ctime % NS,
        mode, nlink & _U32, uid, gid, rdev & _U32, blksize, 0,
        ino, cookie, length, mode >> 12,
    )  # fmt: skip
    return head + name + _PADDING[length % 8]


def statfs(found: os.statvfs_result) -> bytes:
    return _STATFS_OUT.pack(
        found.f_blocks,
        found.f_bfree,
        found.f_bavail,
        found.f_files,
        found.f_ffree,
        found.f_bsize,
        found.f_namemax,
        found.f_frsize,
    )
