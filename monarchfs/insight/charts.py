"""Plots as SVG, for the page: a few kinds, drawn alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, log10

from monarchfs.insight.results import CAUSES

# Okabe and Ito's, which people with weak colour vision tell apart; as in the plots of BENCHMARKS.
COLOURS = ("#d55e00", "#f0e442", "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#8c8c8c")
REST = "#e4e4e4"
_INK, _PALE, _FAINT = "#222222", "#767676", "#dddddd"
_WIDTH, _LEFT, _RIGHT = 860, 66, 14
_PLOT = _WIDTH - _LEFT - _RIGHT
_LEAST = 1.0
_BAR, _NUMBER, _LETTER, _MOST_LETTERS = 22, 170, 7.2, 52

Format = Callable[[float], str]
assert len(COLOURS) == len(CAUSES)


def columns(
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


def bars(
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


def legend(names: Sequence[tuple[str, str]]) -> str:
    """(name, colour) of each."""
    return (
        '<p class="legend">'
        + "".join(
            f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
            for name, colour in names
        )
        + "</p>"
    )


def time_ticks(seconds: float, show: Format) -> list[tuple[float, str]]:
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
