"""What the tests of the source share."""

import os
from collections.abc import Callable
from pathlib import Path

import trio
import trio.testing

from monarchfs.source.posix import PosixSource, SourceEntry
from monarchfs.types import DirRef


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def soon(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - another thread's doing has no trio.Event
            await trio.sleep(0.002)


def ref(root: Path, path: bytes = b"") -> DirRef:
    st, own = os.lstat(os.path.join(os.fsencode(root), path)), os.lstat(root).st_dev
    return DirRef(path, st.st_ino, 0 if st.st_dev == own else st.st_dev)


def everything(posix: PosixSource, directory: DirRef, batch: int = 1000) -> list[SourceEntry]:
    return [entry for entries in posix.list(directory, batch) for entry in entries]
