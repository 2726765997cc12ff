"""An analysis as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from monarchfs.insight.results import Analysis, Conclusion
from monarchfs.insight.tables import Grid, grids, headline, pattern_lines
from monarchfs.system.escaping import printable
from monarchfs.system.sizes import in_columns


def text_of(analysis: Analysis) -> str:
    parts = (headline(analysis), analysis.verdict, grids(analysis), pattern_lines(analysis))
    return "\n".join(map(printable, lines_of(*parts)))


def lines_of(
    head: str, verdict: Conclusion, tables: Iterable[Grid], pattern: Iterable[str]
) -> Iterator[str]:
    yield from (head, "", *verdict.lines)
    yield from (f"Note: {one}" for one in verdict.reservations)
    for grid in tables:
        yield from ("", grid.title, *aligned(grid))
    yield from ("", "How files were read", *(f"  {line}" for line in pattern))


def aligned(grid: Grid) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    return (f"  {line}" for line in in_columns([grid.headings, *grid.rows], 1))
