"""Which file system a descriptor lies on."""

from __future__ import annotations

import ctypes
import os

FUSE = 0x65735546
LUSTRE = 0x0BD00BD0
IN_MEMORY = frozenset({0x01021994, 0x858458F6})
"""tmpfs, ramfs."""

_libc = ctypes.CDLL(None, use_errno=True)


def file_system_type(fd: int) -> int:
    """By f_type of statfs(2), the first word of the struct (120 bytes on 64-bit machines). Raises
    OSError."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
