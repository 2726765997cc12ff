"""``monarchfs top``: which processes, or directories, use a mount now, and who answers them."""

from __future__ import annotations

import argparse
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from monarchfs.cli.ask import AGAIN_SECONDS
from monarchfs.cli.live import LiveView, show
from monarchfs.cli.record import HIDDEN, hidden_by, open_events
from monarchfs.config.places import Search, search_of
from monarchfs.control.client import Connection
from monarchfs.control.messages import SILENCE_SECONDS
from monarchfs.insight.live import Interval, LiveRates
from monarchfs.insight.recording import AnsweredBy, File
from monarchfs.insight.tables import Grid, aligned
from monarchfs.supervisor.recover import require_daemon
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import format_bytes, format_count
from monarchfs.types import OperationError, UsageError

RATE = 20_000
"""So many events a second are asked for: they take one or two hundredths of a processor here."""

_LEAST_SECONDS, _MOST_SECONDS = 0.1, 60.0
_ROWS = 20
_FRAME_LINES = 6
"""Of a screen, beside the rows: headings, and the footer, which may be folded."""

_ANSWERS = {by: by.name.lower() for by in AnsweredBy} | {AnsweredBy.WAITED: "copy"}
_NUMBERS = ("reads/s", "opens/s", "names/s", "read", "waiting")


@dataclass(frozen=True, slots=True)
class Usage:
    """One interval. ``rows``: who, with the command's name of a process; the first in the order
    that was asked for."""

    began: float
    seconds: float
    sampled: int
    lost: int
    rows: Sequence[tuple[int | str, str, LiveRates]]


def top_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    mountpoint, interval = arguments.mountpoint, arguments.interval
    if not _LEAST_SECONDS <= interval <= _MOST_SECONDS:
        raise UsageError(
            f"--interval {interval:g}: use {_LEAST_SECONDS:g} to {_MOST_SECONDS:g} seconds"
        )
    text = arguments.count
    if text is not None and not (text.isdecimal() and 0 < int(text) < 1 << 31):
        raise UsageError(f"--count {text}: give a number of intervals, 1 or more")
    count = None if text is None else int(text)
    by_directory = arguments.by == "directory"
    search, order = search_of(environ), arguments.sort
    feed = Feed(mountpoint, search, interval, count, by_directory=by_directory, order=order)
    view = TopView(mountpoint, feed, arguments.by)
    code = show(view, interval, as_json=arguments.json, screen=count is None)
    if feed.error:
        raise OperationError(feed.error)
    return code


class Feed:
    """Events of a mount, an interval at a time, across restarts of its worker. Changing: the
    connection (None while there is no worker), the names of processes, why it is over.

    The connection ends with the process: a thread may read from it until then.
    """

    def __init__(
        self,
        mountpoint: str,
        search: Search,
        seconds: float,
        count: int | None,
        *,
        by_directory: bool,
        order: str,
    ) -> None:
        """Raises OperationError if the mount cannot be watched."""
        self._mountpoint, self._search = mountpoint, search
        self._seconds = seconds
        self._left = count
        self._order = attrgetter("lookups" if order == "names" else order, "bytes")
        self._interval = Interval(by_directory=by_directory)
        self.connection: Connection | None = None
        self._processes: dict[int | str, str] = {0: "(kernel)"}
        self._sampled = self._lost = 0
        self.error = ""
        self.hidden: Sequence[str] = ()
        self._open()

    def _open(self) -> None:
        self.connection, head = open_events(self._mountpoint, self._search, {"rate": RATE})
        self.hidden = hidden_by(head["facts"])
        self._lost = 0

    def look(self) -> Usage | None:
        """Waits for an interval; None after the last one, or once the mount is gone."""
        if self._left == 0 or self.error:
            return None
        if self._left is not None:
            self._left -= 1
        began, lost_before = time.time(), self._lost
        start = time.monotonic()
        self._sampled = 1
        while (left := start + self._seconds - time.monotonic()) > 0:
            if not self._receive(left):
                return None
        seconds = time.monotonic() - start
        return Usage(
            began, seconds, self._sampled, max(0, self._lost - lost_before), self._rows(seconds)
        )

    def _receive(self, seconds: float) -> bool:
        """What comes next within this time; whether there is still a mount."""
        try:
            if self.connection is None:
                time.sleep(min(seconds, AGAIN_SECONDS))
                require_daemon(self._mountpoint, self._search)
                with suppress(OperationError):  # the next worker is not there yet
                    self._open()
            elif self.connection.received or select.select([self.connection], [], [], seconds)[0]:
                message, content = self.connection.next(SILENCE_SECONDS)
                self._take(message.get("progress", {}), content)
        except ConnectionError:
            if self.connection is not None:
                self.connection.__exit__()
            self.connection = None
        except OperationError as error:
            self.error = str(error)
        return not self.error

    def _take(self, progress: Mapping[str, Any], content: bytes) -> None:
        if not progress:
            raise ConnectionResetError("the worker ended it")
        self._sampled = max(self._sampled, progress["sampled"])
        self._lost = progress["lost"]
        self._processes |= {int(pid): name for pid, name in progress["processes"].items()}
        files = {int(ino): File(*file) for ino, file in progress["files"].items()}
        self._interval.know(files)
        self._interval.add(content, progress["sampled"])

    def _rows(self, seconds: float) -> list[tuple[int | str, str, LiveRates]]:
        found = self._interval.close(seconds)
        order = sorted(found, key=lambda key: self._order(found[key]))
        return [(key, self._processes.get(key, ""), found[key]) for key in reversed(order)]


