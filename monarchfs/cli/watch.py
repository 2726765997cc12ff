"""What mounts do, on a terminal: ``status``, and again and again ``status --watch``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from monarchfs.cli.live import LiveView
from monarchfs.cli.output import Report, format_share, list_row
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import counted, format_bytes, format_count, format_seconds

_SMOOTH_SECONDS = 30.0
"""What time is left is told from the pace of this long."""

_PLACES = ("local", "peer", "source")
_ENDS = ("completed", "failed", "refused", "outdated")

_GOOD, _FAIR, _BAD = "green", "yellow", "bold red"
_FAIR_STATES = ("starting", "restarting", "safe mode", "source not responding", "not mounted")
_LABEL_CELLS = 9


# From successive reports to rates, shares, and what is left to do. They made sense (`status`), but
# may be of another version, and lack anything.


def number(report: Report, *keys: str) -> float:
    """The number under the nested keys; 0 if there is none: a daemon may be of another version."""
    value: Any = report
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, (int, float)) else 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two reports of one worker."""

    seconds: float
    before: Report
    now: Report

    def grown(self, *keys: str) -> float:
        return max(0.0, number(self.now, *keys) - number(self.before, *keys))

    def per_second(self, *keys: str) -> float:
        return self.grown(*keys) / self.seconds

    def share(self, what: str) -> float | None:
        """The local part of ``opens`` or ``file_bytes``, from 0 to 1; None of nothing."""
        counts = [self.grown("served", f"{place}_{what}") for place in _PLACES]
        return counts[0] / sum(counts) if sum(counts) else None

    @property
    def evicted_files(self) -> float:
        keys = self.now.get("evictions", ())
        return sum(self.grown("evictions", key) for key in keys) / self.seconds


@dataclass(frozen=True, slots=True)
class MountView:
    """One mount at one moment. ``report`` is the newest; ``details`` is the newest with an answer,
    ``old_seconds`` old. ``left_seconds`` is None if unknown."""

    report: Report
    details: Report
    old_seconds: float
    rates: Rates | None
    left_seconds: float | None


