"""All files of a source, in the order in which ``--prefetch all`` would copy them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from monarchfs.system import walk as tree
from monarchfs.types import SourceStat


class SurveyedFile(NamedTuple):
    """A regular file: its size, what a copy will probably occupy, and the name of a replica of this
    version."""

    size: int
    occupied_bytes: int
    replica_name: bytes


@dataclass(slots=True)
class WalkCounts:
    """What there is beside files: ``others`` are links and special files, ``unreadable``
    directories could not be listed, ``hard_links`` are further names of counted files."""

    directories: int = 0
    others: int = 0
    unreadable: int = 0
    hard_links: int = 0


def walk(root: str, counts: WalkCounts) -> Iterator[SurveyedFile]:
    """The files below ``root``; ``counts`` is kept up to date. Blocks as long as the source does.
    Raises OSError if ``root`` itself cannot be listed."""
    device = os.stat(root).st_dev
    linked: set[tuple[int, int]] = set()
    for directory in tree.walk(root, everything=False):
        if directory is None:
            counts.unreadable += 1
            continue
        counts.directories += 1
        for batch in directory.batches:
            for _name, st in batch:
                if st is None:
                    continue
                if not stat.S_ISREG(st.st_mode):
                    counts.others += 1
                    continue
                if st.st_nlink > 1:
                    if (st.st_dev, st.st_ino) in linked:
                        counts.hard_links += 1
                        continue
                    linked.add((st.st_dev, st.st_ino))
                found = SourceStat.of(st, device)
                yield SurveyedFile(found.size, found.occupied_bytes, found.version.replica_name)
