"""Bars side by side: what each arm took, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from bench.numbers import number, short
from bench.plotstyle import INK, colours, explained, new_figure, ordered, panels_of
from bench.report import Point, Series

MOST_COLUMNS = 4
MOST_UNLIKE = 20
"""Columns of which one has so much longer bars than another have scales of their own."""


def draw_bars(series: Sequence[Series]) -> Figure:
    """A row of axes for each panel, in it a column for each x, in that a bar for each arm. Where
    there are many x it is the other way round."""
    if len({one.name for one in series}) == 1:
        # The bars' own names are what is to be compared.
        series = [
            replace(one, name=str(p.x), points=[p._replace(x=one.name)])
            for one in series
            for p in one.points
        ]
    if len({str(p.x) for one in series for p in one.points}) > MOST_COLUMNS:
        series = [
            replace(one, panel=str(p.x), points=[p._replace(x=one.panel)])
            for one in series
            for p in one.points
        ]
    panels = panels_of(series)
    columns = list(dict.fromkeys(str(p.x) for one in series for p in one.points))
    names = {p: ordered(one.name for one in series if one.panel == p) for p in panels}
    above = 0.2 * bool(panels[0]) + 0.2 * bool(columns[0])
    heights = [len(names[p]) * 0.235 + 0.25 + above for p in panels]
    figure, axes = new_figure(
        *(sum(heights) + 0.75, len(panels), len(columns)),
        gridspec_kw={"height_ratios": heights},
    )
    colour = colours(ordered(one.name for one in series))
    labels = {one.y for one in series}
    for panel, row in zip(panels, axes, strict=True):
        mine = [one for one in series if one.panel == panel]
        for column, axis in zip(columns, row, strict=True):
            _panel(axis, mine, names[panel], column, colour)
            # The line of the panel's name, which may be as long as the row.
            room_above = "\n" if panel and column else " " * bool(panel)
            axis.set_title(room_above + column, loc="left", fontsize=9, color=INK)
            if axis is not row[0]:
                axis.tick_params(labelleft=False)
        _scale_row(row, mine, columns)
        if panel:
            row[0].annotate(
                *(panel, (0, 1)),
                xycoords="axes fraction",
                xytext=(0, 19 if columns[0] else 6),
                textcoords="offset points",
                fontsize=9.5,
                fontweight="bold",
            ).set_in_layout(False)
        if len(labels) > 1:
            row[0].set_xlabel(mine[0].y, loc="left")
    if len(labels) == 1:
        axes[-1][0].set_xlabel(explained(series[0].y, series), loc="left")
    return figure


def _scale_row(row: Sequence[Axes], series: Sequence[Series], columns: Sequence[str]) -> None:
    """All alike, but for those that would show nothing then. What was not measured is not there."""
    points = {
        column: [p for one in series for p in one.points if str(p.x) == column]
        for column in columns
    }
    tops = [top for some in points.values() if (top := max((p.y for p in some), default=0)) > 0]
    alike = not tops or max(tops) <= MOST_UNLIKE * min(tops)
    for axis, some in zip(row, points.values(), strict=True):
        axis.set_visible(bool(some) or axis is row[0])
        if some:
            shown = [p for one in points.values() for p in one] if alike else some
            _scale(axis, series, shown, 1.0 + 0.1 * len(row))


def _scale(axis: Axes, series: Sequence[Series], points: Sequence[Point], room: float) -> None:
    """With room for a number behind each bar."""
    values = [p.y for p in points]
    most = max(p.high or p.y for p in points)
    if any("x" in one.log for one in series):
        axis.set_xscale("log")
        least = min((value for value in values if value > 0), default=1.0)
        axis.set_xlim(least / 3, most * (most / least * 3) ** (room - 1))
    elif "%" in series[0].y and 50 < most <= 100 and min(values) >= 0:
        axis.set_xlim(0, 100 * room)
        axis.xaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100]))
    else:
        axis.set_xlim(min(0.0, *values) * room, max(0.0, most) * room or 1)
        axis.xaxis.set_major_locator(MaxNLocator(4 if room > 1.1 else 8))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _panel(
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
