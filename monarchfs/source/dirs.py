"""Descriptors of the source's directories, found component by component and kept for a while.

No path of the source is ever given to the kernel whole: each directory is opened relative to the
one above it with O_NOFOLLOW, so that no symbolic link is followed, nothing above the root is
reached, and a path may be longer than PATH_MAX (path_resolution(7)). The descriptors are O_PATH:
opening one needs no permission to read the directory, and closing one sends nothing to a server.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from monarchfs.types import DirectoryChanged, DirRef

_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# What openat(2) says of a component that is not there any more, or is no directory any more: a
# symbolic link gives ENOTDIR (O_DIRECTORY is looked at first) or, on older kernels, ELOOP.
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})


def check_name(name: bytes) -> None:
    """Raise OSError EINVAL unless ``name`` can be one entry of a directory.

    Names usually come from the kernel and are good; those of a hint file or of the control socket
    may be anything.
    """
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise OSError(errno.EINVAL, "Not a name of a directory entry", name)


@dataclass(eq=False, slots=True)
class DirHandle:
    """An open directory; ``with handle as fd`` uses it and releases it.

    ``fd``, ``ref``, ``owner`` and ``linked`` (it had a link count when it was opened: some file
    systems give none) are constant. ``users`` and ``dropped`` change, under the owner's lock: a
    dropped handle is in no table any more and is closed when its last user leaves.
    """

    owner: DirHandles
    ref: DirRef
    fd: int
    linked: bool = False
    users: int = 1
    dropped: bool = False

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        gone = isinstance(error, OSError) and self.is_gone(error.errno)
        self.owner.release(self, drop=gone)
        if gone and self.ref.path:
            # Not the error: with that the kernel would walk the same way again.
            raise _changed(self.ref) from cast(OSError, error)

    def is_gone(self, code: int | None) -> bool:
        """Whether the directory is not there any more, after an error in it. A server that lost it
        says ESTALE to this descriptor for ever; other file systems find no name in it. Blocks."""
        if code == errno.ENOENT and self.linked:
            with suppress(OSError):
                return os.fstat(self.fd).st_nlink == 0
        return code == errno.ESTALE


class DirHandles:
    """The least recently used cache of directory descriptors. Thread-safe.

    Constant: the root's handle (the caller owns its descriptor), its st_dev and the limit.
    Changing, under the lock: the table of handles, and the newest handle of each path. Two
    directories that take turns at one path both stay open. No system call but close(2) of O_PATH
    descriptors happens under the lock, so that a hung source never holds it. At most ``limit``
    handles are kept; more descriptors than that are open only while they are in use.
    """

    def __init__(self, root_fd: int, root_ino: int, device: int, limit: int = 512) -> None:
        self._limit = limit
        self._device = device
        self._lock = threading.Lock()
        self._handles: OrderedDict[DirRef, DirHandle] = OrderedDict()
        self._newest: dict[bytes, DirHandle] = {}
        self._root = DirHandle(self, DirRef(b"", root_ino), root_fd)

    def acquire(self, ref: DirRef) -> DirHandle:
        """The directory that ``ref`` means, to be used as ``with``. Blocks.

        A cached descriptor goes on meaning the directory it was opened for, even after that was
        moved or removed in the source. Raises DirectoryChanged if the directory found at the path
        is another one than ``ref`` means, is none any more, or is gone; OSError for everything
        else that openat(2) may say (EACCES, EIO, ...), and EINVAL for a path with ``..`` and the
        like.
        """
        path = ref.path
        with self._lock:
            handle = self._handles.get(ref) if path else self._root
            if handle is not None and handle.ref == ref:
                handle.users += 1
                if path:
                    self._handles.move_to_end(ref)
                return handle
        if not path:
            raise _changed(ref)
        start = self._nearest(path)
        if start is not self._root:
            try:
                return self._walk(ref, start)
            except DirectoryChanged:
                # Perhaps the ancestor where this began is the one that was replaced.
                start = self._root
        return self._walk(ref, start)

    def known(self, ref: DirRef) -> DirHandle | None:
        """``acquire`` where that need not ask the source; else None."""
        with self._lock:
            handle = self._handles.get(ref) if ref.path else self._root
            if handle is None or handle.ref != ref:
                return None
            handle.users += 1
            return handle

    def open(self, parent: DirHandle, name: bytes) -> DirHandle:
        """The directory ``name`` in ``parent``, whichever it is now, to be used as ``with``.

        So a directory that was reported can be used even if another one takes its place at once.
        Blocks. Raises DirectoryChanged where there is no such directory, and OSError.
        """
        check_name(name)
        return self._open(DirRef(_join(parent.ref.path, name), 0), parent, name)

    def release(self, handle: DirHandle, *, drop: bool = False) -> None:
        """End one use; ``drop`` also takes the handle out of the cache."""
        with self._lock:
            if drop and self._handles.get(handle.ref) is handle:
                self._drop(self._take(handle))
            handle.users -= 1
            _close_if_unused(handle)

    def _nearest(self, path: bytes) -> DirHandle:
        """The handle of the nearest known ancestor. (The root's is never counted or dropped.)"""
        with self._lock:
            while True:
                path = path.rpartition(b"/")[0]
                if not path:
                    return self._root
                handle = self._newest.get(path)
                if handle is not None:
                    handle.users += 1
                    return handle

    def _walk(self, ref: DirRef, start: DirHandle) -> DirHandle:
        """Open ``ref`` from ``start`` downwards, keeping each directory on the way.

        ``start`` comes with one use, which this function ends (the root's is not counted).
        """
        parent = start
        skip = len(start.ref.path) + 1 if start.ref.path else 0
        try:
            for name in ref.path[skip:].split(b"/"):
                check_name(name)
                child = self._open(ref, parent, name)
                if parent is not self._root:
                    self.release(parent)
                parent = child
            if parent.ref != ref:
                raise _changed(ref)
        except BaseException:
            if parent is not self._root:
                self.release(parent)
            raise
        return parent

    def _open(self, ref: DirRef, parent: DirHandle, name: bytes) -> DirHandle:
        try:
            fd = os.open(name, _FLAGS, dir_fd=parent.fd)
        except OSError as error:
            if error.errno in _GONE:
                raise _changed(ref) from error
            raise
        try:
            st = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        device = 0 if st.st_dev == self._device else st.st_dev
        ref = DirRef(_join(parent.ref.path, name), st.st_ino, device)
        handle = DirHandle(self, ref, fd, st.st_nlink > 0)
        with self._lock:
            replaced = self._handles.get(handle.ref)
            if replaced is not None:
                self._drop(self._take(replaced))
            self._handles[handle.ref] = self._newest[handle.ref.path] = handle
            if len(self._handles) > self._limit:
                self._drop(self._take(next(iter(self._handles.values()))))
        return handle

    def _take(self, handle: DirHandle) -> DirHandle:
        """Out of the cache. Under the lock."""
        del self._handles[handle.ref]
        if self._newest.get(handle.ref.path) is handle:
            del self._newest[handle.ref.path]
        return handle

    @staticmethod
    def _drop(handle: DirHandle) -> None:
        handle.dropped = True
        _close_if_unused(handle)


def _join(path: bytes, name: bytes) -> bytes:
    return path + b"/" + name if path else name


def _close_if_unused(handle: DirHandle) -> None:
    if handle.dropped and handle.users == 0:
        os.close(handle.fd)


def _changed(ref: DirRef) -> DirectoryChanged:
    return DirectoryChanged(
        f"{os.fsdecode(ref.path)!r} is not the directory with inode {ref.ino} now"
    )
