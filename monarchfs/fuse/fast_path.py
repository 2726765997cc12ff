"""Answers to requests about what is known, without pyfuse3: its tasks and objects, and the turns of
the event loop, cost more than the answer.

The C part (fuse_session_receive_buf) calls this with each request of these kinds. A request that
would have to wait goes on to pyfuse3. The messages are those of linux/fuse.h.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from time import perf_counter_ns as now_ns

from monarchfs.fs.files import Files
from monarchfs.fs.xattrs import Xattrs
from monarchfs.fuse import protocol
from monarchfs.fuse.handles import Handles
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.fuse.relay import Relay
from monarchfs.fuse.session import hooks
from monarchfs.metadata.tree import Entry, Missing, Tree
from monarchfs.metrics import NS, Metrics
from monarchfs.types import Dirent, Node

FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_CACHE_DIR = 1 << 3
FOPEN_PASSTHROUGH = 1 << 7
"""Alone: with FOPEN_KEEP_CACHE the open fails (fs/fuse/iomode.c, fuse_file_passthrough_open)."""


def drops_listings(release: str) -> bool:
    """Whether a kernel drops the listing that it has of a directory when an OPENDIR is answered
    without FOPEN_KEEP_CACHE. Linux 6.9 to 6.12.9 do not (fs/fuse/dir.c, fuse_dir_open), and EL 8's
    4.18 has errors while it does (fs/fuse/readdir.c, fuse_parse_cache: EIO)."""
    version = tuple(map(int, re.findall(r"\d+", release)[:3]))
    return (5,) <= version < (6, 9) or version >= (6, 12, 10)


CACHES_LISTINGS = drops_listings(os.uname().release)

MOST_LISTED_BYTES = 32 << 10
"""Of one answer to READDIRPLUS: some 190 entries, which take half a millisecond."""

_U32 = 0xFFFFFFFF
_HANDLE = struct.Struct("=Q")
_CHUNKS = struct.Struct("=QQ")
_OPEN_IN = struct.Struct("=I")
_OPEN_OUT = struct.Struct("=QIi")
_READ_IN = struct.Struct("=QQI")
_GETXATTR_IN = struct.Struct("=I4x")
_ACCESS_IN = struct.Struct("=I")
_GETXATTR_OUT = struct.Struct("=I4x")
_ATTR = "QQQqqqIIIIIIIIII"
_ATTR_OUT = struct.Struct("=QII" + _ATTR)
_ENTRY_OUT = struct.Struct("=QQQQII" + _ATTR)
_NO_ENTRY_OUT = struct.Struct("=16xQ8xI4x88x")
_DIRENTPLUS = struct.Struct("=QQQQII" + _ATTR + "QQII")
_BARE_DIRENTPLUS = struct.Struct("=40xQ52xI24xQQII")
_LEAST_BYTES = _DIRENTPLUS.size + 8
_PADDING = [bytes(-length % 8) for length in range(8)]


class FastPath:
    """Constant: its parts."""

    def __init__(
        self,
        tree: Tree,
        files: Files,
        xattrs: Xattrs,
        handles: Handles,
        relay: Relay,
        metrics: Metrics,
        passthrough: Passthrough,
    ) -> None:
        self._files = files
        self._xattrs = xattrs
        self._known = tree.known
        self._siblings = tree.siblings
        self._directories = tree.directories
        self._count_answer = handles.table.count_answer
        self._passthrough = passthrough
        self._handles = handles
        self._relay = relay
        self._durations = metrics.requests

    def answer(self, opcode: int, node: int, body: bytes) -> bytes | int | None:
        """What follows the header of a successful answer, or an errno. None: pyfuse3 answers. True:
        the C part knows more now, and may answer. ``body`` is what follows the header of the
        request. No checkpoint; raises nothing that is foreseen."""
        started = now_ns()
        match opcode:
            case protocol.LOOKUP:
                name = body[:-1]
                found = self._known.lookup(node, name)
                if found is None:
                    return None
                self._durations.lookup_local.observe(now_ns() - started)
                self._count_answer()
                if isinstance(found, Missing):
                    return _negative(found)
                self._relay.known(node, name, found)
                if not found.node.stat.is_directory:
                    self._siblings.looked_up(node)
                return _entry(found)
            case protocol.GETATTR:
                known = self._files.known_attributes(node)
                if known is None:
                    return None
                self._durations.getattr_local.observe(now_ns() - started)
                self._count_answer()
                return _ATTR_OUT.pack(*_split(known.attr_timeout), 0, *_attributes(known.node))
            case protocol.OPEN:
                if _OPEN_IN.unpack_from(body)[0] & os.O_ACCMODE != os.O_RDONLY:
                    return None
                if not self._passthrough.decided(node):
                    return True if self._relay.misses_open(node) else None
                if self._relay.opens(node) or self._relay.misses_open(node):
                    return True
                try:
                    handle = self._files.known_open(node)
                except OSError:
                    return None
                if handle is None:
                    return None
                try:
                    number, backing_id = self._handles.add(handle, hooks.current()[0])
                except OSError:
                    handle.release()
                    return None
                self._durations.open_local.observe(now_ns() - started)
                self._count_answer()
                if backing_id:
                    return _OPEN_OUT.pack(number, FOPEN_PASSTHROUGH, backing_id)
                flags = FOPEN_KEEP_CACHE if handle.keep_cache else 0
                return _OPEN_OUT.pack(number, FOPEN_DIRECT_IO if self._relay.direct else flags, 0)
            case protocol.READ:  # of what was not opened
                if self._relay.misses_open(node):
                    return True
            case protocol.RELEASE:
                number = _HANDLE.unpack_from(body)[0]
                if (released := self._handles.pop(number)) is not None:
                    released.release()
                return b""
            case protocol.AHEAD:
                self._files.read_ahead(node, *_CHUNKS.unpack_from(body))
            case protocol.UNOPENED:
                number = _HANDLE.unpack_from(body)[0]
                if (released := self._handles.unopened(number)) is not None:
                    released.release()
            case protocol.OPENDIR:
                # An error of the source belongs here, and what may be kept changes: so this is not
                # answered ENOSYS, which would be for all directories and for ever.
                keep = self._directories.known_open(node)
                if keep is None:
                    return None
                self._durations.opendir.observe(now_ns() - started)
                self._count_answer()
                flags = FOPEN_CACHE_DIR | FOPEN_KEEP_CACHE if keep else FOPEN_CACHE_DIR
                return _OPEN_OUT.pack(node, flags if CACHES_LISTINGS else 0, 0)
            case protocol.RELEASEDIR:
                self._count_answer()
                return b""  # a directory's handle stands for nothing
            case protocol.READDIRPLUS:
                _fh, offset, size = _READ_IN.unpack_from(body)
                listing = self._listing(node, offset, min(size, MOST_LISTED_BYTES))
                self._durations.readdir.observe(now_ns() - started)
                self._count_answer()
                return listing
            case protocol.GETXATTR:
                return self._attribute(node, body, started)
            case protocol.ACCESS:
                try:
                    allowed = self._xattrs.known_access(node, _ACCESS_IN.unpack_from(body)[0])
                except OSError as exc:
                    return exc.errno or errno.EIO
                if allowed is None:
                    return None
                self._durations.access.observe(now_ns() - started)
                self._count_answer()
                return b"" if allowed else errno.EACCES
        return None

    def _attribute(self, ino: int, body: bytes, started: int) -> bytes | int | None:
        (size,) = _GETXATTR_IN.unpack_from(body)
        name = body[_GETXATTR_IN.size : -1]
        try:
            value = self._xattrs.known(ino, name)
        except OSError as exc:
            self._count_answer()
            code = exc.errno or errno.EIO
            if code == self._xattrs.absent(name) and self._xattrs.plain(ino):
                hooks.absent_name(name, code)
                hooks.absent_add([ino])
            return code
        if value is None:
            return None
        self._durations.getxattr.observe(now_ns() - started)
        self._count_answer()
        if not size:
            return _GETXATTR_OUT.pack(len(value))
        return value if len(value) <= size else errno.ERANGE

    def _listing(self, ino: int, after_cookie: int, size: int) -> bytes:
        """As many entries as ``size`` takes."""
        parts: list[bytes] = []
        while True:
            limit = size // _LEAST_BYTES + 1
            batch = self._directories.shown_entries(ino, after_cookie, limit)
            for row in batch:
                entry = _direntplus(*row)
                size -= len(entry)
                if size < 0:
                    return b"".join(parts)
                parts.append(entry)
            if len(batch) < limit:
                return b"".join(parts)
            after_cookie = batch[-1][0].cookie


def _split(seconds: float) -> tuple[int, int]:
    whole = int(seconds)
    return whole, int((seconds - whole) * NS)


def _negative(found: Missing) -> bytes:
    """Node id 0 lets the kernel remember that there is no such name."""
    seconds, nanoseconds = _split(found.timeout)
    return _NO_ENTRY_OUT.pack(seconds, nanoseconds)


def _entry(found: Entry) -> bytes:
    node, entry_timeout, attr_timeout = found
    entry_seconds, attr_seconds = int(entry_timeout), int(attr_timeout)
    return _ENTRY_OUT.pack(
        node.ino, 0, entry_seconds, attr_seconds,
        int((entry_timeout - entry_seconds) * NS), int((attr_timeout - attr_seconds) * NS),
        *_attributes(node),
    )  # fmt: skip


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


def _direntplus(
    dirent: Dirent, node: Node | None, entry_timeout: float, attr_timeout: float
) -> bytes:
    """One entry; without attributes it has node id 0 (fs/fuse/readdir.c, fuse_direntplus_link)."""
    cookie, name, type_, ino, _checked_ns, shown_ino = dirent
    length = len(name)
    if node is None:
        head = _BARE_DIRENTPLUS.pack(shown_ino, type_ << 12, shown_ino, cookie, length, type_)
        return head + name + _PADDING[length % 8]
    # What _entry would do, in one step: there are as many of these as files.
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
