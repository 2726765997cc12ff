"""Writes the names and attributes of a source to a file. Runs in a child process as the user: it
blocks as long as the source does."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from monarchfs.metadata.snapshot import FoundName, Head, Writer
from monarchfs.system.walk import Stats, walk
from monarchfs.types import FileType, SourceStat


@dataclass(slots=True)
class Exported:
    """What was written. ``unreadable`` directories could not be listed. ``unknown`` names have no
    attributes, because they were gone or changed at that moment."""

    directories: int = 0
    entries: int = 0
    unreadable: int = 0
    unknown: int = 0


def export(root: str, file: IO[bytes], progress: Callable[[Exported], None]) -> Exported:
    """Write all names and attributes below ``root`` to ``file``; ``progress`` is called after each
    batch of names. Raises OSError if ``root`` cannot be listed or ``file`` cannot be written, and
    what ``progress`` raises.

    File systems that are mounted below ``root`` are left out: their inode numbers mean nothing on
    other nodes.
    """
    root_stat, taken_ns = os.stat(root), time.time_ns()
    device = root_stat.st_dev
    writer = Writer(file, Head(root, root_stat.st_ino, taken_ns))
    result = Exported()
    prefix = len(os.fsencode(root).rstrip(b"/")) + 1
    for directory in walk(root, everything=True):
        if directory is None:
            result.unreadable += 1
            continue
        if directory.stat.st_dev != device:
            for _batch in directory.batches:
                continue
            continue
        times = SourceStat.of(directory.stat, device).version
        writer.begin_directory(directory.path[prefix:], times.mtime_ns, times.ctime_ns)
        # A directory that changed during the walk may have changed again.
        complete = times.past_racy_window(taken_ns)
        for batch in directory.batches:
            found = _found(directory.path, batch, device, taken_ns)
            complete = complete and len(found) == len(batch)
            writer.add(found)
            result.directories, result.entries = writer.directories, writer.entries
            result.unknown += len(batch) - sum(one.stat is not None for one in found)
            progress(result)
        if complete:
            writer.complete()
    writer.close()
    result.directories, result.entries = writer.directories, writer.entries
    return result


def _found(directory: bytes, batch: Stats, device: int, taken_ns: int) -> list[FoundName]:
    found = []
    for name, st in batch:
        if st is None or st.st_dev != device:
            continue
        attributes: SourceStat | None = SourceStat.of(st, device)
        target = b""
        if not SourceStat.of(st, device).version.past_racy_window(taken_ns):
            attributes = None
        elif stat.S_ISLNK(st.st_mode):
            try:
                target = os.readlink(os.path.join(directory, name))
            except OSError:
                attributes = None
        found.append(FoundName(name, FileType.of_mode(st.st_mode), st.st_ino, attributes, target))
    return found
