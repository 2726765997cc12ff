"""The report of a job: pure, from the mount's status when the job came and when it left; and where
reports are kept.

A mount counts for all its users. A job's report says what the mount did while the job was there; if
other jobs used it too, the report says so.

There is one JSON object for each job and node, and a page beside it, in a directory of root's. Each
belongs to the job's user: only that user and root may read it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from typing import Any

from monarchfs.slurm.job import JobId
from monarchfs.slurm.records import make_directory, names_in, read_record, write_text
from monarchfs.system.bounded import bounded_value
from monarchfs.system.sizes import counted, format_bytes, format_seconds
from monarchfs.types import OperationError

VERSION = 1
_MOST_BYTES = 1 << 20
_WANTED = "all that was wanted"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_COUNTED = {
    "local_opens": ("served", "local_opens"),
    "source_opens": ("served", "source_opens"),
    "peer_opens": ("served", "peer_opens"),
    "local_file_bytes": ("served", "local_file_bytes"),
    "source_file_bytes": ("served", "source_file_bytes"),
    "peer_file_bytes": ("served", "peer_file_bytes"),
    "source_read_bytes": ("source_io", "read_bytes"),
    "source_operations": ("source_io", "operations"),
    "peer_read_bytes": ("served", "peer_bytes"),
    "copies_completed": ("prefetch", "completed"),
    "copies_failed": ("prefetch", "failed"),
    "worker_restarts": ("worker", "restarts"),
}
_NOT_LOCAL = (
    *(("prefetch", kind) for kind in ("refused", "failed")),
    *(("evictions", kind) for kind in ("policy", "pressure", "manual")),
)
"""What was wanted and is not local, if any of these was counted."""

_ELSEWHERE = ("opens", "read_bytes")

Status = Mapping[str, Any]


def dataset_report(
    before: Status | None,
    after: Status | None,
    *,
    variable: str,
    source: str,
    shared_with: Sequence[JobId],
    ended_early: bool = False,
) -> dict[str, Any]:
    """One mounted dataset of a job, from the mount's status ``before`` (None: it was mounted for
    this job) and ``after`` (None: it did not answer). ``ended_early``: the mount that the job was
    given ended before the job did; ``after`` is of another then."""
    report: dict[str, Any] = {
        "source": source,
        "variable": variable,
        "mounted": True,
        "reason": None,
        "shared_with": list(shared_with),
        "ended_early": ended_early,
    }
    if after is None:
        return {**report, "answered": False}
    counts = counts_between(before, after)
    files, opened = _opened(counts)
    tiers = after.get("tiers")
    return {
        **report,
        "answered": True,
        **counts,
        "local_open_share": _share(counts["local_opens"], files),
        "local_byte_share": _share(counts["local_file_bytes"], opened),
        # Of what was opened, as far as it was not read from the source after all.
        "spared_bytes": max(0, opened - counts["source_read_bytes"]),
        "spared_opens": counts["local_opens"] + counts["peer_opens"],
        "resident_after_seconds": _resident_after(before, after),
        "peak_used_bytes": sum(
            _number(tier.get("peak_used_bytes", tier.get("used_bytes")))
            for tier in (tiers if isinstance(tiers, list) else ())
            if isinstance(tier, Mapping)
        ),
        "files_resident": _at(after, ("files", "resident")),
    }


def job_totals(reports: Sequence[Mapping[str, Any]]) -> str:
    """What the source and the peers gave to all nodes of a job, for people; "" for one node."""
    if len(reports) < 2:
        return ""
    lines = [f"all {len(reports)} nodes"]
    of_all = [one for report in reports for one in report["datasets"] if one.get("answered")]
    for source in dict.fromkeys(one["source"] for one in of_all):
        mounts = [one for one in of_all if one["source"] == source]
        read = sum(one["source_read_bytes"] for one in mounts)
        from_peers = sum(one.get("peer_read_bytes", 0) for one in mounts)
        # A node that has all that it wanted tells how large that is, in whole blocks.
        whole = [one for one in mounts if one["resident_after_seconds"] is not None]
        size = max((one["peak_used_bytes"] for one in whole), default=0)
        times = f": {read / size:.2f} x what a node has ({format_bytes(size)})" if size else ""
        lines += ["", source, f"  source           {format_bytes(read)} read{times}"]
        lines += [f"  {line}" for line in _peer_lines(from_peers)]
    return "\n".join(lines) + "\n"


def unmounted_report(variable: str, source: str, reason: str) -> dict[str, Any]:
    """A dataset that the job read from the source itself."""
    return {
        "source": source,
        "variable": variable,
        "mounted": False,
        "reason": reason,
        "shared_with": [],
    }


def counts_between(before: Status | None, after: Status) -> dict[str, int]:
    """What was counted between two reports of a mount."""
    return {
        # It goes on counting whatever happens to its workers; below 0 is what makes no sense.
        name: max(0, _at(after, path) - (0 if before is None else _at(before, path)))
        for name, path in _COUNTED.items()
    }


def job_report(
    job: JobId,
    user: str,
    node: str,
    began: float,
    ended: float,
    datasets: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The whole report of one job on one node; times are Unix times."""
    return {
        "version": VERSION,
        "job": job,
        "user": user,
        "node": node,
        "began_unix_seconds": round(began, 3),
        "ended_unix_seconds": round(ended, 3),
        "datasets": list(datasets),
    }


