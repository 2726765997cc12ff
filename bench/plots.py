"""The pictures of a report: one for each plot that series name, as SVG and as PNG.

A colour means the same way to the data in all of them. Everything has its name beside it, so that
no legend is needed and grey paper will do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.plotbars import draw_bars
from bench.plotlines import draw_lines, draw_times
from bench.plotstyle import DOTS_PER_INCH, STYLE
from bench.report import Kind, Report, Series


class Picture(NamedTuple):
    """One plot's files. ``result`` is the measurement's name."""

    result: str
    title: str
    svg: Path
    png: Path


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def draw(title: str, series: Sequence[Series]) -> Figure:
    """One plot. Raises ValueError for none, or for kinds that do not go together."""
    kinds = {one.kind for one in series}
    if len(kinds) != 1:
        raise ValueError(f"{title}: one kind of series, not {sorted(kinds) or 'none'}")
    with mpl.rc_context(STYLE):
        match kinds.pop():
            case Kind.BARS:
                figure = draw_bars(series)
            case Kind.TIME:
                figure = draw_times(series)
            case Kind.LINES:
                figure = draw_lines(series)
        figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
        # Where everything lies is found out once, not for each file again.
        figure.canvas.draw()
        figure.set_layout_engine("none")
    return figure


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
