"""One dataset's directory on one tier: replicas, whole and in part.

Layout, below the directory that the caller opened:

    <xx>/<name>.<checksum>  a complete replica; ``name`` is its version's replica_name, in hex, and
                            ``xx`` its first two digits; ``checksum`` (16 hex digits) as in
                            ``store.checksum``. Mode 0400: its data reached the disk; 0600: perhaps
    parts/<name>            one that is being filled
    parts/.probe-<hex>      a trial, see ``probe``
    segments/<16 hex>       a segment: many small complete replicas, see ``store.segments``
    segments/<16 hex>.list  which replicas lie in it, for when the index is lost
    segments/.probe-<hex>   a trial, see ``SegmentFiles.gives_back``

Anything else that lies there is not ours: what is not a regular file of the user's under such a
name is never listed, followed, changed or removed.

Order of the durable steps of a replica, of which this module does 1, 2 (on request), 3 and 5:

    1. write the data under the staging name, in parts/;
    2. sync the data (``sync``, for a group of replicas at once);
    3. rename to the final name;
    4. commit the index record that makes it resident (the caller);
    5. say so in the file's mode (``mark_synced``).

After a crash of the process nothing that 1 wrote is lost. After a reboot only replicas that went
through 2 count: the record says so (Replica.durable), and where the record is lost the mode does;
the size alone proves nothing. Small files go into segments, in the order that ``store.segments``
has.

All functions block, if only for a local disk, and raise OSError. Thread-safe, except that one
replica must not be written by two threads at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator

from monarchfs.engine.units import Unit
from monarchfs.store import files as on_disk
from monarchfs.store.checksum import BLOCK_BYTES, checksum, digests
from monarchfs.store.errors import ReplicaLost
from monarchfs.store.segments import SegmentFiles
from monarchfs.store.verify import stored_checksum
from monarchfs.types import SPARSE_MIN_BYTES, Data, Replica, Space, TierFile

logger = logging.getLogger(__name__)

_PARTS = "parts"
_PROBE = re.compile(r"\.probe-[0-9a-f]+")
_PROBE_BYTES = 4096
ARRIVAL_SECONDS = 0.1
"""So long a thread waits for the source's next bytes."""

_REMARKS = 100  # files that are not ours, in the log; more would add nothing