def page(report: Mapping[str, Any]) -> str:
    """The report for people; the caller makes paths printable."""
    began, ended = report["began_unix_seconds"], report["ended_unix_seconds"]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    lines = [
        f"job {report['job']} of {report['user']} on {report['node']}:"
        f" from {when}, {format_seconds(max(0.0, ended - began))}"
    ]
    for dataset in report["datasets"]:
        lines += ["", f"{dataset['source']} ({dataset['variable']})"]
        lines += [f"  {line}" for line in _dataset_lines(dataset)]
    if not report["datasets"]:
        lines += ["", "no datasets"]
    return "\n".join(lines) + "\n"


def _dataset_lines(dataset: Mapping[str, Any]) -> list[str]:
    if not dataset["mounted"]:
        return [f"not mounted, the job was given the source itself: {dataset['reason']}"]
    lines = _shared_lines(dataset["shared_with"])
    if dataset.get("ended_early"):
        now = "; what follows is of the mount in its place" if dataset["answered"] else ""
        why = "its daemon was killed, or somebody unmounted it"
        lines += [f"the mount ended before the job did: {why}{now}"]
    elif not dataset["answered"]:
        lines += ["the mount did not answer at the job's end: nothing is known of it"]
    if not dataset["answered"]:
        return lines
    resident = dataset["resident_after_seconds"]
    failed, restarts = dataset["copies_failed"], dataset["worker_restarts"]
    files, opened = _opened(dataset)
    return [
        *lines,
        f"served locally   {_percent(dataset['local_open_share'])} of {counted(files, 'open')},"
        f" {_percent(dataset['local_byte_share'])} of {format_bytes(opened)} of files opened",
        f"source           {format_bytes(dataset['source_read_bytes'])} read in"
        f" {counted(dataset['source_operations'], 'operation')}; spared"
        f" {format_bytes(dataset['spared_bytes'])} and {counted(dataset['spared_opens'], 'open')}",
        *_peer_lines(dataset.get("peer_read_bytes", 0)),
        "resident         "
        + (f"not {_WANTED}" if resident is None else f"{_WANTED} after {format_seconds(resident)}")
        + f", {counted(dataset['files_resident'], 'file')};"
        f" {format_bytes(dataset['peak_used_bytes'])} used",
        f"trouble          {counted(failed, 'copy', 'copies')} failed, the daemon was restarted"
        f" {counted(restarts, 'time')}",
        *_verdict_lines(dataset.get("verdict")),
    ]


