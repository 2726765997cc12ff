"""pyfuse3's requests, answered by ``monarchfs.fs``. No decisions here.

Each handler first tries the method that cannot wait; only where the source has to be asked is the
request registered as one that waits, so that its process can be killed meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from time import perf_counter_ns as now_ns
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import FileHandleT, FileNameT, InodeT, RequestContext, XAttrNameT

from monarchfs.fs.files import FileHandle, Files
from monarchfs.fs.xattrs import Xattrs
from monarchfs.fuse import session
from monarchfs.fuse.estale_retries import EstaleRetries
from monarchfs.fuse.handle_table import HandleTable
from monarchfs.fuse.handleless_reads import HandlelessReads
from monarchfs.fuse.handles import Handles, opened_by
from monarchfs.fuse.interrupts import Interrupts
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.fuse.relay import Relay
from monarchfs.insight.recording import AnsweredBy
from monarchfs.metadata.tree import Entry, Missing, Tree
from monarchfs.metrics import Metrics
from monarchfs.types import Data

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

NO_TROUBLE = {errno.ENODATA, errno.ENOSYS, errno.EOPNOTSUPP, errno.ERANGE}
"""Errors that are normal answers; they are not counted."""

_UNKNOWN = (AnsweredBy.UNKNOWN, 0, 0)
_BY = (AnsweredBy.SOURCE, AnsweredBy.MEMORY)  # by whether it was known

Handler = Callable[Concatenate["Adapter", P], Coroutine[Any, Any, T]]


def answers(handler: Handler[P, T]) -> Handler[P, T]:
    """Map what a handler raises to an errno for the kernel, and count that.

    An unknown exception is a bug: it is logged with its traceback and becomes EIO, because pyfuse3
    would end the session and with it the mount.
    """

    @wraps(handler)
    async def answer(self: Adapter, /, *args: P.args, **kwargs: P.kwargs) -> T:
        unique = session.current_request()[0]
        try:
            result = await handler(self, *args, **kwargs)
            self._answers(unique)
            return result
        except OSError as exc:
            failure = pyfuse3.FUSEError(exc.errno or errno.EIO)
            self.count_error(failure, unique)
            raise failure from exc
        except pyfuse3.FUSEError as exc:
            self.count_error(exc, unique)
            raise
        except Exception as exc:
            log.exception("%s failed", handler.__name__)
            failure = pyfuse3.FUSEError(errno.EIO)
            self.count_error(failure, unique)
            raise failure from exc

    return answer


def timed(handler: Handler[P, T]) -> Handler[P, T]:
    """Record the duration of a handler, in the histogram of its name."""
    name = handler.__name__

    @wraps(handler)
    async def answer(self: Adapter, /, *args: P.args, **kwargs: P.kwargs) -> T:
        started = now_ns()
        result = await handler(self, *args, **kwargs)
        getattr(self.durations, name).observe(now_ns() - started)
        return result

    return answer


class Adapter(pyfuse3.Operations):
    """The handlers of one session. pyfuse3 calls one for each kind of request, hence more than
    twenty methods."""

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
        *,
        journals: bool,
    ) -> None:
        """``journals``: there is a journal of requests, which has to hear of each that ends."""
        super().__init__()
        self._tree = tree
        self._files = files
        self._xattrs = xattrs
        self._interrupts = interrupts
        self._metrics = metrics
        self.durations = metrics.requests
        self._relay = relay
        self._passthrough = passthrough
        self._journals = journals
        self.handles = Handles(table, passthrough)
        self.handleless = HandlelessReads(self._files)
        self._refused = EstaleRetries(self._tree.known)
        self._outcome = _UNKNOWN

    def _answers(self, unique: int) -> None:
        """The request is answered in the very next step, by pyfuse3."""
        self.handles.table.count_answer()
        session.hooks.record_answered(unique, *self._outcome)
        self._outcome = _UNKNOWN
        if self._journals:
            session.answered_soon(unique)

    def count_error(self, failure: pyfuse3.FUSEError, unique: int) -> None:
        """For ``answers``."""
        self._answers(unique)
        if failure.errno not in NO_TROUBLE:
            self._metrics.request_errors.count(failure.errno)

    def init(self) -> None:
        """Called by libfuse for FUSE_INIT; the supervisor answers that."""

    def _waiting(self, answer: Awaitable[T]) -> Coroutine[Any, Any, T]:
        """``Interrupts.wait_for`` the request that is being answered.

        To be called before the handler's first checkpoint: until then, the request that was
        received last is the one that the handler answers.
        """
        return self._interrupts.wait_for(*session.current_request(), answer)

    # -- names and attributes

    @answers
    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext
    ) -> pyfuse3.EntryAttributes:
        started, duration = now_ns(), self.durations.lookup_local
        found = self._tree.known.lookup(parent_inode, name)
        if found is None:
            duration = self.durations.lookup_source
            found = await self._waiting(self._tree.names.lookup(parent_inode, name))
        duration.observe(now_ns() - started)
        ino = 0 if isinstance(found, Missing) else found.node.ino
        self._outcome = (_BY[duration is self.durations.lookup_local], ino, 0)
        if isinstance(found, Missing):
            return _negative(found.timeout)
        self._relay.found(found.node)
        return _attributes(found)

    @answers
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> pyfuse3.EntryAttributes:
        started, duration = now_ns(), self.durations.getattr_local
        found = self._files.known_attributes(inode)
        if found is None:
            duration = self.durations.getattr_source
            again = self._refused.again(inode, thread := session.current_request()[1])
            with self._refused.noting(inode, thread):
                found = await self._waiting(self._files.attributes(inode, again=again))
        duration.observe(now_ns() - started)
        return _attributes(found)

    @answers
    @timed
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        target = self._tree.known.target(inode)
        if target is None:
            target = await self._waiting(self._tree.attributes.target(inode))
        return target

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Nothing depends on what the kernel remembers: numbers live as long as the index."""

    # -- directories

    @answers
    @timed
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> int:
        await self._waiting(self._tree.directories.open(inode))
        return inode  # all that READDIR has to know, also of another worker

    @answers
    async def releasedir(self, fh: FileHandleT) -> None:
        """There is nothing to give back."""

    @answers
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """Nothing is ever dirty."""

    # -- files

    @answers
    async def open(self, inode: InodeT, flags: int, ctx: RequestContext) -> pyfuse3.FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        started, duration = now_ns(), self.durations.open_local
        unique, thread = session.current_request()
        opened = self._known_open(inode, unique)
        if opened is None:
            again = self._refused.again(inode, thread)
            with self._refused.noting(inode, thread):
                opened = await self._waiting(self._open(inode, unique, again))
        number, handle, backing_id = opened
        if not handle.local:
            duration = self.durations.open_source
        duration.observe(now_ns() - started)
        self._outcome = (opened_by(handle, backing_id), 0, 0)
        if backing_id:
            session.back_open(number, backing_id)
        direct = (handle.direct or self._relay.direct) and not backing_id
        keep_cache = handle.keep_cache and not (direct or backing_id)
        return pyfuse3.FileInfo(fh=FileHandleT(number), keep_cache=keep_cache, direct_io=direct)

    def _known_open(self, ino: int, unique: int) -> tuple[int, FileHandle, int] | None:
        """``_open`` where neither the source nor the supervisor has to be asked."""
        handle = self._files.known_open(ino) if self._passthrough.decided(ino) else None
        return None if handle is None else self._opened(handle, unique)

    async def _open(self, ino: int, unique: int, again: bool) -> tuple[int, FileHandle, int]:
        """Number, handle and backing id."""
        handle = self._files.known_open(ino) or await self._files.open(ino, again=again)
        try:
            await self._passthrough.decide(handle)
        except BaseException:
            handle.release()
            raise
        return self._opened(handle, unique)

    def _opened(self, handle: FileHandle, unique: int) -> tuple[int, FileHandle, int]:
        """The same. The number owns the handle from now on. Raises OSError ENFILE."""
        try:
            number, backing_id = self.handles.add(handle, unique)
        except OSError:
            handle.release()
            raise
        if handle.local and not backing_id:
            self._relay.offer(handle.ino)
        return number, handle, backing_id

    def take_over(self) -> int:
        """Take over what an earlier worker has opened; returns how many that are. Before the first
        request."""
        for slot in self.handles.table:
            if slot.backing_id:
                self._passthrough.take_over(slot.ino, slot.backing_id)
            if not self._relay.offer(slot.ino):
                self.handles.take_over(slot.number, self._files.reopened(slot.ino))
        return len(self.handles.table)

    @answers
    async def read(self, fh: FileHandleT, off: int, size: int) -> Data:  # type: ignore[override]
        started, duration = now_ns(), self.durations.read_local
        with self._reading(fh) as handle:
            data = handle.known_read(off, size)
            if data is None:
                data = await self._waiting(handle.read(off, size))
                if not handle.local:
                    duration = self.durations.read_source
            if handle.served:  # its copy may be complete by now
                self._relay.offer(handle.ino, seen=True)
        self._metrics.relayed_bytes += len(data)
        by = AnsweredBy.TIER if duration is self.durations.read_local else AnsweredBy.SOURCE
        self._outcome = (by, 0, len(data))
        duration.observe(now_ns() - started)
        return data

    def _reading(self, fh: int) -> AbstractContextManager[FileHandle]:
        """What a READ is about. Raises OSError EBADF. Before the handler's first checkpoint."""
        if not fh:
            return self.handleless.handle(session.current_node())
        handle = self.handles.get(fh)
        if handle is None:
            # Opened by the C part, which cannot read it.
            if (ino := self.handles.table.ino(fh)) is None:
                raise OSError(errno.EBADF, "unknown handle")
            handle = self._files.reopened(ino)
            self.handles.take_over(fh, handle)
        return nullcontext(handle)

    @answers
    async def flush(self, fh: FileHandleT) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # the kernel does not ask again

    @answers
    async def release(self, fh: FileHandleT) -> None:
        self._outcome = (AnsweredBy.MEMORY, 0, 0)
        handle = self.handles.pop(fh)
        if handle is not None:
            handle.release()

    # -- the rest

    @answers
    @timed
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        result = await self._waiting(self._tree.attributes.statfs())
        data = pyfuse3.StatvfsData()
        data.f_bsize = result.f_bsize
        data.f_frsize = result.f_frsize
        data.f_blocks = result.f_blocks
        data.f_bfree = result.f_bfree
        data.f_bavail = result.f_bavail
        data.f_files = result.f_files
        data.f_ffree = result.f_ffree
        data.f_favail = result.f_favail
        data.f_namemax = result.f_namemax
        return data

    @answers
    @timed
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        value = self._xattrs.known(inode, name)
        if value is None:
            value = await self._waiting(self._xattrs.get(inode, name))
        return value

    @answers
    @timed
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> list[bytes]:
        return await self._waiting(self._xattrs.list(inode))

    @answers
    @timed
    async def access(self, inode: InodeT, mode: int, ctx: RequestContext) -> bool:
        allowed = self._xattrs.known_access(inode, mode)
        if allowed is None:
            allowed = await self._waiting(self._xattrs.access(inode, mode))
        return allowed


def _negative(timeout: float) -> pyfuse3.EntryAttributes:
    """Node id 0 lets the kernel remember that there is no such name."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = InodeT(0)
    entry.entry_timeout = timeout
    return entry


def _attributes(found: Entry) -> pyfuse3.EntryAttributes:
    node, entry_timeout, attr_timeout = found
    stat = node.stat
    assert stat is not None
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = InodeT(node.ino)
    entry.entry_timeout = entry_timeout
    entry.attr_timeout = attr_timeout
    entry.st_mode = pyfuse3.ModeT(stat.mode)
    entry.st_nlink = stat.nlink
    entry.st_uid = stat.uid
    entry.st_gid = stat.gid
    entry.st_rdev = stat.rdev
    entry.st_size = stat.size
    entry.st_blocks = stat.blocks
    entry.st_blksize = stat.blksize
    entry.st_atime_ns = stat.atime_ns
    entry.st_mtime_ns = stat.mtime_ns
    entry.st_ctime_ns = stat.ctime_ns
    return entry
