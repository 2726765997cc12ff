"""A real directory as the source, and nothing left open after a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.source import PosixSource
from tests.source.tools import (
    HangingPosix,
    open_descriptors,
)
from tests.support.open_directories import close_directories
from tests.support.timing import wait_for


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    wait_for(lambda: open_descriptors() <= before, "the descriptors to be closed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    return path


@pytest.fixture
def root_fd(root: Path) -> Iterator[int]:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def posix(root_fd: int) -> Iterator[PosixSource]:
    source = PosixSource(root_fd)
    yield source
    close_directories(source)


@pytest.fixture
def hanging(root: Path, root_fd: int) -> Iterator[HangingPosix]:
    for name in ("hang", "file"):
        (root / name).write_bytes(b"contents")
    source = HangingPosix(root_fd)
    yield source
    source.release.set()
    wait_for(lambda: source.inside == 0, "all calls to end")
    close_directories(source)