def _verdict_lines(verdict: Mapping[str, Any] | None) -> list[str]:
    if verdict is None:
        return []
    heads = ["verdict", *[""] * len(verdict["lines"])]
    lines = [f"{head:<16} {line}" for head, line in zip(heads, verdict["lines"], strict=False)]
    return [*lines, *(f"{'':<16} {path}" for path in verdict["files"])]


def _peer_lines(read_bytes: int) -> list[str]:
    return [f"peers            {format_bytes(read_bytes)} read from them"] if read_bytes else []


def _shared_lines(others: Sequence[JobId]) -> list[str]:
    if not others:
        return []
    named = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    return [f"shared           with job {named}: these numbers are theirs, too"]


def _resident_after(before: Status | None, after: Status) -> float | None:
    """Seconds from when the job came until all that was wanted was local: all of the dataset only
    where all of it is copied ahead. 0 if that was so before; None if it is not so."""
    idle = _value(after, ("prefetch", "idle_since_uptime_seconds"))
    if idle is None and _all_was_local(after):
        idle = 0
    done = _number(idle)
    if done != idle or any(_at(after, path) for path in _NOT_LOCAL):
        return None
    if not _at(after, ("files", "resident")):
        return None
    return round(max(0.0, done - _number((before or {}).get("uptime_seconds"))), 3)


def _all_was_local(after: Status) -> bool:
    """Whether files were opened, and nothing was ever left to copy or read from elsewhere."""
    counts = counts_between(None, after)
    elsewhere = [counts[f"{at}_{what}"] for at in ("source", "peer") for what in _ELSEWHERE]
    busy = [_value(after, ("prefetch", key)) for key in ("queued", "active", "scanning")]
    return counts["local_opens"] > 0 and not any(elsewhere + busy)


def _opened(counts: Mapping[str, Any]) -> tuple[int, int]:
    """How many files were opened, and their bytes. Earlier releases counted nothing of peers."""
    files, size = (
        sum(counts.get(f"{place}_{kind}", 0) for place in ("local", "peer", "source"))
        for kind in ("opens", "file_bytes")
    )
    return files, size


def _share(local: int, total: int) -> float | None:
    # Rounded down: 1 is said of nothing but all of it.
    return local * 10_000 // total / 10_000 if total > 0 else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{int(1000 * share + 1e-6) / 10:g}%"


def _at(status: Status, path: tuple[str, str]) -> int:
    return int(_number(_value(status, path)))


def _value(status: Status, path: tuple[str, str]) -> object:
    part = status.get(path[0])
    return part.get(path[1]) if isinstance(part, Mapping) else None


def _number(value: object) -> float:
    """A number that a user's worker may have made up, as one to reckon with."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    return value if abs(value) < 1 << 63 else 0


# Where reports are kept


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


def find_reports(directory: str, job: JobId) -> list[dict[str, Any]]:
    """The reports of a job that all nodes keep here, by node. Raises OperationError if there is
    none, or if they are somebody else's."""
    name = re.compile(rf"{re.escape(str(job))}\.[^/]+\.json")
    found, refused = [], ""
    for entry in names_in(directory):
        if name.fullmatch(entry) is None:
            continue
        try:
            path = os.path.join(directory, entry)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                report = dict(json.loads(file.read(_MOST_BYTES)))
            # Job 12 on a.b may be 12.a on b.
            another = isinstance(report.get("job"), (int, str)) and report["job"] != job
            found += [] if another else [report]
        except PermissionError:
            refused = f"the report of job {job} is another user's: ask root"
        except (OSError, ValueError, TypeError, RecursionError) as error:
            refused = f"the report {path} cannot be read: {error}"
    if not found:
        if not refused and re.fullmatch("[0-9]+_[0-9]+", str(job)):
            # Slurm tells a node's prolog and epilog only the task's own number.
            own = f"sacct -X -n -o jobidraw -j {job}"
            refused = f"there is no report of job {job}: give the number that {own} prints"
        raise OperationError(
            refused
            or f"there is no report of job {job} in {directory}: it had no datasets, is not over"
            " yet, or ran on other nodes"
        )
    return found
