"""Trials with a small file: does a tier store bytes, does its file system give room back?"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from monarchfs.cache.store import _records
from monarchfs.cache.store import files as on_disk
from monarchfs.cache.store.directory import Directory

_TRIAL = re.compile(r"\.probe-[0-9a-f]+")
_STORED_BYTES = 4096
_PUNCHED_BYTES = 32 * 1024
_NO_PUNCHING = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})


@contextmanager
def _trial_file(directory: Directory) -> Iterator[int]:
    """A new file. It is removed at the end, as are those that a crash during a trial left."""
    for entry in directory.entries():
        if _TRIAL.fullmatch(entry.name):
            directory.remove(entry.name)
    file = f".probe-{secrets.token_hex(8)}"
    fd = directory.create(file)
    try:
        yield fd
    except BaseException:
        directory.remove_after_failure(file)
        raise
    else:
        directory.remove(file)
    finally:
        os.close(fd)


def check_stores(directory: Directory, path: str) -> None:
    """Write a small file, sync it and read it back from the disk. Raises OSError if any of that
    fails (EIO also if other bytes come back); ``path`` is for the message."""
    data = secrets.token_bytes(_STORED_BYTES)
    with _trial_file(directory) as fd:
        on_disk.write_all(fd, 0, memoryview(data))
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if os.pread(fd, _STORED_BYTES + 1, 0) != data:
            raise OSError(errno.EIO, "Other bytes than were written", path)


def frees_punched(directory: Directory, path: str, align: int) -> bool:
    """Whether the file system frees blocks that are punched out of a file."""
    half = max(_PUNCHED_BYTES, align)
    with _trial_file(directory) as fd:
        return _frees(fd, path, half, synced=False) or _frees(fd, path, half, synced=True)


def _frees(fd: int, path: str, half: int, *, synced: bool) -> bool:
    """Some file systems count blocks only when they are on the disk."""
    # Nothing that a file system could compress.
    on_disk.write_all(fd, 0, memoryview(secrets.token_bytes(2 * half)))
    if synced:
        os.fdatasync(fd)
    before = os.fstat(fd).st_blocks
    code = _records.punch(fd, [(half, half)])
    if code in _NO_PUNCHING:
        return False
    if code:
        raise OSError(code, os.strerror(code), path)
    if synced:
        os.fdatasync(fd)
    return (before - os.fstat(fd).st_blocks) * 512 >= half
