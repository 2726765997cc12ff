"""``monarchfs warm``: have files copied before they are opened, and follow that."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from monarchfs.cli.ask import add, ask, batches, mount_and_paths
from monarchfs.cli.text import counted, printable
from monarchfs.system.sizes import format_bytes, format_seconds
from monarchfs.types import OperationError, UsageError

_LINE_SECONDS = 10.0
"""How often a line is printed where there is no terminal."""

_RATE_SECONDS = 10.0
"""What the rate is the mean of."""


def warm_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """1 if something failed or, with ``--check``, is not resident. Raises UsageError,
    OperationError, and KeyboardInterrupt with what goes on."""
    if arguments.check and (arguments.wait or arguments.metadata):
        raise UsageError("--check only looks: leave out --wait and --metadata")
    what = "check" if arguments.check else "metadata" if arguments.metadata else "copy"
    waits = arguments.wait or arguments.check
    found, paths = mount_and_paths(arguments, environ)
    total: dict[str, Any] = {}
    try:
        with _shown(arguments) as show:
            for batch in batches(paths):
                before, request = total, {"command": "warm", "what": what, "wait": waits}

                def tell(so_far: Mapping[str, Any], before: Mapping[str, Any] = before) -> None:
                    show({**add(before, so_far), "what": what})

                total = add(total, ask(found, {**request, "paths": batch}, tell))
    except KeyboardInterrupt:
        goes_on = "" if arguments.check else f" the waiting; {_goes_on(found.mountpoint)}"
        raise KeyboardInterrupt(f"interrupted{goes_on}") from None
    total.pop("ended", None)
    if arguments.json:
        print(json.dumps({"waited": waits, "what": what, **(total if waits else {})}))
    elif not waits:
        what_is = "all of it" if paths == [""] else paths[0] if len(paths) == 1 else "these paths"
        print(printable(f"warming {what_is}: {_goes_on(found.mountpoint)}"))
    else:
        print("\n".join(summary(what, total)))
    return _result(arguments, total)


def _goes_on(mountpoint: str) -> str:
    return f"the mount goes on with it; monarchfs warm {mountpoint} --check tells how far it is"


def _result(arguments: argparse.Namespace, total: Mapping[str, Any]) -> int:
    failed = total.get("failed", 0)
    if failed and not arguments.json:
        raise OperationError(f"{failed} failed, the first: {total.get('error')}")
    missing = arguments.check and total.get("resident", 0) < total.get("files", 0)
    return int(bool(failed or missing))


def summary(what: str, total: Mapping[str, Any]) -> Iterator[str]:
    """The result for people; one subject a line."""
    files, size = total.get("files", 0), total.get("bytes", 0)
    if what == "metadata":
        directories = total.get("directories", 0)
        things = "directory" if directories == 1 else "directories"
        yield f"known: {_files(files, size)}, in {directories:,} {things}"
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


# How far it is


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


def _counts(so_far: Mapping[str, Any]) -> str:
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
            text = f"warm: {_counts(so_far)}{', ' + rate if rate else ''}"
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
                counts=_counts(so_far),
                pace=pace.text(so_far, time.monotonic()),
            )

        yield show
