"""Opening what a name means below a directory, without leaving it (openat2(2))."""

from __future__ import annotations

import ctypes
import os
import struct

_OPENAT2 = 437
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 1, 2, 4, 8
_RESOLVE = _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH
_HOW = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE)
"""open_how: flags, mode, resolve."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
)


def find_beneath(directory: int, path: str) -> int:
    """An O_PATH descriptor of what lies there. Nothing is opened, and no symbolic link or other
    file system is entered on the way, so only the directory's file system is asked, also on close.
    Raises OSError; ENOSYS before Linux 5.6, EPERM where a container's filter forbids it."""
    found: int = _libc.syscall(_OPENAT2, directory, os.fsencode(path), _HOW, len(_HOW))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found
