"""Drawing what mounts do, with rich: for ``status`` on a terminal, and ``status --watch``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from monarchfs.cli.rates import MountView, number
from monarchfs.cli.status_text import Report, list_row
from monarchfs.cli.text import format_count, format_share, printable
from monarchfs.system.sizes import format_bytes, format_seconds

_GOOD, _FAIR, _BAD = "green", "yellow", "bold red"
_FAIR_STATES = ("starting", "restarting", "safe mode", "source not responding", "not mounted")
_LABEL_CELLS = 9


def style_of(state: object) -> str:
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
    frame = Panel(body, title=title, title_align="left", border_style=style_of(report.get("state")))
    return Group(frame, Text(footer, style="dim", no_wrap=True)) if footer else frame


def draw_list(reports: Sequence[Report], *, footer: str = "") -> RenderableType:
    """All mounts, one a line."""
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
            Text(mountpoint), Text(source), Text(state, style_of(report.get("state"))), *numbers
        )
    return Group(table, Text(footer, style="dim")) if footer else table


def _rows(view: MountView) -> Iterator[tuple[str, RenderableType]]:
    report, now, rates = view.report, view.details, view.rates
    yield "state", _state(report)
    worker = report.get("worker")
    of_worker = worker.get("error") if isinstance(worker, Mapping) else None
    for error in (report.get("error"), of_worker):
        if error:
            yield "", Text(printable(error), _BAD)
    if "files" not in now:
        return
    if view.old_seconds >= 1:
        yield "", Text(f"what follows is {format_seconds(view.old_seconds)} old", _FAIR)
    for position, tier in enumerate(_tiers(now)):
        yield "tiers" if position == 0 else "", _Tier(tier)
        if tier.get("out_of_service"):
            yield "", Text(f"takes nothing: {printable(tier['out_of_service'])}", _BAD)
    frozen = (now.get("index") or {}).get("frozen")
    if frozen:
        yield "index", Text(f"nothing new is recorded: {printable(frozen)}", _BAD)
    yield "files", _listed(now.get("files"))
    yield "copying", _copying(view)
    yield "local", _local(view)
    yield "source", _source(view)
    for key, trouble in (("stuck", "calls hang"), ("errors", "errors")):
        if number(now, "source_io", key):
            yield "", Text(f"{format_count(number(now, 'source_io', key))} {trouble}", _BAD)
    relayed = f"{format_bytes(number(now, 'served', 'relayed_bytes'))} relayed"
    yield "served", Text(f"{format_bytes(rates.served_bytes)}/s, {relayed}" if rates else relayed)
    evicted = _listed(now.get("evictions"))
    if rates and rates.evicted_files:
        evicted.append(f" ({rates.evicted_files:.1f}/s)", _FAIR)
    yield "evicted", evicted


def _state(report: Report) -> Text:
    state = report.get("state", "?")
    text = Text.assemble((printable(state), style_of(state)))
    worker = report.get("worker")
    for key, name in (("data_path", ""), ("freshness", "freshness ")):
        if report.get(key):
            text.append(f", {name}{printable(report[key])}")
    if "uptime_seconds" in report:
        text.append(f", up {format_seconds(number(report, 'uptime_seconds'))}")
    if isinstance(worker, Mapping):
        pid = worker.get("pid")
        text.append(", no worker" if pid is None else f", worker {printable(pid)}")
        if number(worker, "restarts"):
            text.append(f", restarted {format_count(number(worker, 'restarts'))} times", _FAIR)
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
        text.append(f", {view.rates.copied_files:.1f} files/s")
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
        (number(served, f"local_{what}"), number(served, f"source_{what}"))
        for what in ("opens", "file_bytes")
    )
    text = Text(f"{format_share(opens[0], sum(opens))} of {format_count(sum(opens))} opens")
    text.append(f", {format_share(sizes[0], sum(sizes))} of {format_bytes(sum(sizes))}")
    if view.rates is not None:
        share, sized = view.rates.local_share, view.rates.local_bytes_share
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
    text = Text(f"{format_bytes(rates.demand_bytes)}/s on demand,")
    text.append(f" {format_bytes(rates.prefetch_bytes)}/s prefetched,")
    text.append(f" {rates.operations:.1f} operations/s")
    if rates.latency_seconds is not None:
        text.append(f" of {format_seconds(rates.latency_seconds)}")
    if number(view.details, "requests", "waiting"):
        text.append(f", {format_count(number(view.details, 'requests', 'waiting'))} wait")
    return text


def _listed(values: object) -> Text:
    text = Text()
    if isinstance(values, Mapping):
        counted = [f"{format_count(number(values, key))} {key}" for key in values]
        text.append(", ".join(counted))
    return text


def _tiers(report: Report) -> list[Mapping[str, Any]]:
    tiers = report.get("tiers")
    return [tier for tier in tiers if isinstance(tier, Mapping)] if isinstance(tiers, list) else []


class _Tier:
    """A tier's bar with its numbers, and its path before it where there is room."""

    def __init__(self, tier: Mapping[str, Any]) -> None:
        self._tier = tier

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tier = self._tier
        used, capacity = number(tier, "used_bytes"), number(tier, "capacity_bytes")
        share = min(1.0, used / capacity) if capacity else 0.0
        text = f" {format_bytes(used)} of {format_bytes(capacity)},"
        text += f" {format_count(number(tier, 'files'))} files"
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