class TopView(LiveView[Usage]):
    """An interval as an object, lines or a table."""

    def __init__(self, mountpoint: str, feed: Feed, who: str) -> None:
        self._mountpoint = mountpoint
        self._feed = feed
        self._who = who

    def look(self) -> Usage | None:
        return self._feed.look()

    def to_json(self, usage: Usage) -> dict[str, Any]:
        rows = []
        for key, command, one in usage.rows:
            named = {"directory": key} if self._who == "directory" else {"process": key}
            more = {"command": command} if self._who == "process" else {}
            answered = {_ANSWERS[by]: share for by, share in one.answered.items()}
            rows.append({**named, **more, **asdict(one), "answered": answered})
        return {
            "mountpoint": self._mountpoint,
            "began": usage.began,
            "seconds": usage.seconds,
            "sampled": usage.sampled,
            "lost": usage.lost,
            "hidden": list(self._feed.hidden),
            "rows": rows,
        }

    def lines(self, usage: Usage) -> Iterator[str]:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S")
        yield f"{clock} {printable(self._mountpoint)}, {usage.seconds:.1f} s: {self._notes(usage)}"
        headings = (self._who, *_NUMBERS, "answered by")
        if usage.rows:
            yield from aligned(Grid("", "", headings, list(self._cells(usage, _ROWS))))

    def draw(self, usage: Usage, height: int, footer: str) -> RenderableType:
        table = Table(box=None, pad_edge=False, expand=True, header_style="bold cyan")
        table.add_column(self._who, no_wrap=True, overflow="ellipsis", ratio=2)
        for heading in _NUMBERS:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("answered by", no_wrap=True, overflow="ellipsis", ratio=1)
        for first, *numbers, waiting, last in self._cells(usage, max(1, height - _FRAME_LINES)):
            table.add_row(Text(first), *numbers, Text(waiting, _style(waiting)), Text(last))
        notes = Text(self._notes(usage), style="dim")
        title = Text(printable(self._mountpoint), style="bold", no_wrap=True)
        return Group(title, table, notes, Text(footer, style="dim", no_wrap=True))

    def _cells(self, usage: Usage, most: int) -> Iterator[tuple[str, ...]]:
        for key, command, one in usage.rows[:most]:
            name = f"{key} {command}".rstrip() if self._who == "process" else str(key)
            shares = sorted(one.answered.items(), key=lambda share: -share[1])
            yield (
                printable(name),
                *(format_count(number) for number in (one.reads, one.opens, one.lookups)),
                f"{format_bytes(one.bytes)}/s",
                f"{100 * one.waiting:.0f}%",
                " ".join(f"{_ANSWERS[by]} {100 * share:.0f}%" for by, share in shares),
            )
        if len(usage.rows) > most:
            rest = f"and {format_count(len(usage.rows) - most)} more"
            yield (rest, *("" for _ in _NUMBERS), "")

    def _notes(self, usage: Usage) -> str:
        """What the numbers do not say."""
        notes = []
        if not usage.rows:
            gone = self._feed.connection is None
            idle = "the mount has no worker just now" if gone else "nothing was asked of the mount"
            notes.append(idle)
        if usage.sampled > 1:
            notes.append(f"sampled: one of {usage.sampled} files, so these are estimates")
        if usage.lost:
            notes.append(f"{format_count(usage.lost)} events were lost")
        notes.append(f"not seen: {', '.join(HIDDEN[kind] for kind in self._feed.hidden)}")
        return "; ".join(notes)


def _style(waiting: str) -> str:
    share = int(waiting.rstrip("%") or 0)
    return "bold red" if share >= 50 else "yellow" if share >= 20 else ""
