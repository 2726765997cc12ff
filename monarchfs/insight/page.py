"""An analysis as one page of HTML, which needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, log2, log10

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


# Okabe and Ito's, which people with weak colour vision tell apart; as in the plots of BENCHMARKS.
_COLOURS = ("#d55e00", "#f0e442", "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#8c8c8c")
_REST = "#e4e4e4"
_INK, _PALE, _FAINT = "#222222", "#767676", "#dddddd"
_WIDTH, _LEFT, _RIGHT = 860, 66, 14
_PLOT = _WIDTH - _LEFT - _RIGHT
_LEAST = 1.0
_BAR, _NUMBER, _LETTER, _MOST_LETTERS = 22, 170, 7.2, 52

Format = Callable[[float], str]
assert len(_COLOURS) == len(CAUSES)


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
    ticks = _time_ticks(end, _clock)
    yield _heading(
        "Who waited, and for what",
        "The share of the job's readers that waited, from the beginning to the end of the"
        " recording. At 100% all of them waited: the job could not go on reading. Where nothing is"
        " drawn the job computed, or had what it needed.",
    )
    yield _legend(analysis)
    waited = [[share / (span.with_readers or 1) for share in _waited(span)] for span in spans]
    yield _columns(waited, _COLOURS, ticks=ticks, show=percent, top=1.0, marks=marks, height=190)
    yield _heading("Bytes a second", "What was read, and where it came from.")
    rates = [[amount / (span.seconds or 1) for amount in span.bytes] for span in spans]
    yield _columns(rates, _COLOURS, ticks=ticks, show=_rate, base=1024, marks=marks)


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
    yield _bars(rows, (*_COLOURS, _REST), _clock)


def _outcome_bars(analysis: Analysis) -> Iterator[str]:
    yield _heading("An epoch with other settings", "Estimated seconds of an epoch.")
    rows = [
        (one.change, [one.epoch_seconds], f"{format_seconds(one.epoch_seconds)}")
        for one in analysis.outcomes
    ]
    yield _bars(rows, (_COLOURS[2],), _clock)


def _histograms(analysis: Analysis) -> Iterator[str]:
    yield _heading(
        "How long requests took",
        "Each column counts the requests that took about so long; to the right they are slower.",
    )
    for cause, name in enumerate(CAUSES):
        found: dict[float, int] = {}
        for one in (one for one in analysis.latencies if one.cause == name):
            for up_to, number in one.histogram:
                found[up_to] = found.get(up_to, 0) + number
        if found:
            yield f'<p class="legend">{escape(words_of(cause))}</p>'
            yield _histogram(sorted(found.items()), _COLOURS[cause])
    if analysis.gaps:
        yield _heading(
            "Pauses between the requests of one reader",
            "Short ones are handling of data, long ones computing, or waiting for others.",
        )
        yield _histogram(analysis.gaps, _COLOURS[-1])


def _histogram(rows: Sequence[tuple[float, int]], colour: str) -> str:
    """From 1 us to 1,000 s, a column for each power of two."""
    first, last = -20, 10
    heights = [[0.0] for _ in range(first, last)]
    for up_to, number in rows:
        heights[min(max(round(log2(up_to)) - 1, first), last - 1) - first][0] += number
    scale = [("1 us", 1e-6), ("10 us", 1e-5), ("100 us", 1e-4), ("1 ms", 1e-3), ("10 ms", 0.01)]
    scale += [("100 ms", 0.1), ("1 s", 1.0), ("10 s", 10.0), ("100 s", 100.0)]
    ticks = [((log2(seconds) - first) / (last - first), word) for word, seconds in scale]
    return _columns(heights, (colour,), ticks=ticks, show=_whole, height=110)


def _whole(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else ""


def _waited(span: Span) -> list[float]:
    """The time that readers waited, by cause."""
    return [span.waited * share / (span.waiting or 1) for share in span.shared]


def _legend(analysis: Analysis) -> str:
    seen = "".join(
        f'<span><i style="background:{_COLOURS[cause]}"></i>{escape(words_of(cause))}</span>'
        for cause in range(len(CAUSES))
        if any(span.merged[cause] for span in analysis.timeline)
    )
    return f'<p class="legend">{seen}</p>'


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


# Plots as SVG: columns and bars, drawn alike.


def _columns(
    heights: Sequence[Sequence[float]],
    colours: Sequence[str],
    *,
    ticks: Sequence[tuple[float, str]],
    show: Format,
    top: float | None = None,
    base: int = 10,
    marks: Sequence[tuple[float, str]] = (),
    height: int = 170,
) -> str:
    """Columns side by side, each divided into colours. ``ticks`` and ``marks`` (lines from top to
    bottom, with a word) are at shares of the width."""
    most = top or max(map(sum, heights), default=0) or 1.0
    foot, head = height - 22, 18
    scale = (foot - head) / most
    parts = [_grid(value, foot - value * scale, show) for value in _round_values(most, base)]
    step = _PLOT / max(1, len(heights))
    for number, column in enumerate(heights):
        y = float(foot)
        for value, colour in zip(column, colours, strict=True):
            tall = min(max(value * scale, _LEAST), y - head)
            if value:
                y -= tall
                parts.append(_box(_LEFT + number * step, y, step * 0.98, tall, colour))
    for share, word in ticks:
        parts.append(_text(_LEFT + share * _PLOT, height - 6, word, "middle"))
    last = -1e9
    for share, word in marks:
        x = _LEFT + share * _PLOT
        parts.append(_line(x, head - 4, x, foot, _INK, "3 3"))
        if x - last > 62:
            end = share > 0.93
            parts.append(_text(x + (-3 if end else 3), 11, word, "end" if end else "start"))
            last = x
    return _svg(height, [*parts, _line(_LEFT, foot, _WIDTH - _RIGHT, foot, _PALE)])


def _bars(
    rows: Sequence[tuple[str, Sequence[float], str]], colours: Sequence[str], show: Format
) -> str:
    """A bar for each (name, parts, what stands behind it)."""
    most = max((sum(parts) for _, parts, _ in rows), default=0) or 1.0
    left = min(max(len(name) for name, _, _ in rows), _MOST_LETTERS) * _LETTER + 12
    scale, foot = (_WIDTH - left - _NUMBER) / most, len(rows) * (_BAR + 6) + 4
    drawn = []
    for value in _round_values(most, 10):
        x = left + value * scale
        drawn += [_line(x, 2, x, foot, _FAINT), _text(x, foot + 15, show(value), "middle")]
    for number, (name, parts, behind) in enumerate(rows):
        x, y = left, number * (_BAR + 6) + 4
        short = name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"
        drawn.append(_text(left - 8, y + 15, short, "end", _INK))
        for value, colour in zip(parts, colours, strict=True):
            if value > 0:
                drawn.append(_box(x, y, value * scale, _BAR, colour))
                x += value * scale
        drawn.append(_text(x + 6, y + 15, behind, "start", _INK))
    return _svg(foot + 22, drawn)


def _time_ticks(seconds: float, show: Format) -> list[tuple[float, str]]:
    return [(value / seconds, show(value)) for value in _round_values(seconds, 10, 8)]


def _round_values(most: float, base: int, about: int = 4) -> Iterator[float]:
    """Round values from 0 to ``most``, about so many; of bytes for ``base`` 1024."""
    unit = 1024.0 ** floor(max(0.0, log10(most)) / log10(1024)) if base == 1024 else 1.0
    power = 10.0 ** floor(log10(most / unit / about))
    step = unit * next(n * power for n in (1, 2, 5, 10) if n * power * unit * about >= most * 0.8)
    yield from (n * step for n in range(ceil(most / step * 1.0001)))


def _grid(value: float, y: float, show: Format) -> str:
    line = _line(_LEFT, y, _WIDTH - _RIGHT, y, _FAINT)
    return line + _text(_LEFT - 6, y + 4, show(value), "end")


def _box(x: float, y: float, wide: float, tall: float, colour: str) -> str:
    size = f'width="{wide:.2f}" height="{tall:.2f}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size} fill="{colour}"/>'


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    place = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {place} stroke="{colour}"{dashed}/>'


def _text(x: float, y: float, words: str, anchor: str, colour: str = _PALE) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{escape(words)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {_WIDTH} {height:.0f}"'
    return f'<svg {box} role="img" font-size="12">{"".join(parts)}</svg>'