class History:
    """The reports of one mount as they come. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Report]] = deque()

    def add(self, at: float, report: Report) -> MountView:
        """What there is to see once ``report`` came at the time ``at``."""
        rates = None
        if "files" in report:
            rates = self._take(at - number(report, "age_seconds"), report)
        when, details = self._samples[-1] if self._samples else (at, report)
        return MountView(report, details, max(0.0, at - when), rates, self._left())

    def _take(self, at: float, report: Report) -> Rates | None:
        samples = self._samples
        if samples and at <= samples[-1][0] + 1e-3:
            return None  # the same one again: nothing newer came
        if samples and not _same_worker(samples[-1][1], report):
            samples.clear()
        samples.append((at, report))
        while len(samples) > 2 and samples[1][0] <= at - _SMOOTH_SECONDS:
            samples.popleft()
        return self._since(-2) if len(samples) > 1 else None

    def _since(self, sample: int) -> Rates:
        (began, before), (ended, now) = self._samples[sample], self._samples[-1]
        return Rates(ended - began, before, now)

    def _left(self) -> float | None:
        """When nothing waits to be copied any more, at the recent pace."""
        if len(self._samples) < 2:
            return None
        recent = self._since(0)
        now = recent.now
        queued, active = number(now, "prefetch", "queued"), number(now, "prefetch", "active")
        if not queued + active or number(now, "prefetch", "scanning"):
            return None
        if queued:
            left, pace = queued + active, sum(recent.per_second("prefetch", key) for key in _ENDS)
        else:
            left = number(now, "prefetch", "left_bytes")
            pace = recent.per_second("source_io", "read_bytes")
        return left / pace if pace else None


def _same_worker(before: Report, now: Report) -> bool:
    """Its counts begin at 0 with each worker."""
    same = number(before, "worker", "pid") == number(now, "worker", "pid")
    # Another mount in the same place may have a worker of the same number, in a container.
    return same and all(
        number(now, *keys) >= number(before, *keys)
        for keys in (("source_io", "operations"), ("uptime_seconds",))
    )


# On a terminal.


def _style_of(state: object) -> str:
    if state == "serving":
        return _GOOD
    return _FAIR if state in _FAIR_STATES else _BAD


def draw(view: MountView, *, footer: str = "") -> RenderableType:
    """All of one mount, in a frame; ``footer`` below it."""
    body = Table.grid(padding=(0, 1), expand=True)
    body.add_column(style="bold cyan", no_wrap=True, width=_LABEL_CELLS)
    body.add_column(ratio=1)
    for label, value in _rows(view):
        body.add_row(label, value)
    report = view.report
    title = Text.assemble(
        (printable(report.get("mountpoint", "?")), "bold"),
        " is ",
        printable(report.get("source", "?")),
        overflow="ellipsis",
        no_wrap=True,
    )
    style = _style_of(report.get("state"))
    frame = Panel(body, title=title, title_align="left", border_style=style)
    return Group(frame, Text(footer, style="dim", no_wrap=True)) if footer else frame


def draw_list(reports: Sequence[Report], *, footer: str = "") -> RenderableType:
    if not reports:
        return Group("nothing is mounted", Text(footer, style="dim"))
    table = Table(box=None, pad_edge=False, expand=False, header_style="bold cyan")
    for heading in ("mount point", "source", "state"):
        table.add_column(heading, overflow="fold")
    for heading in ("resident", "local", "used"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        mountpoint, source, state, *numbers = list_row(report)
        table.add_row(
            Text(mountpoint), Text(source), Text(state, _style_of(report.get("state"))), *numbers
        )
    return Group(table, Text(footer, style="dim")) if footer else table


def _rows(view: MountView) -> Iterator[tuple[str, RenderableType]]:
    report, now, rates = view.report, view.details, view.rates
    yield "state", _state(report)
    for error in (report.get("error"), report.get("worker", {}).get("error")):
        if error:
            yield "", Text(printable(error), _BAD)
    if "files" not in now:
        return
    if view.old_seconds >= 1:
        yield "", Text(f"what follows is {format_seconds(view.old_seconds)} old", _FAIR)
    for position, tier in enumerate(now.get("tiers", ())):
        yield "tiers" if position == 0 else "", _Tier(tier)
        if tier.get("out_of_service"):
            yield "", Text(f"takes nothing: {printable(tier['out_of_service'])}", _BAD)
    if frozen := now.get("index", {}).get("frozen"):
        yield "index", Text(f"nothing new is recorded: {printable(frozen)}", _BAD)
    yield "files", _listed(now["files"])
    yield "copying", _copying(view)
    yield "local", _local(view)
    yield "source", _source(view)
    for key, trouble in (("stuck", "calls hang"), ("errors", "errors")):
        if number(now, "source_io", key):
            yield "", Text(f"{format_count(number(now, 'source_io', key))} {trouble}", _BAD)
    relayed = f"{format_bytes(number(now, 'served', 'relayed_bytes'))} relayed"
    served = f"{format_bytes(rates.per_second('served', 'relayed_bytes'))}/s, " if rates else ""
    yield "served", Text(served + relayed)
    evicted = _listed(now.get("evictions", {}))
    if rates and rates.evicted_files:
        evicted.append(f" ({rates.evicted_files:.1f}/s)", _FAIR)
    yield "evicted", evicted


def _state(report: Report) -> Text:
    state = report.get("state", "?")
    text = Text.assemble((printable(state), _style_of(state)))
    for key, name in (("data_path", ""), ("freshness", "freshness "), ("profile", "profile ")):
        if report.get(key):
            text.append(f", {name}{printable(report[key])}")
    if "uptime_seconds" in report:
        text.append(f", up {format_seconds(number(report, 'uptime_seconds'))}")
    if "worker" in report:
        worker = report["worker"]
        pid = worker.get("pid")
        text.append(", no worker" if pid is None else f", worker {printable(pid)}")
        if number(worker, "restarts"):
            restarts = counted(int(number(worker, "restarts")), "time")
            text.append(f", restarted {restarts}", _FAIR)
    return text


def _copying(view: MountView) -> Text:
    prefetch = view.details.get("prefetch", {})
    text = Text(f"{format_count(number(prefetch, 'queued'))} queued, ")
    text.append(f"{format_count(number(prefetch, 'active'))} active")
    if number(prefetch, "left_bytes"):
        text.append(f" ({format_bytes(number(prefetch, 'left_bytes'))} left)")
    if prefetch.get("scanning"):
        text.append(", scanning")
    if view.rates is not None:
        text.append(f", {view.rates.per_second('prefetch', 'completed'):.1f} files/s")
    if view.left_seconds is not None and view.left_seconds >= 1:
        text.append(f", done in about {format_seconds(view.left_seconds)}", _GOOD)
    for key in ("failed", "refused", "outdated"):
        if number(prefetch, key):
            style = _BAD if key == "failed" else _FAIR
            text.append(f", {format_count(number(prefetch, key))} {key}", style)
    return text


def _local(view: MountView) -> Text:
    served = view.details.get("served", {})
    opens, sizes = (
        [number(served, f"{place}_{what}") for place in _PLACES] for what in ("opens", "file_bytes")
    )
    text = Text(f"{format_share(opens[0], sum(opens))} of {counted(int(sum(opens)), 'open')}")
    text.append(f", {format_share(sizes[0], sum(sizes))} of {format_bytes(sum(sizes))}")
    if view.rates is not None:
        share, sized = view.rates.share("opens"), view.rates.share("file_bytes")
        if share is None:
            text.append("; now no opens", "dim")
        else:
            text.append(f"; now {format_share(share, 1)} of opens, {format_share(sized or 0, 1)}")
            text.append(" of bytes")
    return text


def _source(view: MountView) -> Text:
    rates = view.rates
    if rates is None:
        counts = view.details.get("source_io", {})
        return Text(
            f"{format_bytes(number(counts, 'demand_read_bytes'))} on demand,"
            f" {format_bytes(number(counts, 'prefetch_read_bytes'))} prefetched,"
            f" {format_count(number(counts, 'operations'))} operations"
        )
    text = Text(f"{format_bytes(rates.per_second('source_io', 'demand_read_bytes'))}/s on demand,")
    ahead = rates.per_second("source_io", "prefetch_read_bytes")
    text.append(f" {format_bytes(ahead)}/s prefetched,")
    text.append(f" {rates.per_second('source_io', 'operations'):.1f} operations/s")
    if operations := rates.grown("source_io", "operations"):
        took = rates.grown("source_io", "operation_seconds") / operations
        text.append(f" of {format_seconds(took)}")
    if number(view.details, "requests", "waiting"):
        text.append(f", {format_count(number(view.details, 'requests', 'waiting'))} wait")
    return text


def _listed(values: Mapping[str, Any]) -> Text:
    return Text(", ".join(f"{format_count(number(values, key))} {key}" for key in values))


class _Tier:
    """A tier's bar with its numbers, and its path before it where there is room."""

    def __init__(self, tier: Mapping[str, Any]) -> None:
        self._tier = tier

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tier = self._tier
        used, capacity = number(tier, "used_bytes"), number(tier, "capacity_bytes")
        share = min(1.0, used / capacity) if capacity else 0.0
        text = f" {format_bytes(used)} of {format_bytes(capacity)},"
        text += f" {counted(int(number(tier, 'files')), 'file')}"
        if number(tier, "unclaimed"):
            text += f" ({format_count(number(tier, 'unclaimed'))} unclaimed)"
        cells = max(6, min(24, options.max_width // 4))
        full, empty = ("#", "-") if options.ascii_only else ("█", "░")
        filled = round(share * cells) if share in (0.0, 1.0) else max(1, int(share * cells))
        bar = Text.assemble((full * filled, _BAD if tier.get("out_of_service") else _GOOD))
        bar.append(empty * (cells - filled), "dim")
        bar.append(f" {int(100 * share):3}%", "bold")
        bar.append(text)
        path = printable(tier.get("path", "?"))
        left = options.max_width - bar.cell_len
        if len(path) + 2 <= left:
            bar.append(f"  {path}")
            yield bar
        else:
            yield Text(path, overflow="fold")
            yield bar

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(20, options.max_width)


def print_once(reports: Report | list[Report]) -> None:
    if isinstance(reports, list):
        Console().print(draw_list(reports))
    else:
        Console().print(draw(History().add(0.0, reports)))


# Again and again.


class MountsView(LiveView["MountView | list[Report]"]):
    """``status --watch``: one mount, or the list of all."""

    def __init__(self, reports: Callable[[], Report | list[Report]]) -> None:
        """``reports`` is one mount's report, or those of all. May take seconds; raises nothing."""
        self._reports = reports
        self._history = History()

    def look(self) -> MountView | list[Report]:
        seen = self._reports()
        return seen if isinstance(seen, list) else self._history.add(time.monotonic(), seen)

    def to_json(self, seen: MountView | list[Report]) -> object:
        return {"mounts": seen} if isinstance(seen, list) else seen.report

    def lines(self, seen: MountView | list[Report]) -> Iterator[str]:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S")
        if isinstance(seen, MountView):
            yield f"{clock} {_line(seen)}"
            return
        for report in seen:
            mountpoint, _source, state, resident, local, used = list_row(report)
            yield f"{clock} {mountpoint} {state}: resident {resident}, local {local}, used {used}"
        if not seen:
            yield f"{clock} nothing is mounted"

    def draw(self, seen: MountView | list[Report], height: int, footer: str) -> RenderableType:
        if isinstance(seen, list):
            return draw_list(seen, footer=footer)
        return draw(seen, footer=footer)


def _line(view: MountView) -> str:
    report, now, rates = view.report, view.details, view.rates
    text = f"{printable(report.get('mountpoint', '?'))} {printable(report.get('state', '?'))}"
    if "files" not in now or view.old_seconds >= 1:
        return text + (f": {printable(report['error'])}" if report.get("error") else "")
    opens = [number(now, "served", f"{place}_opens") for place in _PLACES]
    parts = [
        f"local {format_share(opens[0], sum(opens))} of {counted(int(sum(opens)), 'open')}",
        f"resident {format_count(number(now, 'files', 'resident'))}"
        f" of {format_count(number(now, 'files', 'known'))} known",
        f"queued {format_count(number(now, 'prefetch', 'queued'))}",
        f"stuck {format_count(number(now, 'source_io', 'stuck'))}",
    ]
    if rates is not None:
        share = rates.share("opens")
        parts[0] += f" (now {'-' if share is None else format_share(share, 1)})"
        demand = rates.per_second("source_io", "demand_read_bytes")
        source = demand + rates.per_second("source_io", "prefetch_read_bytes")
        parts += [
            f"copied {rates.per_second('prefetch', 'completed'):.1f} files/s",
            f"source {format_bytes(source)}/s (demand {format_bytes(demand)}/s)",
            f"{rates.per_second('source_io', 'operations'):.1f} operations/s",
            f"served {format_bytes(rates.per_second('served', 'relayed_bytes'))}/s",
        ]
    return f"{text}: {', '.join(parts)}"
