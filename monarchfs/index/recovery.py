"""Whether an index on disk can be trusted, and what is done with one that cannot.

LMDB maps its file and follows the page numbers in it: opening a truncated or damaged one can end
the process with SIGBUS, SIGSEGV or abort(3). So the index directory carries a mark of how it was
last closed, and an index without the mark of a clean close is walked in a child process first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from enum import Enum
from pathlib import Path

from monarchfs.index.tables import DATA_FILE

INDEX_DIRECTORY = "index"
_MARK = "mark"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

CHECK_SECONDS = 120.0


class LastClose(Enum):
    """How the last process that had the index open parted with it."""

    NEW = "new"
    """There is no index yet."""
    CLEAN = "clean"
    """Synced, closed, and unchanged since."""
    KILLED = "killed"
    """Not closed, but the machine has run since then: what was committed is in its page cache."""
    CRASHED = "crashed"
    """Not closed, and the machine was restarted since, or nothing is known: pages may be lost."""


def last_close(directory: str) -> LastClose:
    """How the index in the state directory ``directory`` was left. Raises OSError."""
    index = Path(directory, INDEX_DIRECTORY)
    try:
        data = (index / DATA_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return LastClose.NEW
    try:
        word, _, rest = (index / _MARK).read_text("ascii", "replace").partition(" ")
    except FileNotFoundError:
        return LastClose.CRASHED
    if word == "clean" and rest == f"{data.st_size} {data.st_mtime_ns}":
        return LastClose.CLEAN
    if word == "open" and rest == _boot_id():
        return LastClose.KILLED
    return LastClose.CRASHED


def mark_open(directory: str) -> None:
    """Durably forget that the index was closed cleanly; before its first write. Raises OSError."""
    _write_mark(directory, f"open {_boot_id()}")


def mark_closed(directory: str) -> None:
    """Durably remember a clean close; after the sync and the close. Raises OSError."""
    data = Path(directory, INDEX_DIRECTORY, DATA_FILE).stat()
    _write_mark(directory, f"clean {data.st_size} {data.st_mtime_ns}")


def _write_mark(directory: str, text: str) -> None:
    index = Path(directory, INDEX_DIRECTORY)
    staged = index / f"{_MARK}.new"
    with open(staged, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staged.rename(index / _MARK)
    descriptor = os.open(index, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _boot_id() -> str:
    return _BOOT_ID.read_text("ascii").strip()


def check_in_child(directory: str, *, deadline_seconds: float = CHECK_SECONDS) -> bool:
    """Walk the index of the state directory ``directory`` in a child process: is it sound?

    Blocks for about a second per 150,000 files, at most ``deadline_seconds`` (then: False).
    Raises OSError where the directory or the child cannot be opened.
    """
    # The caller may know the directory only by /proc/self/fd/N, which is another one in the child.
    descriptor = os.open(Path(directory, INDEX_DIRECTORY), os.O_PATH | os.O_DIRECTORY)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-m", "monarchfs.index.check", f"/proc/self/fd/{descriptor}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            pass_fds=(descriptor,),
            timeout=deadline_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        os.close(descriptor)
    return done.returncode == 0


def set_aside(directory: str) -> str | None:
    """Rename the index to ``index.bad-<n>`` and return that path, or None if there is none.

    ``n`` is the lowest that is free, from 1 on. The index must not be open. Raises OSError.
    """
    index = Path(directory, INDEX_DIRECTORY)
    if not os.path.lexists(index):
        return None
    n = 1
    # No race between the look and the rename: the caller holds the state directory's lock.
    while os.path.lexists(aside := Path(directory, f"{INDEX_DIRECTORY}.bad-{n}")):
        n += 1
    index.rename(aside)
    return str(aside)
