"""``monarchfs status``: what mounts do, for people and for programs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial

from monarchfs.cli.status_text import Report, format_list, format_report
from monarchfs.config.places import Search, search_of
from monarchfs.config.values import parse_path, parse_timeout
from monarchfs.control.client import request
from monarchfs.fuse.mountinfo import resolve_mountpoint
from monarchfs.supervisor.recover import FoundMount, find_all, find_one, find_private
from monarchfs.types import MonarchError, OperationError, UsageError

_ANSWER_SECONDS = 5.0
_LEAST_ANSWER_SECONDS = 0.5
_MOST_AT_ONCE = 16
_WATCH_SECONDS = "2"
_LEAST_WATCH_SECONDS = 0.1
_MOST_WATCH_SECONDS = 86400.0
NOT_WELL = ("not yours", "dead", "unknown", "silent", "down", "worker not answering")


def status_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints one mount, or all, repeatedly with ``--watch``; 1 if the mount that was asked for is
    not there or not well. Raises UsageError, OperationError."""
    search = search_of(environ)
    typed, interval = _what_to_watch(arguments)
    path = None if typed is None else parse_path(typed)
    reports = _find_mounts(path, search)
    if interval is not None:
        from monarchfs.cli.watch import MountsView, show

        if isinstance(reports, list) and len(reports) == 1:
            path = str(reports[0]["mountpoint"])
        view = MountsView(partial(_look_again, path, reports, search))
        return show(view, interval, as_json=arguments.json)
    if arguments.json:
        print(json.dumps({"mounts": reports} if isinstance(reports, list) else reports))
    elif sys.stdout.isatty() and not environ.get("NO_COLOR"):
        _draw(reports)
    else:
        print(format_list(reports) if isinstance(reports, list) else format_report(reports))
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


def _find_mounts(path: str | None, search: Search) -> Report | list[Report]:
    """What the mount on ``path`` says of itself, or all of them. Raises OperationError."""
    if path is None:
        return reports_of([*find_all(search), *find_private(search)])
    found = find_one(path, search)
    if found is None:
        resolved = resolve_mountpoint(path)
        private = [one for one in find_private(search) if one.mountpoint == resolved]
        if len(private) > 1:
            return reports_of(private)
        found = private[0] if private else None
    if found is None:
        raise OperationError(f"{path} is not a monarchfs mount: see monarchfs status for those")
    return report_of(found)


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
        return {**silent, **report, "mountpoint": found.mountpoint}
    except OperationError as error:
        return {**silent, "state": "silent", "error": str(error)}


def _draw(reports: Report | list[Report]) -> None:
    from rich.console import Console

    from monarchfs.cli.rates import History
    from monarchfs.cli.screen import draw, draw_list

    if isinstance(reports, list):
        Console().print(draw_list(reports))
    else:
        Console().print(draw(History().add(0.0, reports)))
