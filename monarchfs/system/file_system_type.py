"""Which file system a descriptor lies on."""

from __future__ import annotations

import ctypes
import os

from monarchfs.system import libc

FUSE = 0x65735546
LUSTRE = 0x0BD00BD0
IN_MEMORY = frozenset({0x01021994, 0x858458F6})
"""tmpfs, ramfs."""

_LOCAL_WITHOUT_DEVICE = IN_MEMORY | {0x794C7630, 0x9123683E, 0x2FC12FC1, 0xCA451A4E}
"""Besides overlayfs, btrfs, ZFS, bcachefs."""


def file_system_type(fd: int) -> int:
    """By f_type of statfs(2), the first word of the struct (120 bytes on 64-bit machines). Raises
    OSError."""
    buffer = ctypes.create_string_buffer(256)
    libc.call("fstatfs", fd, buffer)
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def is_network(fd: int) -> bool:
    """Whether it lies on other machines, as far as one can tell: it has no block device, and its
    type is none that has none here. Raises OSError."""
    local = os.major(os.fstat(fd).st_dev) != 0
    return not local and file_system_type(fd) not in _LOCAL_WITHOUT_DEVICE
