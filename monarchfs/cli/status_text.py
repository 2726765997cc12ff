"""What ``monarchfs status`` prints, as plain text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from monarchfs.cli.text import (
    format_count,
    format_share,
    labelled,
    printable,
    renumbered_text,
)
from monarchfs.system.sizes import format_bytes, format_seconds, in_columns

Report = Mapping[str, Any]

_HEADINGS = ["MOUNT POINT", "SOURCE", "STATE", "RESIDENT", "LOCAL", "USED"]
_PRIVATE = "not visible in this mount namespace"
_APART = ("error", "last_death", "retry_seconds", "renumbered_files")
_MOST_PEERS = 8
_SHOWN = ("files", "source_io", "served", "prefetch", "evictions", "replicas", "worker")


def format_list(reports: Sequence[Report]) -> str:
    """All mounts as plain text, one a line, in columns."""
    if not reports:
        return "nothing is mounted"
    return "\n".join(in_columns([_HEADINGS, *map(list_row, reports)], len(_HEADINGS)))


def list_row(report: Report) -> list[str]:
    """A mount's line in the list, under _HEADINGS."""
    names = [printable(report.get(key, "?")) for key in ("mountpoint", "source", "state")]
    names[2] += ", private" if report.get("private") else ""
    if "files" not in report:
        return [*names, "-", "-", "-"]
    served, tiers = report.get("served", {}), report.get("tiers", ())
    local = served.get("local_opens", 0)
    used, capacity = (
        sum(tier.get(key, 0) for tier in tiers) for key in ("used_bytes", "capacity_bytes")
    )
    return [
        *names,
        format_count(report["files"].get("resident", 0)),
        format_share(local, local + served.get("peer_opens", 0) + served.get("source_opens", 0)),
        f"{format_bytes(used)} of {format_bytes(capacity)}",
    ]


def format_report(report: Report) -> str:
    """A report as plain text, one subject a line."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield f"{printable(report.get('source', '?'))} on {printable(report.get('mountpoint', '?'))}"
    worker = report.get("worker")
    of_worker = worker.get("error") if isinstance(worker, Mapping) else None
    state = [printable(report[key]) for key in ("state", "data_path", "error") if report.get(key)]
    state += [f"private ({_PRIVATE})"] if report.get("private") else []
    yield labelled("state", ", ".join([*state, *([printable(of_worker)] if of_worker else [])]))
    if report.get("age_seconds", 0) and report.get("state") != "serving":
        yield labelled("", f"what follows is {format_seconds(report['age_seconds'])} old")
    for tier in report.get("tiers", ()):
        used, capacity = tier.get("used_bytes", 0), tier.get("capacity_bytes", 0)
        share = f" ({100 * used / capacity:.0f}%)" if capacity else ""
        yield labelled(
            "tier",
            f"{printable(tier.get('path', '?'))}: {format_bytes(used)} of"
            f" {format_bytes(capacity)}{share}, {tier.get('files', 0)} files",
        )
        if tier.get("out_of_service"):
            yield labelled("", f"takes nothing: {printable(tier['out_of_service'])}")
    if (report.get("index") or {}).get("frozen"):
        yield labelled("index", f"nothing new is recorded: {printable(report['index']['frozen'])}")
    peers = report.get("peers", ())
    for peer in peers[:_MOST_PEERS]:
        error = peer.get("error") or ("it failed a moment ago" if peer.get("avoided") else "")
        yield labelled(
            "peer",
            f"{printable(peer.get('name', '?'))}: has {peer.get('has_files', 0)} files,"
            f" gave {peer.get('read_files', 0)} ({format_bytes(peer.get('read_bytes', 0))})"
            + (f"; does not answer: {printable(error)}" if error else ""),
        )
    if len(peers) > _MOST_PEERS:
        yield labelled("", "and others: see monarchfs peers")
    for key in _SHOWN:
        values = report.get(key)
        if isinstance(values, Mapping):
            known = ((name, value) for name, value in values.items() if name not in _APART)
            yield labelled(
                key.removesuffix("_io"), ", ".join(_value(name, value) for name, value in known)
            )
    if renumbered := (report.get("source_io") or {}).get("renumbered_files"):
        yield labelled("", renumbered_text(renumbered))
    died = worker.get("last_death") if isinstance(worker, Mapping) else None
    if isinstance(died, Mapping):
        ago = max(0.0, time.time() - float(died.get("unix_seconds", 0)))
        yield labelled("", f"{printable(died.get('why', '?'))}, {format_seconds(ago)} ago")
    if isinstance(report.get("uptime_seconds"), (int, float)):
        yield labelled("up", format_seconds(report["uptime_seconds"]))


def _value(name: str, value: object) -> str:
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        what = name.removesuffix("_bytes").replace("_", " ")
        if what.endswith(" file"):
            what = f"in {what}s"
        return f"{what} {format_bytes(value)}"
    if name.endswith("_seconds") and isinstance(value, (int, float)):
        return f"{name.removesuffix('_seconds').replace('_', ' ')} time {format_seconds(value)}"
    return f"{name.replace('_', ' ')} {'-' if value is None else printable(value)}"
