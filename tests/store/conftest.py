"""A real directory as the tier, and nothing left open after a test."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.cache.store import Tier
from tests.store.tools import open_tier
from tests.support import surroundings
from tests.support.processes import nothing_left_open as nothing_left_open


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
    with surroundings.mounted_tmpfs(path, options):
        yield path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 32 MiB, with blocks as on a larger one."""
    mounted = tmp_path / "disk"
    surroundings.mount_ext4(tmp_path / "image", mounted, 32 << 20, "-b", "4096", "-m", "0")
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)
