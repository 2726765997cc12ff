"""One dataset's directory on one tier: replicas, whole and in part.

``replica_files`` has the layout of replicas with a file each, ``segments`` of those that share
files. Anything else there is not ours: unless it is a regular file of the user under such a name,
it is never listed, followed, changed or removed.

Methods block, if only for a local disk, and raise OSError. Thread-safe.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable

from monarchfs.cache.store import files as on_disk
from monarchfs.cache.store import trials
from monarchfs.cache.store.read import unpaced
from monarchfs.cache.store.replica_files import ReplicaFiles
from monarchfs.cache.store.segments import SegmentFiles
from monarchfs.types import Replica, ReplicaLost, Space


class Tier:
    """Replicas of one dataset on one tier.

    Constant: ``id``, ``path`` (for messages), ``directory``. Changing, under the lock, when
    ``reopen`` returns True: ``dir_fd``, ``memory_backed``, ``files``, ``segments``. The former ones
    are kept until ``close``: a thread may be using them.
    """

    def __init__(
        self, dir_fd: int, path: str, tier_id: int, *, directory: str | None = None
    ) -> None:
        """``dir_fd`` (not O_PATH: syncfs(2)) stays the caller's and may be closed afterwards.
        ``directory`` is its path, for ``find_again``. Raises OSError, but
        not for what shows with the first use, and may pass."""
        self.id = tier_id
        self.directory = directory
        self.path = path
        self._lock = threading.Lock()
        self._opened: list[ReplicaFiles | SegmentFiles] = []
        self._fds: list[int] = []
        try:
            self._use(os.dup(dir_fd))  # which a disk that fails does not hear of
            try:
                self.files.parts_directory.make()
            except OSError as error:
                if error.errno in on_disk.NOT_A_DIRECTORY:
                    raise
        except BaseException:
            self.close()
            raise

    def _use(self, fd: int) -> None:
        self._fds.append(fd)
        files = self._new_files(fd)
        self._opened.append(files)
        segments = self._new_segments(fd)
        self._opened.append(segments)
        self.files, self.segments, self.dir_fd = files, segments, fd
        self.memory_backed = files.memory_backed

    def _new_files(self, dir_fd: int) -> ReplicaFiles:
        return ReplicaFiles(dir_fd, self.path, os.geteuid())

    def _new_segments(self, dir_fd: int) -> SegmentFiles:
        return SegmentFiles(dir_fd, self.path, os.geteuid())

    def close(self) -> None:
        """Close the directories; nothing of the tier may be in use any more."""
        with self._lock:
            for opened in self._opened:
                opened.close()
            for fd in self._fds:
                os.close(fd)
            self._opened.clear()
            self._fds.clear()

    def find_again(self) -> bool:
        """Use the directory that has the path of the tier's now; whether it is another one: its
        disk may have come back, or the directory was removed.

        Makes the directory if it is gone. Raises OSError; PermissionError for one that is not ours,
        or that others may write to.
        """
        if self.directory is None:
            return False
        try:
            fd = os.open(self.directory, on_disk.DIRECTORY)
        except FileNotFoundError:
            os.mkdir(self.directory, 0o700)
            fd = os.open(self.directory, on_disk.DIRECTORY)
        try:
            st = os.fstat(fd)
            if st.st_uid != os.geteuid() or stat.S_IMODE(st.st_mode) & 0o022:
                raise PermissionError(errno.EACCES, "Belongs to others now", self.directory)
            return self.reopen(fd)
        finally:
            os.close(fd)

    def reopen(self, dir_fd: int) -> bool:
        """Continue in the directory ``dir_fd`` (it stays the caller's). Returns whether it differs.

        For when the tier's directory was deleted, or its disk came back under the same path. If the
        directory is the same (st_dev, st_ino), nothing changes: a new descriptor of it could do no
        more than the old one.
        """
        with self._lock:
            if on_disk.same_directory(dir_fd, self.dir_fd):
                return False
            self._use(os.dup(dir_fd))
            return True

    def open_complete(self, replica: Replica) -> int:
        """Open the file that a complete replica lies in: its own, or a segment. See
        ``ReplicaFiles.open``. Raises ReplicaLost also if the record is durable and the file is not:
        after a power cut the index may be that of some time before, even of before its last sync,
        because LMDB's pages reach the disk in any order between two syncs."""
        if replica.segment:
            fd = self.segments.open(replica.segment, replica.offset + replica.size)
        else:
            fd = self.files.open(replica.name, replica.checksum, replica.size)
        try:
            if replica.durable and not _is_synced(fd, replica):
                raise ReplicaLost(self.path, "A replica that was synced is not there any more")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def verify_complete(self, replica: Replica, paced: Callable[[int], None] = unpaced) -> bool:
        """``ReplicaFiles.verify`` of a complete replica, wherever it lies."""
        name, checksum, size = replica.name, replica.checksum, replica.size
        if replica.segment:
            segment, offset = replica.segment, replica.offset
            return self.segments.verify(segment, offset, size, checksum, paced)
        return self.files.verify(name, checksum, size, paced)

    @property
    def overhead_bytes(self) -> int:
        """Bytes beside the replicas: the lists of segments, and what their extents take."""
        return self.segments.lists.bytes + self.segments.trees.bytes

    def probe(self) -> None:
        """Try whether the tier stores bytes. Raises OSError if not."""
        trials.check_stores(self.files.parts_directory, self.path)

    def space(self) -> Space:
        """The room on the tier's file system. ``total_inodes`` is 0 where they are not counted.
        Raises OSError, also where blocks are not counted (ramfs)."""
        st = os.fstatvfs(self.dir_fd)
        if st.f_blocks == 0:
            raise OSError(errno.ENOSYS, "its file system has no size", self.path)
        return Space(st.f_blocks * st.f_frsize, st.f_bavail * st.f_frsize, st.f_files, st.f_favail)

    def sync(self) -> None:
        """Bring all data of the tier's file system to the disk (syncfs(2))."""
        on_disk.sync_file_system(self.dir_fd, self.path)


def _is_synced(fd: int, replica: Replica) -> bool:
    """Whether the file of a durable replica is still the one that was synced: a later one has
    another mode until it is synced, too. The range of one in a segment is written once, without
    holes, and becomes a hole."""
    if not replica.segment:
        return stat.S_IMODE(os.fstat(fd).st_mode) == on_disk.SYNCED_MODE
    try:
        start = os.lseek(fd, replica.offset, os.SEEK_DATA)
        end = os.lseek(fd, replica.offset, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:  # no data from there on
            raise
        return False
    return start == replica.offset and end >= replica.offset + replica.size
