"""``monarchfs why``: where the bytes of a file are, and if not on this node, why not."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from monarchfs.cli.ask import ask, batches, below
from monarchfs.cli.progress import Progress
from monarchfs.cli.text import printable, renumbered_text
from monarchfs.config.places import search_of
from monarchfs.config.values import parse_path
from monarchfs.fuse.mountinfo import split_below
from monarchfs.supervisor.recover import FoundMount, find_all
from monarchfs.system.sizes import format_bytes, format_seconds
from monarchfs.types import OperationError, UsageError


def why_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints what is known of each path; 1 if nothing is known of one. Raises UsageError and
    OperationError."""
    mounts = find_all(search_of(environ))
    by_point = {found.mountpoint: found for found in mounts}
    wanted: dict[str, list[str]] = {}
    for typed in arguments.path:
        mountpoint, path = _place(typed, by_point)
        wanted.setdefault(mountpoint, []).append(path)
    reports = [
        _named(mountpoint, report)
        for mountpoint, paths in wanted.items()
        for report in _reports(by_point[mountpoint], paths)
    ]
    errors = [report["error"] for report in reports if "error" in report]
    if arguments.json:
        print(json.dumps({"paths": reports}))
        return int(bool(errors))
    known = [report for report in reports if "error" not in report]
    if known:
        print("\n".join(printable(line) for report in known for line in describe(report)))
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise OperationError(f"{errors[0]}{more}")
    return 0


def _named(mountpoint: str, report: Mapping[str, Any]) -> dict[str, Any]:
    """With paths as people know them, not below the mount point."""
    named = {**report, "path": os.path.join(mountpoint, report["path"]).rstrip("/") or "/"}
    if "error" in report:
        named["error"] = os.path.join(mountpoint, report["error"].lstrip("/"))
    return named


def _place(typed: str, mounts: Mapping[str, FoundMount]) -> tuple[str, str]:
    """The mount point that a path is below, and the path relative to it."""
    place = split_below(parse_path(typed), mounts)
    if place is None:
        raise UsageError(
            f"{typed} is not in a monarchfs mount: name it as MOUNTPOINT/PATH; monarchfs status"
            " shows the mounts"
        )
    mountpoint, path = place
    return mountpoint, below(path, (mountpoint,)) if path else ""


def _reports(found: FoundMount, paths: list[str]) -> Iterator[dict[str, Any]]:
    with Progress() as progress:

        def show(so_far: Mapping[str, Any]) -> None:
            if so_far:
                progress.show(f"why: {so_far.get('files', 0):,} files looked at")

        for batch in batches(paths):
            answer = ask(found, {"command": "why", "paths": batch}, show)
            for report in answer.get("paths", ()):
                yield dict(report)


def describe(report: Mapping[str, Any]) -> Iterator[str]:
    """A report as text: what is so, then what goes with it, indented."""
    path = report["path"]
    if report.get("type") == "directory":
        local = f"{format_bytes(report['resident_bytes'])} of {format_bytes(report['bytes'])}"
        yield f"{path}: {report['resident']:,} of {report['files']:,} files ({local}) resident"
        yield from _of_directory(report)
    else:
        tier, reason = report.get("tier"), report.get("reason")
        place = f" in {tier}" if tier else ""
        yield f"{path}: {report.get('state')}{place}{': ' + reason if reason else ''}"
        if report.get("type") == "file":
            yield from _of_file(report)
    if report.get("pinned"):
        yield "  pinned: it is not evicted"
    if not report.get("source_responding", True):
        yield "  the source does not answer: this is what is known without it"
    if renumbered := report.get("renumbered_files"):
        yield f"  {renumbered_text(renumbered)}"


def _of_directory(report: Mapping[str, Any]) -> Iterator[str]:
    for cause, count in report.get("causes", {}).items():
        yield f"  {count:,} {cause}"
    for key, text in (
        ("not_looked_at", "names nobody has looked at yet: they are not counted"),
        ("not_listed", "directories not listed yet: what they hold is not counted"),
    ):
        if report.get(key):
            yield f"  {report[key]:,} {text}"


def _of_file(report: Mapping[str, Any]) -> Iterator[str]:
    if report.get("since_unix_seconds") is not None:
        ago = format_seconds(round(report["since_seconds_ago"]))
        yield (
            f"  copied: {_time(report['since_unix_seconds'])} ({ago} ago),"
            f" {format_bytes(report['allocated_bytes'])} on the disk"
        )
    yield (
        f"  version: {format_bytes(report['size_bytes'])}, modified"
        f" {_time(report['mtime_unix_seconds'])}; {report['freshness']}: the source was asked"
        f" {format_seconds(round(report['checked_seconds_ago']))} ago"
    )


def _time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"at {seconds:.0f}"  # file systems keep times that no calendar has
