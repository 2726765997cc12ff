"""The descriptors of the source's directories, closed when a test says so."""

from __future__ import annotations

from monarchfs.source import PosixSource


def close_directories(posix: PosixSource, path: bytes = b"") -> None:
    """Those of ``path`` and of everything below it; those in use as soon as they are not."""
    handles, below = posix._dirs, path + b"/"
    with handles._lock:
        cached = list(handles._handles)
    for ref in cached:
        if not path or ref.path == path or ref.path.startswith(below):
            handle = handles.known(ref)
            if handle is not None:
                handles.release(handle, drop=True)


def keep_no_directories(posix: PosixSource) -> None:
    """The same of all, at the end: a thread that hung may open another one later."""
    posix._dirs._limit = 0
    close_directories(posix)
