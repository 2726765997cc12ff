"""What the tests of the store share."""

import os
from pathlib import Path

from monarchfs.cache.store import Tier
from monarchfs.cache.store.checksum import checksum
from tests.support import surroundings

needs_root = surroundings.requires_root

KIB = 1024
BLOCK = 128 * KIB


def name_of(number: int) -> bytes:
    """Names of the same fan-out directory ("ab"), rising."""
    return b"\xab" + number.to_bytes(15, "big")


NAME = name_of(7)


def whole(data: bytes, name: bytes = NAME) -> str:
    """Where the complete replica of ``data`` lies, below the tier's directory."""
    return f"{name.hex()[:2]}/{name.hex()}.{checksum(data):016x}"


def content(tier: Tier, data: bytes, name: bytes = NAME) -> bytes:
    """What the complete replica that was written with ``data`` holds."""
    fd = tier.files.open(name, checksum(data), len(data))
    try:
        return os.pread(fd, len(data) + 1, 0)
    finally:
        os.close(fd)


def open_tier(path: Path) -> Tier:
    fd = os.open(path, os.O_DIRECTORY)
    try:
        return Tier(fd, str(path), 3)
    finally:
        os.close(fd)


def files_below(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}


def code_of(result: int | OSError) -> int | None:
    return result.errno if isinstance(result, OSError) else None


def mode_of(path: Path) -> int:
    return os.lstat(path).st_mode & 0o777
