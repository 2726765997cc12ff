"""``monarchfs status``: what mounts do, for people and for programs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from monarchfs.cli.output import Report, labelled, list_row, renumbered_text, show_result
from monarchfs.config.places import Search, search_of
from monarchfs.config.values import parse_path, parse_timeout
from monarchfs.control.client import request
from monarchfs.fuse.mountinfo import resolve_mountpoint
from monarchfs.supervisor.recover import FoundMount, find_all, find_one, find_private, required
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import format_bytes, format_seconds, in_columns, plural
from monarchfs.types import MonarchError, OperationError, UsageError

_ANSWER_SECONDS = 5.0
_LEAST_ANSWER_SECONDS = 0.5
_MOST_AT_ONCE = 16
_WATCH_SECONDS = "2"
_LEAST_WATCH_SECONDS = 0.1
_MOST_WATCH_SECONDS = 86400.0
NOT_WELL = ("not yours", "dead", "unknown", "silent", "down", "worker not answering")

_HEADINGS = ["MOUNT POINT", "SOURCE", "STATE", "RESIDENT", "LOCAL", "USED"]
_PRIVATE = "not visible in this mount namespace"
_APART = ("error", "last_death", "retry_seconds", "renumbered_files")
_MOST_PEERS = 8
_SHOWN = ("files", "source_io", "served", "prefetch", "evictions", "replicas", "worker")
_COUNTED = (
    *("resident", "renumbered_files", "local_opens", "peer_opens", "source_opens", "read_bytes"),
    *("used_bytes", "capacity_bytes", "age_seconds", "unix_seconds"),
)
"""Numbers that are added up or shown, wherever in a report they are."""
_MOST_NUMBER = 1e20


def status_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints one mount, or all, repeatedly with ``--watch``; 1 if the mount that was asked for is
    not there or not well."""
    search = search_of(environ)
    typed, interval = _what_to_watch(arguments)
    path = None if typed is None else parse_path(typed)
    reports = _find_mounts(path, search)
    if interval is not None:
        from monarchfs.cli.live import show
        from monarchfs.cli.watch import MountsView

        if isinstance(reports, list) and len(reports) == 1:
            path = str(reports[0]["mountpoint"])
        view = MountsView(partial(_look_again, path, reports, search))
        return show(view, interval, as_json=arguments.json)
    if not arguments.json and sys.stdout.isatty() and not environ.get("NO_COLOR"):
        from monarchfs.cli.watch import print_once

        print_once(reports)
    elif isinstance(reports, list):
        show_result(arguments, {"mounts": reports}, _list_lines(reports))
    else:
        show_result(arguments, reports, report_lines(reports))
    return int(not isinstance(reports, list) and reports.get("state") in NOT_WELL)


def _what_to_watch(arguments: argparse.Namespace) -> tuple[str | None, float | None]:
    """The mount point, and the seconds between two looks; None without ``--watch``."""
    typed, watched = arguments.mountpoint, arguments.watch
    if watched is None:
        return typed, None
    # In `--watch MOUNTPOINT`, argparse takes the mount point for the option's value.
    if typed is None and watched and ("/" in watched or watched[0] not in "0123456789.+-"):
        typed, watched = watched, _WATCH_SECONDS
    seconds = parse_timeout(watched)
    if not _LEAST_WATCH_SECONDS <= seconds <= _MOST_WATCH_SECONDS:
        raise UsageError(
            f"cannot watch every {seconds:g} s: use {_LEAST_WATCH_SECONDS:g} to"
            f" {_MOST_WATCH_SECONDS:g}"
        )
    return typed, seconds


def mounts_on(path: str, search: Search) -> list[FoundMount]:
    """The mount there; else those that only processes of `monarchfs run` see. Raises
    OperationError."""
    if (found := find_one(path, search)) is not None:
        return [found]
    resolved = resolve_mountpoint(path)
    private = [one for one in find_private(search) if one.mountpoint == resolved]
    return private or [required(path, search)]


def _find_mounts(path: str | None, search: Search) -> Report | list[Report]:
    """What the mount on ``path`` says of itself, or all of them. Raises OperationError."""
    if path is None:
        return reports_of([*find_all(search), *find_private(search)])
    found = mounts_on(path, search)
    return reports_of(found) if len(found) > 1 else report_of(found[0])


def _look_again(
    path: str | None, first: Report | list[Report], search: Search
) -> Report | list[Report]:
    """The same, of a mount that may go away and come back meanwhile."""
    try:
        return _find_mounts(path, search)
    except (MonarchError, OSError) as error:
        known = first[0] if isinstance(first, list) else first
        gone = {"source": known.get("source", "?"), "mountpoint": path, "state": "not mounted"}
        return gone if isinstance(error, OperationError) else {**gone, "error": str(error)}


def reports_of(mounts: Sequence[FoundMount]) -> list[Report]:
    """The report of each. A silent mount does not hold up the others; all take about 10 seconds at
    most."""
    if len(mounts) < 2:
        return [report_of(found) for found in mounts]
    from concurrent.futures import ThreadPoolExecutor

    deadline = time.monotonic() + 2 * _ANSWER_SECONDS
    with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
        return list(threads.map(partial(report_of, deadline=deadline), mounts))


