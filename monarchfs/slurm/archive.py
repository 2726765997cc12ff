"""Where the reports of jobs are kept: for each job and node one JSON object, and a page beside it.

The directory belongs to root, and each report to the job's user: only that user and root may read
it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from typing import Any

from monarchfs.slurm.records import make_directory, names_in, read_record, write_text
from monarchfs.slurm.report import page
from monarchfs.system.bounded import bounded_value
from monarchfs.types import OperationError

_MOST_BYTES = 1 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def keep_report(directory: str, report: Mapping[str, Any], uid: int, timeout: float) -> None:
    """Writes a report, in place of an earlier one of the job on this node. The directory may be on
    a network file system: raises OperationError after ``timeout`` seconds, or on failure."""
    stem = os.path.join(directory, f"{report['job']}.{report['node']}")

    def call() -> None:
        make_directory(directory, 0o755)
        try:
            text = json.dumps(report, indent=1) + "\n"
            write_text(stem + ".json", text, mode=0o400, owner=uid)
            write_text(stem + ".txt", page(report), mode=0o400, owner=uid)
        except OSError as error:
            raise OperationError(f"cannot write {stem}.json: {error.strerror}") from None

    bounded_value(
        call, timeout=timeout, overdue=f"{directory} did not answer within {timeout:.0f} s"
    )


def keep_file(path: str, to: str, uid: int, most_bytes: int, timeout: float) -> None:
    """Copies a file of a user's, for that user. Raises as `keep_report`."""

    def call() -> None:
        make_directory(os.path.dirname(to), 0o755)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OperationError(f"{path} is no file")
                with open(os.open(to + ".new", _NEW, 0o600), "wb") as copy:
                    left = most_bytes
                    while left > 0 and (content := file.read(min(left, _MOST_BYTES))):
                        left -= copy.write(content)
                    os.fchmod(copy.fileno(), 0o400)
                    os.fchown(copy.fileno(), uid, -1)
            os.rename(to + ".new", to)
        except OSError as error:
            raise OperationError(f"cannot write {to}: {error.strerror}") from None

    bounded_value(call, timeout=timeout, overdue=f"{to} was not written in {timeout:.0f} s")


def add_verdict(
    path: str, uid: int, source: str, verdict: Mapping[str, Any], timeout: float
) -> bool:
    """Adds it to what a report says of a dataset; false if there is no such report. Raises as
    `keep_report`."""

    def call() -> bool:
        report = read_record(path)
        if report is None:
            return False
        for dataset in report["datasets"]:
            if dataset["source"] == source:
                dataset["verdict"] = verdict
        keep_report(os.path.dirname(path), report, uid, timeout)
        return True

    overdue = f"{path} did not answer within {timeout:.0f} s"
    return bool(bounded_value(call, timeout=timeout, overdue=overdue))


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
