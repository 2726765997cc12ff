"""Reading an open replica: at once if it is in memory, else in a thread. And reading all of one
again, without pushing useful pages out of the page cache.

Tried on Linux 6.18: preadv2(2) with RWF_NOWAIT works on ext4, in holes too. If a page is not
cached, it fails with EAGAIN and starts reading the page (mm/filemap.c, filemap_get_pages), so the
same call may succeed a moment later. A read beyond the end of the file is EAGAIN as well, so ask
only for what there is. On tmpfs the flag is EOPNOTSUPP, but all is in memory or in swap there.

Nanoseconds a call, Python 3.11, 4 KiB and 128 KiB: pread 340 and 4,200; preadv into a new bytearray
570 and 6,500; the same copied to bytes 700 and 9,900.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable

from monarchfs.cache.store.checksum import digests
from monarchfs.types import ReplicaLost

_NOT_NOW = frozenset({errno.EAGAIN, errno.EOPNOTSUPP})


def read_nowait(
    fd: int, offset: int, size: int, *, memory_backed: bool = False
) -> bytes | bytearray | None:
    """Exactly ``size`` bytes if all of them are in memory, else None. Never waits for a disk.

    ``size`` must not go beyond the end of the file. With ``memory_backed`` (a tmpfs; Tier knows) it
    waits for memory that was swapped out. Raises OSError as pread(2).
    """
    if memory_backed:
        data = os.pread(fd, size, offset)
        return data if len(data) == size else None
    buffer = bytearray(size)
    try:
        count = os.preadv(fd, (buffer,), offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in _NOT_NOW:
            return None
        raise
    return buffer if count == size else None


def read_full(fd: int, offset: int, size: int) -> bytes:
    """Exactly ``size`` bytes. Blocks. Raises ReplicaLost if the file ends early, or OSError."""
    data = os.pread(fd, size, offset)
    if len(data) == size:
        return data
    parts = []
    have = 0
    while data:
        parts.append(data)
        have += len(data)
        if have == size:
            return b"".join(parts)
        data = os.pread(fd, size - have, offset + have)
    raise ReplicaLost(f"descriptor {fd}", f"Replica ends at {offset + have}")


READ_BYTES = 1024 * 1024


def unpaced(_size: int) -> None:
    """No limit on the rate of reading."""


def read_digests(
    fd: int,
    size: int,
    paced: Callable[[int], None],
    *,
    memory_backed: bool,
    name: str,
    base: int = 0,
) -> bytes:
    """The digests (see ``checksum``) of the ``size`` bytes at ``base``, a multiple of a page, of
    the file ``fd``. ``name`` is for the error. Closes ``fd``.

    Reads past the page cache if the file system can. Otherwise reads through it and drops the pages
    afterwards, also those that were cached before: it cannot tell them apart. Blocks. Calls
    ``paced``, which may also block, with the number of bytes before each read. Raises ReplicaLost
    if the file ends early, OSError if it cannot be read, and what ``paced`` raises.
    """
    # O_DIRECT wants memory, offset and length aligned to the device's blocks: whole pages of a map.
    pages = _pages(size)
    view = memoryview(mmap.mmap(-1, min(max(pages, mmap.PAGESIZE), READ_BYTES)))
    found = []
    try:
        _try_direct(fd)
        for start in range(0, size, READ_BYTES):
            wanted = min(READ_BYTES, size - start)
            room = _pages(wanted)
            have = 0
            while have < wanted:
                paced(wanted - have)
                count = _read(fd, view[have:room], base + start + have)
                if count == 0:
                    raise ReplicaLost(name, f"Ends at {start + have} instead of {size}")
                have += count
            found.append(digests(view[:wanted]))
            _drop_pages(fd, base + start, room, memory_backed)
    finally:
        _drop_pages(fd, base, pages, memory_backed)  # also of a read that failed midway
        os.close(fd)
    return b"".join(found)


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _drop_pages(fd: int, offset: int, length: int, memory_backed: bool) -> None:
    if not memory_backed and not _is_direct(fd):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def _read(fd: int, view: memoryview, offset: int) -> int:
    try:
        return os.preadv(fd, (view,), offset)
    except OSError as error:
        # Some file systems refuse only now. After a short read, nothing is aligned any more.
        if error.errno != errno.EINVAL or not _is_direct(fd):
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    _read_nothing_ahead(fd)
    return os.preadv(fd, (view,), offset)


def _try_direct(fd: int) -> None:
    """EINVAL: the file system has no such reads (tmpfs before Linux 6.6, for instance)."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _read_nothing_ahead(fd)


def _read_nothing_ahead(fd: int) -> None:
    """A page that is still on its way from the disk cannot be dropped."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
