"""One dataset's directory on one tier: replicas, whole and in part.

Layout, below the directory that the caller opened:

    <xx>/<name>     a complete replica; ``name`` is replica_name(version), ``xx`` its first two
    parts/<name>    one that is being filled

Order of the durable steps of a replica, of which this module does 1, 2 (on request) and 3:

    1. write the data under the staging name, in parts/;
    2. sync the data (``sync``, for a group of replicas at once);
    3. rename to the final name;
    4. commit the index record that makes it resident (the caller).

After a crash of the process nothing that 1 wrote is lost, and a file that 4 did not reach is found
again by its name or removed by ``clean_replicas``. After a reboot only replicas that went through 2
before 4 count: the record says so (Replica.durable); nor may a file then be adopted by its name,
since it can have its size and not its data. Small files go 1, 3, 4 with a record that is not
durable, and become durable with the next group's sync and a second record.

All functions block, if only for a local disk, and raise OSError. Thread-safe, except that one
version must not be written by two threads at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import stat as stat_module
import threading
from collections.abc import Container, Iterator
from hashlib import blake2b

from monarchfs.store.errors import ReplicaLost
from monarchfs.types import SourceVersion, Space

logger = logging.getLogger(__name__)

_PARTS = "parts"
_NAME = re.compile(r"[0-9a-f]{32}\Z")
_FAN_OUT = re.compile(r"[0-9a-f]{2}\Z")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: something planted under a replica's name (a FIFO) must not stop the thread.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# statfs(2): f_type of file systems that keep their data in memory.
_MEMORY_MAGIC = frozenset({0x01021994, 0x858458F6})  # tmpfs, ramfs

# What open(2) says where something else than a replica lies under its name.
_NOT_A_REPLICA = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO})

_HOLE_BYTES = 64 * 1024
_ZEROS = bytes(_HOLE_BYTES)

_libc = ctypes.CDLL(None, use_errno=True)


def replica_name(version: SourceVersion) -> str:
    """The file name of a version's replica: 32 hex digits, the same in every release.

    Decimal text rather than fixed fields: a time in nanoseconds need not fit in 64 bits.
    """
    return blake2b(b"%d %d %d %d %d" % version, digest_size=16).hexdigest()


class Tier:
    """Replicas of one dataset on one tier.

    Constant: ``id``, ``path`` (for messages), ``memory_backed``, the directory's descriptor.
    Changing, under the lock: the table of open sub-directories, of which none is closed before
    ``close``, because a thread may be using it.
    """

    def __init__(self, dir_fd: int, path: str, tier_id: int) -> None:
        """``dir_fd`` stays the caller's and may be closed afterwards."""
        self.id = tier_id
        self.path = path
        self._fd = os.open(".", _DIRECTORY, dir_fd=dir_fd)
        self._lock = threading.Lock()
        self._subdirs: dict[str, int] = {}
        self._retired: list[int] = []
        self._uid = os.geteuid()
        try:
            self.memory_backed = _file_system_magic(self._fd) in _MEMORY_MAGIC
            self._subdir(_PARTS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the directories; nothing of the tier may be in use any more."""
        with self._lock:
            for fd in (*self._subdirs.values(), *self._retired, self._fd):
                os.close(fd)
            self._subdirs.clear()
            self._retired.clear()

    def write_whole(self, version: SourceVersion, data: bytes | bytearray | memoryview) -> int:
        """Store a complete replica; returns its allocated bytes. On failure nothing is left.

        Raises FileExistsError if the version is being filled as a part.
        """
        name = replica_name(version)
        fd = self._create(name)
        try:
            _write_all(fd, 0, memoryview(data))
            allocated = self.allocated(fd)
            self._publish(name)
        except BaseException:
            self._discard(name)
            raise
        finally:
            os.close(fd)
        return allocated

    def create_part(self, version: SourceVersion, size: int) -> int:
        """A new, sparse file of ``size`` bytes to be filled; returns its descriptor (O_RDWR).

        Raises FileExistsError if there is one.
        """
        name = replica_name(version)
        fd = self._create(name)
        try:
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            self._discard(name)
            raise
        return fd

    def open_part(self, version: SourceVersion) -> int:
        """Open a part to go on filling it (O_RDWR). Raises ReplicaLost as ``open_replica``."""
        return self._open(_PARTS, replica_name(version), _WRITE, version.size)

    def open_replica(self, version: SourceVersion, size: int) -> int:
        """Open a complete replica for reading.

        Raises ReplicaLost unless it is a regular file of ours, of exactly ``size`` bytes.
        """
        name = replica_name(version)
        return self._open(name[:2], name, _READ, size)

    def write(self, fd: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` to a part, where nothing else was ever written.

        Runs of zeros of 64 KiB are left as the holes they are, so that a copy of a sparse file
        takes no more room than the file.
        """
        view = memoryview(data)
        start = 0
        for at in range(0, len(view), _HOLE_BYTES):
            chunk = view[at : at + _HOLE_BYTES]
            # The first and last byte tell nearly always, and then cost nothing.
            if chunk[0] == 0 and chunk[-1] == 0 and bytes(chunk) == _ZEROS[: len(chunk)]:
                _write_all(fd, offset + start, view[start:at])
                start = at + len(chunk)
        _write_all(fd, offset + start, view[start:])

    def finish_part(self, fd: int, version: SourceVersion) -> int:
        """Give a part that has all its bytes its final name; returns its allocated bytes."""
        self._publish(replica_name(version))
        return self.allocated(fd)

    def allocated(self, fd: int) -> int:
        """Bytes of the blocks a file occupies, including those not on the disk yet."""
        return os.fstat(fd).st_blocks * 512

    def remove(self, version: SourceVersion) -> None:
        """Remove a complete replica; it is no error if there is none."""
        name = replica_name(version)
        self._unlink(name[:2], name)

    def remove_part(self, version: SourceVersion) -> None:
        """Remove a part; it is no error if there is none."""
        self._unlink(_PARTS, replica_name(version))

    def clean_parts(self, keep: Container[str]) -> list[str]:
        """Remove parts whose names are not in ``keep``; returns those names.

        Only regular files that are named like a replica; whatever else lies there is not ours.
        """
        return self._clean(_PARTS, keep)

    def clean_replicas(self, keep: Container[str]) -> list[str]:
        """As ``clean_parts``, for complete replicas: those that no index record knows."""
        removed = []
        for xx in self._fan_outs():
            removed += self._clean(xx, keep)
        return removed

    def space(self) -> Space:
        """The room on the tier's file system. ``total_inodes`` is 0 where they are not counted."""
        st = os.fstatvfs(self._fd)
        return Space(st.f_blocks * st.f_frsize, st.f_bavail * st.f_frsize, st.f_files, st.f_favail)

    def sync(self) -> None:
        """Bring all data of the tier's file system to the disk (syncfs(2))."""
        if _libc.syncfs(self._fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), self.path)

    def _subdir(self, name: str, *, create: bool = True, instead_of: int | None = None) -> int:
        """The descriptor of a sub-directory, never one reached through a symbolic link.

        ``instead_of`` is one that turned out to be deleted: something cleaned the tier's directory
        behind our back. Raises FileNotFoundError if it is not there and not to be created.
        """
        with self._lock:
            known = self._subdirs.get(name)
            if known is not None and known != instead_of:
                return known
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self._fd)
            fd = os.open(name, _DIRECTORY, dir_fd=self._fd)
            if known is not None:
                self._retired.append(known)
            self._subdirs[name] = fd
            return fd

    def _create(self, name: str) -> int:
        parts = self._subdir(_PARTS)
        try:
            return os.open(name, _CREATE, 0o600, dir_fd=parts)
        except FileNotFoundError:
            parts = self._subdir(_PARTS, instead_of=parts)
            return os.open(name, _CREATE, 0o600, dir_fd=parts)

    def _publish(self, name: str) -> None:
        parts = self._subdir(_PARTS)
        fan_out = self._subdir(name[:2])
        try:
            os.rename(name, name, src_dir_fd=parts, dst_dir_fd=fan_out)
        except FileNotFoundError:
            fan_out = self._subdir(name[:2], instead_of=fan_out)
            os.rename(name, name, src_dir_fd=parts, dst_dir_fd=fan_out)

    def _open(self, subdir: str, name: str, flags: int, size: int) -> int:
        try:
            fd = os.open(name, flags, dir_fd=self._subdir(subdir, create=False))
        except OSError as error:
            if error.errno in _NOT_A_REPLICA:
                raise ReplicaLost(name, f"Not a replica ({error.strerror})") from error
            raise
        try:
            st = os.fstat(fd)
            if not stat_module.S_ISREG(st.st_mode):
                raise ReplicaLost(name, "Not a regular file")
            if st.st_uid != self._uid:
                raise ReplicaLost(name, f"Belongs to user {st.st_uid}")
            if st.st_size != size:
                raise ReplicaLost(name, f"Has {st.st_size} bytes instead of {size}")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _unlink(self, subdir: str, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._subdir(subdir, create=False))

    def _discard(self, name: str) -> None:
        """Remove a staging file after a failure, which is what the caller is to hear of."""
        try:
            self._unlink(_PARTS, name)
        except OSError as error:
            logger.warning("%s: could not remove %s/%s: %s", self.path, _PARTS, name, error)

    def _clean(self, subdir: str, keep: Container[str]) -> list[str]:
        removed = []
        for entry in self._entries(subdir):
            if (
                _NAME.match(entry.name)
                and entry.name not in keep
                and entry.is_file(follow_symlinks=False)
            ):
                self._unlink(subdir, entry.name)
                removed.append(entry.name)
        return removed

    def _fan_outs(self) -> list[str]:
        return sorted(
            entry.name
            for entry in self._entries(".")
            if _FAN_OUT.match(entry.name) and entry.is_dir(follow_symlinks=False)
        )

    def _entries(self, subdir: str) -> Iterator[os.DirEntry[str]]:
        """Through a descriptor of its own: two listings must not share a position."""
        try:
            fd = os.open(subdir, _DIRECTORY, dir_fd=self._fd)
        except FileNotFoundError:
            return
        try:
            with os.scandir(fd) as entries:
                yield from entries
        finally:
            os.close(fd)


def _write_all(fd: int, offset: int, view: memoryview) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset += count


def _file_system_magic(fd: int) -> int:
    """f_type, the first word of struct statfs (which is 120 bytes on 64-bit machines)."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
