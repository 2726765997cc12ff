"""Lines: what grows with something, and what changed while time went by."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from bench.numbers import short
from bench.plotstyle import (
    DOTS_PER_INCH,
    INK,
    MARKS,
    PALE,
    colours,
    explained,
    new_figure,
    ordered,
    panels_of,
)
from bench.report import Point, Series

# Times: a narrow strip for each series, one below the other, all of the same scales.


def draw_times(series: Sequence[Series]) -> Figure:
    series = sorted(series, key=lambda one: panels_of(series).index(one.panel))
    names = ordered(one.name for one in series)
    series = sorted(
        series, key=lambda one: (panels_of(series).index(one.panel), names.index(one.name))
    )
    figure, axes = new_figure(0.8 * len(series) + 1.1, len(series), 1, sharex=True, sharey=True)
    colour = colours(names)
    for one, (axis,) in zip(series, axes, strict=True):
        xs, ys = [float(p.x) for p in one.points], [p.y for p in one.points]
        axis.fill_between(xs, ys, color=colour[one.name], alpha=0.35, linewidth=0)
        axis.plot(xs, ys, color=colour[one.name], linewidth=1.4)
        heading = ", ".join(part for part in (one.panel, one.name) if part)
        axis.set_title(heading, loc="left", fontsize=9, color=INK, pad=3, fontweight="bold")
        for mark in one.marks:
            axis.axvline(mark, color=PALE, linewidth=0.9, linestyle=(0, (2, 2)))
        axis.grid(axis="y")
    axes[-1][0].set_xlim(left=0)
    most = max(p.y for one in series for p in one.points)
    percent = "%" in series[0].y and most <= 100
    axes[-1][0].set_ylim(0, 104.0 if percent else most * 1.1 or 1.0)
    for (axis,) in axes:
        axis.yaxis.set_major_locator(FixedLocator([0, 50, 100]) if percent else MaxNLocator(2))
    axes[-1][0].set_xlabel(explained(series[0].x, series), loc="left")
    axes[0][0].annotate(
        *(series[0].y, (0, 1)),
        xycoords="axes fraction",
        xytext=(0, 18),
        textcoords="offset points",
        fontsize=9,
    )
    return figure


# Lines: with the name at the end of each.


def draw_lines(series: Sequence[Series]) -> Figure:
    panels = panels_of(series)
    same = len({one.y for one in series}) == 1
    height = 2.7 if len(panels) < 3 else 1.9
    figure, axes = new_figure(
        *(height * len(panels) + 0.7, len(panels), 1), sharex=True, sharey=same
    )
    names = ordered(one.name for one in series)
    colour = colours(names)
    for panel, (axis,) in zip(panels, axes, strict=True):
        mine = [one for one in series if one.panel == panel]
        for one in sorted(mine, key=lambda one: names.index(one.name)):
            _line(axis, one, colour[one.name], MARKS[names.index(one.name) % len(MARKS)])
        axis.set_title(panel, loc="left", fontsize=9.5, color=INK, fontweight="bold")
        axis.set_ylabel(mine[0].y)
        axis.grid()
        binary = "bytes" in mine[0].x
        xs = sorted({float(p.x) for one in mine for p in one.points})
        if any("x" in one.log for one in mine):
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(FixedLocator(xs if len(xs) <= 12 else xs[::2]))
            axis.xaxis.set_minor_locator(NullLocator())
        elif len(xs) <= 6:
            axis.xaxis.set_major_locator(FixedLocator(xs))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _, binary=binary: short(x, binary)))
        ys = [p.y for one in series if one.y == mine[0].y for p in one.points]
        if any("y" in one.log for one in mine) and max(ys) > DECADE * min(ys) > 0:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(10, (1.0, 3.0)))
            axis.yaxis.set_minor_locator(NullLocator())
        elif "ratio" in mine[0].y:
            axis.axhline(1.0, color=PALE, linewidth=0.9)
            axis.margins(y=0.2)
        else:
            axis.set_ylim(bottom=0)
            axis.yaxis.set_major_locator(MaxNLocator(5))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
        for goal in {one.goal for one in mine if one.goal is not None}:
            axis.axhline(goal, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes[-1][0].set_xlabel(explained(series[0].x, series), loc="left")
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


DECADE = 8.0
"""What spans less than about one gets a linear axis: a logarithmic one would have no ticks."""
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
                "relpos": (0, 0.5),
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
