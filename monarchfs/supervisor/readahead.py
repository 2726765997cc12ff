"""How far the kernel reads ahead on the mount."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

READAHEAD_KIB = 512
"""A reader then waits for the worker a quarter as often as with the 128 KiB that FUSE begins with,
while a page fault in a map still brings no more than this."""


def read_ahead(connection: int) -> None:
    """Have the kernel read ahead further on the mount of this connection. Only root may, and only
    after FUSE_INIT is answered, which resets it (fs/fuse/inode.c, process_init_reply). Elsewhere
    reads go on with the kernel's own value."""
    try:
        with open(f"/sys/class/bdi/0:{connection}/read_ahead_kb", "w", encoding="ascii") as file:
            file.write(str(READAHEAD_KIB))
    except OSError as error:
        log.debug("readahead stays as it is: %s", error)
