"""``monarchfs status``: what mounts do, for people and for programs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from monarchfs.config.places import runtime_dirs_to_search
from monarchfs.config.values import parse_path
from monarchfs.control import request
from monarchfs.supervisor.recover import Found, find_all, find_one
from monarchfs.types import OperationError
from monarchfs.units import format_bytes as format_bytes

_ANSWER_SECONDS = 5.0
_LABELS = {
    "files": "files",
    "source_io": "source",
    "served": "served",
    "prefetch": "prefetch",
    "evictions": "evictions",
    "replicas": "replicas",
    "worker": "worker",
}


def status_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints one mount, or all; 1 if the mount that was asked for is not there or not well."""
    search = partial(runtime_dirs_to_search, os.geteuid(), environ)
    if arguments.mountpoint is None:
        reports = [report_of(found) for found in find_all(search)]
        if arguments.json:
            print(json.dumps({"mounts": reports}))
        else:
            print("\n\n".join(map(format_report, reports)) or "nothing is mounted")
        return 0
    path = parse_path(arguments.mountpoint)
    found = find_one(path, search)
    if found is None:
        raise OperationError(f"{path} is not a monarchfs mount: see monarchfs status for those")
    report = report_of(found)
    print(json.dumps(report) if arguments.json else format_report(report))
    return int(report.get("state") in ("dead", "unknown", "silent"))


def report_of(found: Found) -> dict[str, Any]:
    """What the mount says about itself; of one that says nothing, why. Takes 5 seconds at most."""
    silent = {"source": found.source, "mountpoint": found.mountpoint}
    remedy = f"clear it with monarchfs umount {found.mountpoint}"
    if found.registered is None:
        # Another container's, perhaps, or one whose runtime directory was emptied.
        return {**silent, "state": "unknown", "error": f"no daemon is known for it: {remedy}"}
    if not found.supervisor_alive:
        return {**silent, "state": "dead", "error": f"its daemon is dead: {remedy}"}
    try:
        return request(found.registered, {"command": "status"}, _ANSWER_SECONDS)
    except OperationError as error:
        return {**silent, "state": "silent", "error": str(error)}


def format_report(report: Mapping[str, Any]) -> str:
    """A report as plain text, one subject a line."""
    return "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"{_printable(report.get('source', '?'))} on {_printable(report.get('mountpoint', '?'))}"
    state = [str(report[key]) for key in ("state", "data_path", "error") if report.get(key)]
    yield _line("state", ", ".join(state))
    for tier in report.get("tiers", ()):
        used, capacity = tier.get("used_bytes", 0), tier.get("capacity_bytes", 0)
        share = f" ({100 * used / capacity:.0f}%)" if capacity else ""
        yield _line(
            "tier",
            f"{_printable(tier.get('path', '?'))}: {format_bytes(used)} of"
            f" {format_bytes(capacity)}{share}, {tier.get('files', 0)} files",
        )
        if tier.get("out_of_service"):
            yield _line("", f"takes nothing: {_printable(tier['out_of_service'])}")
    if (report.get("index") or {}).get("frozen"):
        yield _line("index", f"nothing new is recorded: {_printable(report['index']['frozen'])}")
    for key, label in _LABELS.items():
        values = report.get(key)
        if isinstance(values, Mapping):
            yield _line(label, ", ".join(_value(name, value) for name, value in values.items()))


def _value(name: str, value: object) -> str:
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        what = name.removesuffix("_bytes").replace("_", " ").replace("file", "files")
        return f"{what} {format_bytes(value)}"
    return f"{name.replace('_', ' ')} {'-' if value is None else value}"


def _line(label: str, text: str) -> str:
    return f"  {label:<9} {text}"


def _printable(value: object) -> str:
    return str(value).encode(errors="backslashreplace").decode()
