"""An analysis as text."""

from __future__ import annotations

from collections.abc import Iterator

from monarchfs.insight.results import Analysis
from monarchfs.insight.tables import Grid, grids, headline, pattern_lines
from monarchfs.text.escaping import printable


def text_of(analysis: Analysis) -> str:
    return "\n".join(map(printable, _lines(analysis)))


def _lines(analysis: Analysis) -> Iterator[str]:
    yield from (headline(analysis), "", *analysis.verdict.lines)
    yield from (f"Note: {one}" for one in analysis.verdict.reservations)
    for grid in grids(analysis):
        yield from ("", grid.title, *_aligned(grid))
    yield from ("", "How files were read", *(f"  {line}" for line in pattern_lines(analysis)))


def _aligned(grid: Grid) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    rows = [grid.headings, *grid.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join(("", first.ljust(widths[0]), *cells)).rstrip()
