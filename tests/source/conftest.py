"""A real directory as the source, and nothing left open after a test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.source.posix import PosixSource
from tests.support.asynchronous import nursery as nursery
from tests.support.asynchronous import pytest_pyfunc_call as pytest_pyfunc_call
from tests.support.faults import FaultySource, keep_no_directories
from tests.support.processes import nothing_left_open as nothing_left_open


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
    keep_no_directories(source)


@pytest.fixture
def hanging(root: Path, root_fd: int) -> Iterator[FaultySource]:
    """With ``file``. What hangs at the end of a test is let go."""
    (root / "file").write_bytes(b"contents")
    source = FaultySource(root_fd)
    yield source
    source.faults.end()
    keep_no_directories(source)
