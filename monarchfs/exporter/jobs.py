"""Which jobs use a mount: the names in a directory ``jobs`` beside its mount point, one file a job.

Only looked for where root alone can have made it: below the directory of root's registrations, for
mounts that root registered. The Slurm prolog keeps such a set.
"""

from __future__ import annotations

import os
import re
from itertools import islice

JOBS = "jobs"
MOST_JOBS = 256
"""Of one mount; there are as many series of ``monarchfs_mount_job_info``."""

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MOST_NAMES = 1024


def way_to_jobs(mountpoint: str, top: str) -> list[str]:
    """The names from the directory ``top`` to the set of a mount's jobs; empty if that is not below
    it."""
    names = mountpoint.split("/")[1:]
    begin = top.split("/")[1:]
    below = names[len(begin) :]
    if names[: len(begin)] != begin or len(below) < 2 or not {"", ".", ".."}.isdisjoint(below):
        return []
    return [*below[:-1], JOBS]


def jobs_in(directory: int) -> tuple[str, ...]:
    """The ids of the jobs that the open directory names, MOST_JOBS at most. Raises OSError."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry in islice(entries, _MOST_NAMES)]
    return tuple(sorted(name for name in names if _JOB.fullmatch(name))[:MOST_JOBS])
