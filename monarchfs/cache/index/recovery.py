"""Whether an index on disk can be trusted, and what is done with one that cannot.

LMDB maps its file and follows the page numbers in it: opening a truncated or damaged one can end
the process with SIGBUS, SIGSEGV or abort(3). So the index directory carries a mark of how it was
last closed. An index without the mark of a clean close is first walked in a child process. So is
one that may have killed a process, whatever its mark says (``mark_suspect``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from monarchfs.cache.index.disk import DATA_FILE

log = logging.getLogger(__name__)

INDEX_DIRECTORY = "index"
_MARK = "mark"
_LONGEST_MARK = 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_SUSPECT = "suspect"
_ASIDE = re.compile(re.escape(INDEX_DIRECTORY) + r"\.bad-([1-9][0-9]{0,8})\Z")
_ASIDE_KEPT = 2
_OURS = frozenset({DATA_FILE, "lock.mdb", _MARK, f"{_MARK}.new"})

DAMAGED = 3
"""The exit code of the check of an index that is not sound."""

QUIET_SECONDS = 20
"""A check that says nothing for so long waits for a page that the disk does not give: the index is
not sound. Less than a start may take (``start_timeout_seconds``), which each step puts off."""


class LastClose(Enum):
    """How the last process that had the index open left it."""

    NEW = "new"
    """There is no index yet."""
    CLEAN = "clean"
    """Synced, closed, and unchanged since."""
    KILLED = "killed"
    """Not closed, but the machine has run since then: what was committed is in its page cache."""
    CRASHED = "crashed"
    """Not closed, and the machine was restarted since, a sync failed, or nothing is known: pages
    may be lost."""


def last_close(directory: str) -> LastClose:
    """How the index in the state directory ``directory`` was left. Raises OSError."""
    index = Path(directory, INDEX_DIRECTORY)
    try:
        data = (index / DATA_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return LastClose.NEW
    try:
        with open(index / _MARK, encoding="ascii", errors="replace") as mark:
            word, _, rest = mark.read(_LONGEST_MARK).partition(" ")
    except OSError:
        return LastClose.CRASHED
    if word == "clean" and rest == f"{data.st_size} {data.st_mtime_ns}":
        return LastClose.CLEAN
    if word == "open" and rest == _boot_id():
        return LastClose.KILLED
    return LastClose.CRASHED


def planted(directory: str) -> str | None:
    """What has a name of the index but is not of its type (a symbolic link, a FIFO), and so is not
    ours; None if all is as it should be. Raises OSError."""
    index = Path(directory, INDEX_DIRECTORY)
    try:
        if not stat.S_ISDIR(index.lstat().st_mode):
            return f"{index} is not a directory"
    except FileNotFoundError:
        return None
    for name in sorted(_OURS):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG((index / name).lstat().st_mode):
                return f"{index / name} is not a file"
    return None


def mark_open(directory: str) -> None:
    """Durably remove the mark of a clean close, before the first write. Raises OSError."""
    _write_mark(directory, f"open {_boot_id()}")


def mark_closed(directory: str) -> None:
    """Durably set the mark of a clean close, after the sync and the close. Raises OSError."""
    data = Path(directory, INDEX_DIRECTORY, DATA_FILE).stat()
    _write_mark(directory, f"clean {data.st_size} {data.st_mtime_ns}")


def remove_mark(directory: str) -> None:
    """A sync failed: pages may be lost, although the machine runs on. Best effort: the disk may
    fail at this, too."""
    with contextlib.suppress(OSError):
        os.unlink(Path(directory, INDEX_DIRECTORY, _MARK))


def forget_pages(directory: str) -> None:
    """Have the index read from the disk again: the kernel may still have pages in memory that it
    could not write. Raises OSError."""
    with open(Path(directory, INDEX_DIRECTORY, DATA_FILE), "rb") as data:
        os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_mark(directory: str, text: str) -> None:
    index = Path(directory, INDEX_DIRECTORY)
    staged = index / f"{_MARK}.new"
    staged.unlink(missing_ok=True)
    with open(staged, "x", encoding="ascii") as file:
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


def mark_suspect(directory: str) -> None:
    """Have the index checked before it is opened again, however it was closed.

    For when the process that had it open died of SIGSEGV, SIGBUS or SIGABRT. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    os.close(os.open(Path(directory, _SUSPECT), flags, 0o600))


def is_suspect(directory: str) -> bool:
    return os.path.lexists(Path(directory, _SUSPECT))


