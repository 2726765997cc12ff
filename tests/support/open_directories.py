"""The descriptors of the source's directories, closed when a test says so."""

from __future__ import annotations

from monarchfs.source import PosixSource
from monarchfs.types import DirRef


def close_directories(posix: PosixSource, path: bytes = b"") -> None:
    """Those of ``path`` and of everything below it; those in use as soon as they are not."""
    handles, below = posix._dirs, path + b"/"
    with handles._lock:
        cached = list(handles._handles)
    for known, ino in cached:
        if not path or known == path or known.startswith(below):
            handle = handles.known(DirRef(known, ino))
            if handle is not None:
                handles.release(handle, drop=True)