class Tier:
    """Replicas of one dataset on one tier.

    Constant: ``id``, ``path`` (for messages). Changing: ``memory_backed``, ``segments`` (another
    object after ``reopen`` said so), the directory's descriptor and the table of open
    sub-directories, all under the lock; no descriptor is closed before ``close``, because a thread
    may be using it.
    """

    def __init__(
        self, dir_fd: int, path: str, tier_id: int, *, directory: str | None = None
    ) -> None:
        """``dir_fd`` stays the caller's and may be closed afterwards. ``directory`` is its path,
        by which it is found again (``store.place``)."""
        self.id = tier_id
        self.directory = directory
        self.path = path
        self._fd = os.open(".", on_disk.DIRECTORY, dir_fd=dir_fd)
        self._lock = threading.Lock()
        self._subdirs: dict[str, int] = {}
        self._retired: list[int] = []
        self._uid = os.geteuid()
        self._remarked: set[str] = set()
        self._all_segments: list[SegmentFiles] = []
        try:
            self.memory_backed = on_disk.is_in_memory(self._fd)
            self.segments = self._new_segments(self._fd)
            self._all_segments.append(self.segments)
            self._subdir(_PARTS)
        except BaseException:
            self.close()
            raise

    @property
    def dir_fd(self) -> int:
        """The directory's descriptor, for now; not the caller's to close."""
        return self._fd

    def close(self) -> None:
        """Close the directories; nothing of the tier may be in use any more."""
        with self._lock:
            for segments in self._all_segments:
                segments.close()
            for fd in (*self._subdirs.values(), *self._retired, self._fd):
                os.close(fd)
            self._all_segments.clear()
            self._subdirs.clear()
            self._retired.clear()

    def _new_segments(self, dir_fd: int) -> SegmentFiles:
        return SegmentFiles(dir_fd, self.path, self._uid)

    def reopen(self, dir_fd: int) -> bool:
        """Go on in the directory ``dir_fd`` (which stays the caller's); whether it is another one.

        For when the tier's directory was deleted, or its disk came back under the same path. If it
        is the same directory (st_dev, st_ino), nothing changes: what a descriptor of it could not
        do, another one cannot either.
        """
        fd = os.open(".", on_disk.DIRECTORY, dir_fd=dir_fd)
        try:
            memory_backed = on_disk.is_in_memory(fd)
            with self._lock:
                if os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
                    os.close(fd)
                    return False
                self.segments = self._new_segments(fd)
                self._all_segments.append(self.segments)
                self._retired += (self._fd, *self._subdirs.values())
                self._subdirs.clear()
                self._fd = fd
                self.memory_backed = memory_backed
                return True
        except BaseException:
            os.close(fd)
            raise

    def write_whole(self, name: bytes, data: Data) -> tuple[int, int]:
        """Store a complete replica; returns its allocated bytes and checksum. Zeros are left as
        holes where they may be many.

        Replaces one of the same name and checksum; on failure nothing new is left. Raises
        FileExistsError if the replica is being filled as a part.
        """
        total = checksum(data)
        fd = self._create(on_disk.part_file(name))
        try:
            view = memoryview(data).cast("B")
            if len(view) > SPARSE_MIN_BYTES:
                os.ftruncate(fd, len(view))
                on_disk.write_sparse(fd, 0, view)
            else:
                on_disk.write_all(fd, 0, view)
            return self.finish_part(fd, name, total), total
        except BaseException:
            self._remove_after_failure(on_disk.part_file(name))
            raise
        finally:
            os.close(fd)

    def create_part(self, name: bytes, size: int) -> int:
        """A new, sparse file of ``size`` bytes to be filled; returns its descriptor (O_RDWR).

        Raises FileExistsError if there is one.
        """
        fd = self._create(on_disk.part_file(name))
        try:
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            self._remove_after_failure(on_disk.part_file(name))
            raise
        return fd

    def open_part(self, name: bytes, size: int) -> int:
        """Open a part to go on filling it (O_RDWR). Raises ReplicaLost as ``open_replica``."""
        return self._open(_PARTS, on_disk.part_file(name), on_disk.WRITE, size)

    def open_replica(self, name: bytes, checksum: int, size: int) -> int:
        """Open a complete replica for reading; its bytes are not looked at.

        Raises ReplicaLost unless it is a regular file of ours, of exactly ``size`` bytes.
        """
        return self._open(
            on_disk.fan_out(name), on_disk.replica_file(name, checksum), on_disk.READ, size
        )

    def open_complete(self, replica: Replica) -> int:
        """Open the file that a complete replica lies in: its own, or a segment. As
        ``open_replica``."""
        if replica.segment:
            return self.segments.open(replica.segment, replica.offset + replica.size)
        return self.open_replica(replica.name, replica.checksum, replica.size)

    def write(self, fd: int, offset: int, data: Data) -> bytes:
        """Write all of ``data`` to a part, where nothing else was ever written.

        ``offset`` is a multiple of 128 KiB, and the data end at one or where the part ends
        (ValueError otherwise). Returns the digests of these blocks (``store.checksum``). Runs of
        zeros of 64 KiB are left as the holes they are, so that a copy of a sparse file takes no
        more room than the file.
        """
        end = offset + memoryview(data).nbytes
        if offset % BLOCK_BYTES or (end % BLOCK_BYTES and end != os.fstat(fd).st_size):
            raise ValueError(f"Bytes {offset} to {end} are not whole blocks")
        on_disk.write_sparse(fd, offset, data)
        return digests(data)

    def write_unit(self, fd: int, unit: Unit) -> bool:
        """``write`` what arrives with a unit; False where nothing did for a while, and there is
        more to come. For the digests ask the unit."""
        return unit.write(fd, ARRIVAL_SECONDS)

    def finish_part(self, fd: int, name: bytes, checksum: int) -> int:
        """Give a part that has all its bytes its final name; returns its allocated bytes.

        A complete replica of the same name and checksum is replaced. Raises ReplicaLost if the file
        ``fd`` does not lie under the part's name any more, FileExistsError if something that is not
        ours lies under the final one.
        """
        part, file, subdir = (
            on_disk.part_file(name),
            on_disk.replica_file(name, checksum),
            on_disk.fan_out(name),
        )
        parts, target = self._subdir(_PARTS), self._subdir(subdir)
        st = os.fstat(fd)
        try:
            there = os.stat(part, dir_fd=parts, follow_symlinks=False)
        except OSError as error:
            raise on_disk.lost_or_same(part, error) from error
        if not os.path.samestat(st, there):
            raise ReplicaLost(part, "Not the file that was written")
        try:
            self._rename(parts, part, target, file)
        except FileNotFoundError:
            self._rename(parts, part, self._subdir(subdir, instead_of=target), file)
        return st.st_blocks * 512

    def allocated(self, fd: int) -> int:
        """Bytes of the blocks a file occupies, including those not on the disk yet."""
        return os.fstat(fd).st_blocks * 512

    def mark_synced(self, replicas: Iterable[tuple[bytes, int]]) -> None:
        """Note in the modes of complete replicas (name, checksum) that their data are on the disk.

        Only of those that were complete before the last ``sync`` began and were not written again
        since. One that is not there any more is passed over.
        """
        for name, total in replicas:
            file = on_disk.replica_file(name, total)
            try:
                fd = self._open(on_disk.fan_out(name), file, on_disk.READ)
            except ReplicaLost:
                continue
            try:
                os.fchmod(fd, on_disk.SYNCED_MODE)
            finally:
                os.close(fd)

    def verify(
        self, name: bytes, checksum: int, size: int, paced: Callable[[int], None] = lambda _: None
    ) -> bool:
        """Whether a complete replica's bytes, all read from the disk, still have its checksum.

        Reads 1 MiB at a time, where possible past the page cache. ``paced`` is called with the
        number of bytes before each reading; it may wait, and what it raises ends this. Raises
        ReplicaLost as ``open_replica`` (a replica that was evicted meanwhile, for instance), and
        OSError where the disk does not give the bytes.
        """
        file = on_disk.replica_file(name, checksum)
        fd = self._open(on_disk.fan_out(name), file, on_disk.READ, size)
        try:
            found = stored_checksum(fd, size, paced, memory_backed=self.memory_backed, name=file)
        finally:
            os.close(fd)
        return found == checksum

    def verify_complete(
        self, replica: Replica, paced: Callable[[int], None] = lambda _: None
    ) -> bool:
        """``verify`` of a complete replica, wherever it lies."""
        name, checksum, size = replica.name, replica.checksum, replica.size
        if replica.segment:
            segment, offset = replica.segment, replica.offset
            return self.segments.verify(segment, offset, size, checksum, paced)
        return self.verify(name, checksum, size, paced)

    def remove(self, name: bytes, checksum: int) -> None:
        """Remove a complete replica; it is no error if there is none."""
        self._remove(on_disk.fan_out(name), on_disk.replica_file(name, checksum))

    def remove_part(self, name: bytes) -> None:
        """Remove a part; it is no error if there is none."""
        self._remove(_PARTS, on_disk.part_file(name))

    def discard(self, name: bytes) -> None:
        """Remove all files of this name, the part and complete ones whatever their checksum.

        For copies that a crash interrupted. Reads the names of a fan-out directory, so not for
        everyday use.
        """
        self.remove_part(name)
        for entry in self._entries(on_disk.fan_out(name)):
            found = on_disk.parse_replica(entry.name)
            if found is not None and found[0] == name:
                self._remove(on_disk.fan_out(name), entry.name)

    def files(self, xx: int) -> list[TierFile]:
        """The complete replicas whose name's first byte is ``xx``, by rising name and checksum."""
        subdir = f"{xx:02x}"
        found = self._list(subdir, on_disk.parse_replica)
        return [file for file in found if file.name[0] == xx]

    def parts(self) -> list[TierFile]:
        """The parts, by rising name. Their checksum is 0, and they do not count as synced."""
        return [file._replace(synced=False) for file in self._list(_PARTS, on_disk.parse_part)]

    def probe(self) -> None:
        """Write a small file, sync it, read it back from the disk and remove it.

        Raises OSError if any of that fails (EIO also if other bytes come back). Removes the files
        that a crash amid this left behind.
        """
        for entry in self._entries(_PARTS):
            if _PROBE.fullmatch(entry.name):
                self._remove(_PARTS, entry.name)
        file = f".probe-{secrets.token_hex(8)}"
        data = secrets.token_bytes(_PROBE_BYTES)
        fd = self._create(file)
        try:
            on_disk.write_all(fd, 0, memoryview(data))
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.pread(fd, _PROBE_BYTES + 1, 0) != data:
                raise OSError(errno.EIO, "Other bytes than were written", self.path)
        except BaseException:
            self._remove_after_failure(file)
            raise
        finally:
            os.close(fd)
        self._remove(_PARTS, file)

    def space(self) -> Space:
        """The room on the tier's file system. ``total_inodes`` is 0 where they are not counted."""
        st = os.fstatvfs(self._fd)
        return Space(st.f_blocks * st.f_frsize, st.f_bavail * st.f_frsize, st.f_files, st.f_favail)

    def sync(self) -> None:
        """Bring all data of the tier's file system to the disk (syncfs(2))."""
        on_disk.sync_file_system(self._fd, self.path)

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
            fd = os.open(name, on_disk.DIRECTORY, dir_fd=self._fd)
            if known is not None:
                self._retired.append(known)
            self._subdirs[name] = fd
            return fd

    def _create(self, file: str) -> int:
        parts = self._subdir(_PARTS)
        try:
            return os.open(file, on_disk.CREATE, on_disk.NOT_SYNCED_MODE, dir_fd=parts)
        except FileNotFoundError:
            parts = self._subdir(_PARTS, instead_of=parts)
            return os.open(file, on_disk.CREATE, on_disk.NOT_SYNCED_MODE, dir_fd=parts)

    def _rename(self, parts: int, part: str, target: int, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not on_disk.is_ours(os.stat(file, dir_fd=target, follow_symlinks=False), self._uid):
                raise FileExistsError(errno.EEXIST, "Something that is not ours is there", file)
        os.rename(part, file, src_dir_fd=parts, dst_dir_fd=target)

    def _open(self, subdir: str, file: str, flags: int, size: int | None = None) -> int:
        try:
            dir_fd = self._subdir(subdir, create=False)
        except OSError as error:
            raise on_disk.lost_or_same(file, error) from error
        return on_disk.open_ours(dir_fd, file, flags, self._uid, size)

    def _remove(self, subdir: str, file: str) -> None:
        """Remove a file if it is ours; it is no error if there is none."""
        try:
            dir_fd = self._subdir(subdir, create=False)
            if on_disk.is_ours(os.stat(file, dir_fd=dir_fd, follow_symlinks=False), self._uid):
                os.unlink(file, dir_fd=dir_fd)
            else:
                self._remark(f"{subdir}/{file}")
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in on_disk.NOT_A_DIRECTORY:
                raise
            self._remark(subdir)

    def _remove_after_failure(self, file: str) -> None:
        """Remove a staging file after a failure, which is what the caller is to hear of."""
        try:
            self._remove(_PARTS, file)
        except OSError as error:
            logger.warning("%s: could not remove %s/%s: %s", self.path, _PARTS, file, error)

    def _remark(self, place: str) -> None:
        if place not in self._remarked and len(self._remarked) < _REMARKS:
            self._remarked.add(place)
            logger.warning("%s/%s is not ours and stays as it is", self.path, place)

    def _list(
        self, subdir: str, parse: Callable[[str], tuple[bytes, int] | None]
    ) -> list[TierFile]:
        found = []
        for entry in self._entries(subdir):
            parsed = parse(entry.name)
            if parsed is None:
                continue
            try:
                st = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if on_disk.is_ours(st, self._uid):
                synced = st.st_mode & 0o777 == on_disk.SYNCED_MODE
                allocated = st.st_blocks * 512
                found.append(TierFile(*parsed, st.st_size, allocated, synced, st.st_mtime_ns))
        return sorted(found)

    def _entries(self, subdir: str) -> Iterator[os.DirEntry[str]]:
        """Through a descriptor of its own: two listings must not share a position."""
        try:
            fd = os.open(subdir, on_disk.DIRECTORY, dir_fd=self._fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in on_disk.NOT_A_DIRECTORY:
                raise
            self._remark(subdir)
            return
        try:
            with os.scandir(fd) as entries:
                yield from entries
        finally:
            os.close(fd)
