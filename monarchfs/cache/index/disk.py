"""The disk under the index: blocks allocated ahead, and the copy in memory when the disk fails."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import lmdb

T = TypeVar("T")

DATA_FILE = "data.mdb"
"""The name that LMDB gives to the file of an environment."""

HEADROOM_BYTES = 64 << 20
_LEAST_BYTES = 1 << 20

TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""The errors of a full, failing or read-only disk. (LMDB turns a short write into EIO.)"""

_MEMORY = "/dev/shm"
_FALLOC_FL_KEEP_SIZE = 1  # linux/falloc.h

_libc = ctypes.CDLL(None, use_errno=True)


def trouble(error: BaseException | None) -> str | None:
    """The message of an error of a full, failing or read-only disk; None for other errors."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    return os.strerror(code) if code in TROUBLE else None


class Preallocation:
    """Blocks allocated beyond the used part of the data file, so that a commit does not fail when
    others fill the disk. Best effort: not every file system can do this.

    Constant: the descriptor, which stays the caller's. Changing: the end of the allocated blocks,
    and how many bytes were asked for last.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = 0
        self._size = 0

    def keep(self, used_bytes: int) -> None:
        """Allocate more once less than half of it is left. Waits for the disk, but briefly."""
        if self._end - used_bytes > self._size // 2:
            return
        # On a disk with little room, leave most of it to others.
        try:
            st = os.fstatvfs(self._fd)
        except OSError:
            return
        self._size = max(min(HEADROOM_BYTES, st.f_bavail * st.f_frsize // 4), _LEAST_BYTES)
        # Also if this fails: not each commit is to try again.
        self._end = used_bytes + self._size
        _fallocate(self._fd, used_bytes, self._size)

    def release(self) -> None:
        """Give the blocks beyond the file's end back."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size)


def _fallocate(fd: int, offset: int, size: int) -> None:
    """fallocate(2). os.posix_fallocate makes the file longer, and writes zeros where fallocate(2)
    is not supported. A failure is ignored: then a commit may meet the full disk."""
    _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(size))


@contextlib.contextmanager
def memory_copy(fill: Callable[[int], None]) -> Iterator[str]:
    """A directory in memory with a data file that ``fill`` writes (given its descriptor).

    At the end of the block the directory is removed: files that are open live on.
    Raises OSError, and what ``fill`` raises.
    """
    directory = tempfile.mkdtemp(prefix="monarchfs-index-", dir=_MEMORY)
    try:
        fd = os.open(os.path.join(directory, DATA_FILE), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fill(fd)
        finally:
            os.close(fd)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def copy_environment(env: Any, data: int, to: int) -> None:
    """Write the last committed state of ``env``, whose data file is ``data``, to a descriptor.

    No transaction may be open. LMDB's compaction is not used, because it reads the map itself: a
    page that the disk fails to read is SIGBUS then, but EFAULT for write(2) from the map. If the
    environment is unusable (its last meta page could not be written), the file is read instead.
    Raises OSError.
    """
    try:
        env.copyfd(to)
    except lmdb.Error:
        os.ftruncate(to, 0)
        os.lseek(to, 0, os.SEEK_SET)
        copy_data(data, to)


def copy_data(data: int, to: int) -> None:
    """Copy one file to another. Raises OSError."""
    offset = 0
    while count := os.sendfile(to, data, offset, 1 << 30):
        offset += count
