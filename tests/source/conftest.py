"""A real directory as the source, and nothing left open after a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from monarchfs.source import PosixSource
from tests.source.tools import HangingPosix, open_descriptors
from tests.support.asynchronous import arguments_of
from tests.support.open_directories import keep_no_directories
from tests.support.timing import wait_for


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An asynchronous test runs in trio. Its ``nursery`` is cancelled at its end."""
    arguments = arguments_of(pyfuncitem)
    if arguments is None:
        return None

    async def main() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                if "nursery" in arguments:
                    arguments["nursery"] = nursery
                await pyfuncitem.obj(**arguments)
                nursery.cancel_scope.cancel()

    trio.run(main)
    return True


@pytest.fixture
def nursery() -> None:
    """See above."""


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
    keep_no_directories(source)


@pytest.fixture
def hanging(root: Path, root_fd: int) -> Iterator[HangingPosix]:
    for name in ("hang", "file"):
        (root / name).write_bytes(b"contents")
    source = HangingPosix(root_fd)
    yield source
    source.release.set()
    wait_for(lambda: source.inside == 0, "all calls to end")
    keep_no_directories(source)
