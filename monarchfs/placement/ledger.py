"""The accounts of one tier: what is used, what is reserved, and what room that leaves."""

from __future__ import annotations

from dataclasses import dataclass

from monarchfs.types import Space

BLOCK_BYTES = 4096
_EXTENT_TREE_BYTES = 4 << 30


def reservation(size_bytes: int) -> int:
    """What a file of ``size_bytes`` may come to occupy, in bytes of whole blocks.

    Beside its data one block, and one more for every 4 GiB: the file system charges a long
    file's extent tree to it (ext4: one block for every 340 extents).
    """
    blocks = -(-size_bytes // BLOCK_BYTES)
    return (blocks + 1 + size_bytes // _EXTENT_TREE_BYTES) * BLOCK_BYTES


@dataclass(slots=True)
class Ledger:
    """One tier's accounts.

    ``used_bytes`` and ``files`` are replicas, at rest or resumed. ``reserved_bytes`` is what copies
    in progress may still add, ``copies`` how many of them add a file. ``free_bytes`` and
    ``free_inodes`` are the file system's, as if no copy in progress had written anything: seen,
    lowered by what is stored since, and raised only by seeing them again. ``kept_free_bytes`` and
    ``kept_free_inodes`` stay free for others.
    """

    capacity_bytes: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    files: int = 0
    copies: int = 0
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
        self.free_bytes = space.free_bytes + written_bytes
        self.kept_free_bytes = int(space.total_bytes * reserve_percent / 100)
        self.free_inodes = space.free_inodes
        self.kept_free_inodes = int(space.total_inodes * reserve_percent / 100)
        if space.total_inodes == 0:
            # Some file systems (btrfs) make inodes as they need them and report none.
            self.free_inodes = 1 << 62

    def room_bytes(self) -> int:
        """How much more may be reserved; negative where others have eaten into what was kept."""
        in_capacity = self.capacity_bytes - self.used_bytes
        in_file_system = self.free_bytes - self.kept_free_bytes
        return min(in_capacity, in_file_system) - self.reserved_bytes

    def has_inode(self) -> bool:
        return self.free_inodes - self.kept_free_inodes - self.copies > 0

    def check_invariants(self) -> None:
        assert self.used_bytes >= 0, self
        assert self.reserved_bytes >= 0, self
        assert self.files >= 0, self
        assert self.copies >= 0, self
