"""What the tests of the store share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from monarchfs.store import Tier
from monarchfs.types import SourceVersion

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

KIB = 1024


def version(size: int, ino: int = 7) -> SourceVersion:
    return SourceVersion(0, ino, size, 1_700_000_000_123_456_789, -5)


def open_tier(path: Path) -> Tier:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        return Tier(fd, str(path), 3)
    finally:
        os.close(fd)


def files_below(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}
