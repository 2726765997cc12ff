"""The journal of requests that are not answered yet, in memory that outlives the worker.

From Linux 6.9 on the kernel hands out again what a dead worker took; before that, whoever waits for
an answer would do so for ever. So there the C part (_journal.c) has each request written into this
memory, and takes it out when it was answered. The supervisor makes it and looks at nothing in it.

====== =========== =====================================================================
offset size        what
====== =========== =====================================================================
0      u64         MAGIC
8      u32, u32    how many buffers there are, and how many entries
16     u32         1: the locks are there
..3583 64          locks of the buffers: robust mutexes (pthread_mutexattr_setrobust(3))
3584   64 x u64    ``unique`` of the request that is in the buffer, all of it; else 0
4096   12 KiB each buffers that threads have requests written to, each the lock's holder's
then   512 each    entries: u64, the length of the request (0: none), and the request
====== =========== =====================================================================
"""

from __future__ import annotations

import os
import struct

from monarchfs.fuse.handle_table import make_memory

MAGIC = int.from_bytes(b"mnrchrq2", "little")
HEADER_BYTES = 4096
BUFFER_BYTES = 12 << 10
BUFFERS = 64
ENTRY_BYTES = 512
ENTRIES = 1 << 14
"""More than requests wait before a mount takes no new ones."""

_HEAD = struct.Struct("=QII")


def make_journal() -> int:
    """``make_memory`` with a new, empty journal."""
    size = HEADER_BYTES + BUFFERS * BUFFER_BYTES + ENTRIES * ENTRY_BYTES
    fd = make_memory("monarchfs-requests", size)
    os.pwrite(fd, _HEAD.pack(MAGIC, BUFFERS, ENTRIES), 0)
    return fd
