"""An analysis as one page of HTML, which needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import log2

from monarchfs.insight import charts
from monarchfs.insight.findings import percent
from monarchfs.insight.results import CAUSES, Analysis, Span
from monarchfs.insight.tables import Grid, grids, headline, pattern_lines
from monarchfs.insight.verdict import words_of
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import format_bytes, format_seconds

_STYLE = """
body { font: 15px/1.5 "DejaVu Sans", Verdana, sans-serif; color: #222; max-width: 60em;
  margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.2em; overflow-wrap: anywhere; } h2 { font-size: 1.05em; margin: 2em 0 0.2em; }
svg { width: 100%; height: auto; display: block; font-family: inherit; }
table { border-collapse: collapse; font-size: 0.83em; display: block; overflow-x: auto; }
td, th { padding: 0.25em 0.7em; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
td { white-space: nowrap; }
.verdict { border-left: 6px solid; padding: 0.4em 1em; background: #f6f6f6; }
.verdict p { margin: 0.4em 0; } .verdict p:first-child { font-weight: bold; }
.input-bound { border-color: #d55e00; } .mixed { border-color: #e69f00; }
.compute-bound { border-color: #009e73; } .unknown { border-color: #8c8c8c; }
.says, .note { color: #555; margin: 0.2em 0 0.7em; font-size: 0.9em; }
.legend { margin: 0.3em 0; font-size: 0.85em; } .legend span { margin-right: 1.3em;
  display: inline-block; }
.legend i { display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.4em;
  vertical-align: -0.1em; }
"""


def page_of(analysis: Analysis) -> str:
    title = escape(printable(headline(analysis)))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(_sections(analysis))
        + "\n</body></html>\n"
    )


def _sections(analysis: Analysis) -> Iterator[str]:
    verdict = analysis.verdict
    yield f"<h1>{escape(printable(headline(analysis)))}</h1>"
    lines = "".join(f"<p>{_safe(line)}</p>" for line in verdict.lines)
    yield f'<div class="verdict {verdict.kind}">{lines}</div>'
    yield from (f'<p class="note">Note: {_safe(one)}</p>' for one in verdict.reservations)
    if analysis.epochs:
        yield from _timeline(analysis)
        yield from _epoch_bars(analysis)
    for grid in grids(analysis):
        if grid.headings[0] == "setting":
            yield from _outcome_bars(analysis)
        yield _table(grid)
        if grid.title == "Requests":
            yield from _histograms(analysis)
    yield "<h2>How files were read</h2>"
    yield from (f"<p>{_safe(line)}</p>" for line in pattern_lines(analysis))


def _timeline(analysis: Analysis) -> Iterator[str]:
    spans = analysis.timeline
    end = spans[-1].end or 1.0
    marks = [(epoch.span.begin / end, f"epoch {epoch.number}") for epoch in analysis.epochs]
    ticks = charts.time_ticks(end, _clock)
    yield _heading(
        "Who waited, and for what",
        "The share of the job's readers that waited, from the beginning to the end of the"
        " recording. At 100% all of them waited: the job could not go on reading. Where nothing is"
        " drawn the job computed, or had what it needed.",
    )
    yield _legend(analysis)
    waited = [[share / (span.with_readers or 1) for share in _waited(span)] for span in spans]
    yield charts.columns(
        waited, charts.COLOURS, ticks=ticks, show=percent, top=1.0, marks=marks, height=190
    )
    yield _heading("Bytes a second", "What was read, and where it came from.")
    rates = [[amount / (span.seconds or 1) for amount in span.bytes] for span in spans]
    yield charts.columns(rates, charts.COLOURS, ticks=ticks, show=_rate, base=1024, marks=marks)


def _epoch_bars(analysis: Analysis) -> Iterator[str]:
    yield _heading(
        "Where the time of each epoch went",
        "In colour: the readers waited (two of four readers count half). Grey: they did not.",
    )
    rows = [
        (
            f"epoch {epoch.number}",
            [*_waited(epoch.span), max(0.0, epoch.seconds - epoch.span.waited)],
            f"{format_seconds(epoch.seconds)}, {percent(epoch.waited_share)} waiting",
        )
        for epoch in analysis.epochs[:40]
    ]
    yield charts.bars(rows, (*charts.COLOURS, charts.REST), _clock)


def _outcome_bars(analysis: Analysis) -> Iterator[str]:
    yield _heading("An epoch with other settings", "Estimated seconds of an epoch.")
    rows = [
        (one.change, [one.epoch_seconds], f"{format_seconds(one.epoch_seconds)}")
        for one in analysis.outcomes
    ]
    yield charts.bars(rows, (charts.COLOURS[2],), _clock)


def _histograms(analysis: Analysis) -> Iterator[str]:
    yield _heading(
        "How long requests took",
        "Each column counts the requests that took about so long; to the right they are slower.",
    )
    for name in CAUSES:
        found: dict[float, int] = {}
        for one in (one for one in analysis.latencies if one.cause == name):
            for up_to, number in one.histogram:
                found[up_to] = found.get(up_to, 0) + number
        if found:
            yield f'<p class="legend">{escape(words_of(CAUSES.index(name)))}</p>'
            yield _histogram(sorted(found.items()), charts.COLOURS[CAUSES.index(name)])
    if analysis.gaps:
        yield _heading(
            "Pauses between the requests of one reader",
            "Short ones are handling of data, long ones computing, or waiting for others.",
        )
        yield _histogram(analysis.gaps, charts.COLOURS[-1])


def _histogram(rows: Sequence[tuple[float, int]], colour: str) -> str:
    """From 1 us to 1,000 s, a column for each power of two."""
    first, last = -20, 10
    heights = [[0.0] for _ in range(first, last)]
    for up_to, number in rows:
        heights[min(max(round(log2(up_to)) - 1, first), last - 1) - first][0] += number
    scale = [("1 us", 1e-6), ("10 us", 1e-5), ("100 us", 1e-4), ("1 ms", 1e-3), ("10 ms", 0.01)]
    scale += [("100 ms", 0.1), ("1 s", 1.0), ("10 s", 10.0), ("100 s", 100.0)]
    ticks = [((log2(seconds) - first) / (last - first), word) for word, seconds in scale]
    return charts.columns(heights, (colour,), ticks=ticks, show=_whole, height=110)


def _whole(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else ""


def _waited(span: Span) -> list[float]:
    """The time that readers waited, by cause."""
    return [span.waited * share / (span.waiting or 1) for share in span.shared]


def _legend(analysis: Analysis) -> str:
    seen = [
        (words_of(cause), charts.COLOURS[cause])
        for cause in range(len(CAUSES))
        if any(span.merged[cause] for span in analysis.timeline)
    ]
    return charts.legend(seen)


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{_safe(cell)}</th>" for cell in grid.headings)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in row) + "</tr>" for row in grid.rows
    )
    return f"{_heading(grid.title, grid.says)}<table><tr>{head}</tr>{rows}</table>"


def _heading(title: str, says: str) -> str:
    return f'<h2>{_safe(title)}</h2><p class="says">{_safe(says)}</p>'


def _safe(words: str) -> str:
    return escape(printable(words))


def _rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


def _clock(seconds: float) -> str:
    """``90 s``, or ``5:00``."""
    if seconds < 300:
        return f"{seconds:g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
