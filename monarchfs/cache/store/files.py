"""The single files of a tier: their names, what they must be, and how they are written.

Functions that take a directory's descriptor never leave that directory: names have no slash, and
the last component is never followed if it is a symbolic link.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat as stat_module

from monarchfs.system.file_system_type import IN_MEMORY, file_system_type
from monarchfs.types import Data, ReplicaLost

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: something planted under a replica's name (a FIFO) must not stop the thread.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

NOT_SYNCED_MODE = 0o600
SYNCED_MODE = 0o400

# The errors of open(2) with O_DIRECTORY and O_NOFOLLOW for something that is no directory.
NOT_A_DIRECTORY = frozenset({errno.ENOTDIR, errno.ELOOP})
# The errors of open(2) if something other than a replica has its name.
_NOT_A_REPLICA = NOT_A_DIRECTORY | {errno.ENOENT, errno.EISDIR, errno.ENXIO}

PARTS = "parts"
_PART = re.compile(r"[0-9a-f]{32}")
_REPLICA = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{16})")

FAN_OUTS = 256
"""How many values `fan_out` has."""

_HOLE_BYTES = 64 * 1024
_ZEROS = bytes(_HOLE_BYTES)

_libc = ctypes.CDLL(None, use_errno=True)


def fan_out(name: bytes) -> str:
    """The directory of complete replicas of this name."""
    return f"{name[0]:02x}"


def part_file(name: bytes) -> str:
    return name.hex()


def part_path(name: bytes) -> str:
    """Where a part lies, relative to the dataset's directory in its tier."""
    return f"{PARTS}/{part_file(name)}"


def replica_file(name: bytes, checksum: int) -> str:
    return f"{name.hex()}.{checksum:016x}"


def replica_path(name: bytes, checksum: int) -> str:
    """Where a complete replica lies, relative to the dataset's directory in its tier."""
    return f"{fan_out(name)}/{replica_file(name, checksum)}"


def parse_part(file: str) -> tuple[bytes, int] | None:
    """The replica's name and 0, or None if no part is called that."""
    return (bytes.fromhex(file), 0) if _PART.fullmatch(file) else None


def parse_replica(file: str) -> tuple[bytes, int] | None:
    """The replica's name and checksum, or None if no complete replica is called that."""
    match = _REPLICA.fullmatch(file)
    return (bytes.fromhex(match[1]), int(match[2], 16)) if match else None


def is_ours(st: os.stat_result, uid: int) -> bool:
    """Whether it may be read, changed and removed: a regular file of ``uid``."""
    return stat_module.S_ISREG(st.st_mode) and st.st_uid == uid


def open_ours(dir_fd: int, file: str, flags: int, uid: int, size: int | None = None) -> int:
    """Open a regular file that belongs to ``uid`` and has ``size`` bytes (if given).

    Raises ReplicaLost if there is no such file, another OSError if that cannot be known.
    """
    try:
        fd = os.open(file, flags, dir_fd=dir_fd)
    except OSError as error:
        raise lost_or_same(file, error) from error
    try:
        st = os.fstat(fd)
        if not stat_module.S_ISREG(st.st_mode):
            raise ReplicaLost(file, "Not a regular file")
        if st.st_uid != uid:
            raise ReplicaLost(file, f"Belongs to user {st.st_uid}")
        if size is not None and st.st_size != size:
            raise ReplicaLost(file, f"Has {st.st_size} bytes instead of {size}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def lost_or_same(file: str, error: OSError) -> OSError:
    """``error`` of opening ``file`` or its directory, as a ReplicaLost if it means that."""
    if error.errno in _NOT_A_REPLICA:
        return ReplicaLost(file, f"Not a replica ({error.strerror})")
    return error


def write_all(fd: int, offset: int, view: memoryview) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset += count


def write_sparse(fd: int, offset: int, data: Data) -> None:
    """Write to a range that was never written; runs of 64 KiB of zeros stay holes."""
    view = memoryview(data).cast("B")
    start = 0
    for at in range(0, len(view), _HOLE_BYTES):
        chunk = view[at : at + _HOLE_BYTES]
        if _is_hole(chunk):
            write_all(fd, offset + start, view[start:at])
            start = at + len(chunk)
    write_all(fd, offset + start, view[start:])


def _is_hole(chunk: memoryview) -> bool:
    # Looking at the first and last byte is nearly always enough.
    return chunk[0] == 0 and chunk[-1] == 0 and bytes(chunk) == _ZEROS[: len(chunk)]


def is_in_memory(fd: int) -> bool:
    """Whether the file system keeps its data in memory. One that does not answer has failed, as
    those in memory never do."""
    try:
        return file_system_type(fd) in IN_MEMORY
    except OSError:
        return False


def same_directory(one: int, other: int) -> bool:
    """Whether two descriptors are of one directory. Raises OSError of the first one: what cannot be
    asked about the other, if its disk is gone for good, makes it another one."""
    st = os.fstat(one)
    try:
        return os.path.samestat(st, os.fstat(other))
    except OSError:
        return False


def sync_file_system(fd: int, path: str) -> None:
    """syncfs(2); ``path`` is for the error."""
    if _libc.syncfs(fd) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
