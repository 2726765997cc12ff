"""Requests of the kernel that C leaves to Python, and their answers. No decisions here.

``answer_known`` answers what is known here. For the rest, somebody has to be asked: then ``answer``
starts a task, and registers the request as one that waits, so that its process can be killed
meanwhile. The bodies of messages are those of linux/fuse.h (``packing``).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns as now_ns
from typing import Any, NamedTuple

import trio

from monarchfs.fs.files import FileHandle, Files
from monarchfs.fs.xattrs import Xattrs
from monarchfs.fuse import packing, protocol
from monarchfs.fuse.estale_retries import KEPT_OF_LISTINGS_NS, EstaleRetries
from monarchfs.fuse.handle_table import HandleTable
from monarchfs.fuse.handles import HandlelessReads, Handles, opened_by
from monarchfs.fuse.interrupts import Interrupts
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.fuse.relay import Relay
from monarchfs.fuse.session import hooks
from monarchfs.insight.recording import AnsweredBy
from monarchfs.metadata.tree import Missing, Tree
from monarchfs.metrics import Histogram, Metrics
from monarchfs.types import Data

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""So many requests may wait for a source that hangs before the mount takes no new ones."""

MOST_LISTED_BYTES = 32 << 10
"""Of one answer to READDIRPLUS: some 190 entries, which take half a millisecond."""

NO_TROUBLE = {errno.ENODATA, errno.ENOSYS, errno.EOPNOTSUPP, errno.ERANGE}
"""Errors that are normal answers; they are not counted."""

Answer = tuple[AnsweredBy, Data]


class FuseRequest(NamedTuple):
    """``number``: how the kernel calls it; ``unique``: the same, or with RESENT if an earlier
    worker has had it. ``thread`` waits for the answer. ``body`` follows the header."""

    number: int
    unique: int
    thread: int
    opcode: int
    node: int
    body: bytes


Asking = Callable[[FuseRequest], Coroutine[Any, Any, Answer]]
"""Raises OSError."""


