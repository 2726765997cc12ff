"""The accounts of one tier: what is used, what is reserved, and what room that leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from monarchfs.types import Space

BLOCK_BYTES = 4096
_EXTENT_TREE_BYTES = 4 << 30


def reservation(size_bytes: int) -> int:
    """The most that a file of ``size_bytes`` may occupy, in whole blocks.

    That is its data, one more block, and one for every 4 GiB: the file system charges a long file's
    extent tree to it (ext4: one block for every 340 extents).
    """
    blocks = -(-size_bytes // BLOCK_BYTES)
    return (blocks + 1 + size_bytes // _EXTENT_TREE_BYTES) * BLOCK_BYTES


class Room(NamedTuple):
    """How much more may be reserved in a tier (negative if it holds too much already).
    ``for_others``: the limit is what its file system keeps free for others, not its capacity."""

    bytes: int
    inodes: int
    for_others: bool


@dataclass(slots=True)
class Ledger:
    """One tier's accounts.

    ``used_bytes`` and ``files`` are replicas, at rest or resumed. ``reserved_bytes`` is what copies
    in progress (and replicas that move here) may still add, ``copies`` how many of them add a file.
    ``leaving_bytes`` and ``leaving_files`` are still on the disk, but have no record any more and
    are being removed. ``departing_bytes``, part of ``used_bytes``, are replicas that move away.

    ``free_bytes`` and ``free_inodes`` are the file system's, as if no copy in progress had written
    anything and all files that leave were gone. They are set when the tier is seen, lowered by what
    is stored, and raised by what begins to leave. ``kept_free_bytes`` and ``kept_free_inodes`` stay
    free for others.
    """

    capacity_bytes: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    leaving_bytes: int = 0
    departing_bytes: int = 0
    files: int = 0
    copies: int = 0
    leaving_files: int = 0
    free_bytes: int = 0
    free_inodes: int = 0
    kept_free_bytes: int = 0
    kept_free_inodes: int = 0
    seen: bool = False
    lost_reason: str | None = None

    @property
    def usable(self) -> bool:
        return self.seen and self.lost_reason is None

    def see(
        self, capacity_bytes: int, space: Space, written_bytes: int, reserve_percent: float
    ) -> None:
        self.seen = True
        self.capacity_bytes = capacity_bytes
        self.free_bytes = space.free_bytes + written_bytes + self.leaving_bytes
        self.kept_free_bytes = int(space.total_bytes * reserve_percent / 100)
        self.free_inodes = space.free_inodes + self.leaving_files
        self.kept_free_inodes = int(space.total_inodes * reserve_percent / 100)
        if space.total_inodes == 0:
            # Some file systems (btrfs) make inodes as they need them and report none.
            self.free_inodes = 1 << 62

    @property
    def usage(self) -> tuple[int, int]:
        """The bytes that the replicas occupy, with those that are being removed, and the capacity
        (0 until the tier was seen)."""
        return self.used_bytes + self.leaving_bytes, self.capacity_bytes

    def room_bytes(self) -> int:
        """How much more may be reserved; negative if the tier holds too much already."""
        in_capacity = self.capacity_bytes - self.used_bytes
        in_file_system = self.free_bytes - self.kept_free_bytes
        return min(in_capacity, in_file_system) - self.reserved_bytes

    def room_inodes(self) -> int:
        """How many more files may be made; may be negative."""
        return self.free_inodes - self.kept_free_inodes - self.copies

    @property
    def room(self) -> Room:
        in_capacity = self.capacity_bytes - self.used_bytes
        for_others = self.free_bytes - self.kept_free_bytes < in_capacity
        return Room(self.room_bytes(), self.room_inodes(), for_others)

    def takes(self, need_bytes: int) -> bool:
        """Whether one more file of that reservation fits."""
        return self.room_bytes() >= need_bytes and self.room_inodes() > 0

    def excess_bytes(self) -> int:
        """How much has to be evicted, beyond what is leaving already, to keep the promises.

        Bytes that copies may still add count against the capacity only. The file system's free
        bytes may lack a part of them already, because they were written a moment ago. To evict for
        these would be to evict for nothing. Files of others show all the same.
        """
        in_capacity = self.used_bytes + self.reserved_bytes - self.capacity_bytes
        in_file_system = self.kept_free_bytes - self.free_bytes
        return max(in_capacity, in_file_system) - self.departing_bytes

    def excess_files(self) -> int:
        """The same for inodes."""
        return self.kept_free_inodes - self.free_inodes

    def begin_removal(self, allocated_bytes: int) -> None:
        """Begin to remove a replica at rest."""
        self.used_bytes -= allocated_bytes
        self.files -= 1
        self.leaving_bytes += allocated_bytes
        self.leaving_files += 1
        self.free_bytes += allocated_bytes
        self.free_inodes += 1

    def removed(self, allocated_bytes: int) -> None:
        """A file that was leaving is removed."""
        self.leaving_bytes -= allocated_bytes
        self.leaving_files -= 1

    def removal_failed(self, allocated_bytes: int) -> None:
        """A file that was leaving could not be removed."""
        self.removed(allocated_bytes)
        self.used_bytes += allocated_bytes
        self.files += 1
        self.free_bytes -= allocated_bytes
        self.free_inodes -= 1

    def reserve(self, reserved_bytes: int) -> None:
        """A file is about to be made, of that many bytes at most."""
        self.reserved_bytes += reserved_bytes
        self.copies += 1

    def release(self, reserved_bytes: int) -> None:
        """That file was not made, or is removed again."""
        self.reserved_bytes -= reserved_bytes
        self.copies -= 1

    def store(self, reserved_bytes: int, allocated_bytes: int) -> None:
        """That file is at rest."""
        self.release(reserved_bytes)
        self.used_bytes += allocated_bytes
        self.files += 1
        self.free_bytes -= allocated_bytes
        self.free_inodes -= 1