def forget_suspicion(directory: str) -> None:
    """The index was checked or set aside. Best effort: on failure it is checked once more."""
    with contextlib.suppress(OSError):
        os.unlink(Path(directory, _SUSPECT))


def check_in_child(directory: str, goes_on: Callable[[], object] = lambda: None) -> bool:
    """Walk the index of the state directory ``directory`` in a child process: can it be read?

    Blocks for about two seconds per million files, more where the disk is slow, and calls
    ``goes_on`` now and then. Raises OSError if the directory cannot be opened, or the child cannot
    do its work.
    """
    return _run_check(directory, [], goes_on)[0] == 0


def problems(directory: str) -> list[str]:
    """What is wrong with the index of the state directory: lines for people, none if it is sound.

    Every record is decoded and held against the others, in a child process: about 30 seconds per
    million files. The index must not be open for writing. Raises OSError as ``check_in_child``.
    """
    code, output = _run_check(directory, ["--deep"], lambda: None)
    lines = output.decode("utf-8", "backslashreplace").splitlines()
    if code < 0:
        lines.append(f"reading the index ended in {signal.Signals(-code).name}")
    return lines


def _run_check(
    directory: str, options: list[str], goes_on: Callable[[], object]
) -> tuple[int, bytes]:
    """The child's exit code, and the lines that it said."""
    # The caller may know the directory only by /proc/self/fd/N, which is another one in the child.
    descriptor = os.open(Path(directory, INDEX_DIRECTORY), os.O_PATH | os.O_DIRECTORY)
    try:
        child = subprocess.Popen(
            [
                *(sys.executable, "-I", "-m", "monarchfs.cache.index.check", *options),
                f"/proc/self/fd/{descriptor}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            pass_fds=(descriptor,),
        )
    finally:
        os.close(descriptor)
    said = bytearray()
    assert child.stdout is not None
    with child.stdout as pipe:
        waits = select.poll()
        waits.register(pipe, select.POLLIN)
        while waits.poll(QUIET_SECONDS * 1000):
            if not (part := os.read(pipe.fileno(), 1 << 16)):
                break
            goes_on()
            said += part
        else:
            child.kill()  # which is not waited for: it may hang in the kernel
            return DAMAGED, b"the disk did not give a page in %d seconds\n" % QUIET_SECONDS
    child.wait()
    if child.returncode > 0 and child.returncode != DAMAGED:
        raise OSError(errno.ENOMEM, "the index cannot be checked")
    return child.returncode, b"".join(line.lstrip() for line in said.splitlines(keepends=True))


def set_aside(directory: str) -> str | None:
    """Rename the index to ``index.bad-<n>`` and return that path, or None if there is none.

    ``n`` is above all others there. The newest of those is kept; older ones are removed if they are
    directories with nothing but an index. The index must not be open. Raises OSError.
    """
    index = Path(directory, INDEX_DIRECTORY)
    forget_suspicion(directory)
    if not os.path.lexists(index):
        return None
    numbers = _aside_numbers(directory)
    n = max(numbers, default=0) + 1
    aside = Path(directory, f"{INDEX_DIRECTORY}.bad-{n}")
    # No race between the look and the rename: the caller holds the state directory's lock.
    index.rename(aside)
    for old in sorted(numbers)[: -(_ASIDE_KEPT - 1)]:
        if not remove_aside(directory, name := f"{INDEX_DIRECTORY}.bad-{old}"):
            log.warning("%s/%s could not be removed", directory, name)
    return str(aside)


def has_set_aside(directory: str) -> bool:
    """Whether there is an index that was set aside. Raises OSError."""
    return bool(_aside_numbers(directory))


def _aside_numbers(directory: str) -> list[int]:
    return [int(match[1]) for name in os.listdir(directory) if (match := _ASIDE.match(name))]


def remove_aside(directory: str, name: str) -> bool:
    """Remove an index that was set aside. Returns whether it did. Follows no symbolic link, and
    keeps a directory that holds anything else. Raises OSError if ``directory`` cannot be opened."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = os.open(name, flags, dir_fd=parent)
        try:
            files = os.listdir(descriptor)
            if not _OURS.issuperset(files) or not all(
                stat.S_ISREG(os.stat(f, dir_fd=descriptor, follow_symlinks=False).st_mode)
                for f in files
            ):
                return False
            for file in files:
                os.unlink(file, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        os.rmdir(name, dir_fd=parent)
        return True
    except OSError as error:
        log.debug("%s/%s cannot be removed: %s", directory, name, error.strerror)
        return False
    finally:
        os.close(parent)