class Answerer:
    """Constant: its parts; ``_asking``, by opcode who answers what is not known, and where the time
    of that counts (None: it does so itself). Changing: which threads were refused an inode."""

    def __init__(
        self,
        tree: Tree,
        files: Files,
        xattrs: Xattrs,
        interrupts: Interrupts,
        metrics: Metrics,
        relay: Relay,
        table: HandleTable,
        passthrough: Passthrough,
        nursery: trio.Nursery,
    ) -> None:
        self.handles = Handles(table, passthrough)
        self.handleless = HandlelessReads(files)
        self._tree = tree
        self._known = tree.known
        self._directories = tree.directories
        self._files = files
        self._xattrs = xattrs
        self._interrupts = interrupts
        self._metrics = metrics
        self._durations = durations = metrics.requests
        self._relay = relay
        self._passthrough = passthrough
        self._nursery = nursery
        self._refused = EstaleRetries(tree.known)
        self._refused_listings = EstaleRetries(tree.known, KEPT_OF_LISTINGS_NS)
        self._asking: Mapping[int, tuple[Asking, Histogram | None]] = {
            protocol.LOOKUP: (self._lookup, durations.lookup_source),
            protocol.GETATTR: (self._getattr, durations.getattr_source),
            protocol.READLINK: (self._readlink, durations.readlink),
            protocol.OPEN: (self._open, None),
            protocol.READ: (self._read, None),
            protocol.STATFS: (self._statfs, durations.statfs),
            protocol.GETXATTR: (self._getxattr, None),
            protocol.LISTXATTR: (self._listxattr, None),
            protocol.OPENDIR: (self._opendir, durations.opendir),
            protocol.ACCESS: (self._access, None),
        }

    def take_over(self) -> int:
        """Take over what an earlier worker has opened; returns how many that are. Before the first
        request."""
        for slot in self.handles.table:
            if slot.backing_id:
                self._passthrough.take_over(slot.ino, slot.backing_id)
            if not self._relay.offer(slot.ino):
                self.handles.take_over(slot.number, self._files.reopened(slot.ino))
        return len(self.handles.table)

    # -- for the C part

    def answer(self, opcode: int, node: int, body: bytes) -> Data | int | None:
        """What follows the header of a successful answer, or an errno; None where the request is
        answered otherwise, now or later. ``body`` is what follows the header of the request. On
        the event loop; no checkpoint, raises nothing."""
        try:
            if self._threads_know(opcode, node, body) and hooks.answer_again():
                return None
            known = self.answer_known(opcode, node, body)
        except OSError as exc:
            code = exc.errno or errno.EIO
        except Exception:
            log.exception("a request (opcode %d) failed", opcode)
            code = errno.EIO
        else:
            if known is not None:
                return known
            if opcode in self._asking:
                self._begin_to_ask(opcode, node, body)
                return None
            code = errno.ENOSYS
        self._count_error(code)
        return code

    def _begin_to_ask(self, opcode: int, node: int, body: bytes) -> None:
        request = FuseRequest(*hooks.current(), opcode, node, body)
        scope = self._interrupts.begin(request.unique, request.thread)
        if self._interrupts.waiting == MOST_WAITING:
            hooks.pause(True)
        self._nursery.start_soon(self._ask, scope, request)

    def _threads_know(self, opcode: int, node: int, body: bytes) -> bool:
        """Whether threads of the C part may answer it, which know more now."""
        if opcode == protocol.OPEN:
            if packing.OPEN_IN.unpack_from(body)[0] & os.O_ACCMODE != os.O_RDONLY:
                return False
            return self._relay.opens(node) or self._relay.misses_open(node)
        # A read of what was not opened.
        no_handle = opcode == protocol.READ and not packing.READ_IN.unpack_from(body)[0]
        return no_handle and self._relay.misses_open(node)

    def answer_known(self, opcode: int, node: int, body: bytes) -> Data | int | None:
        """As ``answer``; None where somebody has to be asked. Requests about names may come from
        another thread, while the event loop stands still. Raises OSError."""
        started = now_ns()
        match opcode:
            case protocol.LOOKUP:
                name = body[:-1]
                found = self._known.lookup(node, name)
                if found is None:
                    return None
                self._durations.lookup_local.observe(now_ns() - started)
                if not isinstance(found, Missing):
                    self._relay.known(node, name, found)
                    if not found.node.stat.is_directory:
                        self._tree.siblings.looked_up(node)
                return packing.entry(found)
            case protocol.GETATTR:
                known = self._files.known_attributes(node)
                if known is None:
                    return None
                self._durations.getattr_local.observe(now_ns() - started)
                return packing.attributes(known)
            case protocol.OPEN:
                if packing.OPEN_IN.unpack_from(body)[0] & os.O_ACCMODE != os.O_RDONLY:
                    return errno.EROFS
                if not self._passthrough.decided(node):
                    return None
                handle = self._files.known_open(node)
                if handle is None:
                    return None
                opened, _backing_id = self._register_open(handle, hooks.current()[1], body)
                self._durations.open_local.observe(now_ns() - started)
                return opened
            case protocol.READ:
                fh, offset, size = packing.READ_IN.unpack_from(body)
                with self._reading(fh, node) as handle:
                    data = handle.known_read(offset, size)
                    if data is not None:
                        self._count_read(handle, data)
                        self._durations.read_local.observe(now_ns() - started)
                return data
            case protocol.RELEASE:
                self._release(packing.HANDLE.unpack_from(body)[0])
                return b""
            case protocol.OPENDIR:
                # An error of the source belongs here, and what may be kept changes: so this is not
                # answered ENOSYS, which would be for all directories and for ever.
                keep = self._directories.known_open(node)
                if keep is None:
                    return None
                self._durations.opendir.observe(now_ns() - started)
                flags = packing.FOPEN_CACHE_DIR | (packing.FOPEN_KEEP_CACHE if keep else 0)
                return packing.OPEN_OUT.pack(node, flags if packing.CACHES_LISTINGS else 0, 0)
            case protocol.READDIRPLUS:
                _fh, offset, size = packing.READ_IN.unpack_from(body)
                listing = self._listing(node, offset, min(size, MOST_LISTED_BYTES))
                self._durations.readdir.observe(now_ns() - started)
                return listing
            case protocol.GETXATTR:
                return self._known_attribute(node, body, started)
            case protocol.ACCESS:
                try:
                    mask = packing.ACCESS_IN.unpack_from(body)[0]
                    allowed = self._xattrs.known_access(node, mask)
                except OSError as exc:
                    return exc.errno or errno.EIO
                if allowed is None:
                    return None
                self._durations.access.observe(now_ns() - started)
                return b"" if allowed else errno.EACCES
            case protocol.READLINK:
                target = self._known.target(node)
                if target is not None:
                    self._durations.readlink.observe(now_ns() - started)
                return target
            case protocol.RELEASEDIR | protocol.FSYNCDIR:
                return b""  # a directory's handle stands for nothing, and nothing is ever dirty
            case protocol.AHEAD:
                self._files.read_ahead(node, *packing.CHUNKS.unpack_from(body))
                return b""
        return None

    def _known_attribute(self, ino: int, body: bytes, started: int) -> bytes | int | None:
        name = body[packing.GETXATTR_IN.size : -1]
        try:
            value = self._xattrs.known(ino, name)
            answer = None if value is None else _sized(body, value)
        except OSError as exc:
            code = exc.errno or errno.EIO
            if code == self._xattrs.absent(name) and self._xattrs.plain(ino):
                hooks.absent_name(name, code)
                hooks.absent_add([ino])
            return code
        if answer is not None:
            self._durations.getxattr.observe(now_ns() - started)
        return answer

    def _listing(self, ino: int, after_cookie: int, size: int) -> bytes:
        """As many entries as ``size`` takes."""
        parts: list[bytes] = []
        while True:
            limit = size // packing.LEAST_DIRENT_BYTES + 1
            batch = self._directories.shown_entries(ino, after_cookie, limit)
            for row in batch:
                entry = packing.direntplus(*row)
                size -= len(entry)
                if size < 0:
                    return b"".join(parts)
                parts.append(entry)
            if len(batch) < limit:
                return b"".join(parts)
            after_cookie = batch[-1][0].cookie

    # -- opens and reads

    def _register_open(self, handle: FileHandle, unique: int, body: bytes) -> tuple[bytes, int]:
        """The answer to an OPEN, and the backing id in it. The number in it owns the handle from
        now on. Raises OSError ENFILE."""
        try:
            number, backing_id = self.handles.add(handle, unique)
        except OSError:
            handle.release()
            raise
        if backing_id:
            flags = packing.FOPEN_PASSTHROUGH
            if packing.OPEN_IN.unpack_from(body)[0] & os.O_DIRECT:  # see core/_opens.c
                flags |= packing.FOPEN_DIRECT_IO
        elif handle.direct or self._relay.direct:
            flags = packing.FOPEN_DIRECT_IO
        else:
            flags = packing.FOPEN_KEEP_CACHE if handle.keep_cache else 0
        return packing.OPEN_OUT.pack(number, flags, backing_id), backing_id

    def _release(self, number: int) -> None:
        if (handle := self.handles.pop(number)) is not None:
            handle.release()

    def _reading(self, fh: int, node: int) -> AbstractContextManager[FileHandle]:
        """What a READ is about. Raises OSError EBADF."""
        if not fh:
            return self.handleless.handle(node)
        handle = self.handles.get(fh)
        if handle is None:
            # Opened by the C part, which cannot read it.
            if (ino := self.handles.table.ino(fh)) is None:
                raise OSError(errno.EBADF, "unknown handle")
            handle = self._files.reopened(ino)
            self.handles.take_over(fh, handle)
        return nullcontext(handle)

    def _count_read(self, handle: FileHandle, data: Data) -> None:
        if handle.served:  # its copy may be complete by now
            self._relay.offer(handle.ino, seen=True)
        self._metrics.relayed_bytes += len(data)

    # -- what has to be asked for

    async def _ask(self, scope: trio.CancelScope, request: FuseRequest) -> None:
        code, by, started = errno.EINTR, AnsweredBy.UNKNOWN, now_ns()
        data: Data = b""
        try:
            with scope:
                ask, duration = self._asking[request.opcode]
                by, data = await ask(request)
                if duration is not None:
                    duration.observe(now_ns() - started)
                code = 0
        except OSError as exc:
            code = exc.errno or errno.EIO
        except Exception:
            log.exception("a request (opcode %d) failed", request.opcode)
            code = errno.EIO
        finally:
            waited = self._interrupts.end(request.unique)
            if waited and self._interrupts.waiting == MOST_WAITING - 1:
                hooks.pause(False)
        self._count_error(code)
        accepted = hooks.reply(request.number, by, code, data)
        if request.opcode == protocol.OPEN and not code:
            number = packing.HANDLE.unpack_from(data)[0]
            if self.handles.table.opened(number, accepted=accepted):
                self._release(number)

    def _count_error(self, code: int) -> None:
        if code and code not in NO_TROUBLE:
            self._metrics.request_errors.count(code)

    async def _lookup(self, request: FuseRequest) -> Answer:
        parent, name = request.node, request.body[:-1]
        found = await self._tree.names.lookup(parent, name)
        if not isinstance(found, Missing):
            self._relay.asked(parent, name, found)
        return AnsweredBy.SOURCE, packing.entry(found)

    async def _getattr(self, request: FuseRequest) -> Answer:
        again = self._refused.again(request.node, request.thread)
        with self._refused.noting(request.node, request.thread, last=False):
            found = await self._files.attributes(request.node, again=again)
        return AnsweredBy.SOURCE, packing.attributes(found)

    async def _readlink(self, request: FuseRequest) -> Answer:
        return AnsweredBy.SOURCE, await self._tree.attributes.target(request.node)

    async def _open(self, request: FuseRequest) -> Answer:
        started = now_ns()
        node, thread = request.node, request.thread
        again = self._refused.again(node, thread)
        with self._refused.noting(node, thread):
            handle = self._files.known_open(node)
            if handle is None:
                handle = await self._files.open(node, again=again)
        try:
            await self._passthrough.decide(handle)
        except BaseException:
            handle.release()
            raise
        opened, backing_id = self._register_open(handle, request.unique, request.body)
        if handle.local and not backing_id:
            self._relay.offer(node)
        duration = self._durations.open_local if handle.local else self._durations.open_source
        duration.observe(now_ns() - started)
        return opened_by(handle, backing_id), opened

    async def _read(self, request: FuseRequest) -> Answer:
        started = now_ns()
        fh, offset, size = packing.READ_IN.unpack_from(request.body)
        with self._reading(fh, request.node) as handle:
            data = await handle.read(offset, size)
            by = AnsweredBy.TIER if handle.local else AnsweredBy.SOURCE
            self._count_read(handle, data)
        duration = self._durations.read_local if handle.local else self._durations.read_source
        duration.observe(now_ns() - started)
        return by, data

    async def _statfs(self, request: FuseRequest) -> Answer:
        return AnsweredBy.SOURCE, packing.statfs(await self._tree.attributes.statfs())

    async def _getxattr(self, request: FuseRequest) -> Answer:
        started = now_ns()
        name = request.body[packing.GETXATTR_IN.size : -1]
        again = self._refused.again(request.node, request.thread)
        with self._refused.noting(request.node, request.thread):
            value = await self._xattrs.get(request.node, name, again=again)
        self._durations.getxattr.observe(now_ns() - started)
        return AnsweredBy.SOURCE, _sized(request.body, value)

    async def _listxattr(self, request: FuseRequest) -> Answer:
        started = now_ns()
        names = await self._xattrs.list(request.node)
        self._durations.listxattr.observe(now_ns() - started)
        return AnsweredBy.SOURCE, _sized(request.body, b"".join(name + b"\0" for name in names))

    async def _opendir(self, request: FuseRequest) -> Answer:
        again = self._refused_listings.again(request.node, request.thread)
        with self._refused_listings.noting(request.node, request.thread):
            await self._directories.open(request.node, again=again)
        # Its number is all that READDIRPLUS has to know, also of another worker.
        return AnsweredBy.SOURCE, packing.OPEN_OUT.pack(request.node, 0, 0)

    async def _access(self, request: FuseRequest) -> Answer:
        started = now_ns()
        mask = packing.ACCESS_IN.unpack_from(request.body)[0]
        allowed = await self._xattrs.access(request.node, mask)
        self._durations.access.observe(now_ns() - started)
        if not allowed:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return AnsweredBy.SOURCE, b""


def _sized(body: bytes, value: bytes) -> bytes:
    """The answer to a GETXATTR or LISTXATTR, which may ask for the size alone. Raises OSError
    ERANGE."""
    (size,) = packing.GETXATTR_IN.unpack_from(body)
    if not size:
        return packing.GETXATTR_OUT.pack(len(value))
    if len(value) > size:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return value
