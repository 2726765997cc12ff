"""A real directory as the tier, and nothing left open after a test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.store import Tier
from tests import surroundings
from tests.store.tools import open_tier


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tier"
    path.mkdir()
    return path


@pytest.fixture
def tier(path: Path) -> Iterator[Tier]:
    opened = open_tier(path)
    yield opened
    opened.close()


@pytest.fixture
def small(path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB and 64 inodes."""
    options = "size=1M,nr_inodes=64,mode=700"
    surroundings.mount_tmpfs(path, options)
    yield path
    subprocess.run(["umount", "-l", path], check=True)
