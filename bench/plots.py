"""The pictures of a report: one for each plot that series name, as SVG and as PNG.

A colour means the same way to the data in all of them. Everything has its name beside it, so that
no legend is needed and grey paper will do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from bench.numbers import number, short
from bench.report import Kind, Point, Report, Series

# Okabe and Ito's, which people with weak colour vision tell apart (Wong, Nature Methods 8, 441).
COLOURS = {
    "parallel FS": "#8c8c8c",
    "direct": "#8c8c8c",
    "all local": "#1a1a1a",
    "framework cache": "#e69f00",
    "cp -r first": "#cc79a7",
    "cp -r": "#cc79a7",
    "rsync -a": "#b06a00",
    "monarchfs cold": "#0072b2",
    "monarchfs warm": "#56b4e9",
    "rclone": "#009e73",
    "juicefs": "#d55e00",
    "bindfs": "#c9b800",
    "mergerfs": "#7a4b94",
}
OTHERS = ("#3b6ea5", "#b5651d", "#4d9078", "#a05195", "#665191", "#6b6b6b", "#2f4b7c", "#9c3848")
MARKS = "osD^vP*X<>"
WIDTH_INCHES = 8.0
DOTS_PER_INCH = 144
INK, PALE, FAINT = "#222222", "#767676", "#dddddd"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.hashsalt": "monarchfs",
    "svg.fonttype": "path",
}


class Picture(NamedTuple):
    """One plot's files. ``result`` is the measurement's name."""

    result: str
    title: str
    svg: Path
    png: Path


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def ordered(names: Iterable[str]) -> list[str]:
    """Once each: those with a colour of their own in its order, the others as they come."""
    known = list(COLOURS)
    found = dict.fromkeys(names)
    return sorted(found, key=lambda name: known.index(name) if name in COLOURS else len(known))


def colours(names: Sequence[str]) -> dict[str, str]:
    others = [name for name in names if name not in COLOURS]
    return {
        **{name: OTHERS[index % len(OTHERS)] for index, name in enumerate(others)},
        **{name: COLOURS[name] for name in names if name in COLOURS},
    }


def draw(title: str, series: Sequence[Series]) -> Figure:
    """One plot. Raises ValueError for none, or for kinds that do not go together."""
    kinds = {one.kind for one in series}
    if len(kinds) != 1:
        raise ValueError(f"{title}: one kind of series, not {sorted(kinds) or 'none'}")
    with mpl.rc_context(STYLE):
        match kinds.pop():
            case Kind.BARS:
                figure = _bars(series)
            case Kind.TIME:
                figure = _times(series)
            case Kind.LINES:
                figure = _lines(series)
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
        # Placing what depends on sizes needs them.
        figure.canvas.draw()
    return figure


def _figure(
    height: float, rows: int, columns: int, **options: Any
) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(
        (WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [list(row) for row in axes]


def _panels(series: Sequence[Series]) -> list[str]:
    return list(dict.fromkeys(one.panel for one in series))


# Bars: a row for each panel, a column for each x, in it a bar for each arm.


def _bars(series: Sequence[Series]) -> Figure:
    if len({one.name for one in series}) == 1:
        # The bars' own names are what is to be compared.
        series = [
            replace(one, name=str(p.x), points=[p._replace(x=one.name)])
            for one in series
            for p in one.points
        ]
    panels = _panels(series)
    columns = list(dict.fromkeys(str(p.x) for one in series for p in one.points))
    names = {p: ordered(one.name for one in series if one.panel == p) for p in panels}
    heights = [len(names[p]) * 0.235 + 0.4 for p in panels]
    figure, axes = _figure(
        *(sum(heights) + 0.75, len(panels), len(columns)),
        sharex="row",
        gridspec_kw={"height_ratios": heights},
    )
    colour = colours(ordered(one.name for one in series))
    for panel, row in zip(panels, axes, strict=True):
        mine = [one for one in series if one.panel == panel]
        tops = [p.high if p.high is not None else p.y for one in mine for p in one.points]
        room = 1.0 + 0.1 * len(columns)
        for column, axis in zip(columns, row, strict=True):
            _bar_panel(axis, mine, names[panel], column, colour)
            if axis is not row[0]:
                axis.tick_params(labelleft=False)
            heading = ", ".join(part for part in (panel if axis is row[0] else "", column) if part)
            if heading:
                axis.set_title(heading, loc="left", fontsize=9.5, color=INK)
            if any("x" in one.log for one in mine):
                axis.set_xscale("log")
                axis.set_xlim(right=max(tops) * 4**room)
            else:
                axis.set_xlim(min(0, *tops) * room, max(0.0, *tops) * room or 1)
                axis.xaxis.set_major_locator(MaxNLocator(4 if len(columns) > 1 else 8))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes[-1][0].set_xlabel(_explained(series[0].y, series), loc="left")
    return figure


def _explained(label: str, series: Sequence[Series]) -> str:
    """With a word on the lines that are drawn."""
    if any(p.high is not None and p.high != p.low for one in series for p in one.points):
        label += "; thin line: from the least to the most"
    if any(one.goal is not None for one in series):
        label += "; dashed: the goal"
    if any(one.marks for one in series):
        label += "; dotted: an epoch begins"
    return label


def _bar_panel(
    axis: Axes, series: Sequence[Series], names: list[str], column: str, colour: dict[str, str]
) -> None:
    for one in series:
        for p in (p for p in one.points if str(p.x) == column):
            place = names.index(one.name)
            axis.barh(place, p.y, 0.72, color=colour[one.name], edgecolor="white", linewidth=0.5)
            end = p.y
            if p.low is not None and p.high is not None and p.high > p.low:
                axis.plot((p.low, p.high), (place, place), color="white", linewidth=2.4)
                axis.plot((p.low, p.high), (place, place), color=INK, linewidth=1)
                end = max(end, p.high)
            axis.annotate(
                *(number(p.y), (end, place)),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    goals = {one.goal for one in series if one.goal is not None}
    for goal in goals:
        axis.axvline(goal, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x")


# Times: a narrow strip for each series, one below the other, all of the same scales.


def _times(series: Sequence[Series]) -> Figure:
    series = sorted(series, key=lambda one: _panels(series).index(one.panel))
    names = ordered(one.name for one in series)
    series = sorted(
        series, key=lambda one: (_panels(series).index(one.panel), names.index(one.name))
    )
    figure, axes = _figure(0.8 * len(series) + 0.9, len(series), 1, sharex=True, sharey=True)
    colour = colours(names)
    for one, (axis,) in zip(series, axes, strict=True):
        xs, ys = [float(p.x) for p in one.points], [p.y for p in one.points]
        axis.fill_between(xs, ys, color=colour[one.name], alpha=0.35, linewidth=0)
        axis.plot(xs, ys, color=colour[one.name], linewidth=1.4)
        heading = ", ".join(part for part in (one.panel, one.name) if part)
        axis.set_title(heading, loc="left", fontsize=9, color=INK, pad=3)
        for mark in one.marks:
            axis.axvline(mark, color=PALE, linewidth=0.9, linestyle=(0, (2, 2)))
        axis.yaxis.set_major_locator(MaxNLocator(2))
        axis.grid(axis="y")
    axes[-1][0].set_xlim(left=0)
    axes[-1][0].set_ylim(0, _ceiling(p.y for one in series for p in one.points))
    axes[-1][0].set_xlabel(_explained(series[0].x, series), loc="left")
    figure.supylabel(series[0].y, fontsize=9)
    return figure


def _ceiling(values: Iterable[float]) -> float:
    most = max(values, default=1.0)
    return 104.0 if 50 < most <= 100 else most * 1.1 or 1.0


# Lines: with the name at the end of each.


def _lines(series: Sequence[Series]) -> Figure:
    panels = _panels(series)
    figure, axes = _figure(2.7 * len(panels) + 0.7, len(panels), 1, sharex=True)
    names = ordered(one.name for one in series)
    colour = colours(names)
    for panel, (axis,) in zip(panels, axes, strict=True):
        mine = [one for one in series if one.panel == panel]
        for one in sorted(mine, key=lambda one: names.index(one.name)):
            _line(axis, one, colour[one.name], MARKS[names.index(one.name) % len(MARKS)])
        axis.set_title(panel, loc="left", fontsize=9.5, color=INK)
        axis.set_ylabel(mine[0].y)
        axis.grid()
        binary = "bytes" in mine[0].x
        xs = sorted({float(p.x) for one in mine for p in one.points})
        if any("x" in one.log for one in mine):
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(FixedLocator(xs if len(xs) <= 12 else xs[::2]))
            axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _, binary=binary: short(x, binary)))
        if any("y" in one.log for one in mine):
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(10, (1.0, 3.0)))
            axis.yaxis.set_minor_locator(NullLocator())
        else:
            axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
        for goal in {one.goal for one in mine if one.goal is not None}:
            axis.axhline(goal, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes[-1][0].set_xlabel(_explained(series[0].x, series), loc="left")
    for panel, (axis,) in zip(panels, axes, strict=True):
        _name_lines(axis, [one for one in series if one.panel == panel], colour)
    return figure


def _line(axis: Axes, one: Series, colour: str, mark: str) -> None:
    points = sorted(one.points, key=lambda p: float(p.x))
    xs = [float(p.x) for p in points]
    axis.plot(
        *(xs, [p.y for p in points]),
        color=colour,
        marker=mark,
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        linewidth=1.6,
    )
    for p in points:
        if p.low is not None and p.high is not None and p.high > p.low:
            axis.plot(
                (float(p.x), float(p.x)), (p.low, p.high), color=colour, linewidth=1, alpha=0.7
            )


LINE_POINTS = 11.0
"""From one name to the next."""


def _name_lines(axis: Axes, series: Sequence[Series], colour: dict[str, str]) -> None:
    """Beside the last point of each line, moved apart where they would overlap."""
    right = axis.get_xlim()[1]
    figure = axis.figure
    figure.canvas.draw()
    ends: list[tuple[float, Series, Point]] = []
    for one in series:
        last = max(one.points, key=lambda p: float(p.x))
        ends.append((axis.transData.transform((right, last.y))[1], one, last))
    ends.sort(key=lambda end: end[0])
    heights = spread_out([end[0] for end in ends], LINE_POINTS * DOTS_PER_INCH / 72)
    box = axis.get_window_extent()
    for height, (_, one, last) in zip(heights, ends, strict=True):
        axis.annotate(
            *(one.name, (float(last.x), last.y)),
            xytext=(1.03, (height - box.y0) / box.height),
            textcoords="axes fraction",
            va="center",
            color=colour[one.name],
            fontsize=8.5,
            fontweight="bold",
            arrowprops={
                "arrowstyle": "-",
                "color": colour[one.name],
                "linewidth": 0.6,
                "alpha": 0.6,
            },
        )


def spread_out(wanted: Sequence[float], apart: float) -> list[float]:
    """The rising numbers moved as little as need be to be ``apart``: neighbours that are too near
    become a group around the middle of what its members wanted."""
    groups: list[tuple[float, int]] = []
    for value in wanted:
        middle, count = value, 1
        while groups and middle - groups[-1][0] < apart * (count + groups[-1][1]) / 2:
            other, more = groups.pop()
            middle, count = (middle * count + other * more) / (count + more), count + more
        groups.append((middle, count))
    return [
        middle + (index - (count - 1) / 2) * apart
        for middle, count in groups
        for index in range(count)
    ]


def plots(series: Sequence[Series]) -> dict[str, list[Series]]:
    """By title; those that have no points are left out."""
    found: dict[str, list[Series]] = {}
    for one in series:
        if one.points:
            found.setdefault(one.plot or one.y, []).append(one)
    return found


def save_svg(figure: Figure, path: Path) -> None:
    """The same figure makes the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure.savefig(path, format="svg", metadata={"Date": None})


def save(figure: Figure, path: Path) -> None:
    """As ``path`` with .svg and .png."""
    save_svg(figure, path.with_suffix(".svg"))
    figure.savefig(path.with_suffix(".png"), dpi=DOTS_PER_INCH)


def save_all(report: Report, folder: Path) -> list[Picture]:
    """Those of all results, named after the report's date, the measurement and the plot."""
    pictures: list[Picture] = []
    for result in report.results:
        for title, series in plots(result.series).items():
            path = folder / f"{report.stem}-{result.name}-{slug(title)}"
            save(draw(title, series), path)
            pictures.append(
                Picture(result.name, title, path.with_suffix(".svg"), path.with_suffix(".png"))
            )
    return pictures
