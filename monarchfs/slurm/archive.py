"""Where the reports of jobs are kept: for each job and node one JSON object, and a page beside it.

The directory belongs to root, and each report to the job's user: only that user and root may read
it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from monarchfs.slurm.records import make_directory, names_in, write_text
from monarchfs.slurm.report import page
from monarchfs.system.bounded import Answer, bounded_call
from monarchfs.types import OperationError

_MOST_BYTES = 1 << 20


def keep_report(directory: str, report: Mapping[str, Any], uid: int, timeout: float) -> None:
    """Writes a report, in place of an earlier one of the job on this node. The directory may be on
    a network file system: raises OperationError after ``timeout`` seconds, or on failure."""
    stem = os.path.join(directory, f"{report['job']}.{report['node']}")

    def call() -> Answer:
        make_directory(directory, 0o755)
        try:
            text = json.dumps(report, indent=1) + "\n"
            write_text(stem + ".json", text, mode=0o400, owner=uid)
            write_text(stem + ".txt", page(report), mode=0o400, owner=uid)
        except OSError as error:
            raise OperationError(f"cannot write {stem}.json: {error.strerror}") from None
        return None, ()

    bounded_call(
        call, timeout=timeout, overdue=f"{directory} did not answer within {timeout:.0f} s"
    )


def find_reports(directory: str, job: int) -> list[dict[str, Any]]:
    """The reports of a job that all nodes keep here, by node. Raises OperationError if there is
    none, or if they are somebody else's."""
    name = re.compile(rf"{job}\.[^/]+\.json")
    found, refused = [], ""
    for entry in names_in(directory):
        if name.fullmatch(entry) is None:
            continue
        try:
            path = os.path.join(directory, entry)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                found.append(dict(json.loads(file.read(_MOST_BYTES))))
        except PermissionError:
            refused = f"the report of job {job} is another user's: ask root"
        except (OSError, ValueError, TypeError, RecursionError) as error:
            refused = f"the report {path} cannot be read: {error}"
    if not found:
        raise OperationError(
            refused
            or f"there is no report of job {job} in {directory}: it had no datasets, is not over"
            " yet, or ran on other nodes"
        )
    return found
