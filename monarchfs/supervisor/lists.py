"""Mistakes in a list of paths (``--prefetch FILE``), reported when it is mounted."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from typing import BinaryIO

from monarchfs.config import User
from monarchfs.supervisor.identity import become
from monarchfs.supervisor.probe import OpenedSource
from monarchfs.system.bounded import Answer, bounded_call
from monarchfs.types import OperationError

_LONGEST_LINE = 8192
"""Twice PATH_MAX (limits.h): a path with that of its root."""

_MOST_LOOKED_AT = 1000
_LOOK_SECONDS = 1.0
_READ_SECONDS = 3.0


def complaint_of_list(path: str, source: OpenedSource, mountpoint: str, user: User) -> str | None:
    """What is wrong with a list that ``user`` may read, in one line; None where nothing is seen.

    All lines are read, and the first thousand names looked up in the source, as far as that gets
    within a second. Takes some seconds at most.
    """
    roots = [os.fsencode(root).rstrip(b"/") + b"/" for root in (mountpoint, source.path)]

    def call() -> Answer:
        become(user)
        began = time.monotonic()
        lines = wrong = looked = 0
        first: tuple[int, str] | None = None
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            for number, line in _lines(file):
                lines += 1
                seconds = time.monotonic() - began
                looks = looked < _MOST_LOOKED_AT and seconds < _LOOK_SECONDS
                looked += looks
                if _is_wrong(line, roots, source.descriptor if looks else None):
                    wrong += 1
                    first = first or (number, os.fsdecode(line[:200]))
                if seconds > _READ_SECONDS:
                    break
        return [lines, looked, wrong, first], ()

    try:
        (lines, looked, wrong, first), _ = bounded_call(
            call, timeout=2 * _READ_SECONDS, overdue="", keep=[source.descriptor]
        )
    except OperationError:
        return None  # the source does not answer just now; the worker goes through the list later
    if lines == 0:
        return f"prefetch list {path} names nothing: write a path in the source on each line"
    if not wrong:
        return None
    part = f" (names of {looked:,} were looked up)" if looked < lines else ""
    return (
        f"prefetch list {path}: {wrong:,} of {lines:,} lines name no file in the source{part}, the"
        f" first is line {first[0]}: {first[1]}"
    )


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers; of long ones the beginning."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        whole = line
        while whole and not whole.endswith(b"\n"):
            whole = file.readline(_LONGEST_LINE)
        if plain := line.rstrip(b"\n"):
            yield number, plain


def _is_wrong(line: bytes, roots: list[bytes], source: int | None) -> bool:
    """``source``: where to look for the name; None: by its form alone."""
    for root in roots:
        if line.startswith(root):
            line = line[len(root) :]
            break
    if line.startswith(b"/") or b"\0" in line or len(line) > _LONGEST_LINE // 2:
        return True
    if b".." in line.split(b"/"):
        return True
    if source is None or not line:
        return not line
    try:
        return not stat.S_ISREG(os.stat(line, dir_fd=source, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False  # it may be there
