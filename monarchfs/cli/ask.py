"""``monarchfs refresh``, ``pin``, ``unpin`` and ``evict``: ask a mount's worker about paths."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from monarchfs.cli.progress import Progress
from monarchfs.config.places import search_of
from monarchfs.config.values import parse_path
from monarchfs.control.client import connect
from monarchfs.control.messages import too_long
from monarchfs.fuse.mountinfo import split_below
from monarchfs.supervisor.recover import FoundMount, find_all
from monarchfs.system.sizes import format_bytes
from monarchfs.types import OperationError, UsageError

CONNECT_SECONDS = 5.0
_BATCH_BYTES = 32 << 10
"""Of paths in one request, which may have 64 KiB (``control.MOST_REQUEST_BYTES``)."""

_NEEDS_PATH = ("pin", "unpin")
_DONE = {"pin": "pinned", "unpin": "unpinned", "evict": "evicted"}
_KEPT = {"unpin": "below another pinned directory", "evict": "open or pinned"}


def ask_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Has the worker do what ``arguments.command`` says to each path, or to the whole mount, and
    prints the result; 1 if some of it failed. Raises UsageError or OperationError."""
    command = arguments.command
    found, paths = mount_and_paths(arguments, environ)
    total: dict[str, Any] = {}
    with Progress() as progress:

        def show(so_far: Mapping[str, Any]) -> None:
            progress.show(f"{command}: {_counts(add(total, so_far))}")

        for batch in batches(paths):
            total = add(total, ask(found, {"command": command, "paths": batch}, show))
    print(json.dumps(total) if arguments.json else describe(command, total))
    failed = total.get("failed", 0)
    if failed and not arguments.json:
        reason = total.get("error") or f"see the log of {found.mountpoint}"
        raise OperationError(f"{failed} of them failed: {reason}")
    return int(bool(failed))


def mount_and_paths(
    arguments: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[FoundMount, list[str]]:
    """The mount, and the paths as the worker takes them; all of it if there are none. A path in the
    mount may stand in its place, as in `monarchfs why`. Raises UsageError or OperationError."""
    typed, paths = parse_path(arguments.mountpoint), list(arguments.path)
    mounts = find_all(search_of(environ))
    by_point = {found.mountpoint: found for found in mounts}
    place = split_below(typed, by_point)
    if place is None:
        raise OperationError(f"{typed} is not a monarchfs mount: see monarchfs status for those")
    mountpoint, first = place
    if first:
        # After a path, not a mount point, paths are what they are to every other command.
        paths = [first, *(parse_path(path) if path else path for path in paths)]
    elif arguments.command in _NEEDS_PATH and not paths:
        raise UsageError(f"which PATH in {typed}? see monarchfs {arguments.command} --help")
    names = (mountpoint,) if first else (typed, mountpoint)
    return by_point[mountpoint], [below(path, names) for path in paths] or [""]


def ask(
    found: FoundMount, request: Mapping[str, Any], progress: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The worker's answer; ``progress`` gets what it reports before. Raises OperationError, with
    the remedy, if there is no answer."""
    with connect(found.daemon, CONNECT_SECONDS) as connection:
        return connection.request(request, progress=progress)


def below(path: str, mountpoints: Sequence[str]) -> str:
    """``path``, absolute below one of the mount point's names or relative to it, as the worker
    takes it: relative to the mount's root, which is ``""``. Raises UsageError, and OperationError
    for a path that no file can have."""
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


def opened_list(name: str) -> BinaryIO:
    """A list to read, by its lines; - is standard input."""
    return open(sys.stdin.fileno() if name == "-" else name, "rb", closefd=name != "-")


def batches(paths: Sequence[str]) -> Iterator[list[str]]:
    """The paths in groups that fit into one request each."""
    batch: list[str] = []
    size = 0
    for path in paths:
        needed = len(json.dumps(path)) + 2
        if batch and size + needed > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(path)
        size += needed
    yield batch


def add(total: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Both results as one: counts are added; of other values (an error, say) the first is kept."""
    both = dict(total)
    for key, value in result.items():
        is_count = isinstance(value, int) and not isinstance(value, bool)
        both[key] = both.get(key, 0) + value if is_count else both.get(key) or value
    return both


def describe(command: str, result: Mapping[str, Any]) -> str:
    """The result as one line for people."""
    if command == "refresh":
        return _counts(result)
    files, size = result.get("files", 0), result.get("bytes", 0)
    text = f"{_DONE[command]} {files} {'file' if files == 1 else 'files'}, {format_bytes(size)}"
    if kept := result.get("kept", 0):
        text += f", kept {kept} that are {_KEPT[command]}"
    if command == "pin" and (unseen := list(_unseen(result))):
        text += f" so far, and what else lies there: {', '.join(unseen)}"
    return text


def _unseen(result: Mapping[str, Any]) -> Iterator[str]:
    if directories := result.get("not_listed", 0):
        yield f"{directories} {'directory' if directories == 1 else 'directories'} not listed yet"
    if names := result.get("not_looked_at", 0):
        yield f"{names} {'name' if names == 1 else 'names'} not looked at yet"


def _counts(result: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {format_bytes(value) if key == 'bytes' else value}"
        for key, value in result.items()
        if isinstance(value, int)
    )
