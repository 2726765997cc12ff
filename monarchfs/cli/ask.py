"""Commands that ask a mount's daemon: ``refresh``, ``pin``, ``unpin``, ``evict``, ``warm``,
``order``, ``weigh``, ``why``, ``peers`` and ``restart``."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from monarchfs.cli.output import Progress, failed, renumbered_text, show_result
from monarchfs.config.places import search_of
from monarchfs.config.values import parse_path
from monarchfs.control.client import ConnectionEnded, connect
from monarchfs.control.client import request as ask_within
from monarchfs.control.messages import NO_WORKER, batches, checked, too_long, weight_requests
from monarchfs.fuse.mountinfo import split_below
from monarchfs.supervisor.recover import (
    FoundMount,
    find_all,
    not_a_mount,
    refuse_private,
    require_daemon,
    required,
)
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import (
    counted,
    format_bytes,
    format_count,
    format_seconds,
    in_columns,
    plural,
)
from monarchfs.types import OperationError, UsageError

ASK_SECONDS = 5.0
"""In which a daemon listens, and answers a short question."""

AGAIN_SECONDS = 0.2
BACK_SECONDS = 60.0
"""A worker that is away for longer does not come back."""

_LINES_BYTES = 1 << 20
"""About so many bytes of an order are sent together."""

_LINE_SECONDS = 10.0
"""How often `warm` prints a line where there is no terminal."""

_RATE_SECONDS = 10.0
"""What its rate is the mean of."""

_NEEDS_PATH = ("pin", "unpin")
_DONE = {"pin": "pinned", "unpin": "unpinned", "evict": "evicted"}
_KEPT = {"unpin": "below another pinned directory", "evict": "open or pinned"}
_PEER_HEADINGS = ("peer", "state", "has", "gave", "bytes", "a file", "fallbacks")


def ask(
    found: FoundMount, request: Mapping[str, Any], progress: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The worker's answer; ``progress`` gets what it reports before. Raises OperationError, with
    the remedy, if there is no answer."""
    with connect(found.daemon, ASK_SECONDS) as connection:
        return connection.request(request, progress=progress)


