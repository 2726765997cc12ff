"""Numbers and names as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from monarchfs.system.escaping import printable as printable

SPARKS = "▁▂▃▄▅▆▇█"
ASCII_SPARKS = "_.:-=+*#"


def format_count(count: float) -> str:
    """``1,234,567``."""
    return f"{count:,.0f}"


def counted(count: int, one: str) -> str:
    """``1 file``, ``1,234 files``."""
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def labelled(label: str, text: str) -> str:
    """A line below a heading: what it is about, then the text."""
    return f"  {label:<9} {text}"


def format_share(part: float, whole: float) -> str:
    """Per cent; ``-`` of nothing. 100% only of all, 0% only of nothing."""
    if whole <= 0:
        return "-"
    percent = 100 * part / whole
    if 0 < part < whole:
        percent = min(max(percent, 0.1), 99.9)
    return f"{percent:.1f}%" if 0 < percent < 100 else f"{percent:.0f}%"


def sparkline(
    values: Sequence[float | None], top: float | None = None, sparks: str = SPARKS
) -> str:
    """One character a value, as high as its share of ``top`` (default: the largest); a space for an
    unknown one."""
    highest = top or max((value for value in values if value), default=0.0) or 1.0
    last = len(sparks) - 1
    return "".join(
        " " if value is None else sparks[max(0, min(last, round(value / highest * last)))]
        for value in values
    )


def renumbered_text(files: int) -> str:
    """What a source does that gives its files other inode numbers."""
    return (
        f"the source changes inode numbers: {files:,} unchanged files were taken for others, and"
        " are copied again (TROUBLESHOOTING, Speed)"
    )
