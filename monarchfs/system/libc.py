"""Functions of the C library that Python lacks."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)


def error_of(name: str, *arguments: object) -> int:
    """Calls one that returns 0, or something else and sets errno: 0, or the error."""
    return ctypes.get_errno() if getattr(_LIBC, name)(*arguments) != 0 else 0


def call(name: str, *arguments: object) -> None:
    """The same; raises OSError."""
    if (code := error_of(name, *arguments)) != 0:
        raise OSError(code, os.strerror(code))
