"""Reading an open replica: at once if it is in memory, else in a thread.

Tried on Linux 6.18: preadv2(2) with RWF_NOWAIT works on ext4, in holes too. If a page is not
cached, it fails with EAGAIN and starts reading the page (mm/filemap.c, filemap_get_pages), so the
same call may succeed a moment later. A read beyond the end of the file is EAGAIN as well, so ask
only for what there is. On tmpfs the flag is EOPNOTSUPP, but all is in memory or in swap there.

Nanoseconds a call, Python 3.11, 4 KiB and 128 KiB: pread 340 and 4,200; preadv into a new bytearray
570 and 6,500; the same copied to bytes 700 and 9,900.
"""

from __future__ import annotations

import errno
import os

from monarchfs.cache.store.errors import ReplicaLost

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