def report_of(found: FoundMount, deadline: float | None = None) -> Report:
    """The mount's report; of a silent one, why. Takes 5 seconds at most, and little after
    ``deadline`` (time.monotonic())."""
    silent = {"source": found.source, "mountpoint": found.mountpoint, "private": found.private}
    if found.other_owner is not None:
        error = f"the mount belongs to {found.other_owner}: only they and root can ask it"
        return {**silent, "state": "not yours", "error": error}
    remedy = f"clear it with monarchfs umount {found.mountpoint}"
    if found.registered is None:
        # Its runtime directory is another container's, perhaps, or was emptied.
        error = f"no daemon can be seen from here; if the mount does not answer either, {remedy}"
        return {**silent, "state": "unknown", "error": error}
    if not found.supervisor_alive:
        return {**silent, "state": "dead", "error": f"its daemon is dead: {remedy}"}
    left = _ANSWER_SECONDS if deadline is None else deadline - time.monotonic()
    seconds = min(_ANSWER_SECONDS, max(left, _LEAST_ANSWER_SECONDS))
    try:
        # Where it is now: a mount point may have been renamed, or be a bind mount.
        report = request(found.registered, {"command": "status"}, seconds)
        if not makes_sense(report):
            return {**silent, "state": "silent", "error": "its answer makes no sense"}
        return {**silent, **report, "mountpoint": found.mountpoint}
    except OperationError as error:
        return {**silent, "state": "silent", "error": str(error)}


def makes_sense(report: Report) -> bool:
    """Whether what a daemon said of itself, which may be another user's, has the shape of a report,
    as far as it goes: only such is added up, shown, and printed as JSON."""
    rows = [report.get(key, []) for key in ("tiers", "peers")]
    if not all(isinstance(row, list) for row in rows):
        return False
    parts = [*(report.get(key, {}) for key in (*_SHOWN, "index")), *rows[0], *rows[1]]
    if not all(isinstance(part, Mapping) for part in parts):
        return False
    # Null until a worker has reported.
    age = {"age_seconds": report.get("age_seconds") or 0}
    parts += [{**report, **age}, report.get("worker", {}).get("last_death") or {}]
    counts = (part.get(key, 0) for part in parts if isinstance(part, Mapping) for key in _COUNTED)
    try:
        return all(isinstance(count, (int, float)) for count in counts) and _is_finite(report)
    except RecursionError:
        return False


def _is_finite(value: object) -> bool:
    """Whether all numbers in it are such as can be counted with."""
    if isinstance(value, (Mapping, list)):
        return all(map(_is_finite, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, (int, float)) or -_MOST_NUMBER < value < _MOST_NUMBER


# As plain text.


def _list_lines(reports: Sequence[Report]) -> Iterator[str]:
    """All mounts, one a line, in columns."""
    if not reports:
        yield "nothing is mounted"
        return
    yield from in_columns([_HEADINGS, *map(list_row, reports)], len(_HEADINGS))


def report_lines(report: Report) -> Iterator[str]:
    """A mount, one subject a line."""
    yield f"{printable(report.get('source', '?'))} on {printable(report.get('mountpoint', '?'))}"
    worker = report.get("worker", {})
    state = [printable(report[key]) for key in ("state", "data_path", "error") if report.get(key)]
    state += [f"private ({_PRIVATE})"] if report.get("private") else []
    state += [printable(worker["error"])] if worker.get("error") else []
    yield labelled("state", ", ".join(state))
    if report.get("profile"):
        yield labelled("profile", printable(report["profile"]))
    if report.get("age_seconds", 0) and report.get("state") != "serving":
        yield labelled("", f"what follows is {format_seconds(report['age_seconds'])} old")
    for tier in report.get("tiers", ()):
        used, capacity = tier.get("used_bytes", 0), tier.get("capacity_bytes", 0)
        share = f" ({100 * used / capacity:.0f}%)" if capacity else ""
        files = tier.get("files", 0)
        yield labelled(
            "tier",
            f"{printable(tier.get('path', '?'))}: {format_bytes(used)} of"
            f" {format_bytes(capacity)}{share}, {files} {plural(files, 'file')}",
        )
        if tier.get("out_of_service"):
            yield labelled("", f"takes nothing: {printable(tier['out_of_service'])}")
    if frozen := report.get("index", {}).get("frozen"):
        yield labelled("index", f"nothing new is recorded: {printable(frozen)}")
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
        if key in report:
            known = (_value(*pair) for pair in report[key].items() if pair[0] not in _APART)
            yield labelled(key.removesuffix("_io"), ", ".join(known))
    if renumbered := report.get("source_io", {}).get("renumbered_files"):
        yield labelled("", renumbered_text(renumbered))
    died = worker.get("last_death")
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
    if name == "idle_since_uptime_seconds" and isinstance(value, (int, float)):
        return f"idle since {format_seconds(value)} after mounting"
    if name.endswith("_seconds") and isinstance(value, (int, float)):
        return f"{name.removesuffix('_seconds').replace('_', ' ')} time {format_seconds(value)}"
    name = name.removesuffix("_uptime_seconds").replace("_", " ")
    return f"{name} {'-' if value is None else printable(value)}"