def _ask_until_answered(
    found: FoundMount, request: Mapping[str, Any], progress: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """As `ask`; where the worker is replaced meanwhile, the next one is asked the same."""
    away_until = 0.0

    def heard(so_far: dict[str, Any]) -> None:
        nonlocal away_until
        away_until = 0.0
        progress(so_far)

    while True:
        try:
            return ask(found, request, heard)
        except OperationError as error:
            ended = isinstance(error, ConnectionEnded)
            if not ended and (not away_until or str(error) != NO_WORKER):
                raise
            away_until = away_until or time.monotonic() + BACK_SECONDS
            if time.monotonic() > away_until:
                raise
        time.sleep(AGAIN_SECONDS)


def _ask_in_parts(
    found: FoundMount,
    request: Mapping[str, Any],
    paths: Iterable[str],
    show: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The sum of the answers for all paths; ``show`` gets what it is so far."""
    asks = _ask_until_answered if request["command"] == "warm" else ask
    total: dict[str, Any] = {}
    for batch in batches(paths):

        def tell(so_far: Mapping[str, Any], before: Mapping[str, Any] = total) -> None:
            show(add(before, so_far))

        total = add(total, asks(found, {**request, "paths": batch}, tell))
    return total


def add(total: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Both results as one: counts are added; of other values (an error, say) the first is kept."""
    both = dict(total)
    for key, value in result.items():
        is_count = isinstance(value, int) and not isinstance(value, bool)
        both[key] = both.get(key, 0) + value if is_count else both.get(key) or value
    return both


# Which mount, and paths as its worker takes them: relative to its root, which is "".


def mount_and_paths(
    arguments: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[FoundMount, list[str]]:
    """All of the mount if there are no paths. A path in the mount may stand in its place, as in
    `monarchfs why`. Raises UsageError or OperationError."""
    typed, paths = parse_path(arguments.mountpoint), list(arguments.path)
    search = search_of(environ)
    by_point = {found.mountpoint: found for found in find_all(search)}
    place = split_below(typed, by_point)
    if place is None:
        raise not_a_mount(typed, search)
    mountpoint, first = place
    if first:
        # After a path, not a mount point, paths are what they are to every other command.
        paths = [first, *(parse_path(path) if path else path for path in paths)]
    elif arguments.command in _NEEDS_PATH and not paths:
        raise UsageError(f"which PATH in {typed}? see monarchfs {arguments.command} --help")
    names = (mountpoint,) if first else (typed, mountpoint)
    return by_point[mountpoint], [below(path, names) for path in paths] or [""]


def below(path: str, mountpoints: Sequence[str]) -> str:
    """``path``, absolute below one of the mount point's names or relative to it. Raises UsageError,
    and OperationError for a path that no file can have."""
    plain = _relative(path, mountpoints)
    if too_long(plain):
        raise OperationError(f"{path[:80]}...: {os.strerror(errno.ENAMETOOLONG)}")
    return plain


def _relative(path: str, mountpoints: Sequence[str]) -> str:
    if not path or "\0" in path:
        raise UsageError("a path is empty or holds a NUL byte: name a file or directory")
    if os.path.isabs(path):
        plain = "/" + os.path.normpath(path).lstrip("/")
        for mountpoint in mountpoints:
            if plain == mountpoint:
                return ""
            if plain.startswith(mountpoint + "/"):
                return plain[len(mountpoint) + 1 :]
    else:
        plain = os.path.normpath(path)
        if plain != ".." and not plain.startswith("../"):
            return "" if plain == "." else plain
    raise UsageError(f"{path} is not below {mountpoints[0]}: name what lies inside the mount")


def _opened_list(name: str) -> BinaryIO:
    """A list to read, by its lines; - is standard input."""
    return open(sys.stdin.fileno() if name == "-" else name, "rb", closefd=name != "-")


# refresh, pin, unpin, evict


def ask_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Has the worker do what ``arguments.command`` says to each path, or to the whole mount, and
    prints the result; 1 if some of it failed."""
    command = arguments.command
    found, paths = mount_and_paths(arguments, environ)
    with Progress() as progress:

        def show(so_far: Mapping[str, Any]) -> None:
            progress.show(f"{command}: {_counts(so_far)}")

        total = _ask_in_parts(found, {"command": command}, paths, show)
    show_result(arguments, total, map(printable, _described(command, total)))
    if count := total.get("failed", 0):
        reason = total.get("error") or f"see the log of {found.mountpoint}"
        return failed(arguments, f"{count} of them failed: {reason}")
    return 0


refresh_command = pin_command = unpin_command = evict_command = ask_command


def _described(command: str, result: Mapping[str, Any]) -> Iterator[str]:
    """The result as one line for people."""
    if command == "refresh":
        yield _counts(result)
        return
    files, size = result.get("files", 0), format_bytes(result.get("bytes", 0))
    text = f"{_DONE[command]} {files} {plural(files, 'file')}, {size}"
    if kept := result.get("kept", 0):
        text += f", kept {kept} that are {_KEPT[command]}"
    unseen = []
    if directories := result.get("not_listed", 0):
        unseen.append(f"{directories} {plural(directories, 'directory', 'directories')} not listed")
    if names := result.get("not_looked_at", 0):
        unseen.append(f"{names} {plural(names, 'name')} not looked at")
    if command == "pin" and unseen:
        text += f" so far, and what else lies there: {' yet, '.join(unseen)} yet"
    yield text


def _counts(result: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {format_bytes(value) if key == 'bytes' else value}"
        for key, value in result.items()
        if isinstance(value, int)
    )


# warm


def warm_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """1 if something failed or, with ``--check``, is not resident. A KeyboardInterrupt says what
    goes on."""
    if arguments.check and (arguments.wait or arguments.metadata):
        raise UsageError("--check only looks: leave out --wait and --metadata")
    what = "check" if arguments.check else "metadata" if arguments.metadata else "copy"
    waits = arguments.wait or arguments.check
    found, paths = mount_and_paths(arguments, environ)
    request = {"command": "warm", "what": what, "wait": waits}
    try:
        with _shown(arguments) as show:
            total = _ask_in_parts(
                found, request, paths, lambda so_far: show({**so_far, "what": what})
            )
    except KeyboardInterrupt:
        goes_on = "" if arguments.check else f" the waiting; {_goes_on(found.mountpoint)}"
        raise KeyboardInterrupt(f"interrupted{goes_on}") from None
    total.pop("ended", None)
    what_is = "all of it" if paths == [""] else paths[0] if len(paths) == 1 else "these paths"
    warming = printable(f"warming {what_is}: {_goes_on(found.mountpoint)}")
    result = {"waited": waits, "what": what, **(total if waits else {})}
    show_result(arguments, result, _summary(what, total) if waits else warming)
    if count := total.get("failed", 0):
        return failed(arguments, f"{count} failed, the first: {total.get('error')}")
    return int(arguments.check and total.get("resident", 0) < total.get("files", 0))


def _goes_on(mountpoint: str) -> str:
    return f"the mount goes on with it; monarchfs warm {mountpoint} --check tells how far it is"


def _summary(what: str, total: Mapping[str, Any]) -> Iterator[str]:
    """The result for people; one subject a line."""
    files, size = total.get("files", 0), total.get("bytes", 0)
    if what == "metadata":
        directories = counted(total.get("directories", 0), "directory", "directories")
        yield f"known: {_files(files, size)}, in {directories}"
        return
    resident = _files(total.get("resident", 0), total.get("resident_bytes", 0))
    copied = total.get("copied", 0)
    now = f" (copied now: {_files(copied, total.get('copied_bytes', 0))})" if copied else ""
    yield f"resident: {resident} of {_files(files, size)}{now}"
    if total.get("partial"):
        yield f"in part:  {counted(total['partial'], 'file')}"
    if total.get("remote"):
        yield f"remote:   {counted(total['remote'], 'file')}"
    if total.get("refused"):
        refused = _files(total["refused"], total.get("refused_bytes", 0))
        short = total.get("short_bytes", 0)
        more = f"; {format_bytes(short)} more in the tiers would do" if short else ""
        yield f"no room:  {refused}: read from the source{more}"
    if total.get("archived"):
        archived = _files(total["archived"], total.get("archived_bytes", 0))
        yield f"archived: {archived}: copied when read"


def _files(count: int, size: int) -> str:
    return f"{counted(count, 'file')}, {format_bytes(size)}"


Show = Callable[[Mapping[str, Any]], None]
"""Gets the counts so far."""


@contextmanager
def _shown(arguments: argparse.Namespace) -> Iterator[Show]:
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar() as show:
            yield show
    else:
        # Programs read the result.
        yield (lambda _so_far: None) if arguments.json else _lines()


class RateEstimate:
    """Bytes a second, and the time left, from the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def text(self, so_far: Mapping[str, Any], now: float) -> str:
        """``120M/s, 3 min left``; empty before anything can be said."""
        done = so_far.get("copied_bytes", 0) + so_far.get("moving_bytes", 0)
        seen = self._seen
        seen.append((now, done))
        while len(seen) > 2 and seen[0][0] < now - _RATE_SECONDS:
            seen.popleft()
        seconds, size = now - seen[0][0], done - seen[0][1]
        if seconds <= 0 or size <= 0:
            return ""
        rate = size / seconds
        left = so_far.get("bytes", 0) - _done_bytes(so_far)
        then = f", {format_seconds(left / rate)} left" if so_far.get("walked") else ""
        return f"{format_bytes(rate)}/s{then}"


def _done_bytes(so_far: Mapping[str, Any]) -> int:
    keys = ("resident_bytes", "moving_bytes", "refused_bytes", "archived_bytes")
    return sum(int(so_far.get(key, 0)) for key in keys)


def _how_far(so_far: Mapping[str, Any]) -> str:
    files, of = so_far.get("resident", 0), so_far.get("files", 0)
    if so_far.get("what") == "metadata":
        return f"{counted(of, 'file')} found so far"
    local = so_far.get("resident_bytes", 0) + so_far.get("moving_bytes", 0)
    text = f"{files:,} of {of:,} files, {format_bytes(local)} of"
    text += f" {format_bytes(so_far.get('bytes', 0))}"
    for key, name in (("refused", "no room"), ("archived", "archived"), ("failed", "failed")):
        if so_far.get(key):
            text += f", {name} {so_far[key]:,}"
    return text if so_far.get("walked") else f"{text} found so far"


def _lines() -> Show:
    """For a job's log: now and then a line."""
    pace = RateEstimate()
    following = time.monotonic() + _LINE_SECONDS

    def show(so_far: Mapping[str, Any]) -> None:
        nonlocal following
        now = time.monotonic()
        rate = pace.text(so_far, now)
        if now >= following:
            following = now + _LINE_SECONDS
            text = f"warm: {_how_far(so_far)}{', ' + rate if rate else ''}"
            print(text, file=sys.stderr, flush=True)

    return show


@contextmanager
def _bar() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("warm"),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TextColumn("{task.fields[counts]}"),
        TextColumn("[cyan]{task.fields[pace]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("warm", total=None, counts="", pace="")
        pace = RateEstimate()

        def show(so_far: Mapping[str, Any]) -> None:
            progress.update(
                task,
                total=max(1, so_far.get("bytes", 0)) if so_far.get("walked") else None,
                completed=_done_bytes(so_far),
                counts=_how_far(so_far),
                pace=pace.text(so_far, time.monotonic()),
            )

        yield show


# order, weigh


def order_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if arguments.file.count("-") > 1:
        raise UsageError("standard input can be one list only")
    typed = parse_path(arguments.mountpoint)
    found = required(typed, search_of(environ))
    total = 0
    for file in arguments.file:
        with _opened_list(file) as lines, connect(found.daemon, ASK_SECONDS) as to:
            request = {"command": "order", "stream": os.path.basename(file)}
            parts = _parts(lines, (typed, found.mountpoint), inodes=arguments.inodes)
            total += int(to.send_list(request, parts).get("files", 0))
    show_result(arguments, {"files": total}, f"announced: {counted(total, 'file')}")
    return 0


def _parts(lines: BinaryIO, mountpoints: tuple[str, str], *, inodes: bool) -> Iterator[bytes]:
    """The list as the worker takes it. Raises UsageError, OperationError."""
    while some := lines.readlines(_LINES_BYTES):
        words = [word for line in some if (word := line.rstrip(b"\r\n"))]
        if inodes:
            if not all(word.isdigit() for word in words):
                raise UsageError("with --inodes, each line is an inode number")
            names = [b"/" + word for word in words]
        else:
            names = [os.fsencode(below(os.fsdecode(word), mountpoints)) for word in words]
        yield b"".join(name + b"\0" for name in names)


def weigh_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Tells a mount how often files will be read, compared with others; 1 if it does not know one
    of them."""
    name, typed = arguments.file, parse_path(arguments.mountpoint)
    found = required(typed, search_of(environ))
    total: dict[str, Any] = {"files": 0, "unknown": 0, "first_unknown": ""}
    with Progress() as progress, _opened_list(name) as lines:
        weights = _weights(lines, name, (typed, found.mountpoint))
        for request in weight_requests(weights, replace=arguments.replace):
            total = add(total, ask(found, request, lambda so_far: None))
            progress.show(f"weigh: {total['files']} files")
    show_result(arguments, total, f"weighed {counted(total['files'], 'file')}")
    if not total["unknown"]:
        return 0
    path = os.path.join(found.mountpoint, total["first_unknown"]) + _and_more(total["unknown"])
    return failed(arguments, f"no weight for {path}: no such file in the mount, or empty")


def _weights(file: BinaryIO, name: str, mountpoints: Sequence[str]) -> Iterator[tuple[str, float]]:
    """(path below the mount, weight) of each line."""
    for number, line in enumerate(file, 1):
        weight, tab, path = line.rstrip(b"\n").partition(b"\t")
        try:
            if not tab:
                raise ValueError("a line is a weight, a tab and a path")
            yield below(os.fsdecode(path), mountpoints), checked(_number(weight))
        except (ValueError, UsageError) as exc:
            raise UsageError(f"{name}, line {number}: {exc}") from None


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"a weight is a number, not {os.fsdecode(text)}") from None


def _and_more(count: int) -> str:
    """Behind the first of so many."""
    return f" (and {count - 1:,} more)" if count > 1 else ""


# why


def why_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints where the bytes of each file are, and if not on this node, why not; 1 if nothing is
    known of one."""
    search = search_of(environ)
    by_point = {found.mountpoint: found for found in find_all(search)}
    wanted: dict[str, list[str]] = {}
    for typed in arguments.path:
        path = parse_path(typed)
        place = split_below(path, by_point)
        if place is None:
            refuse_private(path, search)
            raise UsageError(
                f"{typed} is not in a monarchfs mount: name it as MOUNTPOINT/PATH; monarchfs status"
                " shows the mounts"
            )
        mountpoint, path = place
        wanted.setdefault(mountpoint, []).append(below(path, (mountpoint,)) if path else "")
    reports = [
        report for point, paths in wanted.items() for report in _reports(by_point[point], paths)
    ]
    errors = [report["error"] for report in reports if "error" in report]
    known = (report for report in reports if "error" not in report)
    lines = (printable(line) for report in known for line in _explained(report))
    show_result(arguments, {"paths": reports}, lines)
    return failed(arguments, f"{errors[0]}{_and_more(len(errors))}") if errors else 0


def _reports(found: FoundMount, paths: list[str]) -> Iterator[dict[str, Any]]:
    """The worker's reports, with paths as people know them, not below the mount point."""
    point = found.mountpoint
    with Progress() as progress:

        def show(so_far: Mapping[str, Any]) -> None:
            if so_far:
                progress.show(f"why: {so_far.get('files', 0):,} files looked at")

        for batch in batches(paths):
            request = {"command": "why", "paths": batch}
            for report in ask(found, request, show).get("paths", ()):
                named = {**report, "path": os.path.join(point, report["path"]).rstrip("/") or "/"}
                if "error" in report:
                    named["error"] = os.path.join(point, report["error"].lstrip("/"))
                yield named


def _explained(report: Mapping[str, Any]) -> Iterator[str]:
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
    if names := report.get("not_looked_at"):
        yield f"  {counted(names, 'name')} nobody has looked at yet: not counted"
    if count := report.get("not_listed"):
        directories = counted(count, "directory", "directories")
        yield f"  {directories} not listed yet: what is there is not counted"


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


# peers, restart


def peers_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if bool(arguments.action) != bool(arguments.node):
        raise UsageError("say add or remove, and which nodes: see monarchfs peers --help")
    daemon = require_daemon(arguments.mountpoint, search_of(environ))
    if arguments.action:
        message = {"command": "change_peers", arguments.action: arguments.node}
        timeout = arguments.timeout
        result = ask_within(daemon, {**message, "timeout": timeout}, timeout)
        show_result(arguments, result, map(printable, result["nodes"]))
        return 0
    result = ask_within(daemon, {"command": "peers"}, ASK_SECONDS)
    status = ask_within(daemon, {"command": "status"}, ASK_SECONDS)
    result["peer_server"] = status.get("peer_server")
    show_result(arguments, result, _peer_lines(result))
    return 0


def _peer_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A line for this node, and a table of the others."""
    pid = (report.get("peer_server") or {}).get("pid")
    serves = f"nginx is process {pid}" if pid else "nginx does not run: peers get nothing from here"
    yield printable(f"this node: {_node(report)}; {serves}")
    yield from in_columns([_PEER_HEADINGS, *map(_peer_row, report["peers"])], 2)


def _node(node: Mapping[str, Any]) -> str:
    name, address = node["name"], node["address"]
    host = f"[{address}]" if ":" in address else address
    return f"{name}:{node['port']}" if name == address else f"{name}={host}:{node['port']}"


def _peer_row(peer: Mapping[str, Any]) -> tuple[str, ...]:
    files = peer["read_files"]
    return (
        printable(_node(peer)),
        printable(_peer_state(peer)),
        format_count(peer["has_files"]),
        format_count(files),
        format_bytes(peer["read_bytes"]),
        format_seconds(peer["read_seconds"] / files) if files else "-",
        format_count(peer["failed"] + peer["wrong"]),
    )


def _peer_state(peer: Mapping[str, Any]) -> str:
    """Whether a peer answers, in a few words."""
    if peer["error"]:
        return f"does not answer: {peer['error']}"
    if peer["avoided"]:
        return "avoided: it failed a moment ago"
    if not peer["answered"]:
        return "its catalogue is being read"
    return f"answered {format_seconds(peer['answer_age_seconds'] or 0)} ago"


def restart_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Another worker under a mount that is in use; returns 0 when it serves."""
    found = required(arguments.mountpoint, search_of(environ))
    message = {"command": "restart", "timeout": arguments.timeout}
    worker = ask_within(found.daemon, message, arguments.timeout)
    if arguments.json:
        print(json.dumps(worker))
    return 0
