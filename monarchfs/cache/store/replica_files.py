"""Replicas that have a file each: complete ones, and parts that are being filled.

Below the dataset's directory in a tier:

    <xx>/<name>.<checksum>  a complete replica; ``name`` is its version's replica_name, in hex, and
                            ``xx`` its first two digits; ``checksum`` (16 hex digits) as in
                            ``store.checksum``. Mode 0400: its data reached the disk; 0600: perhaps
    parts/<name>            a replica that is being filled
    parts/.probe-<hex>      a trial, see ``cache.store.trials``

A replica becomes durable in this order. The store does steps 1, 2 (on request), 3 and 5:

    1. write the data under the staging name, in parts/;
    2. sync the data (``Tier.sync``, for a group of replicas at once);
    3. rename to the final name;
    4. commit the index record that makes it resident (the caller);
    5. note the sync in the file's mode (``mark_synced``).

After a crash of the process, nothing that step 1 wrote is lost. After a reboot, only replicas that
went through step 2 count. The record (Replica.durable) and the file's mode say so; without a
record, the mode alone. A record or the size alone proves nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

from monarchfs.cache.store import files as on_disk
from monarchfs.cache.store.checksum import BLOCK_BYTES, checksum, combine, digests
from monarchfs.cache.store.directory import Directory, Remarks
from monarchfs.cache.store.read import read_digests, unpaced
from monarchfs.core.units import Unit
from monarchfs.types import SPARSE_MIN_BYTES, Data, ReplicaLost, TierFile

ARRIVAL_SECONDS = 0.1
"""A thread waits this long for the next bytes from the source."""


class ReplicaFiles:
    """The replicas with a file each of one dataset on one tier.

    Constant: ``memory_backed``, ``parts_directory``. Changing, under the lock: the directories by
    name, each made on first use.

    Methods block, if only for a local disk, and raise OSError. Thread-safe, except that one replica
    must not be written by two threads at once.
    """

    def __init__(self, dir_fd: int, path: str, uid: int) -> None:
        """``dir_fd``: the dataset's directory, which the caller keeps open until ``close``.
        ``path``: its path, for messages."""
        self._fd = dir_fd
        self._uid = uid
        self._remarks = Remarks(path)
        self._lock = threading.Lock()
        self._directories: dict[str, Directory] = {}
        self.memory_backed = on_disk.is_in_memory(dir_fd)
        self.parts_directory = self._directory(on_disk.PARTS)

    def close(self) -> None:
        """Close all descriptors; no call may be under way any more."""
        for directory in self._directories.values():
            directory.close()

    def _directory(self, name: str) -> Directory:
        with self._lock:
            directory = self._directories.get(name)
            if directory is None:
                directory = Directory(self._fd, name, self._uid, self._remarks)
                self._directories[name] = directory
            return directory

    def write_whole(self, name: bytes, data: Data) -> tuple[int, int]:
        """Store a complete replica; returns its allocated bytes and checksum. In a large one, runs
        of zeros stay holes.

        Replaces one of the same name and checksum; a failure leaves nothing new. Raises
        FileExistsError if the replica is being filled as a part.
        """
        total = checksum(data)
        fd = self.parts_directory.create(on_disk.part_file(name))
        try:
            view = memoryview(data).cast("B")
            if len(view) > SPARSE_MIN_BYTES:
                os.ftruncate(fd, len(view))
                on_disk.write_sparse(fd, 0, view)
            else:
                on_disk.write_all(fd, 0, view)
            return self.finish_part(fd, name, total), total
        except BaseException:
            self.parts_directory.remove_after_failure(on_disk.part_file(name))
            raise
        finally:
            os.close(fd)

    def create_part(self, name: bytes, size: int) -> int:
        """A new, sparse file of ``size`` bytes to be filled; returns its descriptor (O_RDWR).

        Raises FileExistsError if there is one.
        """
        fd = self.parts_directory.create(on_disk.part_file(name))
        try:
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            self.parts_directory.remove_after_failure(on_disk.part_file(name))
            raise
        return fd

    def open_part(self, name: bytes, size: int) -> int:
        """Open a part to go on filling it (O_RDWR). Raises ReplicaLost as ``open``."""
        return self.parts_directory.open(on_disk.part_file(name), on_disk.WRITE, size=size)

    def open(self, name: bytes, checksum: int, size: int | None) -> int:
        """Open a complete replica for reading, without checking its bytes.

        Raises ReplicaLost unless it is a regular file of ours, of exactly ``size`` bytes if given.
        """
        file = on_disk.replica_file(name, checksum)
        return self._directory(on_disk.fan_out(name)).open(file, on_disk.READ, size=size)

    def write(self, fd: int, offset: int, data: Data) -> bytes:
        """Write all of ``data`` to a part, where nothing else was ever written.

        ``offset`` is a multiple of 128 KiB, and the data end at another one or at the part's end
        (else ValueError). Returns the digests of these blocks (``store.checksum``). Runs of zeros
        of 64 KiB stay holes, so that a copy of a sparse file takes no more room than the file.
        """
        end = offset + memoryview(data).nbytes
        if offset % BLOCK_BYTES or (end % BLOCK_BYTES and end != os.fstat(fd).st_size):
            raise ValueError(f"Bytes {offset} to {end} are not whole blocks")
        on_disk.write_sparse(fd, offset, data)
        return digests(data)

    def write_unit(self, fd: int, unit: Unit) -> bool:
        """``write`` the bytes of a unit as they arrive. False if none came for a while, but more
        are to come. The unit has the digests."""
        return unit.write(fd, ARRIVAL_SECONDS)

    def finish_part(self, fd: int, name: bytes, checksum: int) -> int:
        """Give a part that has all its bytes its final name; returns its allocated bytes.

        Replaces a complete replica of the same name and checksum. Raises ReplicaLost if the part's
        name no longer belongs to the file ``fd``, FileExistsError if something that is not ours has
        the final name.
        """
        part = on_disk.part_file(name)
        if not self.parts_directory.is_at(fd, part):
            raise ReplicaLost(part, "Not the file that was written")
        target = self._directory(on_disk.fan_out(name))
        target.move_here(self.parts_directory, part, on_disk.replica_file(name, checksum))
        return self.allocated(fd)

    def allocated(self, fd: int) -> int:
        """Bytes of the blocks a file occupies, including those not on the disk yet."""
        return os.fstat(fd).st_blocks * 512

    def mark_synced(self, replicas: Iterable[tuple[bytes, int]]) -> dict[bytes, int]:
        """Note in the modes of complete replicas (name, checksum) that their data are on the disk.
        Returns the bytes that each occupies, by name: only now are the extents known.

        Give only replicas that were complete before the last ``Tier.sync`` began and were not
        written since. Those that are gone are skipped.
        """
        allocated: dict[bytes, int] = {}
        for name, total in replicas:
            try:
                fd = self.open(name, total, None)
            except ReplicaLost:
                continue
            try:
                os.fchmod(fd, on_disk.SYNCED_MODE)
                allocated[name] = os.fstat(fd).st_blocks * 512
            finally:
                os.close(fd)
        return allocated

    def verify(
        self, name: bytes, checksum: int, size: int, paced: Callable[[int], None] = unpaced
    ) -> bool:
        """Whether a complete replica's bytes, all read from the disk, still have its checksum.

        Reads 1 MiB at a time, past the page cache if possible. Calls ``paced`` with the number of
        bytes before each read; it may wait, and an exception from it ends the check. Raises
        ReplicaLost as ``open`` does (if the replica was evicted, for instance), OSError if the disk
        fails.
        """
        return combine(self.digests(name, checksum, size, paced)) == checksum

    def digests(
        self, name: bytes, checksum: int, size: int, paced: Callable[[int], None] = unpaced
    ) -> bytes:
        """The digests of a complete replica's bytes, all read from the disk. See ``verify``."""
        fd = self.open(name, checksum, size)
        file = on_disk.replica_file(name, checksum)
        return read_digests(fd, size, paced, memory_backed=self.memory_backed, name=file)

    def remove(self, name: bytes, checksum: int) -> None:
        """Remove a complete replica, if there is one."""
        directory = self._directory(on_disk.fan_out(name))
        directory.remove(on_disk.replica_file(name, checksum))

    def remove_part(self, name: bytes) -> None:
        """Remove a part, if there is one."""
        self.parts_directory.remove(on_disk.part_file(name))

    def discard(self, name: bytes) -> None:
        """Remove all files of this name: the part, and complete ones of any checksum.

        For copies that a crash interrupted. Slow: it reads all names of a fan-out directory.
        """
        self.remove_part(name)
        directory = self._directory(on_disk.fan_out(name))
        for entry in directory.entries():
            found = on_disk.parse_replica(entry.name)
            if found is not None and found[0] == name:
                directory.remove(entry.name)

    def complete(self, xx: int) -> list[TierFile]:
        """The complete replicas whose name's first byte is ``xx``, by rising name and checksum."""
        found = self._list(f"{xx:02x}", on_disk.parse_replica)
        return [file for file in found if file.name[0] == xx]

    def parts(self) -> list[TierFile]:
        """The parts, by rising name. Their checksum is 0, and they do not count as synced."""
        found = self._list(on_disk.PARTS, on_disk.parse_part)
        return [file._replace(synced=False) for file in found]

    def _list(
        self, directory: str, parse: Callable[[str], tuple[bytes, int] | None]
    ) -> list[TierFile]:
        found = []
        for file, st in self._directory(directory).ours():
            if (parsed := parse(file)) is not None:
                synced = st.st_mode & 0o777 == on_disk.SYNCED_MODE
                place = (st.st_size, st.st_blocks * 512)
                found.append(TierFile(*parsed, *place, synced, st.st_mtime_ns))
        return sorted(found)
