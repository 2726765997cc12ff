"""How all pictures look: colours, sizes, words on axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.report import Series

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
    "monarchfs, passthrough": "#0072b2",
    "monarchfs, relayed": "#56b4e9",
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


def new_figure(
    height: float, rows: int, columns: int, **options: Any
) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(
        (WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, [list(row) for row in axes]


def panels_of(series: Sequence[Series]) -> list[str]:
    return list(dict.fromkeys(one.panel for one in series))


def explained(label: str, series: Sequence[Series]) -> str:
    """With a word on the lines that are drawn."""
    if any(p.high is not None and p.high != p.low for one in series for p in one.points):
        label += "; thin line: from the least to the most"
    if any(one.goal is not None for one in series):
        label += "; dashed: the goal"
    if any(one.marks for one in series):
        label += "; dotted: an epoch begins"
    return label
